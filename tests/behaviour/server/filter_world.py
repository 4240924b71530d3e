"""A round of two sites whose updates pass through filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from kit.client import Client
from kit.servers import plain_server
from kit.sites import finish
from torch import Tensor

import atoll
from atoll.filters import CHUNK_ELEMENTS, Filter

START = {"w": torch.zeros(2), "head": torch.zeros(1), "bn.running_mean": torch.zeros(1), "n": torch.tensor(7)}
State = dict[str, Tensor]


def become(w: list[float], head: float = 0.0, mean: float = 0.0, n: int = 7) -> State:
    return {
        "w": torch.tensor(w),
        "head": torch.tensor([head]),
        "bn.running_mean": torch.tensor([mean]),
        "n": torch.tensor(n),
    }


def serving(folder: Path, start: State = START, **options: Any) -> atoll.Server:
    return plain_server(folder, start, **({"rounds.total": 1, "rounds.sites": 2, "run.threads": 1} | options))


def join(
    server: atoll.Server, folder: Path, sites: str, filters: Mapping[str, Sequence[Filter]] | None = None
) -> dict[str, Client]:
    """Sites with filters of their own that have pulled the version of round 1."""
    own = filters or {}
    found = {
        site: Client(server.url, site=site, folder=folder / "w", filters=own.get(site, ())).register() for site in sites
    }
    for client in found.values():
        assert client.next_round() == 1
        client.pull()
    return found


def play(
    server: atoll.Server, folder: Path, updates: dict[str, State], filters: Mapping[str, Sequence[Filter]] | None = None
) -> State:
    """One round of these sites; returns the result."""
    sites = join(server, folder, "".join(updates), filters)
    for site, client in sites.items():
        client.submit(updates[site])
    return finish(server, sites)


class Halved(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        assert len(values) <= CHUNK_ELEMENTS
        return values.div_(2)
