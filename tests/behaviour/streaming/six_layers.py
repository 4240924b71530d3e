"""A model of six equal layers in fp64, and sites with data of their own: what a training script needs of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
