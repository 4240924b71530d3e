"""The interface of codecs. A codec encodes the parameters of an update as bytes, to be sent over the network.

A codec is an immutable object. It has a fixed rate: the sizes and offsets of encoded data depend only on the number of
elements. So any range of whole tiles (4,096 elements each) can be decoded alone. `atoll.testing.contracts` has tests
that every codec must pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Codec(Protocol):
    """An encoding of tensors as bytes."""

    @property
    def name(self) -> str:
        """The codec's name in the run file and in descriptions of encoded files."""
        ...

    @property
    def elementwise(self) -> bool:
        """Whether each element is encoded alone. If so, one call can encode or decode several neighbouring tensors."""
        ...

    @property
    def raw(self) -> bool:
        """Whether the encoded bytes equal the bytes of the elements in memory, so that no decoding is needed."""
        ...

    @property
    def feedback(self) -> bool:
        """Whether a worker keeps an update's encoding error and adds this error to its next update (error feedback)."""
        ...

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        """Return the encoded size of `numel` elements of the safetensors dtype `dtype`, in bytes.

        Sizes must be additive over whole tiles: size(n + m) = size(n) + size(m) if n is a multiple of 4,096.
        """
        ...

    def encode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        """Encode `source` into `target`.

        Args:
            source: the elements: [n], contiguous, any float or integer dtype, on any device.
            target: buffer for the encoded data: uint8, [`encoded_bytes(n, dtype)`], on the CPU.
            dtype: the tensor's safetensors dtype in the schema.
        """
        ...

    def decode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        """Decode `source` into `target`.

        Args:
            source: the encoded data: uint8, [`encoded_bytes(n, dtype)`], on the CPU.
            target: buffer for the elements: [n]. Its dtype can differ from the schema's: a reducer decodes into the
                dtype in which it accumulates.
            dtype: the tensor's safetensors dtype in the schema.
        """
        ...
