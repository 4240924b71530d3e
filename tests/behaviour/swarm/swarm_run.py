"""What the sites of the swarms of these tests train, and how: nothing else, so that a training script may import it."""

from __future__ import annotations

import torch
from torch import nn

SITES = {"a": 1.0, "b": 2.5, "c": 0.75}
"""Site → weight of its updates."""


STEPS = {"a": 2, "b": 3, "c": 1}
"""Local steps of a site in each round."""


class Tied(nn.Module):
    """About 340 kB: tied weights, an integer buffer, parameters of several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(256, 128)
        self.norm = nn.BatchNorm1d(128)
        self.middle = nn.Linear(128, 128)
        self.decoder = nn.Linear(128, 256)
        self.again = nn.Linear(256, 128, bias=False)
        self.again.weight = self.encoder.weight


def build() -> nn.Module:
    torch.manual_seed(7)
    return Tied()


def gradients_(model: nn.Module, site: str, step: int) -> None:
    """Gradients and buffers that depend on the values, on the site and on the step."""
    generator = torch.Generator().manual_seed(1000 * step + ord(site[0]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.01 + torch.randn(parameter.shape, generator=generator)
        for name, buffer in model.named_buffers():
            buffer.add_(ord(site[0]) if name.endswith("num_batches_tracked") else 0.25)
