"""Executes the workflows of a run in order: its rounds (training), cross-site evaluations, functions of the user.

The journal records which of `workflow.steps` have ended, and a restarted server does not repeat them. If a restart
interrupts training, training continues from its last version. An interrupted function goes on, too: it runs again, and
gets from its journal what it had got (`workflow_journal`). An interrupted evaluation begins again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from atoll.config import TRAIN, Settings, WorkflowEntry, entries_of, function_of
from atoll.config.workflow_settings import EVALUATES
from atoll.errors import AtollError, ConfigError, RunFailed, UsageError
from atoll.format_text import number_of
from atoll.protocol import status_messages
from atoll.protocol.task_messages import Evaluation
from atoll.rounds import events
from atoll.runtime import failpoint
from atoll.server.coordinator.background_writes import until_passed
from atoll.server.coordinator.served_run import ServedRun
from atoll.server.coordinator.user_code import Components, Function
from atoll.server.tasks.task_payloads import TaskFilters
from atoll.server.tasks.task_queue import TaskQueue
from atoll.server.tasks.workflow_controller import Controller, ServerStops, progress_of_run
from atoll.server.tasks.workflow_journal import WorkflowJournal

LOG = logging.getLogger("atoll.server")
T = TypeVar("T")

LOOK_S = 1.0
"""Seconds between two checks for progress."""
LATER_START_S = 600.0
"""Maximum seconds that an evaluation waits for sites, if it is not the first workflow: all sites may have left."""


def unused(exports: Path) -> str:
    """Return a name for an evaluation. No file in the export folder has this name yet."""
    names = itertools.chain([EVALUATES], (f"{EVALUATES}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not any((exports / f"{name}{each}").exists() for each in (".json", ".md")))


@dataclass(eq=False)
class WorkflowRun:
    """One workflow of a run, with its state and progress. Times are those of `time.monotonic`.

    Attributes:
        entry: entry of the workflow in the run file.
        function: function of the workflow; None for training.
        state: state of the workflow.
        begun_s: time at which the workflow began.
        ended_s: time at which the workflow ended.
        moved_s: time of the last progress.
        detail: text about the progress, for the status.
        notes: number of calls of `note`, each of which counts as progress.
    """

    entry: WorkflowEntry
    function: Function | None = None
    state: Literal["to come", "running", "done", "failed"] = "to come"
    begun_s: float = 0.0
    ended_s: float = 0.0
    moved_s: float = 0.0
    detail: str = ""
    notes: int = 0

    @property
    def trains(self) -> bool:
        """Whether this workflow is training, that is, the run's rounds. Every other workflow sends tasks."""
        return self.entry.kind == TRAIN

    def note(self, text: str) -> None:
        """Set the text about the progress that the status shows. Thread-safe."""
        self.detail = text
        self.notes += 1

    def status(self) -> status_messages.WorkflowStatus:
        """Return the workflow's status: name, state, duration and progress."""
        running, now_s = self.state == "running", time.monotonic()
        end_s = now_s if running else self.ended_s
        return status_messages.WorkflowStatus(
            name=self.entry.name,
            kind=self.entry.kind,
            state=self.state,
            seconds=max(0.0, end_s - self.begun_s) if self.begun_s else 0.0,
            quiet_s=max(0.0, now_s - self.moved_s) if running else 0.0,
            detail=self.detail,
        )


