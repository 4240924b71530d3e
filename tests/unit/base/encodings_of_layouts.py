"""Two rates for tests of layouts."""

from __future__ import annotations

import dataclasses

from atoll.tensors.schema import ITEM_BYTES


@dataclasses.dataclass(frozen=True)
class Raw:
    name: str = "none"
    elementwise: bool = True

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        return numel * ITEM_BYTES[dtype]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """As int8 with a scale per 256 values: a rate that is not a whole number of bytes per element."""

    name: str = "blocks"
    elementwise: bool = False

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        return -(-numel // 256) * (256 + 4)
