"""What each site of a run contributes, whether or not it takes part in the round: SCAFFOLD's c.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh: SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning. ICML 2020, arXiv 1910.06378, algorithm 1, line 17:

    Σ_{i ∈ S} Δc_i / N          N: all workers, S: those of the round

Atoll: Σ_{i ∈ S} (w_i / W)·Δc_i, where W is the weight of all workers together; with weights of 1 it is N.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.reducers.base import normalised
from atoll.reducers.mean import WeightedMean


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
