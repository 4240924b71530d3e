"""The coordinate-wise median.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates.
ICML 2018, arXiv 1803.01498, definition 1.

    g_j = med{ (u_k)_j : k }          of an even number: the mean of the two in the middle

Weights do not count: one site is one voice, or a hostile one would name itself a large weight. It bears up to
⌈k/2⌉ − 1 hostile updates; where the sites' data differ, it is biased against what only few of them know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.reducers.base import normalised
from atoll.reducers.order import select


@dataclass(frozen=True)
class Median:
    """med_k u_k, element by element."""

    name: str = "median"
    needs_all: bool = True
    buffers: str = "median"

    def weigh(self, weights: Sequence[float], norms: Sequence[float]) -> list[float]:
        return normalised(weights)

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        held = list(rows)
        k = len(held)
        middle = select(held, frozenset({(k - 1) // 2, k // 2}), spare=out)
        torch.lerp(middle[0], middle[-1], 0.5, out=out)  # of one with itself: as it is
        out.add_(0.0)
