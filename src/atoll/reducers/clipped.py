"""The norm-clipped mean.

Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan: Can You Really Backdoor Federated Learning? arXiv 1911.07963,
section 4.

    g = Σ_k ŵ_k · u_k · min(1, C / ‖u_k‖₂)          ‖u_k‖₂: of all params of the update, as it was accepted

An update may be wrong in its direction, but not far: good against large norms, of little use against a flipped sign of
ordinary size. Without a `max_norm`, C is the median of the round's norms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.errors import ConfigError
from atoll.reducers.base import normalised
from atoll.reducers.mean import WeightedMean


@dataclass(frozen=True)
class ClippedMean:
    """The weighted mean of updates that are no longer than C.

    Args:
        max_norm: C; None: the median of the norms in the round.

    Raises:
        ConfigError: `max_norm` is no length.
    """

    max_norm: float | None = None
    name: str = "clipped_mean"
    needs_all: bool = False
    buffers: str = "mean"

    def __post_init__(self) -> None:
        if self.max_norm is not None and not (math.isfinite(self.max_norm) and self.max_norm > 0):
            raise ConfigError(
                f"reducer_options: max_norm = {self.max_norm!r} is no L2 norm.",
                "Choose a number above zero, or leave it out: then it is the median of the round's norms.",
            )

    def weigh(self, weights: Sequence[float], norms: Sequence[float]) -> list[float]:
        bound = statistics.median(norms) if self.max_norm is None else self.max_norm
        return [
            weight * min(1.0, bound / norm) if norm else weight
            for weight, norm in zip(normalised(weights), norms, strict=True)
        ]

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        WeightedMean().reduce_(rows, weights, out)
