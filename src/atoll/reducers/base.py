"""The reducer contract: how the updates of a round become one.

A reducer is a small frozen value. It sees the same run of elements of every update, one *row* per update in the frozen
order (by site name), and writes one row. Elements never influence each other, so the result does not depend on how a
tensor is cut into runs. Between two tensors of a run there may be padding: elements of any value. Their result is never
read. `atoll.testing.reducers` has the contract suite.

    mean          Σ ŵ_k·u_k, ŵ = w / Σ w      streams: one row at a time
    max           max_k u_k                   streams
    clipped_mean  Σ ŵ_k·s_k·u_k               streams; s_k follows from the updates' norms
    median, …     order statistics            needs_all: all rows at once
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from atoll.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RoundFacts:
    """What a reducer may know of a frozen round. Lists have one entry per update, in the frozen order.

    Attributes:
        weights: as the sites gave them.
        norms: L2, of all `params` of each update.
        steps: local optimizer steps that each update reports.
        population_weight: of all sites that ever joined; 0 where no reducer of the run needs it.
        population_scale: `population_weight` of the base version divided by this round's.
    """

    weights: Sequence[float]
    norms: Sequence[float]
    steps: Sequence[int]
    population_weight: float = 0.0
    population_scale: float = 1.0


class Reducer(ABC):
    """One way to reduce k rows of n elements to one.

    Attributes:
        needs_all: whether `rows` must be one tensor [k, n], not one row after the other; windows are then smaller.
        buffers: name of the reducer of floating point buffers where this one reduces `params`; empty: this one.
        needs_steps: whether an update must report its local steps.
        needs_population: whether `population_weight` must be known. Each site then keeps its first weight.
    """

    needs_all: ClassVar[bool] = False
    buffers: ClassVar[str] = "mean"
    needs_steps: ClassVar[bool] = False
    needs_population: ClassVar[bool] = False

    def weigh(self, facts: RoundFacts) -> list[float]:
        """Return the weight of each row, in the frozen order; asked once a round.

        Raises:
            UsageError: there are no updates, or a weight is not finite or not above zero.
        """
        return normalised(facts.weights)

    def carry(self, facts: RoundFacts) -> float:
        """Return s of `v ← s·v + reduction`, for a group that lies beside the model in a version."""
        return 1.0

    @abstractmethod
    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """Write the reduction of `rows` into `out`.

        Args:
            rows: k tensors [n] of the dtype of `out`, in the frozen order. Without `needs_all` a row is only valid
                until the next one is asked for. All may be overwritten.
            weights: as `weigh` returned them.
            out: [n], in the dtype in which the tensor is accumulated.
        """


def normalised(weights: Sequence[float]) -> list[float]:
    """Return the weights of a frozen set, in fp64, divided by their sum.

    Raises:
        UsageError: there are none, or one is not finite or not above zero.
    """
    for weight in weights:
        if not math.isfinite(weight) or weight <= 0:
            raise UsageError(f"An update has the weight {weight}.", "Weights are finite and above zero.")
    if not weights:
        raise UsageError("A round without updates cannot be reduced.")
    total = math.fsum(weights)
    return [weight / total for weight in weights]
