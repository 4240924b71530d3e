"""Floats travel as 4-bit codes in blocks of 256, two in a byte: 7.76 times fewer bytes than fp32.

The width with which Streaming DiLoCo sends its pseudo-gradients (Douillard et al., arXiv 2501.18512).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from atoll.codecs.blocks import BLOCK, BlockCodec

if TYPE_CHECKING:
    from torch import Tensor

_ZERO = 8
"""How the code 0 is written: codes from −7 to 7 as 1 to 15."""


@dataclass(frozen=True)
class Int4Codec(BlockCodec):
    """132 bytes for 256 elements; an error of at most 1/14 of the largest in the block."""

    name: ClassVar[str] = "int4"
    levels: ClassVar[int] = 7
    block_bytes: ClassVar[int] = BLOCK // 2

    def _packed(self, codes: Tensor) -> Tensor:
        """The element with the even number in the low half of a byte."""
        import torch

        pairs = codes.add_(_ZERO).to(torch.uint8).view(torch.int16)  # the even one in the low byte
        return (pairs | pairs >> 4).to(torch.uint8)

    def _codes(self, packed: Tensor) -> Tensor:
        import torch

        pairs = packed.to(torch.int16)
        return (pairs | pairs << 4).bitwise_and_(0x0F0F).view(torch.int8).sub_(_ZERO)
