"""What the sites of the small runs train, and how: nothing else, so that a training script may import it."""

from __future__ import annotations

import torch
from torch import nn

SITES = {"a": 1.0, "b": 2.5}
"""Site → weight of its updates."""


def build() -> nn.Module:
    """About 340 kB of tensors, an integer one among them."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(128, 512), nn.BatchNorm1d(512), nn.Linear(512, 32))


def train_(model: nn.Module, site: str, number: int) -> None:
    """Change every tensor in a way that depends on its value, on the site and on the round."""
    generator = torch.Generator().manual_seed(1000 * number + ord(site[0]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 - 0.01 * number)
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        for name, buffer in model.named_buffers():
            buffer.add_(ord(site[0]) if name.endswith("num_batches_tracked") else 0.5 * number)


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, site: str, step: int) -> None:
    """A gradient that depends on site and step, and on the parameters."""
    generator = torch.Generator().manual_seed(1000 * step + ord(site[0]))
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.01 + torch.randn(parameter.shape, generator=generator)
    for name, buffer in model.named_buffers():
        buffer.add_(ord(site[0]) if name.endswith("num_batches_tracked") else 0.25)
    optimizer.step()
