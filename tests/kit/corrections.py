"""Corrections of one round in memory: the hooks that `fl_round.correct` makes, around any model and control variates.

with fedprox(model, mu=0.5).attach(optimizer) as hooks:
    train()
assert hooks.steps == 3
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atoll.algorithms.fedprox import ProximalTerm
from atoll.algorithms.optimizer_hooks import StepHooks
from atoll.algorithms.scaffold import CONTROL, ControlVariates


def fedprox(model: nn.Module, mu: float) -> StepHooks:
    """FedProx's hooks; the model has the values of the version."""
    return StepHooks(model, "fedprox", ProximalTerm(mu))


class Scaffold(StepHooks):
    """SCAFFOLD's hooks; the model has the values of the version.

    Args:
        model: the model that is trained.
        c: the run's control variate: parameter name → tensor.
        own: the site's control variate c_i, likewise.
    """

    def __init__(self, model: nn.Module, c: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        self.x = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.own = InMemory(own)
        super().__init__(model, "scaffold", ControlVariates(), InMemory(c).read, self.own)

    def difference(self) -> dict[str, Tensor]:
        """Return Δc_i: parameter name → tensor."""
        self.close()

        def moved(name: str, start: int, stop: int) -> Tensor:
            return (self.x[name].float() - self.parameters[name].detach().float()).flatten()[start:stop]

        read = self.finish(moved)[CONTROL]
        return {name: read(name, 0, x.numel()).reshape(x.shape) for name, x in self.x.items()}


class InMemory:
    """Control variates: those with which the round begins, and `after` it. A version's are only read."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.before = {f"atoll.{CONTROL}.{name}": torch.as_tensor(value) for name, value in tensors.items()}
        self.after = {name: value.clone() for name, value in self.before.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.before[name].flatten()[start:stop].clone()

    def write(self, name: str, start: int, values: Tensor) -> None:
        self.after[name].view(-1)[start : start + values.numel()] = values
