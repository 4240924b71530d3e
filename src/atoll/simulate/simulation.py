"""`atoll.Simulation`: a run with simulated sites, in a program or by `atoll simulate`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from atoll.algorithms.resolve import require_training
from atoll.config import Settings, default_of
from atoll.errors import ConfigError, UsageError, print_interrupt_in_a_line, public_api
from atoll.protocol import status_messages
from atoll.rounds.sampling import Sampling
from atoll.server.coordinator.coordinator import Coordinator
from atoll.server.coordinator.persistor import Persistor
from atoll.server.filter_table import Given
from atoll.server.startup import open_run, settings_beside
from atoll.server.tasks.task_payloads import TaskFilters
from atoll.simulate import STATE_DIR, require_engine
from atoll.simulate.engine import Engine
from atoll.simulate.job_messages import Beginning
from atoll.simulate.local_processes import LocalHost
from atoll.simulate.schedule_sites import Conductor, now
from atoll.simulate.script import name_of, require_outside
from atoll.tensors.module_tensors import Tensors
from atoll.transport.loop_thread import LoopThread
from atoll.worker.arguments import require_site

LOG = logging.getLogger("atoll.simulate")

SITES = "sites"
"""Folder in the state directory with what sites keep between their rounds."""


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation.

    Attributes:
        model: the result, a safetensors file.
        metrics_file: a line for each round.
        version: that the run is at.
        rounds: of this call; a simulation that was continued has had others before.
        worker_rounds: accepted updates of this call.
        seconds: from the first join to the result.
        bytes_up, bytes_down: of tensors that would have travelled between the sites and a server.
        metrics: of the last round.
        failed: site → what ended its part.
        late: updates that came after their round had closed.
        refused: site → how many of its updates were refused.
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

    @property
    def worker_rounds_per_s(self) -> float:
        """Accepted updates per second."""
        return self.worker_rounds / self.seconds if self.seconds else 0.0


@public_api
class Simulation:
    """A run with simulated sites: trained in turn by a few processes, with no network in between.

    Args:
        model: the initial model, as for `atoll.Server`.
        settings: of the run, as for `atoll.Server`.
        script: what each site runs: a function of a worker at the top level of a file, or the name of one
            (`train.py:train`, `my_package.module:train`), or a script (`train.py`); by default the setting
            `run.script`.
        arguments: what the script finds in `sys.argv`.
        sites: how many, `site-0000` and so on; or their names. By default the setting `rounds.sites`.
        processes: that train them; by default one for each core.
        engine: `local`, processes of this machine; or `ray`.
        address: of a Ray cluster; by default Ray is started on this machine.
        outer_optimizer, filters: as for `atoll.Server`.
        on_round: called with every round's summary when it is committed.

    Raises:
        ConfigError: a setting is unknown or wrong, or has no meaning in a simulation.
        UsageError: another process cannot find the script.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        model: nn.Module | Tensors | str | None = None,
        settings: Settings | Mapping[str, Any] | None = None,
        *,
        script: str | Callable[..., Any] | None = None,
        arguments: Sequence[str] = (),
        sites: int | Sequence[str] | None = None,
        processes: int | None = None,
        engine: str = "local",
        address: str | None = None,
        outer_optimizer: Any = None,
        filters: Given = (),
        on_round: Callable[[status_messages.RoundSummary], object] | None = None,
    ) -> None:
        require_outside()
        if not isinstance(settings, Settings):
            count = {} if sites is None else {"rounds.sites": len(_names(sites))}
            settings = {"disk.state_dir": Path(STATE_DIR), **count, **(settings or {})}
        settings = settings_beside("Simulation", settings, model=model, outer_optimizer=outer_optimizer)
        model, outer_optimizer = (None if isinstance(each, str) else each for each in (model, outer_optimizer))
        self.sites = _names(settings.rounds.sites if sites is None else sites)
        self.settings = _simulated(settings, len(self.sites))
        self._model, self._outer = model, outer_optimizer
        script = script if script is not None else settings.run.script
        if script is None:
            raise ConfigError(
                "The simulation has no script.",
                "Set run.script, in the run file or by --set: 'train.py:train', a function of a worker, or 'train.py', "
                "a script that joins.",
            )
        self._script, self._arguments = name_of(script), tuple(arguments)
        require_engine(engine, processes, address)
        self._processes = processes or cores()
        self._engine = _engine(engine, self._processes, address)
        self._filters = TaskFilters(self.settings, (), filters)
        self._filters.require_rounds()
        self._on_round = on_round or (lambda summary: None)
        self._thread = LoopThread("atoll-simulation", self._main)
        self._started = False
        self._result: Simulated | None = None

    # -- life

    def run(self) -> Simulated:
        """Simulate until the run is finished, or until `stop`; the same call on the same state directory goes on.

        Raises:
            AtollError: it cannot begin, or go on; its message says how to go on.
            UsageError: it was stopped before its end.
        """
        self.start()
        try:
            self._thread.wait()
        except BaseException as error:
            print_interrupt_in_a_line(error)
            self.stop()
            raise
        if self._result is None:
            raise UsageError("The simulation was stopped.", "The same simulation goes on from its state directory.")
        return self._result

    def start(self) -> Simulation:
        """Begin in a thread, and return at once."""
        if self._started:
            raise UsageError("The simulation was started already.", "Make a new one for a new start.")
        self._started = True
        self._thread.start()
        return self

    def stop(self) -> None:
        """End it and every process. A new one on the same state directory goes on. Idempotent."""
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
        """Folder of `model.safetensors` and `metrics.jsonl`."""
        return self.settings.exports

    @property
    def described(self) -> str:
        """How it runs, in a few words."""
        name = "" if self._engine.name == "local" else f" of {self._engine.name}"
        rounds = self.settings.rounds
        asked = Sampling(rounds.sample_fraction, rounds.sample_min).size(len(self.sites))
        per_round = f"{asked} a round, " if asked < len(self.sites) else ""
        return f"{per_round}{self._processes} process{'es' * (self._processes != 1)}{name}"

    def pids(self) -> list[int]:
        """The processes that train, those of this machine."""
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
        persistor = Persistor(self.settings)
        plan, store, lost = open_run(self.settings, self._model, persistor, self._outer)
        run = Coordinator(plan, store, lost, persistor, self._filters.results)
        self._model = None  # version 0 is on disk
        try:
            beginning = self._beginning(run)
            run.start()
            lasts = plan.algorithm.keeps or plan.codecs[plan.algorithm.codec].feedback
            folder = Path(beginning.sites) if lasts else None
            conductor = Conductor(run, self.sites, self._engine, folder, self._on_round)
            if not run.state.finished:
                await asyncio.get_running_loop().run_in_executor(None, self._engine.start, beginning, conductor)
            first, begin_s = run.state.rounds[0].done, time.monotonic()
            await conductor.conduct()
            self._result = self._simulated(run, conductor, first, time.monotonic() - begin_s)
        finally:
            self._engine.close()
            run.send_away()
            await run.stop()

    def _beginning(self, run: Coordinator) -> Beginning:
        return Beginning(
            script=self._script,
            arguments=self._arguments,
            path=tuple(sys.path),
            info=now(run.get_run()),
            schema_message=now(run.get_schema()),
            threads=threads_of(self._processes),
            seed=self.settings.run.seed,
            sites=str((self.settings.disk.state_dir / SITES).resolve()),
        )

    def _simulated(self, run: Coordinator, conductor: Conductor, first: int, seconds: float) -> Simulated:
        told = run.store.run_log.history(1, 0)[0].summary_json  # empty of version 0
        last = status_messages.RoundSummary.model_validate_json(told) if told else None
        return Simulated(
            model=self.exports / "model.safetensors",
            metrics_file=self.exports / "metrics.jsonl",
            version=run.store.versions.head().version,
            rounds=run.state.rounds[0].done - first,
            worker_rounds=conductor.worker_rounds,
            seconds=seconds,
            bytes_up=conductor.bytes_up,
            bytes_down=conductor.bytes_down,
            metrics=dict(last.metrics) if last else {},
            failed=dict(conductor.failed),
            late=conductor.late,
            refused=dict(conductor.refused),
        )


