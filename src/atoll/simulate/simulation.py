"""`atoll.Simulation`: a run with simulated sites, started by a program or by `atoll simulate`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from atoll import registry
from atoll.algorithms.resolve import require_training
from atoll.config import Settings, default_of
from atoll.config.round_changes import CODEC
from atoll.errors import ConfigError, UsageError, print_interrupt_in_a_line, public_api
from atoll.protocol import status_messages
from atoll.rounds.sampling import Sampling
from atoll.server.assemble_run import UserCode, assemble
from atoll.server.coordinator.build_status import keep_status
from atoll.server.coordinator.filter_table import Given
from atoll.server.coordinator.persistor import Persistor
from atoll.server.coordinator.round_configs import ConfigFunction, config_function
from atoll.server.coordinator.served_run import ServedRun
from atoll.server.evaluation_process import Evaluate, Evaluator
from atoll.server.startup import open_run, settings_beside
from atoll.server.tasks.task_payloads import TaskFilters
from atoll.simulate import STATE_DIR, require_engine, threads_of
from atoll.simulate.engine import Beginning, Engine
from atoll.simulate.inputs import Inputs, begin
from atoll.simulate.local_processes import LocalHost
from atoll.simulate.progress import Progress
from atoll.simulate.schedule_sites import SiteScheduler, now
from atoll.simulate.script import arguments_of_program, given_function, name_of, require_outside
from atoll.system_calls import cores
from atoll.tensors.module_tensors import Tensors
from atoll.transport.loop_thread import LoopThread
from atoll.worker.arguments import require_site

LOG = logging.getLogger("atoll.simulate")

SITES = "sites"
"""Name of the folder, in the state directory, with the local state of all sites."""


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation.

    Attributes:
        model: path of the trained model, a safetensors file.
        metrics_file: path of a JSON Lines file with a line for each round.
        version: number of the newest version.
        rounds: number of rounds in this call, without the rounds before an interruption.
        worker_rounds: number of accepted updates in this call.
        seconds: time that the rounds took, without the start of the processes.
        bytes_up: bytes of tensors that real sites would have sent to a server.
        bytes_down: bytes of tensors that real sites would have received from a server.
        metrics: the metrics of the last round.
        failed: site → the error that ended its participation.
        late: number of updates that came after their round had closed.
        global_metrics: metrics of the last version, by the function that evaluates versions at the server.
        refused: site → number of its refused updates.
        not_evaluated: version → why the function that evaluates versions gave no metrics, or not all: the last ones.
        not_evaluated_count: number of such versions.
    """

    model: Path
    metrics_file: Path
    version: int
    rounds: int
    worker_rounds: int
    seconds: float
    bytes_up: int
    bytes_down: int
    metrics: dict[str, float]
    failed: dict[str, str]
    late: int
    refused: dict[str, int]
    global_metrics: dict[str, float] = field(default_factory=dict)
    not_evaluated: dict[int, str] = field(default_factory=dict)
    not_evaluated_count: int = 0

    @property
    def history(self) -> list[dict[str, Any]]:
        """All rounds of the run, oldest first, with each site's metrics and weight: lines of `metrics_file`."""
        return [json.loads(line) for line in self.metrics_file.read_text(encoding="utf-8").splitlines()]

    @property
    def worker_rounds_per_s(self) -> float:
        """Number of accepted updates per second."""
        return self.worker_rounds / self.seconds if self.seconds else 0.0


