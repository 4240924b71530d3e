"""Yogi: Adam with a second moment that changes by a limited amount in each step.

M. Zaheer, S. J. Reddi, D. Sachan, S. Kale, S. Kumar: Adaptive Methods for Nonconvex Optimization. NeurIPS 2018.
In the form of FedYogi in S. J. Reddi et al.: Adaptive Federated Optimization. ICLR 2021, arXiv 2003.00295, algorithm 2:

    m_t = β₁·m_{t−1} + (1 − β₁)·g_t
    v_t = v_{t−1} − (1 − β₂)·g_t²·sign(v_{t−1} − g_t²)          v₀ = τ²
    x_{t+1} = x_t − η·m_t / (√v_t + τ)

In a step, v changes by at most (1 − β₂)·g². So if v is much larger than g², it shrinks more slowly than in Adam. There
is no bias correction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atoll.outer_optimizers.torch_optimizer import EachTensor


class Yogi(EachTensor):
    """The optimizer Yogi: Adam with Yogi's rule for v, and without bias correction.

    Args:
        params: the parameters to step, or torch's parameter groups.
        lr: η, the learning rate, above zero.
        betas: β₁ and β₂, each from 0 to below 1.
        eps: τ, above zero.
    """

    def __init__(
        self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-3
    ) -> None:
        if not lr > 0:
            raise ValueError(f"lr is {lr}, not above zero")
        if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(f"betas are {betas}, not both from 0 to below 1")
        if not eps > 0:
            raise ValueError(f"eps is {eps}, not above zero")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def _step(self, x: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), state = group["betas"], self.state[x]
        if not state:
            state["m"] = torch.zeros_like(x)
            state["v"] = torch.full_like(x, group["eps"] ** 2)
        m: Tensor = state["m"]
        v: Tensor = state["v"]
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        squared = g * g
        v.addcmul_(squared, torch.sign(v - squared), value=-(1 - beta2))
        x.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-group["lr"])
