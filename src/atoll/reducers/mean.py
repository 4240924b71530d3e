"""The weighted mean, in the one order of operations that every part of Atoll (and every reference) uses:

acc = u₀·ŵ₀;   acc = acc + ŵ_k·u_k   for k = 1 …        (`add_` with `alpha`: one rounding per update)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.reducers.base import normalised


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
