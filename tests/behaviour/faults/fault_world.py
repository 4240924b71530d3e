"""A small federated run that gives the same bits every time, and what can be read of it afterwards.

Two sites with unequal weights train a model of six parts for three rounds under an outer optimizer with momentum, so
that a lost, doubled or reordered update, and a lost or doubled outer step, change the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.processes import Nursery, Process, wait_until
from kit import (
    SETTINGS,
    SITES,
    DiLoCoSites,
    FederatedSites,
    ForkedServer,
    ForkedSite,
    Threads,
    ask_journal,
    serve,
    tensors_digest,
)
from kit.models import wide_model
from torch import nn

import atoll

KILLED = -signal.SIGKILL
PART_BYTES = SETTINGS["network.part_bytes"]
ROUNDS = SETTINGS["rounds.total"]
EVERY_SITE_AND_ROUND = [(site, number) for site in SITES for number in range(1, ROUNDS + 1)]

STREAMING: dict[str, Any] = {
    "algorithm.name": "diloco",
    "aggregation.upload_codec.name": "int8",
    "rounds.total": 2,
    "diloco.num_fragments": 3,
    "diloco.sync_every": 6,
    "diloco.fragment_sync_delay": 1,
    "diloco.fragment_update_alpha": 0.25,
}
"""Three fragments; results are merged a step later."""

Sites = partial(FederatedSites, build=wide_model)
ServerProcess = partial(ForkedServer, **{"model.source": "kit_model:wide_model"})
StreamingSites = partial(
    DiLoCoSites,
    build=wide_model,
    inner=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5),
    steps=13,
)
"""So many steps that each fragment has its two rounds."""


def serving(folder: Path, model: nn.Module | None = None, **settings: Any) -> AbstractContextManager[atoll.Server]:
    """The run, served by this process; of another model where one is given."""
    return serve(folder, model or wide_model(), **settings)


class Result:
    """What a finished run has left on disk; equal for equal bits.

    Attributes:
        exports: file → digest of the models that the run has exported, and of the note of the best.
        versions: (fragment, version, digest).
        updates: (site, fragment, round) of every counted update, each as often as it counted.
        tickets: how many there were.
    """

    def __init__(self, folder: Path) -> None:
        files = (folder / "state" / "exports").iterdir()
        self.exports = {file.name: _digest(file) for file in files if file.name != "metrics.jsonl"}
        self.versions = ask_journal(
            folder, "SELECT fragment, version, digest FROM history WHERE NOT lost ORDER BY fragment, version"
        )
        self._heads = ask_journal(
            folder, "SELECT max(version), hex(part_digests), hex(state_digests) FROM versions GROUP BY fragment"
        )
        self.updates = ask_journal(
            folder, "SELECT site, fragment, base_version + 1 FROM tickets WHERE state = 'counted' ORDER BY 1, 2, 3"
        )
        ((self.tickets,),) = ask_journal(folder, "SELECT count(*) FROM tickets")

    @property
    def bits(self) -> tuple[Any, ...]:
        """The exported models, every version's digest, and the outer states at the end."""
        return self.exports, self.versions, self._heads

    @property
    def digests(self) -> list[str]:
        """Of every version, in order."""
        return [digest for *_, digest in self.versions]

    def counted(self) -> list[tuple[str, int]]:
        """(site, round) of every counted update, each as often as it counted."""
        return [(site, number) for site, _, number in self.updates]

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


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def left_undisturbed(folder: Path, sites: Callable[..., Threads] = Sites, **settings: Any) -> Result:
    """What the run leaves if nothing disturbs it."""
    with serving(folder, **settings) as server:
        sites(server.url, folder).join()
        server.run()
    result = Result(folder)
    result.require_once()
    return result


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same bits."""
    return tensors_digest(dict(one.state_dict())) == tensors_digest(dict(other.state_dict()))


@contextlib.contextmanager
def beside(server: atoll.Server, others: Threads) -> Iterator[None]:
    """Disturb a site within; then the others come to the end of the run, and the server with them."""
    yield
    others.join()
    server.run()


class SiteProcess(ForkedSite):
    """One site as a process of its own, running a script that lies beside this file."""

    def __init__(self, nursery: Nursery, folder: Path, url: str, site: str, script: str = "fault_worker.py") -> None:
        super().__init__(nursery, folder, url, site, Path(__file__).with_name(script))
        self._never = folder / "never"

    def killed_and_again(self, failpoints: str) -> Process:
        """Killed where the failpoints say, and started again; returns the second process, which came to its end."""
        assert self.start(failpoints).wait(60) == KILLED
        return self._again()

    def killed_in_training_and_again(self, number: int) -> Process:
        """Likewise, in the middle of the training of a round."""
        first = self.start(HOLD=f"{number}:{self._never}")
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
    """The first line of this kind (and round) that a `SiteProcess` has written; None while there is none."""
    return next((each for each in lines(process) if each["what"] == what and number in (None, each.get("round"))), None)


def told(process: Process, what: str, number: int | None = None) -> dict[str, Any]:
    """As `said`, of a process that has said it."""
    line = said(process, what, number)
    assert line is not None, process.output()
    return line
