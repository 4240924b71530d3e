"""Fewer significant digits than were trained."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.errors import UsageError
from atoll.filters.base import Filter
from atoll.registry import nearest

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Cast(Filter):
    """Round what is sent to the values that a narrower dtype has.

    The bytes stay as many as they were: those are the codec's (setting `codec`).

    Args:
        dtype: `bf16` or `fp16`; fp16 cannot hold more than 65504, and what is beyond becomes infinite, which the server
            refuses.
    """

    def __init__(self, dtype: str) -> None:
        if dtype not in _DTYPES:
            raise UsageError(f"Cast({dtype!r}): it casts to {' and '.join(_DTYPES)}.", nearest(dtype, _DTYPES))
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Cast({self.dtype!r})"

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        return values.to(_DTYPES[self.dtype]).to(values.dtype)
