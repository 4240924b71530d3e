"""What each of a population contributes, whether or not it takes part in the round: SCAFFOLD's c.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh: SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning. ICML 2020, arXiv 1910.06378, algorithm 1, line 17:

    Σ_{i ∈ S} Δc_i / N          N: all workers, S: those of the round; weights do not count
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.reducers.base import normalised
from atoll.reducers.mean import WeightedMean


@dataclass(frozen=True)
class Share:
    """Σ_k u_k / N.

    Args:
        population: N; 0: as many as there are updates.
    """

    population: int = 0
    name: str = "share"
    needs_all: bool = False
    buffers: str = "mean"

    def weigh(self, weights: Sequence[float], norms: Sequence[float]) -> list[float]:
        normalised(weights)  # refuses those that are none
        return [1 / (self.population or len(weights))] * len(weights)

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        WeightedMean().reduce_(rows, weights, out)
