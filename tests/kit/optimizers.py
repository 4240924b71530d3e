"""Optimizers as scripts bring them, which keep weights of their own beside the model's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class ScheduleFree(Optimizer):
    """SGD of Defazio et al. with β = 1/2: gradients at y, which is the weights, between z and its average x."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 1.0, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        group["k"] += 1
        for y in group["params"]:
            z = self.state[y].setdefault("z", y.clone())
            y.lerp_(z, 1 / group["k"]).sub_(y.grad, alpha=1 - 0.5 * (1 - 1 / group["k"]))
            z.sub_(y.grad)
