"""Optimizers as scripts bring them, which keep weights of their own beside the model's.

Those with masters step as SGD with a learning rate of 1 does, w ← w − g, but from fp32 copies of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer


def fp32(value: Tensor) -> Tensor:
    """A copy of a weight."""
    return value.detach().float().clone()


class Masters(Optimizer):
    """Steps copies of the weights. Subclasses say where these are."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def copies(self) -> list[Tensor]:
        raise NotImplementedError

    @property
    def weights(self) -> list[Tensor]:
        return [value for group in self.param_groups for value in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for value, copy in zip(self.weights, self.copies(), strict=True):
            copy -= value.grad
            value.copy_(copy)


class InState(Masters):
    """Made at the first step, beside a moment that is zero, as are some of the weights."""

    def copies(self) -> list[Tensor]:
        for value in self.weights:
            if not self.state[value]:
                self.state[value] |= {"master": fp32(value), "moment": torch.zeros_like(value), "n": torch.tensor(0.0)}
        return [self.state[value]["master"] for value in self.weights]


class InList(Masters):
    """Made with the optimizer, before any load."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.fp32_groups = [[fp32(value) for value in group["params"]] for group in self.param_groups]

    def copies(self) -> list[Tensor]:
        return [copy for group in self.fp32_groups for copy in group]


class Flat(Masters):
    """One tensor of all weights, made at the first step."""

    flat: Tensor | None = None

    def copies(self) -> list[Tensor]:
        if self.flat is None:
            self.flat = torch.cat([fp32(value) for value in self.weights])
        return list(self.flat.split([value.numel() for value in self.weights]))


class Padded(Masters):
    """One flat tensor of all weights, with padding at its end, made with the optimizer."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.flat = torch.cat([*map(fp32, self.weights), torch.zeros(3)])

    def copies(self) -> list[Tensor]:
        sizes = [value.numel() for value in self.weights]
        return list(self.flat[: sum(sizes)].split(sizes))


class Outside:
    """As in Apex: the optimizer has copies alone, and the wrapper copies gradients and weights.

    Args:
        dtype: of the copies; a weight that has it needs none.
    """

    def __init__(self, parameters: Iterable[Tensor], dtype: torch.dtype = torch.float32) -> None:
        parameters = list(parameters)
        self.weights = [value for value in parameters if value.dtype != dtype]
        self.masters = [nn.Parameter(value.detach().to(dtype)) for value in self.weights]
        self.optimizer = SGD([*self.masters, *(value for value in parameters if value.dtype == dtype)], lr=1.0)

    @torch.no_grad()
    def step(self) -> None:
        for value, master in zip(self.weights, self.masters, strict=True):
            master.grad = value.grad.to(master.dtype)
        self.optimizer.step()
        for value, master in zip(self.weights, self.masters, strict=True):
            value.copy_(master)


class ScheduleFree(Optimizer):
    """SGD of Defazio et al. with β = 1/2: gradients at y, which is the weights, between z and its average x."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 1.0, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["k"] += 1
        for y in group["params"]:
            z = self.state[y].setdefault("z", y.clone())
            y.lerp_(z, 1 / group["k"]).sub_(y.grad, alpha=1 - 0.5 * (1 - 1 / group["k"]))
            z.sub_(y.grad)
