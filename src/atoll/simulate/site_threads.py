"""`atoll.run`: a server and its sites in this program, each site in a thread. For notebooks, and to try a script.

The sites are real ones (`embedded_site`): the function is called once for each, and its loop goes over all rounds, so
that its local variables last. It may be any function, and may use the GPU that the program uses already.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from atoll import runtime
from atoll.config import Settings
from atoll.errors import ConfigError, RunFailed, print_interrupt_in_a_line, public_api
from atoll.filters.base import Filter
from atoll.protocol import run_events, status_messages
from atoll.server.coordinator.round_configs import ConfigFunction
from atoll.server.evaluation_process import Evaluate
from atoll.server.serve import Server
from atoll.simulate.embedded_site import local_worker
from atoll.simulate.inputs import Inputs, begin
from atoll.simulate.progress import Progress
from atoll.simulate.script import given_function, name_of
from atoll.simulate.simulated_site import result_of_error
from atoll.simulate.simulation import Simulated, names_of, not_evaluated
from atoll.system_calls import cores
from atoll.tensors.module_tensors import Tensors
from atoll.worker.training.federated_loop import Worker

END_S = 10.0
"""Seconds that the threads of an interrupted run get to end."""


class _Interrupted(BaseException):
    """Ends the training code of a site, in its thread, because the run was interrupted."""


@public_api
def run(  # noqa: PLR0913 (options, by keyword)
    model: nn.Module | Tensors | str | None,
    script: Callable[[Worker], object],
    *,
    sites: int | Sequence[str] = 2,
    settings: Settings | Mapping[str, Any] | None = None,
    filters: Sequence[Filter] = (),
    config: ConfigFunction | str | None = None,
    evaluate: Evaluate | str | None = None,
    on_round: Callable[[status_messages.RoundSummary], object] | None = None,
    fresh: bool = False,
    resume: bool = False,
) -> Simulated:
    """Run a server with its sites in this program, each site in a thread, until the run is finished.

        def train(worker):
            for fl_round in worker: ...

        settings = {"algorithm.name": "fedavg", "rounds.total": 5}
        atoll.run(model, train, sites=["clinic-a", "clinic-b"], settings=settings)

    The same call on the same state directory continues an interrupted run. A run that has finished, or was begun with
    other code, settings or sites, is refused with what differs, so that no old result looks new.

    Args:
        model: the initial model, as for `atoll.Server`.
        script: any function with one argument, the worker that `atoll.join` would return; also one of a notebook cell,
            a lambda or a partial. The threads share the random numbers of torch: draw from a generator of the site.
        sites: the number of sites, with names `site-0000` and so on; or a list of names.
        settings: settings of the run, as for `atoll.Server`.
        filters: filters of the updates, at each site.
        config: a function of a round and a site that returns a dict for them, as for `atoll.Server`.
        evaluate: a function that evaluates versions, or its import path, as for `atoll.Server`.
        on_round: called with the summary of every finished round, in another thread; it must not block.
        fresh: begin a new run; the state directory of an earlier one is renamed.
        resume: continue the earlier run, or return its result, whatever it was begun with.

    Raises:
        UsageError: the state directory has a run that has finished, or was begun with other code, settings or sites,
            and neither `fresh` nor `resume` is set.
        AtollError: the run cannot start or continue. The message has the remedy.
        ConfigError: the run has fragments, ranks, a number of local steps between synchronisations, tasks or a swarm;
            or it would wait for more sites than there are, or has no number of rounds.
        RunFailed: so many sites have failed that a round cannot end.
    """
    names = names_of(sites)
    if not isinstance(settings, Settings):
        settings = {"network.port": 0, "rounds.sites": len(names), **(settings or {})}
    server = Server(model, settings, config=config, evaluate=evaluate)
    _require_end(server.settings, len(names))
    given = [filters, *(each for each in (config, evaluate) if not isinstance(each, str))]
    inputs = Inputs.of(server.settings, given_function(script, "local") or name_of(script), (), names, given)
    begin(server.settings.disk.state_dir, inputs, fresh=fresh, resume=resume)
    return _Threads(server, script, names, filters, on_round, inputs).run()


def _require_end(settings: Settings, sites: int) -> None:
    """Raise a `ConfigError` if the run could not begin with so many sites, or would never end."""
    if settings.rounds.sites > sites:
        raise ConfigError(
            f"rounds.sites is {settings.rounds.sites}, but sites gives {sites}, so round 1 would wait for ever.",
            "Leave rounds.sites out of the settings, or give more sites.",
        )
    if not settings.rounds.total:
        raise ConfigError("rounds.total is 0, so the run would never end.", "Set it to a number of rounds.")


class _Threads:
    """The threads of the sites, and what has happened so far."""

    def __init__(
        self,
        server: Server,
        script: Callable[[Worker], object],
        names: list[str],
        filters: Sequence[Filter],
        on_round: Callable[[status_messages.RoundSummary], object] | None,
        inputs: Inputs,
    ) -> None:
        self._inputs = inputs
        self._server, self._script, self._names, self._filters, self._on_round = (
            server, script, names, filters, on_round,
        )  # fmt: skip
        self._progress = Progress(server.settings)
        self._ended: queue.SimpleQueue[tuple[str, BaseException | None]] = queue.SimpleQueue()
        self._rounds: list[status_messages.RoundSummary] = []
        self._refused, self._failed = Counter[str](), dict[str, str]()
        self._is_single = cores() <= len(names)

    def run(self) -> Simulated:
        server = self._server
        server.follow("atoll.run", self._on_event)
        self._progress.begin()
        threads = [threading.Thread(target=self._train, args=(name,), name=name, daemon=True) for name in self._names]
        try:
            with server:
                self._inputs.write(server.settings.disk.state_dir)
                begin_s = time.monotonic()
                try:
                    for thread in threads if not server.finished else ():
                        thread.start()
                    self._wait(len([thread for thread in threads if thread.ident]))
                except BaseException as error:
                    print_interrupt_in_a_line(error)
                    server.stop()
                    _interrupt(threads)
                    raise
                seconds = time.monotonic() - begin_s
                server.wait()
        finally:
            self._progress.end()
        return self._result(server.status(), seconds)

    def _train(self, site: str) -> None:
        """Train a site in this thread, to the end of the run."""
        try:
            if self._is_single:
                runtime.stay_single_threaded()
            with local_worker(self._server, site, filters=self._filters) as worker:
                self._script(worker)
            self._ended.put((site, None))
        except BaseException as error:
            self._ended.put((site, error))

    def _wait(self, training: int) -> None:
        """Wait until all sites have ended.

        Raises:
            RunFailed: sites have ended before the run, and the others are too few for a round.
            AtollError: the run failed.
        """
        rounds = self._server.settings.rounds
        floor = rounds.min_sites or (1 if rounds.quorum else len(self._names))
        while training:
            site, error = self._ended.get()
            training -= 1
            self._server.wait(0.0)  # raises the error of a failed run
            finished = self._server.status().finished
            if finished and error is None:
                continue
            if isinstance(error, ConfigError) and not finished:  # such a site cannot take part in the run
                raise error
            why = "its script returned before the end of the run" if error is None else str(error)
            result = result_of_error(error) if error is not None else None
            self._failed[site] = result.error if result is not None else why
            if training < floor and not finished:
                raise RunFailed(
                    f"Only {training} of {len(self._names)} sites are left, and a round needs {floor}; the last that "
                    f"ended is {site}: {self._failed[site].rstrip('.')}.",
                    "Correct the script, and call the same again: the run continues from its state directory.",
                    result.trace if result is not None else "",
                ) from error

    def _on_event(self, event: run_events.Happened) -> None:
        if isinstance(event, run_events.UpdateRefused):
            self._refused[event.site] += 1
        if isinstance(event, run_events.RoundEnded):
            self._rounds.append(event.summary)
            self._progress.show(event.summary)
            if self._on_round is not None:
                self._on_round(event.summary)

    def _result(self, status: status_messages.Status, seconds: float) -> Simulated:
        sent = [each for summary in self._rounds for each in summary.sites]
        return Simulated(
            model=self._server.exports / "model.safetensors",
            metrics_file=self._server.exports / "metrics.jsonl",
            version=status.version,
            rounds=len(self._rounds),
            worker_rounds=len(sent),
            seconds=seconds,
            bytes_up=sum(each.nbytes for each in sent),
            bytes_down=len(sent) * status.model_bytes,
            metrics=dict(status.history[-1].metrics) if status.history else {},
            failed=self._failed,
            late=0,
            refused=dict(self._refused),
            global_metrics=dict(status.history[-1].global_metrics) if status.history else {},
            not_evaluated=not_evaluated(status.evaluation),
            not_evaluated_count=status.evaluation.failures if status.evaluation is not None else 0,
        )


def _interrupt(threads: Sequence[threading.Thread]) -> None:
    """Raise `_Interrupted` in threads that still run, and wait for them for `END_S` seconds at most.

    So the sites release their locks, and the same program can continue the run.
    """
    until_s = time.monotonic() + END_S
    for thread in threads:
        while thread.is_alive() and time.monotonic() < until_s:
            thread.join(0.2)  # most end by themselves, since the server has ended
            if thread.is_alive() and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Interrupted))