@public_api
class Simulation:
    """A run with simulated sites. A few processes train the sites in turn, without a network.

    Args:
        model: the initial model, as for `atoll.Server`.
        settings: settings of the run, as for `atoll.Server`.
        script: the training code of each site: a function with one argument, the worker; the name of one at the top
            level of a file (`train.py:train`, `my_package.module:train`); or a script (`train.py`). Processes load it
            by its name. If no name leads to a function (of a notebook cell, a lambda, a partial), they are forks of
            this process. By default the setting `run.script`.
        arguments: arguments of the script, which the script finds in `sys.argv`; None: those of this program, or none
            in a notebook.
        sites: the number of sites, with names `site-0000` and so on; or a list of names. By default the setting
            `rounds.sites`.
        processes: number of processes that train the sites; by default one for each core.
        engine: `local` for processes on this machine, or `ray`.
        address: the address of a Ray cluster; by default, Ray is started on this machine.
        outer_optimizer: the optimizer that applies the averaged update to the global model, as for `atoll.Server`.
        filters: filters that are applied to updates at the server, as for `atoll.Server`.
        config: a function of a round and a site that returns a dict for them, as for `atoll.Server`.
        evaluate: a function that evaluates versions, or its import path, as for `atoll.Server`.
        on_round: called with the summary of every finished round.
        fresh: begin a new run, also if the state directory has one. The earlier run is kept in a folder beside it.
        resume: continue the run of the state directory, or return its result if it has finished, whatever it was begun
            with. By default, only a run that has stopped is continued, and only with the same code, arguments, settings
            and sites.

    Raises:
        ConfigError: a setting is unknown, wrong or not supported in a simulation, or contradicts an argument.
        UsageError: the script is a function that other processes cannot import, and the engine is `ray`.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        model: nn.Module | Tensors | str | None = None,
        settings: Settings | Mapping[str, Any] | None = None,
        *,
        script: str | Callable[..., Any] | None = None,
        arguments: Sequence[str] | None = None,
        sites: int | Sequence[str] | None = None,
        processes: int | None = None,
        engine: str = "local",
        address: str | None = None,
        outer_optimizer: Any = None,
        filters: Given = (),
        config: ConfigFunction | str | None = None,
        evaluate: Evaluate | str | None = None,
        on_round: Callable[[status_messages.RoundSummary], object] | None = None,
        fresh: bool = False,
        resume: bool = False,
    ) -> None:
        require_outside()
        if not isinstance(settings, Settings):
            count = {} if sites is None else {"rounds.sites": len(names_of(sites))}
            settings = {"disk.state_dir": Path(STATE_DIR), **count, **(settings or {})}
        settings = settings_beside(
            "Simulation",
            settings,
            model=model,
            outer_optimizer=outer_optimizer,
            filters=filters,
            config=config,
            evaluate=evaluate,
        )
        model, outer_optimizer = (None if isinstance(each, str) else each for each in (model, outer_optimizer))
        self.sites = names_of(settings.rounds.sites if sites is None else sites)
        self.settings = _simulated(settings, len(self.sites))
        self._model, self._outer = model, outer_optimizer
        self._evaluator = Evaluator.of(self.settings, None if isinstance(evaluate, str) else evaluate, model)
        script = script if script is not None else settings.run.script
        if script is None:
            raise ConfigError(
                "The simulation has no script to train with.",
                "Set run.script to 'train.py:train', a function that takes a worker, or to 'train.py', a "
                "script that calls atoll.join.",
            )
        require_engine(engine, processes, address)
        self._function = function = given_function(script, engine)
        self._script = name_of(script) if function is None else registry.label_of(function)
        self._arguments = arguments_of_program() if arguments is None else tuple(arguments)
        self._processes = processes or cores()
        self._engine = _engine(engine, self._processes, address, function)
        self._filters = TaskFilters(self.settings, (), filters)
        self._filters.require_rounds()
        self._given = [each for each in (outer_optimizer, filters, config, evaluate) if not isinstance(each, str)]
        self._config = config_function(self.settings, None if isinstance(config, str) else config)
        self._on_round, self._progress = on_round, Progress(self.settings)
        self._thread = LoopThread("atoll-simulation", self._main)
        self._fresh, self._resume = fresh, resume
        self._started = False
        self._result: Simulated | None = None

    # -- start and end

    def run(self) -> Simulated:
        """Run the simulation until it is finished, and return the result.

        If the simulation is interrupted, the same call on the same state directory continues it. A finished one is
        refused, so that no old result looks new: see `fresh` and `resume`.

        Raises:
            AtollError: the simulation cannot start or continue. The message has the remedy.
            UsageError: `stop` was called before the simulation was finished.
        """
        self._progress.begin()
        self.start()
        try:
            self._thread.wait()
        except BaseException as error:
            print_interrupt_in_a_line(error)
            self.stop()
            raise
        finally:
            self._progress.end()
        if self._result is None:
            raise UsageError(
                "The simulation was stopped before it was finished.", "Start it again with the same state directory."
            )
        return self._result

    def start(self) -> Simulation:
        """Start the simulation in a thread, and return at once.

        Raises:
            UsageError: this simulation was started before. Or the state directory has a run that has finished, or was
                begun with other code, arguments, settings or sites, and neither `fresh` nor `resume` is set.
        """
        if self._started:
            raise UsageError("This Simulation object was already started.", "Create a new Simulation for each start.")
        self._inputs = Inputs.of(
            self.settings, self._function or self._script, self._arguments, self.sites, self._given
        )
        begin(self.settings.disk.state_dir, self._inputs, fresh=self._fresh, resume=self._resume)
        self._started = True
        if self._evaluator is not None:
            self._evaluator.fork()
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the simulation and its processes. A new one on the same state directory continues it. Idempotent."""
        self._thread.stop()

    def __enter__(self) -> Simulation:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        print_interrupt_in_a_line(error)
        self.stop()

    @property
    def exports(self) -> Path:
        """The folder that contains `model.safetensors` and `metrics.jsonl`."""
        return self.settings.exports

    @property
    def described(self) -> str:
        """A text for the log: the number of sites per round, and the number of processes."""
        name = "" if self._engine.name == "local" else f" of {self._engine.name}"
        rounds = self.settings.rounds
        sampled = Sampling(rounds.sample_fraction, rounds.sample_min).size(len(self.sites))
        per_round = f"{sampled} of them per round, " if sampled < len(self.sites) else ""
        return f"{per_round}{self._processes} process{'es' * (self._processes != 1)}{name}"

    def pids(self) -> list[int]:
        """Return the process ids of the training processes on this machine."""
        return self._engine.pids()

    # -- the thread

    async def _main(self) -> None:
        self._thread.ready()
        work = asyncio.ensure_future(self._simulate())
        stopping = asyncio.ensure_future(self._thread.stopping.wait())
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    async def _simulate(self) -> None:
        try:
            if self._evaluator is not None:
                await asyncio.to_thread(self._evaluator.open)
            await self._train()
        finally:
            if self._evaluator is not None:
                self._evaluator.close()

    async def _train(self) -> None:
        persistor = Persistor(self.settings)
        opened = open_run(self.settings, self._model, persistor, self._outer)
        code = UserCode(persistor, self._filters, config=self._config, evaluator=self._evaluator)
        served = assemble(opened, code, simulated=True)
        run = served.run
        self._model = None  # version 0 is on disk
        self._inputs.write(self.settings.disk.state_dir)
        try:
            beginning = self._beginning(served)
            served.coordinator.start()
            keep_status(served)
            scheduler = SiteScheduler(served, self.sites, self._engine, Path(beginning.sites), self._round_ended)
            if not run.state.finished:
                await asyncio.get_running_loop().run_in_executor(None, self._engine.start, beginning, scheduler)
            first, begin_s = run.state.rounds[0].done, time.monotonic()
            await scheduler.run_rounds()
            self._result = self._simulated(served, scheduler, first, time.monotonic() - begin_s)
        finally:
            self._engine.close()
            run.send_away()
            keep_status(served)
            await served.coordinator.stop()

    def _round_ended(self, summary: status_messages.RoundSummary) -> None:
        self._progress.show(summary)
        if self._on_round is not None:
            self._on_round(summary)

    def _beginning(self, served: ServedRun) -> Beginning:
        return Beginning(
            script=self._script,
            arguments=self._arguments,
            path=tuple(sys.path),
            info=now(served.sites.get_run()),
            schema_message=now(served.sites.get_schema()),
            threads=threads_of(self._processes),
            seed=self.settings.run.seed,
            sites=str((self.settings.disk.state_dir / SITES).resolve()),
            names=tuple(self.sites),
            own=served.run.plan.own_code,
        )

    def _simulated(self, served: ServedRun, scheduler: SiteScheduler, first: int, seconds: float) -> Simulated:
        run = served.run
        summary = run.store.run_log.history(1, 0)[0].summary_json  # empty for version 0
        last = status_messages.RoundSummary.model_validate_json(summary) if summary else None
        return Simulated(
            model=self.exports / "model.safetensors",
            metrics_file=self.exports / "metrics.jsonl",
            version=run.store.versions.head().version,
            rounds=run.state.rounds[0].done - first,
            worker_rounds=scheduler.worker_rounds,
            seconds=seconds,
            bytes_up=scheduler.bytes_up,
            bytes_down=scheduler.bytes_down,
            metrics=dict(last.metrics) if last else {},
            failed=dict(scheduler.failed),
            late=scheduler.late,
            refused=dict(scheduler.refused),
            global_metrics=dict(last.global_metrics) if last else {},
            not_evaluated=not_evaluated(evaluation := served.evaluation.status()),
            not_evaluated_count=evaluation.failures if evaluation is not None else 0,
        )


