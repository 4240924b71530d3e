"""The codec `topk`: it sends the k floats of largest magnitude in each tile (4,096 elements).

The other floats decode as zero. The encoded form of a tile is:

    two magnitudes      fp32 each: the mean of the low and of the high magnitudes; low: at most the mean of all k
    k indices           12 bits each, in rising order
    k values            2 bits each: the sign, and which of the two magnitudes

The worker keeps the encoding error and adds it to its next update. The method follows SparseLoCo (Sarfi et al., arXiv
2508.15706: 1 to 3 % of the elements, 2 bits, error feedback).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from atoll.codecs.plain import Narrowing, rows_of
from atoll.errors import ConfigError
from atoll.tensors.layout import TILE

if TYPE_CHECKING:
    from torch import Tensor

STEP = 16
"""k is a multiple of `STEP`, so that the encoded size of a tile is a multiple of 4 bytes."""
MAGNITUDES_BYTES = 8


@dataclass(frozen=True)
class TopKCodec(Narrowing):
    """The codec `topk`. With the default density 1/64, k is 64: 120 bytes for 4,096 elements, 137 times less than fp32.

    Attributes:
        density: share of the elements to send, above 0 and at most 1. k is density × 4,096, rounded to a multiple of
            16 and at least 16.

    Raises:
        ConfigError: `density` is not in (0, 1].
    """

    name: ClassVar[str] = "topk"
    density: float = 1 / 64

    def __post_init__(self) -> None:
        if type(self.density) not in (int, float) or not 0 < self.density <= 1:
            raise ConfigError(
                f"The codec topk has density = {self.density!r}.",
                "Use the share of elements to send: above 0, at most 1.",
            )

    @property
    def k(self) -> int:
        """Number of elements of each tile that are sent."""
        return max(1, round(self.density * TILE / STEP)) * STEP

    @property
    def tile_bytes(self) -> int:
        """Size of an encoded tile, in bytes: two magnitudes, and 12 + 2 bits for each of the k elements."""
        return MAGNITUDES_BYTES + self.k * 3 // 2 + self.k // 4

    def _nbytes(self, numel: int) -> int:
        return -(-numel // TILE) * self.tile_bytes

    def _encode_(self, source: Tensor, target: Tensor) -> None:
        import torch  # here, so that offsets can be computed without torch

        values = rows_of(source, TILE)
        tiles = len(values)
        indices = _largest(values.abs(), self.k)
        chosen = values.gather(1, indices)
        sizes = chosen.abs()
        is_high = sizes > sizes.mean(dim=1, keepdim=True)
        magnitudes, codes, where = self._split(target, tiles)
        for column, group in enumerate((~is_high, is_high)):
            count = group.sum(dim=1).clamp_(min=1)
            magnitudes[:, column].copy_(torch.where(group, sizes, 0.0).sum(dim=1) / count)
        pairs = indices[:, 0::2] | indices[:, 1::2] << 12  # two indices fill the low three of eight bytes
        where.view(tiles, -1, 3).copy_(pairs.view(torch.uint8).view(tiles, -1, 8)[:, :, :3])
        bits = (chosen < 0).int() | is_high.int() << 1
        shifts = torch.arange(0, 8, 2, device=bits.device, dtype=torch.int32)
        codes.copy_((bits.view(tiles, -1, 4) << shifts).sum(dim=2))

    def _decode_(self, source: Tensor, target: Tensor) -> None:
        import torch

        tiles, in_place = -(-target.numel() // TILE), target.numel() % TILE == 0 and target.dtype == torch.float32
        values = target.zero_() if in_place else torch.zeros(tiles * TILE, dtype=torch.float32, device="cpu")
        magnitudes, codes, where = self._split(source, tiles)
        pairs = torch.zeros(tiles, self.k // 2, 8, dtype=torch.uint8, device="cpu")
        pairs[:, :, :3].copy_(where.view(tiles, -1, 3))  # two indices fill the low three of eight bytes
        both = pairs.view(torch.int64)
        indices = torch.cat((both & 0xFFF, both >> 12), dim=2).view(tiles, self.k)
        shifts = torch.arange(0, 8, 2, dtype=torch.int64, device="cpu")
        bits = (codes.unsqueeze(2) >> shifts & 3).view(tiles, self.k)
        signed = torch.stack((magnitudes, -magnitudes), dim=2).view(tiles, 4)
        values.view(tiles, TILE).scatter_(1, indices, signed.gather(1, bits))
        if not in_place:
            target.copy_(values[: target.numel()])

    def _split(self, encoded: Tensor, tiles: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of the encoded tiles: magnitudes [tiles, 2] in fp32, values [tiles, k/4], indices [tiles, 3k/2].

        Values and indices are packed bytes.
        """
        import torch

        rows = encoded[: tiles * self.tile_bytes].view(tiles, self.tile_bytes)
        end = MAGNITUDES_BYTES + self.k * 3 // 2
        return rows[:, :MAGNITUDES_BYTES].view(torch.float32), rows[:, end:], rows[:, MAGNITUDES_BYTES:end]


def _largest(sizes: Tensor, k: int) -> Tensor:
    """Return the indices [tiles, k], in rising order, of the k largest values in each row of `sizes` [tiles, n].

    On the CPU, NumPy finds the k-th largest value, several times faster than torch's `topk`. All values that are at
    least as large are chosen. If these are more than k, because values are equal, torch's `topk` chooses for that row.
    NumPy and torch both treat NaN as the largest value.
    """
    import torch

    def slowly(some: Tensor) -> Tensor:
        return some.topk(k, dim=1, sorted=False).indices.sort(dim=1).values

    if sizes.device.type != "cpu":
        return slowly(sizes)
    least = np.partition(sizes.numpy(), sizes.shape[1] - k, axis=1)[:, -k, None]
    is_chosen = ~(sizes.numpy() < least)  # also chooses NaN, so that the server sees and refuses it
    is_clear = np.count_nonzero(is_chosen, axis=1) == k
    if is_clear.all():
        return torch.from_numpy(np.flatnonzero(is_chosen).reshape(-1, k)).remainder_(sizes.shape[1])
    indices = torch.empty(len(sizes), k, dtype=torch.int64, device="cpu")
    clear = torch.from_numpy(is_clear)
    found = np.flatnonzero(is_chosen[is_clear]).reshape(-1, k)
    indices[clear] = torch.from_numpy(found).remainder_(sizes.shape[1])
    indices[~clear] = slowly(sizes[~clear])
    return indices
