"""Of each tile of 4,096 floats the k largest travel, with 2 bits each and their places; the others are zero.

A tile is written as two magnitudes in fp32, k places of 12 bits in rising order, and k values of 2 bits: sign, and
which of the two magnitudes. They are the means of the chosen magnitudes below and above these ones' mean. What is not
sent stays at the worker for later updates. After SparseLoCo (Sarfi et al., arXiv 2508.15706: 1 to 3 % of the elements,
2 bits, error feedback).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from atoll.codecs.narrowing import Narrowing, rows_of
from atoll.errors import ConfigError
from atoll.tensors.layout import TILE

if TYPE_CHECKING:
    from torch import Tensor

STEP = 16
"""k is a multiple of it, so that what is written for a tile ends at a border of 4 bytes."""
MAGNITUDES_BYTES = 8


@dataclass(frozen=True)
class TopKCodec(Narrowing):
    """With a density of 1/64, k = 64: 120 bytes for 4,096 elements, 137 times fewer than fp32.

    Attributes:
        density: share of the elements that travel; k is the nearest multiple of 16, at least 16.

    Raises:
        ConfigError: `density` is no share.
    """

    name: ClassVar[str] = "topk"
    density: float = 1 / 64

    def __post_init__(self) -> None:
        if not isinstance(self.density, int | float) or not 0 < self.density <= 1:
            raise ConfigError(
                f"The codec topk has density = {self.density!r}.", "Give the share to send: between 0 and 1."
            )

    @property
    def k(self) -> int:
        """Elements of a tile that travel."""
        return max(1, round(self.density * TILE / STEP)) * STEP

    @property
    def tile_bytes(self) -> int:
        return MAGNITUDES_BYTES + self.k * 3 // 2 + self.k // 4

    def _nbytes(self, numel: int) -> int:
        return -(-numel // TILE) * self.tile_bytes

    def _encode_(self, source: Tensor, target: Tensor) -> None:
        import torch  # here, so that offsets can be computed without torch

        values = rows_of(source, TILE)
        tiles = len(values)
        places = values.abs().topk(self.k, dim=1, sorted=False).indices.sort(dim=1).values
        chosen = values.gather(1, places)
        sizes = chosen.abs()
        is_high = sizes > sizes.mean(dim=1, keepdim=True)
        magnitudes, codes, where = self._split(target, tiles)
        for column, group in enumerate((~is_high, is_high)):
            count = group.sum(dim=1).clamp_(min=1)
            magnitudes[:, column].copy_(torch.where(group, sizes, 0.0).sum(dim=1) / count)
        first, second = places[:, 0::2], places[:, 1::2]
        packed = torch.stack((first & 255, first >> 8 | (second & 15) << 4, second >> 4), dim=2)
        where.copy_(packed.view(tiles, -1))
        bits = (chosen < 0).int() | is_high.int() << 1
        shifts = torch.arange(0, 8, 2, device=bits.device, dtype=torch.int32)
        codes.copy_((bits.view(tiles, -1, 4) << shifts).sum(dim=2))

    def _decode_(self, source: Tensor, target: Tensor) -> None:
        import torch

        tiles = -(-target.numel() // TILE)
        values = torch.zeros(tiles, TILE)
        magnitudes, codes, where = self._split(source, tiles)
        low, middle, high = where.reshape(tiles, -1, 3).long().unbind(dim=2)
        places = torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), dim=2).view(tiles, self.k)
        shifts = torch.arange(0, 8, 2, dtype=torch.int32)
        bits = (codes.int().unsqueeze(2) >> shifts & 3).view(tiles, self.k)
        sizes = magnitudes.gather(1, (bits >> 1).long())
        values.scatter_(1, places, torch.where(bits & 1 > 0, -sizes, sizes))
        target.copy_(values.view(-1)[: target.numel()])

    def _split(self, encoded: Tensor, tiles: int) -> tuple[Tensor, Tensor, Tensor]:
        """Magnitudes [tiles, 2] in fp32, values [tiles, k/4] and places [tiles, 3k/2] where they lie encoded."""
        import torch

        rows = encoded[: tiles * self.tile_bytes].view(tiles, self.tile_bytes)
        end = MAGNITUDES_BYTES + self.k * 3 // 2
        return rows[:, :MAGNITUDES_BYTES].view(torch.float32), rows[:, end:], rows[:, MAGNITUDES_BYTES:end]
