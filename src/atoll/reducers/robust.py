"""Robust reducers: median, trimmed mean, clipped mean. A few wrong updates change their result only a little.

Rows are sorted by a sorting network (K. E. Batcher: Sorting networks and their applications. AFIPS 1968, odd-even merge
sort). A network is a fixed list of comparators (i, j): row i ← min(row i, row j), row j ← max(row i, row j). This uses
vector instructions on rows in a core's cache, which is faster than sorting k numbers for each element. Comparators that
do not affect the needed ranks are skipped: the median of ten rows takes 50 minima and maxima, a full sort 64.

In IEEE 754, −0.0 and +0.0 are equal. Which of them a minimum returns depends on the element's place in a vector
register. So +0.0 is added to the results: then a zero is always +0.0.

Median and trimmed mean: D. Yin, Y. Chen, K. Ramchandran, P. Bartlett: Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates. ICML 2018, arXiv 1803.01498, definitions 1 and 2. Both ignore weights, because a hostile
site could claim a large weight.

    median         g_j = med{ (u_k)_j : k }          for an even k: the mean of the two middle values
    trimmed mean   g_j = (1 / |U_j|) · Σ_{u ∈ U_j} u        U_j: (u_k)_j without the ⌊β·k⌋ largest and ⌊β·k⌋ smallest

The median tolerates up to ⌈k/2⌉ − 1 hostile updates, the trimmed mean ⌊β·k⌋. Choose β at least as large as the share of
hostile updates. If the sites' data differ, the median neglects patterns that only a minority of sites has.

Clipped mean: Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan: Can You Really Backdoor Federated Learning? arXiv
1911.07963, section 4.

    g = Σ_k ŵ_k · u_k · min(1, C / ‖u_k‖₂)          ‖u_k‖₂: L2 norm over all params of the accepted update

The clipped mean limits updates with large norms. It does little against an update of ordinary norm with a flipped sign.
Without `max_norm`, C is the median of the round's norms.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.reducers.base import Reducer, RoundFacts, normalised
from atoll.reducers.means import WeightedMean

Wanted = Literal["min", "max", "both"]


def select(rows: Sequence[Tensor], ranks: frozenset[int], spare: Tensor) -> list[Tensor]:
    """Sort the k values of each element, and return the rows with the given ranks, in rising order.

    Args:
        rows: k tensors [n]; overwritten.
        ranks: the wanted ranks, each below k; rank 0 holds the smallest values.
        spare: scratch [n] with the dtype of the rows; overwritten. A returned row may be in this memory.
    """
    all_rows = list(rows)
    for low, high, wanted in network(len(all_rows), ranks):
        if wanted == "max":
            torch.maximum(all_rows[low], all_rows[high], out=all_rows[high])
        elif wanted == "min":
            torch.minimum(all_rows[low], all_rows[high], out=all_rows[low])
        else:
            torch.minimum(all_rows[low], all_rows[high], out=spare)
            torch.maximum(all_rows[low], all_rows[high], out=all_rows[high])
            all_rows[low], spare = spare, all_rows[low]
    return [all_rows[rank] for rank in sorted(ranks)]


@functools.lru_cache(maxsize=64)
def network(k: int, ranks: frozenset[int]) -> tuple[tuple[int, int, Wanted], ...]:
    """Return the ordered comparators (i, j, needed outputs) that find the given ranks among k rows."""
    needed, comparisons = set(ranks), list[tuple[int, int, Wanted]]()
    for low, high in reversed(list(_merge_sort(k))):
        if low in needed or high in needed:
            comparisons.append((low, high, "max" if low not in needed else "min" if high not in needed else "both"))
            needed |= {low, high}
    return tuple(reversed(comparisons))


def _merge_sort(k: int) -> Iterator[tuple[int, int]]:
    """Yield the comparators of Batcher's network for k rows. Comparators with rows past the end are left out."""
    p = 1
    while p < k:
        q = p
        while q:
            for start in range(q % p, k - q, 2 * q):
                for low in range(start, min(start + q, k - q)):
                    if low // (2 * p) == (low + q) // (2 * p):
                        yield low, low + q
            q //= 2
        p *= 2


@dataclass(frozen=True)
class Median(Reducer):
    """The reducer `median`: the median of the k values of each element."""

    needs_all: ClassVar[bool] = True
    buffers: ClassVar[str] = ""

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """Write the median of the k values of each element into `out`. Overwrite the rows; ignore `weights`."""
        all_rows = list(rows)
        k = len(all_rows)
        middle = select(all_rows, frozenset({(k - 1) // 2, k // 2}), spare=out)
        torch.lerp(middle[0], middle[-1], 0.5, out=out)  # for an odd k, both are the same row
        out.add_(0.0)


@dataclass(frozen=True)
class TrimmedMean(Reducer):
    """The reducer `trimmed_mean`: the mean of each element's k values without the ⌊β·k⌋ largest and ⌊β·k⌋ smallest.

    Args:
        trim: β, the share of values to cut off at each end, in [0, 0.5).

    Raises:
        ConfigError: `trim` is not in [0, 0.5).
    """

    needs_all: ClassVar[bool] = True
    buffers: ClassVar[str] = ""
    trim: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.trim < 0.5:
            raise ConfigError(
                f"aggregation.reducer: trim = {self.trim!r} is not valid. This share of the values is left out at each "
                "end: of the largest and of the smallest ones.",
                "Use a number from 0 to below 0.5, at least the share of sites that may be hostile.",
            )

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """Write the mean without the ⌊β·k⌋ values at each end into `out`. Overwrite the rows; ignore `weights`."""
        all_rows = list(rows)
        cut = int(self.trim * len(all_rows) + 1e-9)  # in fp64, 0.29 · 100 is 28.999999999999996
        lowest, *others = select(all_rows, frozenset(range(cut, len(all_rows) - cut)), spare=out)
        for row in others:
            lowest.add_(row)  # added in rising order, so that the bits do not depend on the order of the sites
        torch.div(lowest, 1 + len(others), out=out)
        out.add_(0.0)


@dataclass(frozen=True)
class ClippedMean(WeightedMean):
    """The reducer `clipped_mean`: the weighted mean of the updates, each scaled down to an L2 norm of at most C.

    Args:
        max_norm: C; None: the median of the round's norms.

    Raises:
        ConfigError: `max_norm` is not finite or not above zero.
    """

    max_norm: float | None = None

    def __post_init__(self) -> None:
        if self.max_norm is not None and not (math.isfinite(self.max_norm) and self.max_norm > 0):
            raise ConfigError(
                f"aggregation.reducer: max_norm = {self.max_norm!r} is not a valid L2 norm.",
                "Use a number above zero, or leave max_norm out to use the median of the round's norms.",
            )

    def weigh(self, facts: RoundFacts) -> list[float]:
        """Return the factor of each update: its share of all weights, times C / norm if its norm is above C."""
        bound = statistics.median(facts.norms) if self.max_norm is None else self.max_norm
        return [
            weight * min(1.0, bound / norm) if norm else weight
            for weight, norm in zip(normalised(facts.weights), facts.norms, strict=True)
        ]
