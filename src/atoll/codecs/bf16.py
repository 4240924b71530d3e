"""Floats travel as bfloat16, narrower ones, too; everything else as it is.

bfloat16 keeps fp32's exponent and 8 bits of its significand: half the bytes, a relative error of at most 2⁻⁸, and what
is not finite stays not finite. It is the default of DiLoCo, whose pseudo-gradients bear it without loss of quality
(Douillard et al., Streaming DiLoCo, arXiv 2501.18512, go down to 4 bits).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from atoll.tensors.schema import FLOATS, ITEM_BYTES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Bf16Codec:
    """Two bytes per element of every float: the difference of two fp16 or fp8 values may be beyond their own range."""

    name: ClassVar[str] = "bf16"
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
        return "BF16" if dtype in FLOATS else dtype
