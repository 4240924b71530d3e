"""A run as a test needs it: make a world, do the thing, look.

world = World(tmp_path, build_model(), "ab", rounds=2)      # sites a and b; further settings by their short names
world.run()                                                 # a server, and the sites' loops as threads
assert world.counted == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]

with World(tmp_path, {"w": torch.zeros(3)}, {"a": 1.0, "b": 3.0}, rounds=1) as world:
    world.rounds(1.0, 1)  # or one by one: ask, pull, submit
    assert world.finish()["w"].tolist() == [1.0, 1.0, 1.0]
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

import atoll
from atoll.protocol.status_messages import Status
from atoll.testing.run import free_port, give_back_port, wait_until
from kit.digests import exported
from kit.folders import copy_folder, put_back
from kit.manual_site import ManualSite
from kit.results import Result, saved_model
from kit.servers import PLAIN, long, new_server
from kit.sites import DiLoCoSites, FederatedSites, diloco, finish, run_to_end

State = dict[str, Tensor]
Change = float | Tensor | Callable[[str, int, State], Any]
"""What a site adds to every tensor, or a function: site, number of the round, what it pulled → what it submits."""


class World:
    """A run: its settings, a server in this process, and its sites.

    The server keeps its port and its state directory from one start to the next. Leaving a `with` block ends the sites
    that the test has moved, and then the server.

    Attributes:
        server: the server that was started last.
        sites: name → a site that the test moves. All join when one is first asked for.
        workers: the folder of the sites' own folders.
        log: what Atoll has logged in this process while the server was there, from INFO on.
        ended: set when the world is closed; a slow site waits for it in place of training.
    """

    server: atoll.Server

    def __init__(self, folder: Path, model: Any = None, sites: Iterable[str] = "ab", **settings: Any) -> None:
        """`settings` may have short names, replace those of PLAIN, and hold other arguments of `atoll.Server`.

        Args:
            model: the initial model.
            sites: their names; or name → weight of its updates, 1 by default.
        """
        self.folder, self.workers = folder, folder / "workers"
        self.weights = dict(sites) if isinstance(sites, Mapping) else dict.fromkeys(sites, 1.0)
        where = {"network.port": free_port(), "disk.state_dir": folder / "state", "rounds.sites": len(self.weights)}
        self._model, self._settings = model, PLAIN | where | long(settings)
        self.sites, self.ended = _Sites(self), threading.Event()
        self.log: list[str] = []
        self._pulled: dict[str, State] = {}

    # -- do

    def set(self, **changes: Any) -> None:
        """Let the next servers have other settings."""
        self._settings |= long(changes)

    def start(self, **changes: Any) -> Self:
        """Start a server; with other settings than before, if any are given."""
        self.set(**changes)
        with contextlib.ExitStack() as logged:
            logger, handler = logging.getLogger("atoll"), _Handler(self.log)
            logged.callback(logger.removeHandler, handler)
            logged.callback(logger.setLevel, logger.level)
            logger.addHandler(handler)
            logger.setLevel(min(logger.level or logging.INFO, logging.INFO))
            self.server = new_server(self._model, **self._settings).start()
            self._logged = logged.pop_all()
        return self

    def stop(self) -> None:
        """Stop the server; its sites stay."""
        self.server.stop()
        self._logged.close()

    def close(self, error: BaseException | None = None) -> None:
        """The sites that the test has moved leave the run, for this error if there is one, and the server ends."""
        self.ended.set()
        try:
            while self.sites:
                self.sites.popitem()[1].close(error)
        finally:
            self.stop()
            give_back_port(self._settings["network.port"])

    def backup(self) -> Path:
        """A copy of the state directory."""
        return copy_folder(self.folder / "state", self.folder / "backup")

    def put_back(self, backup: Path) -> None:
        """Let the next server start on this copy."""
        put_back(backup, self.folder / "state")

    def restart(self, **changes: Any) -> None:
        self.stop()
        self.start(**changes)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)

    def begin(self, *names: str, **loops: Any) -> FederatedSites | DiLoCoSites:
        """Start the loops of these sites, by default of all, as threads; `loops` go to the class of them."""
        kind = DiLoCoSites if self.server.settings.algorithm.name == "diloco" else FederatedSites
        return kind(self.server.url, self.folder, names=names or self.weights, weights=self.weights, **loops)

    def run(self, **loops: Any) -> FederatedSites | DiLoCoSites:
        """The whole run: a server, and all sites' loops, to their end."""
        with self:
            sites = self.begin(**loops)
            run_to_end(self.server, sites)
        return sites

    def worker(self, site: str = "a", **options: Any) -> Any:
        """A site that has joined, for a loop in the test; `options` go to `atoll.join`, such as another `server`."""
        return atoll.join(**{"server": self.url, "site": site, "folder": self.workers} | options)

    def diloco(self, *model_and_optimizer: Any, site: str = "a", **options: Any) -> atoll.DiLoCo:
        """A site's `atoll.DiLoCo` with these options, not started; by default around `build_model()` and SGD."""
        return diloco(self.server, self.folder, site, *model_and_optimizer, **options)

    def train_steps(self, model: Any, optimizer: Any, step: Callable[[], object]) -> None:
        """The whole run of DiLoCo with the site a, in this thread; `step` makes a local step."""
        with self:
            with self.diloco(model, optimizer) as loop:
                while not loop.finished:
                    step()
            self.server.run()

    def train_rounds(self, model: Any, train: Callable[[Any], object]) -> None:
        """The whole federated run with the site a, in this thread; `train` gets each round once it is loaded."""
        with self:
            with self.worker() as worker:
                for fl_round in worker:
                    fl_round.load_into(model)
                    train(fl_round)
                    fl_round.submit(model)
            self.server.run()

    def join(self, *names: str, **options: Any) -> None:
        """These sites, by default all, join, so that the test can move them; `options` go to `atoll.join`."""
        for name in names or self.weights:
            self.sites[name] = ManualSite(self.url, site=name, folder=self.workers, **options).join()

    def ask(self, *names: str, number: int | None = None) -> None:
        """These sites, by default all, get a ticket, of this round if a number is given."""
        for name in names or self.sites.all():
            given = self.sites[name].next_round()
            assert given is not None
            assert number in (None, given)

    def pull(self, *names: str, number: int | None = None) -> None:
        """These sites, by default all, get a ticket, and then pull its version."""
        self.ask(*names, number=number)
        for name in names or self.sites.all():
            self._pulled[name] = self.sites[name].pull()

    def submit(self, name: str, change: Change, **about: Any) -> None:
        """The site submits what it makes of what it pulled last, with its weight; `about` goes to `submit`."""
        site, state = self.sites[name], self._pulled[name]
        if callable(change):
            trained = change(name, site.round.number, state)
        else:
            trained = {key: value + change for key, value in state.items()}
        site.submit(trained, **{"weight": self.weights.get(name, 1.0)} | about)

    def move(self, name: str, number: int, change: Change, **about: Any) -> State:
        """This site's part in the round with this number; what it pulled."""
        self.pull(name, number=number)
        self.submit(name, change, **about)
        return self._pulled[name]

    def rounds(self, change: Change, *numbers: int, **about: Any) -> None:
        """Rounds with these numbers: all sites pull its version, and then each submits."""
        for number in numbers:
            self.pull(number=number)
            for name in self.sites.all():
                self.submit(name, change, **about)

    def wait(self, version: int) -> None:
        """Wait until this is the newest version."""
        wait_until(lambda: self.version == version, f"version {version}")

    def wait_until_durable(self, version: int) -> None:
        wait_until(lambda: self.status.durable_version == version, f"version {version} to be durable")

    def finish(self) -> State:
        """The sites hear that the run is over, and leave; the model that it has exported."""
        result = finish(self.server, self.sites)
        self.sites.clear()
        return result

    # -- look

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def status(self) -> Status:
        return self.server.status()

    @property
    def version(self) -> int:
        """The newest of the first fragment."""
        return self.status.fragments[0].version

    @property
    def model(self) -> State:
        """The newest version."""
        return saved_model(self.server, self.folder)

    @property
    def result(self) -> State:
        """The model that the run has exported at its end."""
        return exported(self.folder)

    @property
    def left(self) -> Result:
        """What the run has left on disk."""
        return Result(self.folder)

    @property
    def counted(self) -> list[tuple[str, int]]:
        """(site, round) of every update that counted, each as often as it counted."""
        return self.left.counted()

    @property
    def staleness(self) -> list[tuple[str, int]]:
        """(site, how many versions behind) of every update that counted, in order."""
        return [(each.site, each.staleness) for row in self.status.history for each in row.sites]

    @property
    def text(self) -> str:
        """The log as one text."""
        return "\n".join(self.log)


class _Handler(logging.Handler):
    """Keeps the lines of a log."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


class _Sites(dict[str, ManualSite]):
    """All sites of a run join when one is first asked for; later, each that is asked for and is not there."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def __missing__(self, name: str) -> ManualSite:
        if not self:
            self._world.join()
        if name not in self:
            self._world.join(name)
        return self[name]

    def all(self) -> list[str]:
        """The names of those that are there."""
        if not self:
            self._world.join()
        return list(self)


def require_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def require_close(found: Mapping[str, Tensor], expected: Mapping[str, Any]) -> None:
    """The same names, and values to 1e-12."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], torch.as_tensor(values).detach(), rtol=0, atol=1e-12)
