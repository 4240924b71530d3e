"""A round of two sites whose updates pass through the server's filters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kit.servers import new_server
from safetensors.torch import load_file
from torch import Tensor

import atoll
from atoll.filters import CHUNK_ELEMENTS, Filter

START = {"w": torch.zeros(2), "head": torch.zeros(1), "bn.running_mean": torch.zeros(1), "n": torch.tensor(7)}
State = dict[str, Tensor]


def become(w: list[float], head: float, mean: float = 0.0, n: int = 7) -> State:
    return {
        "w": torch.tensor(w),
        "head": torch.tensor([head]),
        "bn.running_mean": torch.tensor([mean]),
        "n": torch.tensor(n),
    }


def serving(folder: Path, start: State = START, **options: Any) -> atoll.Server:
    settings: dict[str, Any] = {"algorithm.name": "fedavg", "rounds.total": 1, "rounds.sites": 2, "run.threads": 1}
    where = {"network.port": 0, "disk.min_free_bytes": 0, "disk.state_dir": folder / "state"}
    return new_server(start, **(where | settings | options))


def join(server: atoll.Server, folder: Path, sites: str) -> dict[str, atoll.functional.Client]:
    clients = {site: atoll.functional.Client(server.url, site=site, folder=folder / "w").register() for site in sites}
    for client in clients.values():
        assert client.next_round() == 1
        client.pull()
    return clients


def play(server: atoll.Server, folder: Path, updates: dict[str, State]) -> State:
    """One round of these sites; returns the result."""
    clients = join(server, folder, "".join(updates))
    for site, client in clients.items():
        client.submit(updates[site])
    for client in clients.values():
        assert client.next_round() is None
        client.close()
    assert server.wait(60)
    server.run()
    return load_file(server.exports / "model.safetensors")


class Halved(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        assert len(values) <= CHUNK_ELEMENTS
        return values.div_(2)