def threads_of(processes: int) -> int:
    """Return torch's threads in each of so many processes: `OMP_NUM_THREADS`, else the cores divided among them."""
    told = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if told.isdecimal() and int(told):
        return int(told)
    return max(1, cores() // processes)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _names(sites: int | Sequence[str]) -> list[str]:
    if not isinstance(sites, int):
        names = [require_site(site) for site in sites]
        if len(set(names)) != len(names) or not names:
            raise ConfigError(f"sites is {list(sites)!r}.", "Give each site a name of its own.")
        return names
    if sites < 1:
        raise ConfigError(f"sites is {sites}.", "Give at least 1.")
    return [f"site-{number:04}" for number in range(sites)]


def _engine(name: str, processes: int, address: str | None) -> Engine:
    if name == "local":
        return Engine(LocalHost(), processes)
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
    """Return the settings of a run with simulated sites.

    Raises:
        ConfigError: something in them has no meaning here.
    """
    for key in _ONE_WHOLE_MODEL:
        if settings.at(key) != default_of(key):
            raise ConfigError(
                f"{key} is {settings.at(key)!r}: a simulation has rounds of whole models, which wait.",
                f"Leave {key} out, or run it with atoll server and real workers.",
            )
    if settings.workflow.steps:
        raise ConfigError(
            "workflow.steps is set: a simulation has rounds of training, and simulated sites answer no tasks.",
            "Leave workflow.steps out, or run it with atoll server and real workers.",
        )
    require_training(settings)
    if not settings.rounds.total:
        raise ConfigError("rounds.total is 0: the simulation would never end.", "Set rounds.total.")
    return settings.changed(
        {
            "rounds.sites": sites,
            "network.heartbeat_timeout_s": 0.0,
            "network.heartbeat_interval_s": 0.0,
            "swarm.enabled": False,  # where a round is reduced changes no bit of it
            "swarm.aggregators": (),
        }
    )
