"""What codecs have in common that write floats in less than their bytes, by tiles: everything else travels as it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from atoll.codecs.none import NoneCodec
from atoll.tensors.layout import TILE
from atoll.tensors.schema import FLOATS

if TYPE_CHECKING:
    from torch import Tensor

_RAW = NoneCodec()

RUN_ELEMENTS = 32 * TILE
"""Encoded or decoded at a time: 512 KB of fp32, which stay in a core's cache."""


def narrows(dtype: str) -> bool:
    """Whether tensors of this dtype are narrowed: floats. The difference of two fp8 values has no place in fp8."""
    return dtype in FLOATS


def rows_of(source: Tensor, width: int) -> Tensor:
    """Elements [n] in fp32, as rows [rows, width] on the same device, the last padded with zeros; not to be written.

    They are the elements themselves where those are whole rows of fp32.
    """
    import torch  # here, so that offsets can be computed without torch

    numel = source.numel()
    rows = -(-numel // width)
    if numel == rows * width and source.dtype == torch.float32:
        return source.view(rows, width)
    values = torch.empty(rows * width, dtype=torch.float32, device=source.device)
    values[:numel].copy_(source)
    values[numel:].zero_()
    return values.view(rows, width)


class Narrowing(ABC):
    """A codec but for its name, for one that says how it narrows fp32 values."""

    elementwise: ClassVar[bool] = False
    raw: ClassVar[bool] = False
    feedback: ClassVar[bool] = True

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        return self._nbytes(numel) if narrows(dtype) else _RAW.encoded_bytes(numel, dtype)

    def encode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        if not narrows(dtype):
            _RAW.encode_(source, target, dtype)
            return
        for elements, encoded in self._runs(source.numel()):
            self._encode_(source[elements], target[encoded])

    def decode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        if not narrows(dtype):
            _RAW.decode_(source, target, dtype)
            return
        for elements, encoded in self._runs(target.numel()):
            self._decode_(source[encoded], target[elements])

    def _runs(self, numel: int) -> Iterator[tuple[slice, slice]]:
        """Where elements lie, and what is written of them, so many at a time that what is made of them stays small."""
        for start in range(0, numel, RUN_ELEMENTS):
            stop = min(start + RUN_ELEMENTS, numel)
            yield slice(start, stop), slice(self._nbytes(start), self._nbytes(stop))

    @abstractmethod
    def _nbytes(self, numel: int) -> int:
        """Bytes of so many elements; additive over multiples of the tile."""

    @abstractmethod
    def _encode_(self, source: Tensor, target: Tensor) -> None:
        """Write `source` [n], of any float dtype and device, into `target`, uint8 of `_nbytes(n)`, on the CPU."""

    @abstractmethod
    def _decode_(self, source: Tensor, target: Tensor) -> None:
        """Write what `source` holds into `target` [n], of any float dtype."""
