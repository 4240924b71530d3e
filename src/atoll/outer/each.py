"""What outer optimizers of Atoll's own have in common: each tensor is stepped by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class EachTensor(Optimizer, ABC):
    """An optimizer that is one rule for a tensor, its gradient and its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step along every gradient; returns what `closure` does, which computes them anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    self._step(x, x.grad, group)
        return loss

    @abstractmethod
    def _step(self, x: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        """Step `x` in place along `g`; what is kept is in `self.state[x]`."""
