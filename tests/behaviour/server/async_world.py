"""An asynchronous run with an fp64 weight, and three sites that a test moves one by one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from harness.processes import free_port, wait_until
from kit.servers import new_server
from kit.sites import manual_sites
from torch import Tensor

import atoll

SITES = ("a", "b", "c")
START = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3)
LR, MOMENTUM = 0.5, 0.5


class Clients:
    """A run with an fp64 weight that begins with `start`, and sites that a test moves one by one."""

    def __init__(
        self, folder: Path, stack: ExitStack, sites: Iterable[str] = SITES, start: Tensor = START, **settings: Any
    ) -> None:
        self.folder, self.start = folder, start
        self.options: dict[str, Any] = {
            "algorithm.name": "fedavg",
            "aggregation.upload_codec.name": "none",
            "async.enabled": True,
            "rounds.sites": 3,
            "algorithm.outer_optimizer.lr": LR,
            "algorithm.outer_optimizer.momentum": MOMENTUM,
            "algorithm.outer_optimizer.nesterov": MOMENTUM > 0,
            "network.port": free_port(),
            "disk.state_dir": folder / "state",
            **settings,
        }
        self.server = new_server({"weight": start}, **self.options).start()
        stack.callback(lambda: self.server.stop())
        self.sites = manual_sites(self.server, folder, sites)
        for client in self.sites.values():
            stack.enter_context(client)
        self.base: dict[str, Tensor] = {}

    def restart(self) -> None:
        self.server.stop()
        self.server = new_server({"weight": self.start}, **self.options).start()

    def pull(self, *sites: str) -> None:
        for site in sites:
            assert self.sites[site].next_round() is not None
            self.base[site] = self.sites[site].pull()["weight"]

    def submit(self, site: str, u: Tensor, **about: Any) -> None:
        """Submit the pseudo-gradient `u` against what the site pulled last."""
        self.sites[site].submit({"weight": self.base[site] - u}, **about)

    def advance(self, site: str, *seeds: int) -> None:
        """The site submits a gradient for each seed, and pulls what comes of it."""
        for seed in seeds:
            self.submit(site, gradient(seed))
            self.pull(site)

    def wait(self, version: int) -> None:
        wait_until(lambda: self.server.status().fragments[0].version == version, f"version {version}")

    def weight(self) -> Tensor:
        return safetensors.torch.load_file(self.server.save_state(self.folder / "now.safetensors"))["weight"]

    def require_weight(self, expected: Tensor) -> None:
        assert torch.allclose(self.weight(), expected, rtol=0, atol=1e-12)

    def staleness(self) -> list[tuple[str, int]]:
        """(site, how many versions behind) of every update that counted, in order."""
        return [
            (site, s)
            for line in self.server.status().history
            for site, s in zip(line.workers, line.staleness, strict=True)
        ]

    def one_by_one(self) -> None:
        """All pull version 0; b, c, and a come in, then b, which is at version 1: 0, 1, 2 and 2 versions behind."""
        self.pull("a", "b", "c")
        for number, site in enumerate(("b", "c", "a")):
            self.submit(site, gradient(number))
            self.wait(number + 1)
            if site == "b":
                self.pull("b")
        self.submit("b", gradient(3))
        self.wait(4)


def wait_until_durable(server: atoll.Server, version: int) -> None:
    wait_until(lambda: server.status().durable_version == version, f"version {version} to be durable")


def gradient(seed: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nesterov(gradients: list[Tensor]) -> Tensor:
    theta, m = START.clone(), torch.zeros_like(START)
    for g in gradients:
        m = MOMENTUM * m + g
        theta = theta - LR * (g + MOMENTUM * m)
    return theta
