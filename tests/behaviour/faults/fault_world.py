"""A small federated run that gives the same bits every time, and what can be read of it afterwards.

Two sites with unequal weights train a model of six parts for three rounds under an outer optimizer with momentum, so
that a lost, doubled or reordered update, and a lost or doubled outer step, change the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from harness.processes import Kept, Nursery, Process, free_port, wait_until
from kit.processes import toml
from kit.servers import new_server
from site_threads import Threads
from small_run import SITES, build, train_
from torch import nn

import atoll

KILLED = -signal.SIGKILL
ROUNDS = 3
PART_BYTES = 2**16

SETTINGS: dict[str, Any] = {
    "algorithm.name": "fedavg",
    "algorithm.outer_optimizer.name": "sgd",
    "algorithm.outer_optimizer.lr": 0.7,
    "algorithm.outer_optimizer.momentum": 0.9,
    "rounds.sites": len(SITES),
    "rounds.total": ROUNDS,
    "network.part_bytes": PART_BYTES,
    "disk.min_free_bytes": 0,
    "network.heartbeat_interval_s": 0.5,
    "network.heartbeat_timeout_s": 60.0,
    "run.threads": 1,
}


class Sites(Threads):
    """Workers as threads of this process.

    Attributes:
        trained: (site, round) → how often it was trained.
    """

    def __init__(
        self, url: str, folder: Path, during: Callable[[str, int], None] | None = None, names: Iterable[str] = SITES
    ) -> None:
        """`during(site, round)` is called in the middle of every local training."""
        self.trained: Counter[tuple[str, int]] = Counter()
        self._url, self._folder, self._during = url, folder, during
        self._lock = threading.Lock()
        super().__init__(*(partial(self._work, site) for site in names))

    def _work(self, site: str) -> None:
        model = build()
        with atoll.join(self._url, site=site, folder=self._folder / "workers") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                with self._lock:
                    self.trained[site, fl_round.number] += 1
                if self._during:
                    self._during(site, fl_round.number)
                train_(model, site, fl_round.number)
                fl_round.submit(model, weight=SITES[site], metrics={"loss": 1.0 / fl_round.number})


@contextlib.contextmanager
def serving(folder: Path, model: nn.Module | None = None, **settings: Any) -> Iterator[atoll.Server]:
    """The run, served by this process; of another model where one is given."""
    server = new_server(
        model or build(), **(SETTINGS | {"network.port": 0, "disk.state_dir": folder / "state"} | settings)
    ).start()
    try:
        yield server
    finally:
        server.stop()


class ServerProcess:
    """The run, served by `atoll server` in a process of its own; started again whenever it was killed."""

    def __init__(
        self, nursery: Nursery, folder: Path, lives: tuple[str, ...] = (), *, port: int = 0, **settings: Any
    ) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.log = folder / "server.log"
        self._nursery = nursery
        write_run_file(folder, **{"network.port": self.port}, **settings)
        self.kept = Kept(self._start, lives)

    def _start(self, failpoints: str) -> Process:
        return self._nursery.start("atoll", "server", "run.toml", cwd=self.folder, failpoints=failpoints, log=self.log)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kept.close()


def write_run_file(folder: Path, **settings: Any) -> Path:
    """`run.toml`, and `fault_model.py` that it names, in `folder`."""
    (folder / "fault_model.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom small_run import build\n"
    )
    values = SETTINGS | {"model.source": "fault_model:build", "disk.state_dir": "state"} | settings
    path = folder / "run.toml"
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in values.items()))
    return path


class Result:
    """What a finished run has left on disk; equal for equal bits."""

    def __init__(self, folder: Path) -> None:
        self.model = hashlib.sha256((folder / "state/exports/model.safetensors").read_bytes()).hexdigest()
        with contextlib.closing(sqlite3.connect(folder / "state/journal.sqlite")) as journal:
            self.versions = journal.execute(
                "SELECT version, digest FROM history WHERE NOT lost ORDER BY seq"
            ).fetchall()
            head = "SELECT hex(part_digests), hex(state_digests) FROM versions ORDER BY version DESC LIMIT 1"
            self.head = journal.execute(head).fetchone()
            self.tickets = journal.execute(
                "SELECT site, base_version, state, count(*) FROM tickets GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
            ).fetchall()

    @property
    def bits(self) -> tuple[Any, ...]:
        """The exported model, every version's digest, and the outer state at the end."""
        return self.model, self.versions, self.head

    def counted(self) -> list[tuple[str, int]]:
        """(site, round) of every counted update, each as often as it counted."""
        return [(site, base + 1) for site, base, state, n in self.tickets if state == "counted" for _ in range(n)]

    def require_same(self, undisturbed: Result, sites: Sites | None = None) -> None:
        """The bits are those of the undisturbed run, and every update counted once; `sites` trained each round once."""
        assert self.bits == undisturbed.bits
        assert self.counted() == EVERY_SITE_AND_ROUND
        if sites is not None:
            assert sites.trained == dict.fromkeys(EVERY_SITE_AND_ROUND, 1)


