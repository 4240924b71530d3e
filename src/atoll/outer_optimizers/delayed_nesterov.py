"""Delayed Nesterov: SGD for asynchronous runs, with a Nesterov momentum that is applied only at every N-th update.

B. Liu, R. Chhaparia, A. Douillard, S. Kale, A. A. Rusu, J. Shen, A. Szlam, M. Ranzato: Asynchronous Local-SGD Training
for Language Modeling. arXiv 2401.09135, algorithm 3 with c = 0. The updates g_1, g_2, … are applied one at a time. Only
every N-th update changes the momentum m (with the mean of the last N updates) and applies it. ε: the learning rate.
t counts updates, from 1:

    t mod N ≠ 0    θ ← θ − ε · g_t / N
    t mod N = 0    m ← β · m + (1/N) · Σ g           Σ over the last N updates
                   θ ← θ − ε · (β · m + g_t / N)

N equal updates move θ exactly as far as one synchronous Nesterov step along one of them (m ← β·m + g,
θ ← θ − ε·(g + β·m)). Implementations that apply ε·g_t without the division by N overshoot N-fold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atoll.outer_optimizers.torch_optimizer import EachTensor


class DelayedNesterov(EachTensor):
    """SGD with a Nesterov momentum that is applied at every N-th step.

    Args:
        params: the parameters to step, or torch's parameter groups.
        lr: ε, the learning rate, above zero.
        momentum: β, from 0 to below 1.
        delay: N, at least 1. With N = 1, this is `torch.optim.SGD(nesterov=True)`.
        undelayed: number of steps at the start that use N = 1, for a run that starts with synchronous rounds.
    """

    def __init__(self, params: Any, lr: float = 0.7, momentum: float = 0.9, delay: int = 1, undelayed: int = 0) -> None:
        if not lr > 0:
            raise ValueError(f"lr is {lr}, not above zero")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}, not from 0 to below 1")
        if delay < 1 or undelayed < 0:
            raise ValueError(f"delay is {delay} and undelayed {undelayed}, but delay ≥ 1 and undelayed ≥ 0 are needed")
        super().__init__(params, {"lr": lr, "momentum": momentum, "delay": delay, "undelayed": undelayed})

    def _step(self, theta: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        lr, beta, state = group["lr"], group["momentum"], self.state[theta]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64)
            state["m"] = torch.zeros_like(theta)
            state["sum"] = torch.zeros_like(theta)
        step: Tensor = state["step"]
        m: Tensor = state["m"]
        total: Tensor = state["sum"]
        done = int(step)
        step += 1
        n = 1 if done < group["undelayed"] else group["delay"]
        total.add_(g)
        if n == 1 or (done - group["undelayed"]) % n == n - 1:
            m.mul_(beta).add_(total, alpha=1 / n)
            total.zero_()
            theta.add_(m, alpha=-lr * beta)
        theta.add_(g, alpha=-lr / n)
