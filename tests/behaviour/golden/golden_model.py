"""What the sites of the golden runs train, and how; scripts of sites and simulations import it, too."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import atoll

WEIGHTS = {"equal": {"a": 1.0, "b": 1.0}, "unequal": {"a": 1.0, "b": 2.5}}
STEPS = {"a": 2, "b": 3}
"""Local steps of a site in a federated round: FedNova divides by them."""


class Small(nn.Module):
    """Tied weights, a frozen, an empty and a scalar parameter, buffers of floats, integers and flags; several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(400, 100)
        self.hidden = nn.Linear(100, 24)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(100, 400, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(7, 3), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))


def build(dtype: str = "float32") -> Small:
    """The initial model: the same numbers wherever it is built."""
    torch.manual_seed(7)
    return Small().to(getattr(torch, dtype))


class ExactSGD(torch.optim.Optimizer):
    """SGD in fp64, rounded once: torch's own rounds bf16 differently in the middle and at the end of a vector.

    So a share of a tensor is trained to the bits of the whole, and on all machines alike.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(parameter.double() - group["lr"] * parameter.grad.double())


def inner(model: nn.Module) -> torch.optim.Optimizer:
    """The local optimizer."""
    return ExactSGD([each for each in model.parameters() if each.requires_grad], lr=0.05)


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, site: str, step: int) -> None:
    """One step on a gradient that depends on site, step and parameters; the buffers change, too."""
    generator = torch.Generator().manual_seed(1000 * step + ord(site[0]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = (rows_like(parameter, noise) + 0.01 * parameter.detach().double()).to(parameter.dtype)
    for name, buffer in model.named_buffers():
        if buffer.dtype == torch.bool:
            buffer[ord(site[0]) % 3] = True
        else:
            buffer.add_(ord(site[0]) if name.endswith("num_batches_tracked") else 0.25)
    optimizer.step()


def rows_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """A whole tensor as the parameter is laid out: itself, or its rows at each rank."""
    if not hasattr(parameter, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of what a model is."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def take_rounds(worker: Any, site: str, how: dict[str, str]) -> dict[str, Tensor]:
    """A site's part in a federated run; returns its model as the last round's training left it."""
    model, trained = build(how["dtype"]), {}
    optimizer = inner(model)
    for fl_round in worker:
        fl_round.load_into(model)
        with fl_round.correct(model, optimizer):
            for step in range(STEPS[site]):
                local_step(model, optimizer, site, 10 * fl_round.number + step)
        trained = state_of(model)
        weight = WEIGHTS[how["weights"]][site]
        fl_round.submit(model, weight=weight, steps=STEPS[site], metrics={"loss": 1.0 / fl_round.number})
    return trained


def train_steps(diloco: Any, model: nn.Module, site: str, whole: Any = state_of) -> dict[str, Tensor]:
    """A site's part in a DiLoCo run; returns its model as it was before the last local step."""
    before: dict[str, Tensor] = {}
    for step in range(200):
        if diloco.finished:
            return before
        before = whole(model)
        local_step(model, diloco.optimizer, site, step)
    raise RuntimeError(f"{site}: the run is not finished after 200 steps")


def train(worker: Any) -> None:
    """What a simulated site runs; its model goes to a file."""
    torch.set_num_threads(1)
    how = json.loads(sys.argv[1])
    save_file(take_rounds(worker, worker.site, how), Path(how["out"]) / f"{worker.site}-before.safetensors")


def enter_diloco(worker: Any) -> None:
    """What a simulated site is refused."""
    model = build()
    with atoll.DiLoCo(model, inner(model)) as diloco:
        train_steps(diloco, model, "a")
