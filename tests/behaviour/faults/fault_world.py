"""A small federated run that gives the same bits every time, and what can be read of it afterwards.

Two sites with unequal weights train a model of six parts for three rounds under an outer optimizer with momentum, so
that a lost, doubled or reordered update, and a lost or doubled outer step, change the result.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import kit.results
import torch
from harness.processes import Nursery, Process, wait_until
from kit import SETTINGS, SITES, ForkedServer, ForkedSite, serve
from kit.models import wide_model
from kit.sites import DiLoCoSites, FederatedSites, Threads, run_to_end

import atoll

KILLED = -signal.SIGKILL
PART_BYTES = SETTINGS["network.part_bytes"]
ROUNDS = SETTINGS["rounds.total"]
EVERY_SITE_AND_ROUND = [(site, number) for site in SITES for number in range(1, ROUNDS + 1)]

STREAMING = dict[str, Any](algorithm="diloco", codec="int8", rounds=2, K=3, H=6, tau=1, alpha=0.25)
"""Three fragments; results are merged a step later."""

QUICK: dict[str, Any] = {
    "network.heartbeat_interval_s": 0.2,
    "network.heartbeat_timeout_s": 1.5,
    "limits.weight_share": 1.0,
}
"""A silent site is dead soon. No warning of unequal weights, which the sites have on purpose."""

Sites = partial(FederatedSites, build=wide_model)
ServerProcess = partial(ForkedServer, **{"model.source": "kit_model:wide_model"})
StreamingSites = partial(
    DiLoCoSites,
    build=wide_model,
    inner=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5),
    steps=13,
)
"""So many steps that each fragment has its two rounds."""


def serve_wide(folder: Path, **settings: Any) -> AbstractContextManager[atoll.Server]:
    """The run, served by this process."""
    return serve(folder, wide_model(), **settings)


class Result(kit.results.Result):
    """What the run has left on disk."""

    def require_once(self) -> None:
        """No update counted twice."""
        assert len(set(self.updates)) == len(self.updates) > 0

    def require_same(self, undisturbed: Result, sites: Threads | None = None) -> None:
        """The bits are those of the undisturbed run, and each update counted once; `sites` did nothing in vain."""
        assert self.bits == undisturbed.bits
        assert self.updates == undisturbed.updates
        if isinstance(sites, FederatedSites):
            assert sites.trained == dict.fromkeys(self.counted(), 1)
        if isinstance(sites, DiLoCoSites):
            assert [loop.sync_metrics["skipped"] for loop in sites.loops.values()] == [0] * len(sites.loops)


def left_undisturbed(folder: Path, sites: Callable[..., Threads] = Sites, **settings: Any) -> Result:
    """What the run leaves if nothing disturbs it."""
    with serve_wide(folder, **settings) as server:
        run_to_end(server, sites(server.url, folder))
    result = Result(folder)
    result.require_once()
    return result


@contextlib.contextmanager
def beside(server: atoll.Server, others: Threads) -> Iterator[None]:
    """Disturb a site within; then the others come to the end of the run, and the server with them."""
    yield
    run_to_end(server, others)


class SiteProcess(ForkedSite):
    """One site as a process of its own, which runs `fault_site.py`.

    Attributes:
        never: a file; once it is there, processes of `in_training` go on.
    """

    def __init__(self, nursery: Nursery, folder: Path, url: str, site: str, loop: str = "federated") -> None:
        super().__init__(nursery, folder, url, site, Path(__file__).with_name("fault_site.py"))
        self.never, self._loop = folder / "never", loop

    def start(self, failpoints: str = "", **env: str) -> Process:
        """Start the script, with further environment variables."""
        return super().start(failpoints, LOOP=self._loop, **env)

    def in_training(self, number: int) -> Process:
        """Start it, and wait until it trains in a round; there it stays."""
        process = self.start(HOLD=f"{number}:{self.never}")
        wait_until(lambda: said(process, "trains", number), f"the training of round {number}")
        return process


def parts_sent(requests: Iterable[str], part: int) -> list[int]:
    """The parts, in their order, that requests bring of the first update of which they bring this one."""
    found = [line.split("/parts/") for line in requests if "/parts/" in line]
    update = next(path for path, rest in found if rest.startswith(f"{part} "))
    return [int(rest.split()[0]) for path, rest in found if path == update]


def lines(process: Process) -> Iterator[dict[str, Any]]:
    """What a `SiteProcess` has written of itself so far."""
    return (json.loads(line) for line in process.output().splitlines() if line.startswith("{"))


def said(process: Process, what: str, number: int | None = None) -> dict[str, Any] | None:
    """The first line of this kind (and round) that a `SiteProcess` has written; None while there is none."""
    return next((each for each in lines(process) if each["what"] == what and number in (None, each.get("round"))), None)
