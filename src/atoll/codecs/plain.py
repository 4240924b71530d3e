"""Codecs that cast each element (raw, bf16, fp16 widened to fp32), and the base class of codecs that shrink more.

bfloat16 keeps fp32's exponent and 8 bits of its significand: half the bytes, and a relative error of at most 2⁻⁸. NaN
and Inf are not made finite. bf16 is DiLoCo's default, since this rounding does not reduce quality. (Streaming DiLoCo,
Douillard et al., arXiv 2501.18512, goes down to 4 bits.)

The difference of two values can exceed the range of their dtype. For example, the largest fp16 is 65,504, but
40,000 − (−40,000) is 80,000. So with the codec `none`, fp16 and fp8 parameters are sent as fp32
(`atoll.codecs.encoded_layout`). bfloat16 has fp32's range and needs no widening.
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
    """Base class of codecs that cast each element to another dtype (`stored`). Subclasses add `name`."""

    elementwise: ClassVar[bool] = True
    raw: ClassVar[bool] = False
    feedback: ClassVar[bool] = False

    @staticmethod
    def stored(dtype: str) -> str:
        """Return the safetensors dtype in which elements of `dtype` are stored."""
        raise NotImplementedError

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        """Return `numel` times the item size of `stored(dtype)`, in bytes."""
        return numel * ITEM_BYTES[self.stored(dtype)]

    def encode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        """Write the elements of `source`, from any device, into `target`, cast to `stored(dtype)`."""
        from atoll.tensors.dtypes import torch_dtype  # here, so that offsets can be computed without torch

        target.view(torch_dtype(self.stored(dtype))).copy_(source)

    def decode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        """Write the elements of `source`, which are in `stored(dtype)`, into `target`, cast to the target's dtype."""
        from atoll.tensors.dtypes import torch_dtype

        target.copy_(source.view(torch_dtype(self.stored(dtype))))


@dataclass(frozen=True)
class NoneCodec(Elementwise):
    """The codec `none`: raw values, lossless."""

    name: ClassVar[str] = "none"
    raw: ClassVar[bool] = True

    @staticmethod
    def stored(dtype: str) -> str:
        """Return `dtype` itself."""
        return dtype


@dataclass(frozen=True)
class Bf16Codec(Elementwise):
    """The codec `bf16`: two bytes per float. fp8 is widened, because differences of fp8 values can exceed its range."""

    name: ClassVar[str] = "bf16"

    @staticmethod
    def stored(dtype: str) -> str:
        """Return BF16 for every float dtype (also fp64 and fp8), and `dtype` itself for integers and booleans."""
        return "BF16" if dtype in FLOATS else dtype


@dataclass(frozen=True)
class WideCodec(Elementwise):
    """The codec `wide`: fp16 and fp8 as fp32; all other dtypes raw. For internal use: settings cannot name it."""

    name: ClassVar[str] = "wide"

    @staticmethod
    def stored(dtype: str) -> str:
        """Return F32 for fp16 and fp8, and `dtype` itself for all others."""
        return "F32" if is_of_short_range(dtype) else dtype


def is_of_short_range(dtype: str) -> bool:
    """Return whether the dtype is fp16 or fp8: floats with a smaller range than fp32."""
    return dtype == "F16" or dtype.startswith("F8")


_RAW = NoneCodec()

RUN_ELEMENTS = 32 * TILE
"""Elements that are encoded or decoded at a time: 512 KB of fp32, so that they stay in a core's cache."""


def narrows(dtype: str) -> bool:
    """Return whether lossy codecs encode this dtype: true for all floats; integers and booleans are copied raw."""
    return dtype in FLOATS


def rows_of(source: Tensor, width: int) -> Tensor:
    """Return the tensor `source` [n] as fp32 rows [rows, width] on the same device. The last row is padded with zeros.

    If `source` is fp32 and n a multiple of `width`, the rows are a view of `source`. So do not write to the rows.
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
    """Base class of lossy codecs that encode several floats together. Subclasses add `name` and the encoding."""

    elementwise: ClassVar[bool] = False
    raw: ClassVar[bool] = False
    feedback: ClassVar[bool] = True

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        """Return the size of `numel` encoded elements, in bytes. Only floats are encoded; other dtypes stay raw."""
        return self._nbytes(numel) if narrows(dtype) else _RAW.encoded_bytes(numel, dtype)

    def encode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        """Encode floats, `RUN_ELEMENTS` at a time; copy every other dtype raw."""
        if not narrows(dtype):
            _RAW.encode_(source, target, dtype)
            return
        for elements, encoded in self._runs(source.numel()):
            self._encode_(source[elements], target[encoded])

    def decode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        """Decode floats, `RUN_ELEMENTS` at a time; copy every other dtype raw."""
        if not narrows(dtype):
            _RAW.decode_(source, target, dtype)
            return
        for elements, encoded in self._runs(target.numel()):
            self._decode_(source[encoded], target[elements])

    def _runs(self, numel: int) -> Iterator[tuple[slice, slice]]:
        """Yield (slice of the elements, slice of the encoded bytes), `RUN_ELEMENTS` at a time."""
        for start in range(0, numel, RUN_ELEMENTS):
            stop = min(start + RUN_ELEMENTS, numel)
            yield slice(start, stop), slice(self._nbytes(start), self._nbytes(stop))

    @abstractmethod
    def _nbytes(self, numel: int) -> int:
        """Return the encoded size of `numel` floats, in bytes. n whole tiles must take n times the size of one."""

    @abstractmethod
    def _encode_(self, source: Tensor, target: Tensor) -> None:
        """Encode `source` ([n], any float dtype, any device) into `target` (uint8, [`_nbytes(n)`], on the CPU)."""

    @abstractmethod
    def _decode_(self, source: Tensor, target: Tensor) -> None:
        """Decode `source` (uint8, [`_nbytes(n)`], on the CPU) into `target` ([n], any float dtype)."""
