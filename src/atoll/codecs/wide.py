"""fp16 and fp8 travel as fp32: the difference of two of their values may be beyond their own range.

The largest fp16 is 65,504, and 40,000 − (−40,000) is 80,000. So where `params` are to travel as they are, those of
such dtypes are written by this codec (`atoll.codecs.update`). bfloat16 has the range of fp32, and is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from atoll.tensors.schema import ITEM_BYTES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WideCodec:
    """Four bytes per element of fp16 and fp8; everything else as it is."""

    name: ClassVar[str] = "wide"
    elementwise: ClassVar[bool] = True
    raw: ClassVar[bool] = False
    feedback: ClassVar[bool] = False

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        return numel * ITEM_BYTES[self._stored(dtype)]

    def encode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        from atoll.tensors.dtypes import torch_dtype  # here, so that offsets can be computed without torch

        target.view(torch_dtype(self._stored(dtype))).copy_(source)

    def decode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        from atoll.tensors.dtypes import torch_dtype

        target.copy_(source.view(torch_dtype(self._stored(dtype))))

    @staticmethod
    def _stored(dtype: str) -> str:
        return "F32" if is_of_short_range(dtype) else dtype


def is_of_short_range(dtype: str) -> bool:
    """Whether a float has fewer bits of exponent than fp32."""
    return dtype == "F16" or dtype.startswith("F8")
