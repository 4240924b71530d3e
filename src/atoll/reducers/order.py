"""Order statistics of k rows, element by element, by a sorting network: what median and trimmed mean stand on.

K. E. Batcher: Sorting networks and their applications. AFIPS 1968 (odd-even merge sort).

A network is a fixed list of comparators (i, j): row i ← min, row j ← max of both. Each is two vector instructions a
register over rows that stay in a core's cache, which beats sorting k numbers at a time. Comparators that no wanted
rank depends on are left out: the median of ten rows needs 29 of 32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def select(rows: Sequence[Tensor], ranks: frozenset[int]) -> list[Tensor]:
    """The rows of the given ranks (0: the smallest of every element), in rising order.

    Args:
        rows: k tensors [n]; overwritten.
        ranks: each below k.
    """
    held = list(rows)
    spare = torch.empty_like(held[0])
    for low, high in network(len(held), ranks):
        torch.minimum(held[low], held[high], out=spare)
        torch.maximum(held[low], held[high], out=held[high])
        held[low], spare = spare, held[low]
    return [held[rank] for rank in sorted(ranks)]


@functools.lru_cache(maxsize=64)
def network(k: int, ranks: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """The comparators, in order, that bring the given ranks of k rows to their places."""
    needed, kept = set(ranks), list[tuple[int, int]]()
    for low, high in reversed(list(_merge_sort(k))):
        if low in needed or high in needed:
            needed |= {low, high}
            kept.append((low, high))
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
