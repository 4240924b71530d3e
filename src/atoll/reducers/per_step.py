"""The mean of updates per local step, times the mean number of steps: FedNova.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization. NeurIPS 2020, arXiv 2007.07481, section 5, for plain local SGD:

    g = τ_eff · Σ_k ŵ_k · u_k / τ_k          τ_eff = Σ_k ŵ_k·τ_k,   τ_k: local steps of update k

A site that trains for more steps moves further along the direction of its own data; divided by its steps, it counts by
its weight alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from atoll.errors import UsageError
from atoll.reducers.base import normalised
from atoll.reducers.mean import WeightedMean


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
