"""SCAFFOLD's algorithm 1, option II, in Python's own numbers: two sites with a weight, both in every round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from kit.world import World
from torch import nn

ETA, STEPS = 0.1, 3
TARGETS = {"a": 1.0, "b": -3.0}  # each site's loss is (w − target)²/2, so its gradient is w − target


class One(nn.Module):
    """One weight that is trained, one that is frozen, a buffer."""

    def __init__(self, w: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((1,), w))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("count", torch.zeros(1))


@contextmanager
def first_round(folder: Path, algorithm: str = "scaffold", model: Any = None, **settings: Any) -> Iterator[Any]:
    """The first of two rounds of a run of one site. What the worker refuses, the server does not hear of."""
    with World(folder, model or One(), "a", algorithm=algorithm, rounds=2, **settings) as world:
        world.ask()
        yield world.sites["a"].round
        assert world.status.refused == 0


def sgd(model: nn.Module, lr: float = ETA) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def controls(value: float) -> dict[str, torch.Tensor]:
    """Control variates of `One`."""
    return {"w": torch.full((1,), value), "frozen": torch.zeros(2)}


def train(model: Any, optimizer: torch.optim.Optimizer, target: float, steps: int = STEPS) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        ((model.w - target) ** 2 / 2).sum().backward()
        optimizer.step()


def local_part(x: float, c: float, own: float, target: float) -> tuple[float, float]:
    """A site's round: y, and c_i⁺."""
    y = x
    for _ in range(STEPS):
        y -= ETA * ((y - target) - own + c)
    return y, own - c + (x - y) / (STEPS * ETA)


def one_round(
    x: float, c: float, own: dict[str, float], targets: dict[str, float] = TARGETS
) -> tuple[float, float, dict[str, float], dict[str, float]]:
    """x, c and every c_i after a round of all sites, and the y of each."""
    after = {site: local_part(x, c, own[site], target) for site, target in targets.items()}
    y, plus = {site: pair[0] for site, pair in after.items()}, {site: pair[1] for site, pair in after.items()}
    c += sum(plus[site] - own[site] for site in targets) / len(targets)
    x -= sum(x - value for value in y.values()) / len(targets)
    return x, c, plus, y
