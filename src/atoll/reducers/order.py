"""Order statistics of k rows, element by element, by a sorting network: what median and trimmed mean stand on.

K. E. Batcher: Sorting networks and their applications. AFIPS 1968 (odd-even merge sort).

A network is a fixed list of comparators (i, j): row i ← min, row j ← max of both. Each is two vector instructions a
register over rows that stay in a core's cache, which beats sorting k numbers at a time. What no wanted rank depends on
is left out: the median of ten rows takes 50 minima and maxima, a sort of them 64.

IEEE 754 has two zeros that are equal, and which of them a minimum yields depends on where in a vector register an
element lies. Who makes a result of these rows therefore adds +0.0 to it at last: then the sign of a zero is always +.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

Wanted = Literal["min", "max", "both"]


def select(rows: Sequence[Tensor], ranks: frozenset[int], spare: Tensor) -> list[Tensor]:
    """The rows of the given ranks (0: the smallest of every element), in rising order.

    Args:
        rows: k tensors [n]; overwritten.
        ranks: each below k.
        spare: [n], of their dtype; overwritten, and one of the returned may lie in it.
    """
    held = list(rows)
    for low, high, wanted in network(len(held), ranks):
        if wanted == "max":
            torch.maximum(held[low], held[high], out=held[high])
        elif wanted == "min":
            torch.minimum(held[low], held[high], out=held[low])
        else:
            torch.minimum(held[low], held[high], out=spare)
            torch.maximum(held[low], held[high], out=held[high])
            held[low], spare = spare, held[low]
    return [held[rank] for rank in sorted(ranks)]


@functools.lru_cache(maxsize=64)
def network(k: int, ranks: frozenset[int]) -> tuple[tuple[int, int, Wanted], ...]:
    """The comparators, in order, that bring the given ranks of k rows to their places: low, high, what is wanted."""
    needed, kept = set(ranks), list[tuple[int, int, Wanted]]()
    for low, high in reversed(list(_merge_sort(k))):
        if low in needed or high in needed:
            kept.append((low, high, "max" if low not in needed else "min" if high not in needed else "both"))
            needed |= {low, high}
    return tuple(reversed(kept))


def _merge_sort(k: int) -> Iterator[tuple[int, int]]:
    """Batcher's network; for k that is no power of two, without the comparators that would meet rows at infinity."""
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
