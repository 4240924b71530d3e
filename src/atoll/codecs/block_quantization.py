"""int8 and int4: blocks of 256 elements with one scale each.

    scale = max |x| / levels        code = round(x / scale), half to even        x̂ = code · scale

So |x̂ − x| ≤ scale / 2. The encoded form of a tile (4,096 elements) is its 16 scales in fp32, then its codes. The last
tile of a tensor can have fewer blocks; its last block is padded with zeros. If the largest magnitude of a block is
below 2⁻¹⁰⁰, the block becomes zeros. If a block contains NaN or Inf, no decoded value of the block is finite.

Streaming DiLoCo (Douillard et al., arXiv 2501.18512) sends its pseudo-gradients with 4 bits per element.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from atoll.codecs.plain import Narrowing, rows_of
from atoll.tensors.layout import TILE

if TYPE_CHECKING:
    from torch import Tensor


BLOCK = 256
SCALE_BYTES = 4
BLOCKS_PER_TILE = TILE // BLOCK
SMALLEST = 2.0**-100
"""A block of smaller magnitudes becomes zeros: below 2⁻¹²¹, `levels / largest` is Inf, and 0 · Inf is NaN."""


class BlockCodec(Narrowing):
    """A codec that quantizes blocks of 256 elements with one scale per block.

    Attributes:
        levels: the largest code; codes are whole numbers from −levels to levels.
        block_bytes: size of the codes of one block, in bytes.
    """

    levels: ClassVar[int]
    block_bytes: ClassVar[int]

    def _nbytes(self, numel: int) -> int:
        return -(-numel // BLOCK) * (SCALE_BYTES + self.block_bytes)

    def _encode_(self, source: Tensor, target: Tensor) -> None:
        import torch  # here, so that offsets can be computed without torch

        values = rows_of(source, BLOCK)
        # `abs()` would write all values once more
        largest = torch.maximum(values.amax(dim=1), -values.amin(dim=1))
        is_zero = largest < SMALLEST
        inverse = (self.levels / largest).masked_fill_(is_zero, 0.0)
        codes = torch.mul(values, inverse.unsqueeze(1)).round_()
        if not math.isfinite(float(largest.max())):  # finite input needs no clamp: its codes are within the levels
            codes.nan_to_num_(0.0).clamp_(-self.levels, self.levels)
        packed, scales = self._packed(codes), (largest / self.levels).masked_fill_(is_zero, 0.0)
        for first, last, shape in _runs(len(values)):
            stored_scales, stored_codes = self._split(target, first, last, shape)
            stored_scales.copy_(scales[first:last].view(shape))
            stored_codes.copy_(packed[first:last].reshape(shape[0], -1))

    def _decode_(self, source: Tensor, target: Tensor) -> None:
        import torch

        blocks, in_place = -(-target.numel() // BLOCK), target.numel() % BLOCK == 0 and target.dtype == torch.float32
        values = (target if in_place else torch.empty(blocks * BLOCK, dtype=torch.float32, device="cpu")).view(
            blocks, BLOCK
        )
        for first, last, shape in _runs(blocks):
            scales, packed = self._split(source, first, last, shape)
            rows = values[first:last]
            rows.view(shape[0], -1).copy_(self._codes(packed))
            rows.mul_(scales.reshape(-1, 1))
        if not in_place:
            target.copy_(values.view(-1)[: target.numel()])

    def _split(self, encoded: Tensor, first: int, last: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return views of the encoded blocks [first, last): fp32 scales [tiles, blocks] and codes [tiles, bytes].

        `shape` is (tiles, blocks per tile), from `_runs`.
        """
        import torch

        nbytes, scale_bytes = SCALE_BYTES + self.block_bytes, SCALE_BYTES * shape[1]
        tiles = encoded[first * nbytes : last * nbytes].view(shape[0], -1)
        return tiles[:, :scale_bytes].view(torch.float32), tiles[:, scale_bytes:]

    @abstractmethod
    def _packed(self, codes: Tensor) -> Tensor:
        """Pack codes [blocks, 256], whole numbers in fp32, into bytes [blocks, block_bytes]."""

    @abstractmethod
    def _codes(self, packed: Tensor) -> Tensor:
        """Unpack bytes from `_packed` into codes: [rows, bytes] → [rows, elements]. A row can hold several blocks."""


def _runs(blocks: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Yield (first, last, (tiles, blocks per tile)) for the blocks of all whole tiles, then for the other blocks."""
    rest = blocks % BLOCKS_PER_TILE
    whole = blocks - rest
    if whole:
        yield 0, whole, (whole // BLOCKS_PER_TILE, BLOCKS_PER_TILE)
    if rest:
        yield whole, blocks, (1, rest)


@dataclass(frozen=True)
class Int8Codec(BlockCodec):
    """The codec `int8`: 260 bytes for 256 elements; errors are at most 1/254 of the block's largest magnitude."""

    name: ClassVar[str] = "int8"
    levels: ClassVar[int] = 127
    block_bytes: ClassVar[int] = BLOCK

    def _packed(self, codes: Tensor) -> Tensor:
        import torch

        return codes.to(torch.int8).view(torch.uint8)

    def _codes(self, packed: Tensor) -> Tensor:
        import torch

        return packed.view(torch.int8)


_ZERO = 8
"""Offset added to each code before packing: codes from −7 to 7 are stored as 1 to 15."""


@dataclass(frozen=True)
class Int4Codec(BlockCodec):
    """The codec `int4`: 132 bytes for 256 elements; errors are at most 1/14 of the block's largest magnitude."""

    name: ClassVar[str] = "int4"
    levels: ClassVar[int] = 7
    block_bytes: ClassVar[int] = BLOCK // 2

    def _packed(self, codes: Tensor) -> Tensor:
        """Pack two codes into each byte: the element with the even index into the low 4 bits."""
        import torch

        pairs = codes.add_(_ZERO).to(torch.uint8).view(torch.int16)  # the even element is the low byte
        return (pairs | pairs >> 4).to(torch.uint8)

    def _codes(self, packed: Tensor) -> Tensor:
        import torch

        pairs = packed.to(torch.int16)
        return (pairs | pairs << 4).bitwise_and_(0x0F0F).view(torch.int8).sub_(_ZERO)
