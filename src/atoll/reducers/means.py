"""Weighted mean, mean per local step, share of a population, and element-wise maximum.

acc = u₀·ŵ₀;   acc = acc + ŵ_k·u_k   for k = 1 …        (`add_` with `alpha`: one rounding per update)

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization. NeurIPS 2020, arXiv 2007.07481, section 5, for plain local SGD:

    g = τ_eff · Σ_k ŵ_k · u_k / τ_k          τ_eff = Σ_k ŵ_k·τ_k,   τ_k: local steps of update k

A site that trains for more steps moves further along the direction of its own data; divided by its steps, it counts by
its weight alone.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh: SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning. ICML 2020, arXiv 1910.06378, algorithm 1, line 17:

    Σ_{i ∈ S} Δc_i / N          N: all workers, S: those of the round

Atoll: Σ_{i ∈ S} (w_i / W)·Δc_i, where W is the weight of all workers together; with weights of 1 it is N.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from atoll.errors import UsageError
from atoll.reducers.base import normalised

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WeightedMean:
    """Σ ŵ_k·u_k; one row is in memory at a time."""

    name: str = "mean"
    needs_all: bool = False
    buffers: str = "mean"

    def weigh(self, weights: Sequence[float], norms: Sequence[float]) -> list[float]:
        return normalised(weights)

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        for index, (row, weight) in enumerate(zip(rows, weights, strict=True)):
            if index == 0:
                torch.mul(row, weight, out=out)
            else:
                out.add_(row, alpha=weight)


@dataclass(frozen=True)
class NormalisedMean:
    """τ_eff · Σ ŵ_k·u_k / τ_k.

    Args:
        steps: τ_k of a round's updates, in the frozen order, each at least 1; (): all alike.
    """

    steps: tuple[int, ...] = ()
    name: str = "normalised_mean"
    needs_all: bool = False
    buffers: str = "mean"

    def of(self, steps: Sequence[int]) -> NormalisedMean:
        """The reducer of a round whose updates report these steps."""
        return replace(self, steps=tuple(steps))

    def weigh(self, weights: Sequence[float], norms: Sequence[float]) -> list[float]:
        shares = normalised(weights)
        steps = self.steps or (1,) * len(shares)
        if min(steps) < 1:
            raise UsageError(
                f"The updates of the round report {list(steps)} local steps; normalised_mean divides by them.",
                "Every submit(model, steps=…) has to give at least 1.",
            )
        effective = math.fsum(share * step for share, step in zip(shares, steps, strict=True))
        return [share * effective / step for share, step in zip(shares, steps, strict=True)]

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        WeightedMean().reduce_(rows, weights, out)


@dataclass(frozen=True)
class Share:
    """Σ_k (w_k / W)·u_k.

    Args:
        total_weight: W; 0: the sum of the weights at hand.
    """

    total_weight: float = 0.0
    name: str = "share"
    needs_all: bool = False
    buffers: str = "mean"

    def weigh(self, weights: Sequence[float], norms: Sequence[float]) -> list[float]:
        shares = normalised(weights)  # refuses weights that are not finite and above zero
        return [weight / self.total_weight for weight in weights] if self.total_weight else shares

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        WeightedMean().reduce_(rows, weights, out)


@dataclass(frozen=True)
class Maximum:
    """max_k u_k, weights aside. By NumPy: torch has no maximum of unsigned integers above 8 bits."""

    name: str = "max"
    needs_all: bool = False
    buffers: str = "max"

    def weigh(self, weights: Sequence[float], norms: Sequence[float]) -> list[float]:
        return normalised(weights)

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        target = out.numpy()
        for index, row in enumerate(rows):
            if index == 0:
                out.copy_(row)
            else:
                np.maximum(target, row.numpy(), out=target)
