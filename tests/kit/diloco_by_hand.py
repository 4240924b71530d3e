"""DiLoCo by the formula of 2501.18512, of whole models and of fragments; nothing of Atoll is used.

Local steps are AdamW's on mean squares in fp64; between them is SGD with Nesterov momentum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

WEIGHTS = {"a": 1.0, "b": 2.5, "c": 4.0}
OUTER_LR, MOMENTUM = 0.6, 0.8
OUTER = {"algorithm.outer_optimizer.lr": OUTER_LR, "algorithm.outer_optimizer.momentum": MOMENTUM}

Trace = list[dict[str, Tensor]]
"""Every parameter after each local step."""
Data = Callable[[str], tuple[Tensor, Tensor]]
"""Site → its inputs and targets."""


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-2, weight_decay=0.05)


def data_of(site: str, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    """16 samples of a model with so many inputs and outputs."""
    generator = torch.Generator().manual_seed(ord(site))
    sizes = ((16, inputs), (16, outputs))
    first, second = (torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes)
    return first, second


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor]) -> None:
    inputs, targets = data
    optimizer.zero_grad()
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()


def copied(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in parameters.items()}


def traces_by_hand(  # noqa: PLR0913 (the paper's symbols, by keyword)
    build: Callable[[], nn.Module],
    data: Data,
    sites: Sequence[str],
    fragments: Sequence[Sequence[str]],
    *,
    H: int,  # noqa: N803
    rounds: int,
    tau: int = 0,
    alpha: float = 0.0,
) -> dict[str, Trace]:
    """What each site's parameters are after every local step, until the run is finished.

    Args:
        fragments: names of the parameters of each.
        H, tau, alpha: local steps in a cycle of all fragments; from taking a fragment to merging it; kept of one's own.
    """
    models = {site: build() for site in sites}
    optimizers = {site: inner(models[site]) for site in sites}
    parameters = {site: dict(models[site].named_parameters()) for site in sites}
    theta = copied(dict(build().named_parameters()))
    momentum = {name: torch.zeros_like(value) for name, value in theta.items()}
    total = sum(WEIGHTS[site] for site in sites)
    traces: dict[str, Trace] = {site: [] for site in sites}
    results: dict[int, dict[str, Tensor]] = {}  # local step at which it is merged → fragment's parameters
    taken, every, end = 0, H // len(fragments), rounds * len(fragments)
    step = merged = 0
    while merged < end:
        step += 1
        for site in sites:
            local_step(models[site], optimizers[site], data(site))
        with torch.no_grad():
            arrivals = [results.pop(step)] if step in results else []
            if step % every == 0 and taken < end:
                names = fragments[taken % len(fragments)]
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
            if merged == end:  # the run is finished: every site has its model
                for site, name in itertools.product(sites, theta):
                    parameters[site][name].copy_(theta[name])
        for site in sites:
            traces[site].append(copied(parameters[site]))
    return traces
