"""DiLoCo as specified (`spec/specification.py`): what each site's parameters are after every local step, in fp64.

Local steps are AdamW's on mean squares; between them is SGD with Nesterov momentum.
"""

from __future__ import annotations

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


def copied(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in parameters.items()}


def specified_traces(  # noqa: PLR0913 (the paper's symbols, by keyword)
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
    """The traces of a run that goes on until it is finished.

    Args:
        fragments: names of the parameters of each.
    """
    import specification as spec  # here: only pytest's own process has it on its path, and sites import this file, too

    rules = spec.Rules(spec.of_torch(torch.optim.SGD, lr=OUTER_LR, momentum=MOMENTUM, nesterov=True))
    traces: dict[str, Trace] = {site: [] for site in sites}

    def site_of(name: str) -> spec.Site:
        model = build()
        optimizer = inner(model)

        def step(k: int, w: spec.Tensors, _: object) -> None:
            if k:
                traces[name].append(copied(w))  # with what was merged after the step before
            local_step(model, optimizer, data(name))

        return spec.Site(rules, name, {key: p.data for key, p in model.named_parameters()}, step, weight=WEIGHTS[name])

    initial = {name: p.detach() for name, p in build().named_parameters()}
    servers = [spec.Fragment(rules, {name: initial[name] for name in names}) for names in fragments]
    trained = [site_of(name) for name in sites]
    spec.diloco(servers, trained, rounds, H, tau, alpha)
    for site in trained:
        traces[site.name].append(copied(site.w))
    return traces