def not_evaluated(evaluation: status_messages.EvaluationStatus | None) -> dict[int, str]:
    """Return version → why the function that evaluates versions gave no metrics, or not all."""
    return {int(version): why for version, why in evaluation.failed.items()} if evaluation is not None else {}


def names_of(sites: int | Sequence[str]) -> list[str]:
    """Return the names of simulated sites: those given, or `site-0000` and so on.

    Raises:
        ConfigError: there is no site, or a name is wrong or given twice.
    """
    if not isinstance(sites, int):
        names = [require_site(site) for site in sites]
        if len(set(names)) != len(names) or not names:
            raise ConfigError(f"sites is {list(sites)!r}.", "Give at least one site, each with its own name.")
        return names
    if isinstance(sites, bool) or sites < 1:
        raise ConfigError(f"sites is {sites}.", "Give a number of at least 1.")
    return [f"site-{number:04}" for number in range(sites)]


def _engine(name: str, processes: int, address: str | None, function: Callable[..., Any] | None) -> Engine:
    if name == "local":
        return Engine(LocalHost(function), processes)
    from atoll.simulate.ray_actors import RayHost

    return Engine(RayHost(processes, address), processes)


_ONE_WHOLE_MODEL = (
    "diloco.num_fragments",
    "diloco.fragment_sync_delay",
    "model.ranks",
    "workflow.function",
    "async.enabled",
)


