"""Two small models and their local training, the same on every machine: scripts of sites import them, too."""

from __future__ import annotations

import torch
from torch import nn

SITES = {"a": 1.0, "b": 2.5}
"""Site → weight of its updates."""


def build_model() -> nn.Module:
    """Matrices, biases, float buffers and an integer buffer; about 20 kB."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 40))


def wide_model() -> nn.Module:
    """The same of about 340 kB: six parts of 64 KiB."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(128, 512), nn.BatchNorm1d(512), nn.Linear(512, 32))


class Tied(nn.Module):
    """Its head has the weight of its embedding; one of its modules has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


class TiedHead(nn.Module):
    """Two names of one weight, of which the further one comes first in the alphabet, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2)
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.ones(1))


class Weights(nn.Module):
    """These parameters, by name, and nothing else."""

    def __init__(self, **values: torch.Tensor) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone()))


def train_(model: nn.Module, site: str, number: int) -> None:
    """Change every tensor in a way that depends on its value, on the site and on the round."""
    generator = torch.Generator().manual_seed(1000 * number + ord(site[0]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 - 0.01 * number)
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    _count_(model, site)


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, site: str, step: int) -> None:
    """One optimizer step on a gradient that depends on site and step, and on the parameters."""
    generator = torch.Generator().manual_seed(1000 * step + ord(site[0]))
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.01 + torch.randn(parameter.shape, generator=generator)
    _count_(model, site)
    optimizer.step()


def _count_(model: nn.Module, site: str) -> None:
    for name, buffer in model.named_buffers():
        buffer.add_(ord(site[0]) if name.endswith("num_batches_tracked") else 0.25)
