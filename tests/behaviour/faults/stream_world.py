"""A small streaming run that gives the same bits every time: three fragments, results merged a step later."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from fault_world import PART_BYTES
from site_threads import DiLoCoSites
from small_run import SITES, build, local_step
from torch import nn

ROUNDS = 2
FRAGMENTS = 3
SETTINGS: dict[str, Any] = {
    "algorithm.name": "diloco",
    "aggregation.upload_codec.name": "int8",
    "algorithm.outer_optimizer.lr": 0.7,
    "algorithm.outer_optimizer.momentum": 0.9,
    "rounds.total": ROUNDS,
    "diloco.num_fragments": FRAGMENTS,
    "diloco.sync_every": 6,
    "diloco.fragment_sync_delay": 1,
    "diloco.fragment_update_alpha": 0.25,
    "network.part_bytes": PART_BYTES,
}
"""Over those of `fault_world`."""
STEPS = ROUNDS * 6 + 1
EVERY_UPDATE = sorted((site, fragment, base, 1) for site in SITES for fragment in range(3) for base in range(ROUNDS))
"""(site, fragment, base version, how often it counted)."""


class StreamingSites(DiLoCoSites):
    """Workers as threads of this process."""

    weights = SITES

    def __init__(
        self,
        url: str,
        folder: Path,
        during: Callable[[str, int], None] | None = None,
        names: Collection[str] = SITES,
        steps: int = STEPS,
        **options: Any,
    ) -> None:
        super().__init__(url, folder, names, steps, during, **options)

    def build(self) -> nn.Module:
        return build()

    def inner(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    def local_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, site: str, step: int) -> None:
        local_step(model, optimizer, site, step)


class Left:
    """What a finished run has left on disk."""

    def __init__(self, folder: Path) -> None:
        self.model = hashlib.sha256((folder / "state/exports/model.safetensors").read_bytes()).hexdigest()
        with contextlib.closing(sqlite3.connect(folder / "state/journal.sqlite")) as journal:
            self.versions = journal.execute(
                "SELECT fragment, version, digest FROM history WHERE NOT lost ORDER BY fragment, version"
            ).fetchall()
            self.states = journal.execute(
                "SELECT fragment, hex(state_digests) FROM versions WHERE version = 2 ORDER BY fragment"
            ).fetchall()
            self.counted = journal.execute(
                "SELECT site, fragment, base_version, count(*) FROM tickets WHERE state = 'counted' "
                "GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
            ).fetchall()

    @property
    def bits(self) -> tuple[Any, ...]:
        """The exported model, every version's digest, and the outer states at the end."""
        return self.model, self.versions, self.states


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same bits."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == again and torch.equal(mine, theirs) for (name, mine), (again, theirs) in pairs)
