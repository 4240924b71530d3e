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

        halves = codes.add(_ZERO).to(torch.uint8)
        return halves[:, 0::2] | halves[:, 1::2] << 4

    def _codes(self, packed: Tensor) -> Tensor:
        import torch

        halves = torch.stack((packed & 15, packed >> 4), dim=2)
        return halves.view(len(packed), BLOCK).to(torch.int8).sub_(_ZERO)
