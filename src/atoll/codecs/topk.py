"""Of each tile of 4,096 floats the k largest travel, with 2 bits each and their places; the others are zero.

A tile is written as two magnitudes in fp32, k places of 12 bits in rising order, and k values of 2 bits: sign, and
which of the two magnitudes. They are the means of the chosen magnitudes below and above these ones' mean. What is not
sent stays at the worker for later updates. After SparseLoCo (Sarfi et al., arXiv 2508.15706: 1 to 3 % of the elements,
2 bits, error feedback).
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
        if type(self.density) not in (int, float) or not 0 < self.density <= 1:
            raise ConfigError(
                f"The codec topk has density = {self.density!r}.", "Give the share to send: between 0 and 1."
            )

    @property
    def k(self) -> int:
        """Elements of a tile that travel."""
        return max(1, round(self.density * TILE / STEP)) * STEP

    @property
    def tile_bytes(self) -> int:
        """Bytes of an encoded tile: two magnitudes, and 12 + 2 bits for each of its k elements."""
        return MAGNITUDES_BYTES + self.k * 3 // 2 + self.k // 4

    def _nbytes(self, numel: int) -> int:
        return -(-numel // TILE) * self.tile_bytes

    def _encode_(self, source: Tensor, target: Tensor) -> None:
        import torch  # here, so that offsets can be computed without torch

        values = rows_of(source, TILE)
        tiles = len(values)
        places = _largest(values.abs(), self.k)
        chosen = values.gather(1, places)
        sizes = chosen.abs()
        is_high = sizes > sizes.mean(dim=1, keepdim=True)
        magnitudes, codes, where = self._split(target, tiles)
        for column, group in enumerate((~is_high, is_high)):
            count = group.sum(dim=1).clamp_(min=1)
            magnitudes[:, column].copy_(torch.where(group, sizes, 0.0).sum(dim=1) / count)
        pairs = places[:, 0::2] | places[:, 1::2] << 12  # three bytes of eight
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
        pairs[:, :, :3].copy_(where.view(tiles, -1, 3))  # three bytes of eight
        both = pairs.view(torch.int64)
        places = torch.cat((both & 0xFFF, both >> 12), dim=2).view(tiles, self.k)
        shifts = torch.arange(0, 8, 2, dtype=torch.int64, device="cpu")
        bits = (codes.unsqueeze(2) >> shifts & 3).view(tiles, self.k)
        signed = torch.stack((magnitudes, -magnitudes), dim=2).view(tiles, 4)
        values.view(tiles, TILE).scatter_(1, places, signed.gather(1, bits))
        if not in_place:
            target.copy_(values[: target.numel()])

    def _split(self, encoded: Tensor, tiles: int) -> tuple[Tensor, Tensor, Tensor]:
        """Magnitudes [tiles, 2] in fp32, values [tiles, k/4] and places [tiles, 3k/2] where they lie encoded."""
        import torch

        rows = encoded[: tiles * self.tile_bytes].view(tiles, self.tile_bytes)
        end = MAGNITUDES_BYTES + self.k * 3 // 2
        return rows[:, :MAGNITUDES_BYTES].view(torch.float32), rows[:, end:], rows[:, MAGNITUDES_BYTES:end]


def _largest(sizes: Tensor, k: int) -> Tensor:
    """Places [tiles, k], in rising order, of the k largest of each row of `sizes` [tiles, n].

    NumPy finds the k-th largest several times faster than torch the k largest. They are all from it on, unless there
    are more of its size than places left. NaN is larger than anything, for both.
    """
    import torch

    def slowly(some: Tensor) -> Tensor:
        return some.topk(k, dim=1, sorted=False).indices.sort(dim=1).values

    if sizes.device.type != "cpu":
        return slowly(sizes)
    least = np.partition(sizes.numpy(), sizes.shape[1] - k, axis=1)[:, -k, None]
    is_chosen = ~(sizes.numpy() < least)  # NaN among them: the server must see it
    is_clear = np.count_nonzero(is_chosen, axis=1) == k
    if is_clear.all():
        return torch.from_numpy(np.flatnonzero(is_chosen).reshape(-1, k)).remainder_(sizes.shape[1])
    places = torch.empty(len(sizes), k, dtype=torch.int64, device="cpu")
    clear = torch.from_numpy(is_clear)
    found = np.flatnonzero(is_chosen[is_clear]).reshape(-1, k)
    places[clear] = torch.from_numpy(found).remainder_(sizes.shape[1])
    places[~clear] = slowly(sizes[~clear])
    return places
