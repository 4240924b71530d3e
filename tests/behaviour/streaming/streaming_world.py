"""A model of six equal layers in fp64, runs of it, and the numbers that streaming has to give.

`expected` is the formula of 2501.18512, computed in one process with plain tensors; nothing of Atoll's is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from kit.servers import long, new_server
from kit.sites import DiLoCoSites, diloco
from torch import Tensor, nn

import atoll

LAYERS = 6


WEIGHTS = {"a": 1.0, "b": 2.5, "c": 4.0}


def build() -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(5, 5), nn.Tanh()]
    return nn.Sequential(*layers).double()


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-2, weight_decay=0.05)


def data(site: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(ord(site))
    return (
        torch.randn(16, 5, dtype=torch.float64, generator=generator),
        torch.randn(16, 5, dtype=torch.float64, generator=generator),
    )


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, site: str) -> None:
    inputs, targets = data(site)
    optimizer.zero_grad()
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()


OUTER_LR, MOMENTUM = 0.6, 0.8


Trace = list[dict[str, Tensor]]
"""Every parameter after each local step."""


def names_of(fragments: int) -> list[list[str]]:
    """By hand: six layers of the same size, each with a weight and a bias; a layer is an even place of the sequence."""
    each = LAYERS // fragments
    return [
        [
            f"{2 * layer}.{kind}"
            for layer in range(each * fragment, each * (fragment + 1))
            for kind in ("weight", "bias")
        ]
        for fragment in range(fragments)
    ]


def expected(sites: list[str], settings: Mapping[str, Any]) -> dict[str, Trace]:
    """What each site's parameters are after every local step, until the run is finished.

    Args:
        settings: K, H, tau, alpha and rounds.
    """
    fragments, sync_every, tau, alpha, rounds = (settings[key] for key in ("K", "H", "tau", "alpha", "rounds"))
    models = {site: build() for site in sites}
    optimizers = {site: inner(models[site]) for site in sites}
    parameters = {site: dict(models[site].named_parameters()) for site in sites}
    theta = {name: value.detach().clone() for name, value in build().named_parameters()}
    momentum = {name: torch.zeros_like(value) for name, value in theta.items()}
    total = sum(WEIGHTS[site] for site in sites)
    traces: dict[str, Trace] = {site: [] for site in sites}
    results: dict[int, dict[str, Tensor]] = {}  # local step at which it is merged → fragment's parameters
    taken, every = 0, sync_every // fragments
    step = merged = 0
    while merged < rounds * fragments:
        step += 1
        for site in sites:
            local_step(models[site], optimizers[site], site)
        with torch.no_grad():
            arrivals = [results.pop(step)] if step in results else []
            if step % every == 0 and taken < rounds * fragments:
                names = names_of(fragments)[taken % fragments]
                arrived = set(arrivals[0]) if arrivals else set()
                assert arrived.isdisjoint(names), "a fragment is not taken in the step in which it is merged"
                for name in names:
                    gradient = sum((theta[name] - parameters[s][name]) * (WEIGHTS[s] / total) for s in sites)
                    momentum[name] = MOMENTUM * momentum[name] + gradient
                    theta[name] = theta[name] - OUTER_LR * (gradient + MOMENTUM * momentum[name])
                now = {name: theta[name].clone() for name in names}
                taken += 1
                if tau:
                    results[step + tau] = now
                else:
                    arrivals.append(now)
            merged += len(arrivals)
            for arrival, site in itertools.product(arrivals, sites):
                for name, value in arrival.items():
                    parameters[site][name].copy_((1 - alpha) * value + alpha * parameters[site][name])
            if merged == rounds * fragments:  # the run is finished: every site has its model
                for site, name in itertools.product(sites, theta):
                    parameters[site][name].copy_(theta[name])
        for site in sites:
            traces[site].append({name: value.detach().clone() for name, value in parameters[site].items()})
    return traces


def serve(folder: Path, model: nn.Module | None = None, **options: Any) -> atoll.Server:
    """A server that is not started; settings stand among its arguments, some by their short names."""
    settings: dict[str, Any] = {
        "algorithm.name": "diloco",
        "aggregation.upload_codec.name": "none",
        "algorithm.outer_optimizer.lr": OUTER_LR,
        "algorithm.outer_optimizer.momentum": MOMENTUM,
        "network.port": 0,
        "disk.state_dir": folder / "state",
        "network.heartbeat_interval_s": 1.0,
        "run.threads": 1,
    }
    return new_server(model or build(), **settings | long(options))


def loop_of(url: str, folder: Path, site: str = "a", **options: Any) -> atoll.DiLoCo:
    """The loop of a site around the six layers, not started."""
    model = build()
    return diloco(url, folder, site, model, inner(model), **options)


def step_(loop: atoll.DiLoCo, site: str = "a") -> None:
    """One local step of a loop."""
    local_step(loop.model, loop.optimizer, site)  # type: ignore[arg-type]


def versions(server: atoll.Server) -> list[int]:
    """The newest version of each fragment."""
    return [fragment.version for fragment in server.status().fragments]


class Sites(DiLoCoSites):
    """Workers as threads of this process.

    Attributes:
        traces: site → its parameters after each local step.
    """

    def __init__(self, url: str, folder: Path, sites: list[str], steps: int, **options: Any) -> None:
        self.traces: dict[str, Trace] = {site: [] for site in sites}
        how = {"build": build, "inner": inner, "step": self._traced, "weights": WEIGHTS}
        super().__init__(url, folder, steps, sites, **how | options)

    def _traced(self, model: nn.Module, optimizer: torch.optim.Optimizer, site: str, step: int) -> None:
        local_step(model, optimizer, site)
        self.traces[site].append({name: p.detach().clone() for name, p in model.named_parameters()})


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two states have the same names and bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def copied(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model, apart from it."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def require_close(traces: dict[str, Trace], right: dict[str, Trace]) -> None:
    """Every parameter of every site after every step is what it has to be, to 1e-12."""
    assert traces.keys() == right.keys()
    for site, trace in right.items():
        assert len(traces[site]) == len(trace), site
        for step, (mine, theirs) in enumerate(zip(traces[site], trace, strict=True), start=1):
            for name, value in theirs.items():
                error = float((mine[name] - value).abs().max())
                assert error <= 1e-12, f"{site}, step {step}, {name}: {error}"