def left_undisturbed(folder: Path, **settings: Any) -> Result:
    """What the run leaves where nothing happens to anybody."""
    with serving(folder, **settings) as server:
        Sites(server.url, folder).join()
        server.run()
    return Result(folder)


class Others(Protocol):
    """Sites that train beside the one that is disturbed."""

    def join(self) -> None: ...


@contextlib.contextmanager
def beside(server: atoll.Server, others: Others) -> Iterator[None]:
    """Disturb a site within; then the others come to the end of the run, and the server with them."""
    yield
    others.join()
    server.run()


def require_ends_soon_by_ctrl_c(site: Process) -> None:
    """Though nothing moves on its connections: not only when `idle_timeout_s`, which is 60, is over."""
    begin_s = time.monotonic()
    site.send(signal.SIGINT)
    assert site.wait(100.0) != 0
    assert time.monotonic() - begin_s < 30.0
    assert "KeyboardInterrupt" in site.output()


class SiteProcess:
    """One site as a process of its own, running a script that lies beside this file."""

    def __init__(self, nursery: Nursery, folder: Path, url: str, site: str, script: str = "fault_worker.py") -> None:
        self._nursery, self._folder, self._script = nursery, folder, Path(__file__).with_name(script)
        self._env = {"ATOLL_SERVER": url, "ATOLL_SITE": site, "ATOLL_DIR": str(folder / "workers")}
        self.starts = 0

    def start(self, failpoints: str = "", hold: str = "", **env: str) -> Process:
        """Start it; `hold` "2:PATH" lets it wait in the training of round 2 until PATH exists."""
        self.starts += 1
        return self._nursery.start(
            str(self._script),
            cwd=self._folder,
            env=self._env | ({"HOLD": hold} if hold else {}) | env,
            failpoints=failpoints,
            log=self._folder / f"worker-{self._env['ATOLL_SITE']}-{self.starts}.log",
        )

    def killed_and_again(self, failpoints: str) -> Process:
        """Killed where the failpoints say, and started again; returns the second process, which came to its end."""
        assert self.start(failpoints).wait(60) == KILLED
        return self._again()

    def killed_in_training_and_again(self, number: int) -> Process:
        """Likewise, in the middle of the training of a round."""
        first = self.start(hold=f"{number}:{self._folder}/never")
        wait_until(lambda: said(first, "trains", number), f"the training of round {number}")
        assert first.kill() == KILLED
        return self._again()

    def _again(self) -> Process:
        process = self.start()
        assert process.wait(60) == 0
        return process


def lines(process: Process) -> Iterator[dict[str, Any]]:
    """What a `SiteProcess` has written of itself so far."""
    return (json.loads(line) for line in process.output().splitlines() if line.startswith("{"))


def said(process: Process, what: str, number: int | None = None) -> dict[str, Any] | None:
    """The first line of this kind (and round) that a `SiteProcess` has written; None where there is none yet."""
    return next((each for each in lines(process) if each["what"] == what and number in (None, each.get("round"))), None)


def told(process: Process, what: str, number: int | None = None) -> dict[str, Any]:
    """As `said`, of a process that has said it."""
    line = said(process, what, number)
    assert line is not None, process.output()
    return line


EVERY_SITE_AND_ROUND = [(site, number) for site in SITES for number in range(1, ROUNDS + 1)]
