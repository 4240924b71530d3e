"""The codec contract: how the `params` of an update are written on the wire.

A codec is a small frozen value. It is fixed-rate: size and offset of what it writes follow from the element count
alone, so that any run of whole tiles can be decoded without the rest. `atoll.testing.codecs` has its contract suite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Codec(Protocol):
    """One way to write tensors as bytes."""

    @property
    def name(self) -> str:
        """The name in the run file and in layouts."""
        ...

    @property
    def elementwise(self) -> bool:
        """Whether each element is written by itself, so that segments without padding between them decode as one."""
        ...

    @property
    def raw(self) -> bool:
        """Whether what is written are the elements as they lie in memory, so that they need no decoding."""
        ...

    @property
    def feedback(self) -> bool:
        """Whether a worker keeps what encoding has lost, and adds it to its next update (error feedback)."""
        ...

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        """Return bytes for `numel` elements of the safetensors `dtype`; additive over multiples of the tile (4,096)."""
        ...

    def encode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        """Write `source` (1-D, contiguous, any float or integer dtype, any device) into `target`.

        Args:
            source: n elements.
            target: uint8, CPU, of exactly `encoded_bytes(n, dtype)` bytes.
            dtype: the tensor's safetensors dtype in the schema.
        """
        ...

    def decode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        """Write what `source` (uint8, CPU, `encoded_bytes(n, dtype)` bytes) holds into `target` (1-D, n elements).

        `target` may have another dtype than the schema's: the reducer asks for the one it accumulates in.
        """
        ...
