"""The interface of reducers. A reducer combines the updates of a round into one.

A reducer is an immutable object. It gets the same range of elements from every update: one *row* per update, ordered
by site name. It writes one row. Elements must not influence each other, so that the result does not depend on the
ranges. A range can include padding between two tensors. Padding has arbitrary values, and its result is never read.
`atoll.testing.contracts` has tests that every reducer must pass. The built-in reducers, for updates with rows u_k and
weights w_k:

    mean          Σ ŵ_k·u_k, ŵ = w / Σ w      one row in memory at a time
    max           max_k u_k                   one row in memory at a time
    clipped_mean  Σ ŵ_k·s_k·u_k               one row in memory at a time; s_k depends on the updates' norms
    median, …     order statistics            all rows in memory at once (`needs_all`)
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
    """What reducers can read about a round. The lists have one entry per update in the round, ordered by site name.

    Attributes:
        weights: the weight of each update, set by its site.
        norms: the L2 norm of each update, over all `params`.
        steps: the number of local optimizer steps that each update reports.
        population_weight: the estimated total weight of all sites that ever joined; 0 if no reducer of the run needs
            it.
        population_scale: the previous round's `population_weight`, divided by this round's `population_weight`.
    """

    weights: Sequence[float]
    norms: Sequence[float]
    steps: Sequence[int]
    population_weight: float = 0.0
    population_scale: float = 1.0


class Reducer(ABC):
    """A rule that reduces k rows of n elements to one row.

    Attributes:
        needs_all: whether all rows must be in memory at once. If so, the server reduces smaller ranges at a time.
        buffers: name of the reducer of floating point buffers, in runs where this reducer reduces `params`. Empty: this
            reducer itself.
        needs_steps: whether every update must report its local steps.
        needs_population: whether the reducer needs `population_weight`. If so, all updates of a site get the weight of
            the site's first aggregated update.
    """

    needs_all: ClassVar[bool] = False
    buffers: ClassVar[str] = "mean"
    needs_steps: ClassVar[bool] = False
    needs_population: ClassVar[bool] = False

    def weigh(self, facts: RoundFacts) -> list[float]:
        """Return the weight of each row, in the order of the rows. The server calls this once per round.

        Raises:
            UsageError: there are no updates, or a weight is not finite or not above zero.
        """
        return normalised(facts.weights)

    def carry(self, facts: RoundFacts) -> float:
        """Return the factor s for the algorithm's own tensors v (SCAFFOLD: c): the server sets v ← s·v + reduction."""
        return 1.0

    @abstractmethod
    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """Write the reduction of `rows` into `out`.

        Args:
            rows: k tensors [n] with the dtype of `out`, ordered by site name. You may overwrite them. Without
                `needs_all`, a row is only valid until the iterator yields the next one.
            weights: the return value of `weigh`.
            out: buffer for the result: [n], in fp32 (fp64 for fp64) for floats.
        """


def normalised(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum.

    Raises:
        UsageError: there are no weights, or a weight is not finite or not above zero.
    """
    for weight in weights:
        if not math.isfinite(weight) or weight <= 0:
            raise UsageError(f"An update has the weight {weight}.", "Use finite weights above zero.")
    if not weights:
        raise UsageError("There are no weights: a round without updates cannot be reduced.")
    total = math.fsum(weights)
    return [weight / total for weight in weights]
