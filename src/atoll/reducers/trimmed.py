"""The coordinate-wise trimmed mean.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates.
ICML 2018, arXiv 1803.01498, definition 2.

    g_j = (1 / |U_j|) · Σ_{u ∈ U_j} u        U_j: the values (u_k)_j without the ⌊β·k⌋ largest and ⌊β·k⌋ smallest

Weights do not count, as with the median. It bears up to ⌊β·k⌋ hostile updates: choose β at least their share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.reducers.base import normalised
from atoll.reducers.order import select


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of what is left of each element's k values.

    Args:
        trim: β, the share cut off at each end; in [0, 0.5).

    Raises:
        ConfigError: `trim` is none.
    """

    trim: float = 0.2
    name: str = "trimmed_mean"
    needs_all: bool = True
    buffers: str = "trimmed_mean"

    def __post_init__(self) -> None:
        if not 0 <= self.trim < 0.5:
            raise ConfigError(
                f"reducer_options: trim = {self.trim!r} is no share of the updates to cut off at each end.",
                "Choose it from 0 to below 0.5, at least the share of sites that may be hostile.",
            )

    def weigh(self, weights: Sequence[float], norms: Sequence[float]) -> list[float]:
        return normalised(weights)

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        held = list(rows)
        cut = int(self.trim * len(held) + 1e-9)  # 0.29 · 100 is 28.999999999999996
        lowest, *others = select(held, frozenset(range(cut, len(held) - cut)), spare=out)
        for row in others:
            lowest.add_(row)  # in rising order, so that no order of the sites changes a bit either
        torch.div(lowest, 1 + len(others), out=out)
        out.add_(0.0)
