"""Elements as they are, as bf16, or widened to fp32; and what codecs that write floats in fewer bytes share.

bfloat16 keeps fp32's exponent and 8 bits of its significand: half the bytes, a relative error of at most 2⁻⁸, and what
is not finite stays not finite. It is the default of DiLoCo: its pseudo-gradients bear it without loss of quality
(Douillard et al., Streaming DiLoCo, arXiv 2501.18512, go down to 4 bits).

The largest fp16 is 65,504, and 40,000 − (−40,000) is 80,000: the difference of two values may be beyond their range. So
where `params` travel as they are, fp16 and fp8 are widened (`atoll.codecs.encoded_layout`). bfloat16 has the range of
fp32 and needs no widening.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from atoll.tensors.layout import TILE
from atoll.tensors.schema import FLOATS, ITEM_BYTES

if TYPE_CHECKING:
    from torch import Tensor


class Elementwise:
    """A codec but for its name, for one that writes each element by itself, in the dtype that `stored` names."""

    elementwise: ClassVar[bool] = True
    raw: ClassVar[bool] = False
    feedback: ClassVar[bool] = False

    @staticmethod
    def stored(dtype: str) -> str:
        """Return the safetensors dtype in which elements of `dtype` are written."""
        raise NotImplementedError

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        """Return the item size of `stored(dtype)` times `numel`: nothing is written beside the elements."""
        return numel * ITEM_BYTES[self.stored(dtype)]

    def encode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        """Cast each element to `stored(dtype)`; a source on another device is copied to the CPU."""
        from atoll.tensors.dtypes import torch_dtype  # here, so that offsets can be computed without torch

        target.view(torch_dtype(self.stored(dtype))).copy_(source)

    def decode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        """Cast each element from `stored(dtype)` to the dtype of `target`."""
        from atoll.tensors.dtypes import torch_dtype

        target.copy_(source.view(torch_dtype(self.stored(dtype))))


@dataclass(frozen=True)
class NoneCodec(Elementwise):
    """Raw values; nothing is lost."""

    name: ClassVar[str] = "none"
    raw: ClassVar[bool] = True

    @staticmethod
    def stored(dtype: str) -> str:
        """Return `dtype` itself."""
        return dtype


@dataclass(frozen=True)
class Bf16Codec(Elementwise):
    """Two bytes per element of every float: the difference of two fp16 or fp8 values may be beyond their own range."""

    name: ClassVar[str] = "bf16"

    @staticmethod
    def stored(dtype: str) -> str:
        """Return BF16 for every float, fp64 and fp8 too; integers and booleans keep their dtype."""
        return "BF16" if dtype in FLOATS else dtype


@dataclass(frozen=True)
class WideCodec(Elementwise):
    """Four bytes per element of fp16 and fp8; everything else as it is."""

    name: ClassVar[str] = "wide"

    @staticmethod
    def stored(dtype: str) -> str:
        """Return F32 for fp16 and fp8; every other dtype is kept."""
        return "F32" if is_of_short_range(dtype) else dtype


def is_of_short_range(dtype: str) -> bool:
    """Return whether a float has fewer bits of exponent than fp32."""
    return dtype == "F16" or dtype.startswith("F8")


_RAW = NoneCodec()

RUN_ELEMENTS = 32 * TILE
"""Encoded or decoded at a time: 512 KB of fp32, which stay in a core's cache."""


def narrows(dtype: str) -> bool:
    """Return whether tensors of this dtype are narrowed: floats, fp8 too, which cannot hold its own differences."""
    return dtype in FLOATS


def rows_of(source: Tensor, width: int) -> Tensor:
    """Return elements [n] in fp32, as rows [rows, width] on the same device, the last padded with zeros; read only.

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
        """Return the narrowed size of a float tensor, the raw size of every other."""
        return self._nbytes(numel) if narrows(dtype) else _RAW.encoded_bytes(numel, dtype)

    def encode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        """Narrow floats in runs of `RUN_ELEMENTS`; copy every other dtype as it is."""
        if not narrows(dtype):
            _RAW.encode_(source, target, dtype)
            return
        for elements, encoded in self._runs(source.numel()):
            self._encode_(source[elements], target[encoded])

    def decode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        """Restore floats in runs of `RUN_ELEMENTS`; copy every other dtype as it is."""
        if not narrows(dtype):
            _RAW.decode_(source, target, dtype)
            return
        for elements, encoded in self._runs(target.numel()):
            self._decode_(source[encoded], target[elements])

    def _runs(self, numel: int) -> Iterator[tuple[slice, slice]]:
        """Give where elements lie, and where they are written, few enough at a time that scratches stay small."""
        for start in range(0, numel, RUN_ELEMENTS):
            stop = min(start + RUN_ELEMENTS, numel)
            yield slice(start, stop), slice(self._nbytes(start), self._nbytes(stop))

    @abstractmethod
    def _nbytes(self, numel: int) -> int:
        """Return bytes of so many elements; additive over multiples of the tile."""

    @abstractmethod
    def _encode_(self, source: Tensor, target: Tensor) -> None:
        """Write `source` [n], of any float dtype and device, into `target`, uint8 of `_nbytes(n)`, on the CPU."""

    @abstractmethod
    def _decode_(self, source: Tensor, target: Tensor) -> None:
        """Write what `source` holds into `target` [n], of any float dtype."""
