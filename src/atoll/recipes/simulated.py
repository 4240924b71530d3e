"""A recipe in simulation: its clients are virtual, trained in turn by a few processes, with no network in between."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.config import Settings, default_of
from atoll.errors import public_api
from atoll.recipes.recipe import Strict, require_number, require_path
from atoll.recipes.result import (
    RUN_FILE,
    RunResult,
    ended_by_sigterm,
    prepared,
    require_clients,
    result_of,
    sites_of,
    told,
)
from atoll.simulate.engines import require_engine

if TYPE_CHECKING:
    from atoll.protocol.status_messages import RoundSummary
    from atoll.recipes.recipe import Recipe

STATE_DIR = "atoll-simulation"
"""Beside the run file, as `atoll simulate` has it: not where the run itself would be."""


@public_api
@dataclass(frozen=True)
class SimEnv(Strict):
    """Virtual clients on this machine, or on Ray: the same rounds, algorithms and script, and the same bits.

    Args:
        num_clients: how many; round one waits for all of them.
        folder: as for `LocalEnv`.
        processes: that train them in turn; by default one for each core.
        engine: `local`, or `ray` (`pip install 'atoll[ray]'`).
        address: of a Ray cluster; by default Ray is started on this machine.
        quiet: say nothing while it runs.

    Raises:
        UsageError: a value is of a wrong type.
        ConfigError: an engine, or a number of processes, that is not there.
    """

    num_clients: int
    folder: str | Path | None = None
    processes: int | None = None
    engine: str = "local"
    address: str | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        require_number(self, "num_clients", self.num_clients, 1)
        if self.folder is not None:
            require_path(self, "folder", self.folder)
        require_engine(self.engine, self.processes, self.address)

    def run(self, recipe: Recipe) -> RunResult:
        """Execute a recipe; what was started has ended when this returns or raises.

        Raises:
            AtollError: it could not begin, or failed.
        """
        require_clients(recipe, self.num_clients)
        folder = prepared(recipe, self.folder, self.num_clients)
        settings = Settings.read(folder / RUN_FILE, environ={})
        settings = settings.changed({"swarm.enabled": False, "swarm.aggregators": ()})  # the bits are the same
        if settings.disk.state_dir == folder / default_of("disk.state_dir"):
            settings = settings.changed({"disk.state_dir": folder / STATE_DIR})
        self._say(f"{settings.run.name}: {self.num_clients} virtual clients; files in {folder}")
        with _found(Path.cwd(), Path(recipe.train_script).resolve().parent), ended_by_sigterm():
            from atoll.simulate.simulation import Simulation

            done = Simulation(
                settings=settings,
                arguments=recipe.argv[1:],
                workers=sites_of(self.num_clients),
                processes=self.processes,
                engine=self.engine,
                address=self.address,
                on_round=lambda summary: self._tell(summary, settings.rounds.total),
            ).run()
        for site, why in sorted(done.failed.items()):
            self._say(f"{site} failed: {why}")
        self._say(f"{settings.run.name} is finished: {done.model}")
        return result_of(settings, folder, None)

    def _tell(self, summary: RoundSummary, rounds: int) -> None:
        if summary.fragment == 0:
            self._say(told(summary, rounds))

    def _say(self, line: str) -> None:
        if not self.quiet:
            print(line, flush=True)


@contextlib.contextmanager
def _found(*folders: Path) -> Iterator[None]:
    """Within, modules in these folders are found: where the recipe's model lies."""
    before = list(sys.path)
    sys.path[:0] = [str(folder) for folder in folders if str(folder) not in sys.path]
    try:
        yield
    finally:
        sys.path[:] = before
