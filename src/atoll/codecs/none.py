"""Elements as they lie in memory: the codec of buffers, and of federated runs by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from atoll.tensors.schema import ITEM_BYTES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NoneCodec:
    """Raw values; nothing is lost."""

    name: ClassVar[str] = "none"
    elementwise: ClassVar[bool] = True
    raw: ClassVar[bool] = True
    feedback: ClassVar[bool] = False

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        return numel * ITEM_BYTES[dtype]

    def encode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        from atoll.tensors.dtypes import torch_dtype  # here, so that offsets can be computed without torch

        target.view(torch_dtype(dtype)).copy_(source)

    def decode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        from atoll.tensors.dtypes import torch_dtype

        target.copy_(source.view(torch_dtype(dtype)))