def _simulated(settings: Settings, sites: int) -> Settings:
    """Return the settings with the changes that a simulation needs: its number of sites, no heartbeats, no swarm.

    Raises:
        ConfigError: a setting is not supported in a simulation.
    """
    for key in _ONE_WHOLE_MODEL:
        if settings.at(key) != default_of(key):
            raise ConfigError(
                f"{key} is {settings.at(key)!r}, but a simulation supports only synchronous rounds of whole models.",
                f"Leave {key} out, or use atoll server and real workers.",
            )
    if settings.workflow.steps:
        raise ConfigError(
            "workflow.steps is set, but simulated sites cannot answer tasks.",
            "Leave workflow.steps out, or use atoll server and real workers.",
        )
    if any(CODEC in each.values for each in settings.changes):
        raise ConfigError(
            f"rounds.changes sets {CODEC}, but the processes of a simulation know one codec.",
            "Leave it out, or use atoll server and real workers.",
        )
    require_training(settings)
    if not settings.rounds.total:
        raise ConfigError("rounds.total is 0, so the simulation would never end.", "Set it to a number of rounds.")
    return settings.changed(
        {
            "rounds.sites": sites,
            "network.heartbeat_timeout_s": 0.0,
            "network.heartbeat_interval_s": 0.0,
            "swarm.enabled": False,  # a swarm computes the same bits as a server
            "swarm.aggregators": (),
        }
    )
