"""Evaluates every n-th version of a run and the last one, at the server: `server.evaluate`.

Which version is the last one may be known only later: if the admin stops the run, or all sites sit out its last round.

The evaluation runs while the sites train the next round. The next version is not made before it has ended, so no
evaluation is left out, and the best version does not depend on how fast the function is. If the server is killed
meanwhile, its next start evaluates the version again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from atoll.errors import DiskFull, Gone
from atoll.format_text import numbers
from atoll.posix import own_folder
from atoll.protocol import run_events, status_messages
from atoll.rounds import events
from atoll.server.coordinator.background_writes import until_passed
from atoll.server.coordinator.exports import export_model
from atoll.server.coordinator.round_history import RoundHistory, value_of
from atoll.server.coordinator.run_core import RunCore

LOG = logging.getLogger("atoll.server")

MOST_STOPPED = 2
"""Number of evaluations in a row that are stopped at the time limit, after which no version is evaluated any more: each
delays a round."""
SAY_S = 10.0
"""Seconds after which the log says that the end of the run waits for an evaluation."""


class Result(NamedTuple):
    """What the user's function has returned for a version.

    Attributes:
        metrics: name → number, without those that are not finite.
        problem: what is wrong, as text; empty if nothing is.
        is_stopped: whether the function was stopped at the time limit.
    """

    metrics: dict[str, float]
    problem: str = ""
    is_stopped: bool = False


class Evaluates(Protocol):
    """The process that evaluates versions.

    Attributes:
        name: name of the user's function.
        every: versions between two evaluations.
        timeout_s: seconds after which an evaluation is stopped.
    """

    name: str
    every: int
    timeout_s: float

    def evaluate(self, path: Path, version: int) -> Result:
        """Evaluate the version in a safetensors file. This blocks until the function has ended or was stopped."""

    def interrupt(self) -> None:
        """End the evaluation that runs. Thread-safe."""


class VersionEvaluation:
    """The evaluations of a run's versions. All methods run on the server's event loop.

    Args:
        run: the run.
        history: the rounds that have ended.
        process: the process that evaluates; None: no version is evaluated.

    Attributes:
        task: the newest evaluation; None if there was none.
    """

    def __init__(self, run: RunCore, history: RoundHistory, process: Evaluates | None) -> None:
        self._run, self._history, self._process = run, history, process
        self.task: asyncio.Task[None] | None = None
        self._begun: Sequence[int] = ()  # the version of each fragment that was evaluated last, or is now
        self._stopped_in_a_row, self._is_said, self._failed = 0, False, set[int]()
        self._status = status_messages.EvaluationStatus(function="", every=1)
        if process is not None:
            self._status = status_messages.EvaluationStatus(function=process.name, every=process.every)
            last = next((each for each in reversed(history.summaries) if each.global_metrics), None)
            if last is not None:
                self._note(version=last.version, metrics=last.global_metrics)

    def _note(self, **values: object) -> None:
        self._status = type(self._status).model_validate(self._status.model_dump() | values)  # cuts the user's texts

    def begin(self, summary: status_messages.RoundSummary, heads: Sequence[int]) -> asyncio.Task[None] | None:
        """Begin to evaluate a version, if it is due, as the port `Evaluation` says."""
        is_due = self._process is not None and (min(heads) % self._process.every == 0 or self._run.state.finished)
        if not is_due or summary.global_metrics or self._stopped_in_a_row >= MOST_STOPPED:
            return None
        if tuple(heads) == self._begun:
            return None
        self._begun = tuple(heads)
        self.task = self._run.spawn(self._evaluate(summary, tuple(heads)))
        return self.task

    async def _evaluate(self, summary: status_messages.RoundSummary, heads: tuple[int, ...]) -> None:
        process, loop, begin_s = self._process, asyncio.get_running_loop(), time.monotonic()
        assert process is not None
        path = self._run.settings.disk.state_dir / "objects" / f"evaluate-{os.getpid()}.safetensors"
        self._note(running=min(heads))
        text = "the end of the run waits for the evaluation of version %d, at most %g s"
        said = (
            loop.call_later(SAY_S, LOG.info, text, min(heads), process.timeout_s) if self._run.state.finished else None
        )
        try:
            await loop.run_in_executor(self._run.io, self._export, path, heads)
            result = await asyncio.to_thread(process.evaluate, path, min(heads))
        except (DiskFull, Gone, OSError) as error:
            result = Result({}, f"the version cannot be written for it: {error}")
        finally:
            path.unlink(missing_ok=True)
            self._note(running=None)
            if said is not None:
                said.cancel()
        await self._record(summary, min(heads), result, time.monotonic() - begin_s)

    def _export(self, path: Path, heads: tuple[int, ...]) -> None:
        own_folder(path.parent, self._run.settings.disk.state_dir)
        self._run.store.require_space(self._run.settings.disk.min_free_bytes)
        export_model(self._run.plan, self._run.store, path, heads)

    async def _record(
        self, summary: status_messages.RoundSummary, version: int, result: Result, seconds: float
    ) -> None:
        """Write the result of a version's evaluation into the journal, and say it."""
        run, metric = self._run, self._run.ledger.rules.tracking.metric
        summary = summary.model_copy(update={"global_metrics": result.metrics})
        happened = run_events.VersionEvaluated(
            fragment=summary.fragment,
            round=summary.round,
            version=version,
            metrics=result.metrics,
            seconds=seconds,
            problem=result.problem,
        )
        value = value_of(summary, metric) if metric.startswith(status_messages.GLOBAL) else None
        problem = result.problem
        if metric.startswith(status_messages.GLOBAL) and value is None and not problem:
            problem = f"it returned no {metric.removeprefix(status_messages.GLOBAL)!r}, which rounds.best_metric names"
        text = summary.model_dump_json(exclude={"sites"})
        row = functools.partial(run.store.run_log.set_summary, summary.fragment, summary.version or 0, text)
        event = events.VersionEvaluated(version, summary.round, value)

        async def record() -> None:
            run.ledger.record(event, row, happened)

        await until_passed(record, f"the evaluation of version {version} cannot be written")
        self._history.replace(summary)
        earlier = [each for each in self._status.failed.items() if each[0] != str(version)]
        failed = [*earlier, *([(str(version), problem)] if problem else [])]
        self._failed = self._failed | {version} if problem else self._failed - {version}
        self._note(
            version=version,
            metrics=result.metrics,
            seconds=seconds,
            problem=problem,
            failed=dict(failed[-status_messages.HISTORY :]),
            failures=len(self._failed),
        )
        self._stopped_in_a_row = self._stopped_in_a_row + 1 if result.is_stopped else 0
        if result.metrics:
            LOG.info("version %d evaluated in %.1f s: %s", version, seconds, numbers(result.metrics))
        if problem and (not self._is_said or self._stopped_in_a_row == MOST_STOPPED):
            LOG.error("%s", self.warnings()[0])
        self._is_said = bool(problem)

    def resume(self) -> tuple[status_messages.RoundSummary, asyncio.Task[None]] | None:
        """Begin to evaluate the newest version if that is due and was not begun, as the port `Evaluation` says."""
        rounds = self._run.state.rounds
        made = [each for each in self._history.summaries if each.version is not None]
        if not made or len({each.done for each in rounds}) > 1:
            return None
        task = self.begin(made[-1], [each.head for each in rounds])
        if task is not None:
            LOG.info("version %s was not evaluated yet: evaluating it now", made[-1].version)
        return (made[-1], task) if task is not None else None

    def stop(self) -> None:
        """End the evaluation that runs."""
        if self._process is not None:
            self._process.interrupt()

    # -- the status

    def status(self) -> status_messages.EvaluationStatus | None:
        """Return the status of the evaluations; None: no version is evaluated."""
        return self._status if self._process is not None else None

    def warnings(self) -> list[str]:
        """Return the warning about the newest evaluation, if it had a problem."""
        if not self._status.problem:
            return []
        then = (
            "No further version is evaluated: correct it, or raise server.evaluate_timeout_s, and start the run again"
            if self._stopped_in_a_row >= MOST_STOPPED
            else "The run ends without metrics of that version"
            if self._run.state.finished
            else "Training goes on, and the next version is evaluated again"
        )
        what, version = self._status.function, self._status.version
        return [f"server.evaluate ({what}) at version {version}: {self._status.problem}. {then}"]