class WorkflowSchedule:
    """Executes the workflows of a run, one after another.

    Args:
        settings: the run's settings, with `workflow.steps` or `workflow.function`.
        function: a function that a program passes in place of these settings.
        filters: filters of payloads and answers.
        evaluation: arguments of a cross-site evaluation. If given, this evaluation is the only workflow.

    Raises:
        ConfigError: a table of the run file is wrong.
    """

    def __init__(
        self,
        settings: Settings,
        function: Function | None,
        filters: TaskFilters,
        evaluation: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings, self._filters = settings, filters
        self.recorded = bool(settings.workflow.steps) and function is None and evaluation is None
        entries = entries_of(settings.workflow.steps)
        if evaluation is not None:
            entries = entries_of([{"kind": EVALUATES, "name": unused(settings.exports), "args": dict(evaluation)}])
        elif not self.recorded:
            name = str(settings.workflow.function or getattr(function, "__name__", "workflow"))
            entries = (WorkflowEntry(name, path=function_of(function or settings.workflow.function)),)
        self.steps = [WorkflowRun(entry) for entry in entries]
        files = Counter(step.entry.file_name for step in self.steps if step.entry.kind == EVALUATES)
        name, times = next(iter(files.most_common(1)), ("", 0))
        if times > 1:
            raise ConfigError(
                f"{times} evaluations have the same name, and so the same file for results: {name}.json.",
                'Give each a different name: {kind = "cross_site_evaluation", name = "before"}.',
            )
        self.evaluated: Callable[[], Evaluation] | None = None  # returns the results so far of the newest evaluation
        self._controller: Controller | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def of(
        cls,
        settings: Settings,
        function: Function | None,
        filters: TaskFilters,
        evaluation: Mapping[str, Any] | None = None,
    ) -> WorkflowSchedule | None:
        """Return the schedule of a server; None if the run has only rounds. The arguments are those of the class.

        Raises:
            UsageError: `function` and `workflow.function` are both set, or `evaluation` is set and the run is a swarm.
        """
        if evaluation is not None:
            if settings.swarm.enabled:
                raise UsageError(
                    "The run is a swarm: the models are stored at the sites, so the server cannot evaluate them.",
                    "Evaluate model.safetensors from a site's folder in a separate run: [[workflow.steps]] "
                    'with kind = "cross_site_evaluation" and versions = ["model.safetensors"]. See '
                    "docs/cross-site-evaluation.md.",
                )
            return cls(settings, None, filters, evaluation)
        if function is not None and settings.workflow.function is not None:
            raise UsageError("Server got a workflow, but its settings have one, too.", "Use one of them.")
        if function is None and settings.workflow.function is None and not settings.workflow.steps:
            return None
        return cls(settings, function, filters)

    @property
    def trains(self) -> bool:
        """Whether one of the workflows is training."""
        return any(step.trains for step in self.steps)

    @property
    def sends_tasks(self) -> bool:
        """Whether one of the workflows sends tasks."""
        return not all(step.trains for step in self.steps)

    @property
    def _training(self) -> int | None:
        """Position of training among the workflows; None if there is none."""
        return next((index for index, step in enumerate(self.steps) if step.trains), None)

    @property
    def follows(self) -> bool:
        """Whether a workflow follows training."""
        return self._training is not None and self._training + 1 < len(self.steps)

    @property
    def keeps_local(self) -> bool:
        """Whether sites must keep the models that they submit, because a cross-site evaluation needs them later."""
        return self.trains and any(
            step.entry.kind == EVALUATES and step.entry.args.get("site_models", True) for step in self.steps
        )

    def will_evaluate(self, site: str) -> bool:
        """Return whether a cross-site evaluation will still ask this site to evaluate models."""
        return any(
            step.entry.kind == EVALUATES and step.state != "done" and site in (step.entry.args.get("sites") or [site])
            for step in self.steps
        )

    def load(self) -> None:
        """Import the functions of all workflows, and create their components. Call this before the run is opened.

        Raises:
            ConfigError: a function is not found, is not callable, or does not take its arguments.
        """
        components = Components(self._settings)
        for step in self.steps:
            if not step.trains:
                step.function = components.function_of(step.entry)

    def start(self, served: ServedRun) -> None:
        """Begin the workflows, or continue them after a restart of the server. Call this on the server's event loop."""
        assert isinstance(served.tasks, TaskQueue)
        self._run, self._queue, self._background = served.run, served.tasks, served.background
        if self._filters.data:
            LOG.info("filters for the payloads that are sent to sites: %s", self._filters.data)
        if self.recorded:
            self._mark_ended()
        disk = self._settings.disk
        self._run.store.facts.max_bytes = disk.workflow_max_bytes if disk.in_files else 0
        index = next((index for index, step in enumerate(self.steps) if step.state != "done"), 0)
        self._open_journal(index)  # before the first request: a site may send an answer again
        self._task = self._run.spawn(self._main())

    def stop(self) -> None:
        """Stop the running workflow: its function gets an error from its current or next call of the controller."""
        if self._task is not None:
            self._task.cancel()
        if self._controller is not None:
            self._controller.stop()

    def status(self) -> list[status_messages.WorkflowStatus]:
        """Return the status of each workflow, in order."""
        return [step.status() for step in self.steps]

    # -- on the loop

    def _mark_ended(self) -> None:
        """Mark the workflows that had ended before this start of the server, according to the journal.

        If the settings now have more rounds, training continues, and all later workflows run again.

        Raises:
            ConfigError: a workflow that has ended is no longer at its position in the settings.
        """
        ended, train = self._run.store.run_log.ended_workflows(), self._training
        for index, name in ended.items():
            entry = self.steps[index].entry if index < len(self.steps) else None
            current = entry.name if entry else "none"
            if entry is None or name not in (current, str(entry.path)):
                raise ConfigError(
                    f"In {self._settings.disk.state_dir}, workflow {index + 1} was {name!r} and has ended, "
                    f"but this start has {current!r} in its place.",
                    "Start with the old workflows, and add new ones only after them; or start a new run in "
                    "another disk.state_dir.",
                )
        if train is not None and train in ended:
            if self._run.state.finished:
                self._queue.rounds = "over"
            else:  # the settings ask for more rounds now
                self._run.store.run_log.forget_workflows_from(train)
                ended = {index: name for index, name in ended.items() if index < train}
        for index in ended:
            self.steps[index].state = "done"

    def _open_journal(self, index: int) -> WorkflowJournal:
        """Begin or continue with the journal of a workflow. Those that Atoll ships have none."""
        step, facts = self.steps[index], self._run.store.facts
        facts.end()
        if not step.trains and step.entry.kind != EVALUATES:
            facts.begin(index, step.entry.name)
        journal = WorkflowJournal(facts, step.entry.name)
        self._queue.recognise(journal.answers_before())
        self._queue.awaited = journal.open_tasks()
        return journal

    async def _main(self) -> None:
        for index, step in enumerate(self.steps):
            if step.state == "done":
                LOG.info("workflow %d of %d, %s, ended before this start", index + 1, len(self.steps), step.entry.name)
                continue
            step.state, step.begun_s = "running", time.monotonic()
            step.moved_s = step.begun_s
            if self.recorded:
                LOG.info("workflow %d of %d begins: %s", index + 1, len(self.steps), step.entry.name)
            try:
                await (self._train(step) if step.trains else self._send_tasks(step, index))
                step.state = "done"
                record = functools.partial(self._record, index, step.entry.name)
                await until_passed(record, f"the end of workflow {step.entry.name} cannot be written")
            except Exception as error:
                step.state, step.detail = "failed", str(error) if isinstance(error, AtollError) else repr(error)
                raise
            finally:
                step.ended_s = time.monotonic()
        if self.trains:
            await self._run.trained.wait()  # until the result is exported, even if training ended before this start
        LOG.info("the workflow %s has ended", self.steps[-1].entry.name)
        self._filters.warn_of_unsent(self._queue.names)
        self._queue.finish()
        self._run.finished.set()

    async def _record(self, index: int, name: str) -> None:
        store = self._run.store
        with store.journal.transaction():
            if self.recorded:
                store.run_log.end_workflow(index, name)
            store.facts.forget()
        failpoint("workflow.ended")

    async def _train(self, step: WorkflowRun) -> None:
        run, queue = self._run, self._queue
        queue.rounds = "now"

        async def begin() -> None:
            run.ledger.record(events.TrainingBegins())

        await until_passed(begin, "training cannot begin")
        run.wake()
        try:
            await self._watched(run.trained.wait(), step, self._require_begun)
        finally:
            queue.rounds = "over"
            run.wake()

    def _require_begun(self, step: WorkflowRun) -> None:
        """Raise an error if training has not begun within the start timeout, because too few sites joined.

        Raises:
            RunFailed: fewer than `rounds.sites` sites joined in time.
        """
        if any(round_.phase == "gathering" for round_ in self._run.state.rounds):
            step.moved_s = time.monotonic()  # before training has begun, no progress is possible
            self._require_in_time(step, self._settings.rounds.sites, step.entry.start_timeout_s)

    def _require_in_time(self, step: WorkflowRun, wanted: int, limit_s: float | None) -> None:
        if limit_s and time.monotonic() - step.begun_s >= limit_s:
            present = self._run.alive()
            names = ", ".join(present) or "none"
            raise RunFailed(
                f"The workflow {step.entry.name} waited {limit_s:g} s for {number_of(wanted, 'site')}, but only "
                f"{len(present)} take part: {names}.",
                "Start the other sites, or raise start_timeout_s. A script without task handlers leaves "
                "after training: register one with worker.evaluates(function).",
            )

    async def _send_tasks(self, step: WorkflowRun, index: int) -> None:
        journal = self._open_journal(index)
        await self._wait_for_sites(step, index)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[BaseException | None] = loop.create_future()
        journal.fail = functools.partial(_end, loop, ended)
        self._controller = controller = Controller(
            self._run, self._queue, self._background, loop, self._filters, journal, step.note
        )
        work = (step.function, controller, loop, ended)
        threading.Thread(target=_call, args=work, name="atoll-workflow", daemon=True).start()
        try:
            error = await self._watched(ended, step)
        except RunFailed:  # no progress: the next start begins the workflow again
            self._run.store.facts.forget()
            raise
        finally:
            controller.stop()  # also for threads that the function has left running
            self._queue.awaited.clear()
        if journal.difference is not None:  # the journal stays: the function may ask as before again
            raise journal.difference
        if error is not None:
            self._run.store.facts.forget()
        if isinstance(error, AtollError) and step.entry.kind:
            raise error
        if error is not None:  # also SystemExit, because otherwise the server would wait for ever
            LOG.error("the workflow %s failed", step.entry.name, exc_info=error)
            raise RunFailed(
                f"The workflow {step.entry.name} failed: {type(error).__name__}: {error}",
                "See the traceback in the log. The next start of the server begins the workflow again.",
            ) from error

    async def _wait_for_sites(self, step: WorkflowRun, index: int) -> None:
        """Wait until enough sites take part for a workflow of tasks.

        Raises:
            RunFailed: too few sites joined in time.
        """
        limit_s = step.entry.start_timeout_s
        if limit_s is None:
            if not step.entry.kind:
                return  # a function waits by itself, with controller.sites()
            limit_s = LATER_START_S if index else 0.0
        while True:
            members = self._run.state.members.values()
            present, ended = len(self._run.alive()), sum(each.why in ("left", "failed") for each in members)
            wanted = max(1, self._settings.rounds.sites - (ended if index else 0))
            if present >= wanted:
                step.detail = ""
                return
            step.detail = f"waits for sites: {present} of {wanted} take part"
            self._require_in_time(step, wanted, limit_s)
            await asyncio.sleep(0.1)

    async def _watched(
        self, work: Awaitable[T], step: WorkflowRun, on_progress: Callable[[WorkflowRun], None] = lambda step: None
    ) -> T:
        """Wait for `work`, and return its result. Raise an error if the run makes no progress meanwhile.

        Args:
            work: the work to wait for.
            step: the workflow that the work belongs to.
            on_progress: function to call at each check. It may raise an error, too.

        Raises:
            RunFailed: there was no progress for `progress_timeout_s`.
        """
        future, limit_s = asyncio.ensure_future(work), step.entry.progress_timeout_s
        last: object = None
        try:
            while not future.done():
                now_s, progress = time.monotonic(), (step.notes, progress_of_run(self._run, self._queue))
                if progress != last or self._run.state.paused:  # a paused run makes none
                    last, step.moved_s = progress, now_s
                on_progress(step)
                if limit_s and now_s - step.moved_s >= limit_s:
                    raise RunFailed(
                        f"The workflow {step.entry.name} made no progress for {limit_s:g} s: no answer, no "
                        "byte and no report from a site, and no note from the workflow.",
                        "See the logs of the sites. The next start of the server begins the workflow again. "
                        "If the workflow computes for longer without sites, raise progress_timeout_s, or call "
                        "controller.note(...) in it.",
                    )
                await asyncio.wait([future], timeout=min(LOOK_S, limit_s / 4 if limit_s else LOOK_S))
            return await future
        finally:
            future.cancel()


def _call(
    function: Function | None,
    controller: Controller,
    loop: asyncio.AbstractEventLoop,
    ended: asyncio.Future[BaseException | None],
) -> None:
    """Call a workflow's function in the current thread. Then set `ended` to the function's error, or to None.

    If the server's stop has ended the function, do not set `ended`.
    """
    assert function is not None
    error: BaseException | None = None
    try:
        controller.begin()
        returned: Any = function(controller)
        if inspect.isawaitable(returned) or inspect.isgenerator(returned) or inspect.isasyncgen(returned):
            error = RunFailed(
                f"it returned an object of type {type(returned).__name__}, which is never run.", "Use a plain function."
            )
        controller.journal.require_all_asked()
    except ServerStops:
        return
    except BaseException as raised:
        error = raised
    _end(loop, ended, error)


def _end(
    loop: asyncio.AbstractEventLoop, ended: asyncio.Future[BaseException | None], error: BaseException | None
) -> None:
    """Set the future of a workflow's end, from its thread."""

    def end() -> None:
        if not ended.done():
            ended.set_result(error)

    with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
        loop.call_soon_threadsafe(end)
