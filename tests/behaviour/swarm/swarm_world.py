"""Swarms for these tests: sites in threads or processes, their server likewise, and what can be read of them."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.processes import Kept, Nursery, Process, wait_until
from kit import ForkedServer, Threads, serve
from swarm_run import SITES, STEPS, build, gradients_
from torch import nn

import atoll
from atoll.errors import ServerUnreachable
from atoll.testing.run import Status, status

ROUNDS = 3
SETTINGS: dict[str, Any] = {
    "swarm.enabled": True,
    "rounds.sites": len(SITES),
    "rounds.total": ROUNDS,
    "network.heartbeat_interval_s": 0.2,
    "network.heartbeat_timeout_s": 2.0,
}
PLAIN: dict[str, Any] = dict.fromkeys(
    ("algorithm.outer_optimizer.name", "algorithm.outer_optimizer.lr", "algorithm.outer_optimizer.momentum")
)
"""Without the outer optimizer of the kit's settings: that of the algorithm."""


class Sites(Threads):
    """Workers as threads of this process.

    Attributes:
        models: site → what the run has made of its model.
        moved: site → bytes of tensors that it has sent and received.
    """

    def __init__(self, url: str, folder: Path, names: Iterable[str] = SITES) -> None:
        self.models: dict[str, nn.Module] = {}
        self.moved: dict[str, tuple[int, int]] = {}
        self._url, self._folder = url, folder
        super().__init__(*(partial(self._work, site) for site in names))

    def _work(self, site: str) -> None:
        model, steps = build(), STEPS.get(site, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with atoll.join(self._url, site=site, folder=self._folder / "workers") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                fl_round.correct(model, optimizer)
                for step in range(steps):
                    gradients_(model, site, 10 * fl_round.number + step)
                    optimizer.step()
                fl_round.submit(
                    model, weight=SITES.get(site, 1.0), metrics={"loss": 1.0 / fl_round.number}, steps=steps
                )
            self.models[site] = worker.load_into(model)
            self.moved[site] = worker.bytes_up, worker.bytes_down


@contextlib.contextmanager
def serve_swarm(folder: Path, **settings: Any) -> Iterator[atoll.Server]:
    """The run, served by this process; its sites are threads, which do not die."""
    with serve(folder, build(), **(SETTINGS | {"network.heartbeat_timeout_s": 60.0} | settings)) as server:
        yield server


class ServerProcess(ForkedServer):
    """The run, served by `atoll server` in a process of its own; started again whenever it was killed."""

    def __init__(self, nursery: Nursery, folder: Path, lives: Sequence[str] = (), **settings: Any) -> None:
        (folder / "swarm_model.py").write_text(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom swarm_run import build\n"
        )
        super().__init__(nursery, folder, tuple(lives), **SETTINGS | {"model.source": "swarm_model:build"} | settings)

    def status(self) -> Status | None:
        """None while no server answers."""
        try:
            return status(self.url)
        except ServerUnreachable:
            return None

    def place(self, what: str, timeout_s: float = 30.0) -> str:
        """The aggregator or checker of the open round, once there is one."""

        def asked() -> str:
            now = self.status()
            place = now.fragments[0].place if now else None
            return str(getattr(place, what)) if place else ""

        return wait_until(asked, f"a worker that is {what}", timeout_s)

    def reason(self) -> str:
        """What the round waits for, according to the status."""
        now = self.status()
        return now.fragments[0].reason if now else ""

    def said(self, text: str, timeout_s: float = 30.0) -> None:
        """Return once the server has logged this."""
        wait_until(lambda: text in self.log.read_text(), f"{text!r} in {self.log}", timeout_s)


class SiteProcess:
    """One site as a process of its own, running `swarm_site.py`; started again whenever it was killed."""

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        url: str,
        site: str,
        lives: Sequence[str] = (),
        *,
        script: str = "swarm_site.py",
        **env: str,
    ) -> None:
        self.site, self._nursery, self._folder, self._starts = site, nursery, folder, 0
        self._script = str(Path(__file__).with_name(script))
        self._env = {"ATOLL_SERVER": url, "ATOLL_SITE": site, "ATOLL_DIR": str(folder / "workers")} | env
        self.kept = Kept(self._start, lives)

    def _start(self, failpoints: str) -> Process:
        self._starts += 1
        log = self._folder / f"site-{self.site}-{self._starts}.log"
        return self._nursery.start(self._script, cwd=self._folder, env=self._env, failpoints=failpoints, log=log)

    def told(self, what: str, number: int | None = None) -> dict[str, Any] | None:
        """The first line of this kind (and round) of all its processes; None where there is none yet."""
        for process in self.kept.processes:
            for line in process.output().splitlines():
                if line.startswith("{"):
                    told: dict[str, Any] = json.loads(line)
                    if told["what"] == what and number in (None, told["round"]):
                        return told
        return None

    def ended(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Its last words, once it has come to its end by itself."""
        try:
            assert self.kept.wait(timeout_s) == 0, self.kept.now.output()
        except TimeoutError as error:
            logs = {path.name: path.read_text()[-3000:] for path in sorted(self._folder.glob("*.log"))}
            raise AssertionError(f"{self.site}: {error}; {logs}") from error
        last = self.told("ends")
        assert last is not None
        return last


@contextlib.contextmanager
def sites(
    nursery: Nursery, server: ServerProcess, lives: dict[str, Sequence[str]] | None = None, **env: dict[str, str]
) -> Iterator[dict[str, SiteProcess]]:
    """The three sites as processes; `lives` and `env` of those that have any."""
    found = {
        site: SiteProcess(nursery, server.folder, server.url, site, (lives or {}).get(site, ()), **env.get(site, {}))
        for site in SITES
    }
    try:
        yield found
    finally:
        for each in found.values():
            each.kept.close()


class Result:
    """What the journal of a finished run says; equal for equal bits."""

    def __init__(self, folder: Path) -> None:
        with contextlib.closing(sqlite3.connect(folder / "state/journal.sqlite")) as journal:
            self.versions = journal.execute(
                "SELECT fragment, version, digest FROM history WHERE NOT lost ORDER BY fragment, version"
            ).fetchall()
            self.heads = journal.execute(
                "SELECT fragment, version, hex(part_digests), hex(state_digests) FROM versions ORDER BY 1, 2"
            ).fetchall()[-1:]
            self.tickets = journal.execute(
                "SELECT site, base_version, state FROM tickets ORDER BY site, base_version, ticket"
            ).fetchall()
            self.history = [
                json.loads(text)
                for (text,) in journal.execute("SELECT summary_json FROM history WHERE summary_json != '' ORDER BY seq")
            ]

    @property
    def bits(self) -> tuple[Any, ...]:
        """Every version's digest, and the outer state at the end."""
        return self.versions, self.heads

    def counted(self) -> list[tuple[str, int]]:
        return [(site, base + 1) for site, base, state in self.tickets if state == "counted"]

    @property
    def aggregators(self) -> list[str]:
        return [summary["aggregator"] for summary in self.history]


EVERY_SITE_AND_ROUND = [(site, number) for site in SITES for number in range(1, ROUNDS + 1)]


def left_by(folder: Path, names: Iterable[str] = SITES, **settings: Any) -> tuple[Result, Sites]:
    """A finished run, and its sites."""
    folder.mkdir(exist_ok=True)
    with serve_swarm(folder, **settings) as server:
        sites = Sites(server.url, folder, names)
        sites.join()
        server.run()
    return Result(folder), sites
