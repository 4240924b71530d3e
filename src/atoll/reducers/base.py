"""The reducer contract: how the updates of a round become one.

A reducer is a small frozen value. It sees the same run of elements of every update, one *row* per update in the frozen
order (by site name), and writes one row. Elements never influence each other, so the result does not depend on how
a tensor is cut into runs; between two tensors of a run there may be elements of padding, of any value, whose result
nobody looks at. `atoll.testing.reducers` has the contract suite.

    mean          Σ ŵ_k·u_k, ŵ = w / Σ w      streams: one row at a time
    max           max_k u_k                   streams
    clipped_mean  Σ ŵ_k·s_k·u_k               streams; s_k follows from the updates' norms
    median, …     order statistics            needs_all: the rows at once
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from atoll.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Reducer(Protocol):
    """One way to reduce k rows of n elements to one."""

    @property
    def name(self) -> str:
        """The name in an algorithm's table of groups."""
        ...

    @property
    def needs_all(self) -> bool:
        """Whether `rows` must be one tensor [k, n] (the pass then takes smaller runs), not one row after the other."""
        ...

    @property
    def buffers(self) -> str:
        """The name of the reducer for floating point buffers where this one reduces `params`."""
        ...

    def weigh(self, weights: Sequence[float], norms: Sequence[float]) -> list[float]:
        """What `reduce_` gets as weights, once for a round.

        Args:
            weights: as the workers gave them, in the frozen order.
            norms: L2, of all `params` of each update.

        Raises:
            UsageError: there are none, or one is not finite or not above zero.
        """
        ...

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """Write the reduction of `rows` into `out`.

        Args:
            rows: k tensors [n] of the dtype of `out`, in the frozen order. Without `needs_all` a row is only valid
                until the next one is asked for. All may be overwritten.
            weights: as `weigh` gives them.
            out: [n], in the dtype in which the tensor is accumulated.
        """
        ...


def normalised(weights: Sequence[float]) -> list[float]:
    """The weights of a frozen set, in fp64, divided by their sum.

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
