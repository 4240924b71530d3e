"""Reducers: the weighted mean, FedNova's mean, SCAFFOLD's mean over all sites, and those for the rules of buffers.

u_k is update k, and ŵ_k its weight divided by the sum of all weights. A mean is summed up update by update:

    acc = u₀·ŵ₀;   acc = acc + ŵ_k·u_k   for k = 1 …        (`add_` with `alpha`: one rounding per update)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from atoll.errors import UsageError
from atoll.reducers.base import Reducer, RoundFacts, normalised
from atoll.tensors.chunks import add_


@dataclass(frozen=True)
class WeightedMean(Reducer):
    """The reducer `mean`: Σ ŵ_k·u_k, with the values of one update in memory at a time."""

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """Write the sum of weight × row into `out`. Add in the order of the rows, and do not overwrite the rows."""
        for index, (row, weight) in enumerate(zip(rows, weights, strict=True)):
            if index == 0:
                torch.mul(row, weight, out=out)
            else:
                out.add_(row, alpha=weight)


@dataclass(frozen=True)
class NormalisedMean(WeightedMean):
    """FedNova's mean: τ_eff · Σ ŵ_k·u_k / τ_k, where τ_k are the local steps of update k and τ_eff = Σ ŵ_k·τ_k.

    More local steps change a model further. So each update is divided by its number of steps: only the site's weight
    then decides the influence of the update (Wang et al., arXiv 2007.07481, section 5, for plain local SGD).
    """

    needs_steps: ClassVar[bool] = True

    def weigh(self, facts: RoundFacts) -> list[float]:
        """Return the factor of each update: ŵ_k·τ_eff / τ_k, where ŵ_k is its share of the sum of all weights.

        Raises:
            UsageError: a weight is not finite or not above zero, or an update reports less than one local step.
        """
        shares, steps = normalised(facts.weights), facts.steps
        if min(steps) < 1:
            raise UsageError(
                f"An update of the round reports fewer than 1 local step (all: {list(steps)}), and normalised_mean "
                "cannot divide by that.",
                "Call submit(model, steps=…) with at least 1 step at every site.",
            )
        effective = math.fsum(share * step for share, step in zip(shares, steps, strict=True))
        return [share * effective / step for share, step in zip(shares, steps, strict=True)]


@dataclass(frozen=True)
class Share(WeightedMean):
    """SCAFFOLD's mean over all sites: Σ_k (w_k / W)·u_k, where W is the total weight of all sites that ever joined.

    If a site has no update in the round, its update counts as zero. When W changes, the sum that a version stores is
    scaled by W_before / W, where W_before is W before the round.
    """

    needs_population: ClassVar[bool] = True

    def weigh(self, facts: RoundFacts) -> list[float]:
        """Return each update's weight divided by W. If W is unknown (0), return the weights of the weighted mean."""
        shares = normalised(facts.weights)  # also checks the weights
        total = facts.population_weight
        return [weight / total for weight in facts.weights] if total else shares

    def carry(self, facts: RoundFacts) -> float:
        """Return W_before / W, the factor for the sum of updates that the base version stores."""
        return facts.population_scale


@dataclass(frozen=True)
class Maximum(Reducer):
    """The reducer `max`: max_k u_k, without weights. It uses NumPy: torch has no maximum of uint16 to uint64."""

    buffers: ClassVar[str] = ""

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """Write the element-wise maximum of the rows into `out`, one row at a time. `weights` are ignored."""
        target = out.numpy()
        for index, row in enumerate(rows):
            if index == 0:
                out.copy_(row)
            else:
                np.maximum(target, row.numpy(), out=target)


@dataclass(frozen=True)
class Sum(Reducer):
    """The rule `sum` of buffers: Σ_k u_k, without weights, where u_k is the change of the buffer at site k."""

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """Write the sum of the rows into `out`, one row at a time. `weights` are ignored."""
        for index, row in enumerate(rows):
            if index == 0:
                out.copy_(row)
            else:
                add_(out, row)


@dataclass(frozen=True)
class First(Reducer):
    """The rule `first` of buffers: u_0, the value of the first site by name."""

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """Copy the first row into `out`. The other rows are not read, and `weights` are ignored."""
        out.copy_(next(iter(rows)))
