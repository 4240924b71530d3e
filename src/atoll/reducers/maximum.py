"""The element-wise maximum: what integer counters take, and flags (a flag is set when any site set it)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from atoll.reducers.base import normalised

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Maximum:
    """max_k u_k, weights aside. By NumPy: torch has no maximum of unsigned integers above 8 bits."""

    name: str = "max"
    needs_all: bool = False
    buffers: str = "max"

    def weigh(self, weights: Sequence[float], norms: Sequence[float]) -> list[float]:
        return normalised(weights)

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        target = out.numpy()
        for index, row in enumerate(rows):
            if index == 0:
                out.copy_(row)
            else:
                np.maximum(target, row.numpy(), out=target)
