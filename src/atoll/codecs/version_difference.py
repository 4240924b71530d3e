"""Compressed downloads: a version encoded as its difference (delta) from the previous version.

    Δ = C(θ' − b)        b' = b + dec(Δ)

    θ, θ'    the server's full-precision parameter before and after the round
    b, b'    the parameter in the published versions, in the model's dtype; all workers have the same values
    C, dec   the codec's encoding and decoding

The encoding error stays in θ' − b', so the next difference contains it. This is error feedback that needs no file.
Server and workers both compute b' with `advance_`: add in the dtype of accumulation, then cast. The digest of b' shows
whether they agree. Tensors other than float parameters are sent as their new values, without a difference.

A delta has the layout of an update, but is divided into parts like the version: part n of the delta turns part n of the
previous version into part n of the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from atoll.codecs.base import Codec
from atoll.codecs.encoded_layout import build_codecs
from atoll.posix import write_at
from atoll.runtime import failpoint
from atoll.tensors.byte_runs import Run, RunTable
from atoll.tensors.layout import ALIGN_BYTES, TILE, Layout, Part, Segment, update_layout
from atoll.tensors.schema import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.tensors.chunks import Scratch


@dataclass(frozen=True)
class Downlink:
    """The format of the compressed downloads of one fragment.

    Attributes:
        codecs: name → codec, for all codecs in the layout.
        layout: the layout of a delta.
        parts: the delta's parts: one for each part of the version that belongs to this rank; some are empty.
        count: number of the version's parts, of all ranks.
    """

    codecs: Mapping[str, Codec]
    layout: Layout
    parts: tuple[Part, ...]
    count: int

    @classmethod
    def of(cls, version: Layout, codec: str, options: Mapping[str, Any], *, sent: bool = False) -> Downlink | None:
        """Return the format of compressed downloads of versions with this layout.

        Return None for the codec `none`: then workers download whole versions.

        Args:
            version: layout of the versions.
            codec: name of the codec of float parameters.
            options: the codec's keyword arguments.
            sent: whether the codec's name came over the wire (`build_codecs`).

        Raises:
            ConfigError: the codec's name is unknown, or an option is unknown or has a wrong value.
        """
        if codec == "none":
            return None
        codecs = build_codecs(codec, options, setting="aggregation.download_codec", sent=sent)

        def encoding(spec: TensorSpec) -> Codec:
            return codecs[codec if spec.is_stepped else "none"]

        layout = update_layout((segment.spec for segment in version.segments), encoding, version.part_bytes)
        parts = tuple(part for part in _along(version, layout) if version.rank in (None, part.rank))
        return cls(codecs, layout, parts, len(version.all_parts))

    @functools.cached_property
    def runs(self) -> RunTable:
        """The byte runs of the layout, each of at most one tile."""
        return RunTable(self.layout, TILE)

    def encode_(self, segment: Segment, theta: Tensor, held: Tensor, target: Tensor) -> None:
        """Encode the difference θ' − b of a range of a parameter into `target`, and update `held` from b to b'.

        Args:
            segment: the parameter's segment in the delta.
            theta: θ' [n], in the dtype of accumulation.
            held: b [n], in the model's dtype; changed in place.
            target: buffer for the encoded range: uint8, of the size that `layout.piece` gives.
        """
        self.codecs[segment.codec].encode_(theta - held.to(theta.dtype), target, segment.spec.dtype)
        self.advance_(segment, held, target)

    def advance_(self, segment: Segment, held: Tensor, encoded: Tensor) -> None:
        """Update a range of a tensor from b to b', in place.

        A float parameter gets the decoded difference added. Any other tensor is replaced by the decoded values.

        Args:
            segment: the tensor's segment in the delta.
            held: b [n], on the CPU, in the model's dtype; changed in place.
            encoded: the delta's encoded bytes of the range, uint8.
        """
        import torch  # here, so that layouts can be computed without torch

        from atoll.tensors.dtypes import accumulate_dtype

        spec, codec = segment.spec, self.codecs[segment.codec]
        if not spec.is_stepped:
            codec.decode_(encoded, held, spec.dtype)
            return
        change = torch.empty(held.numel(), dtype=accumulate_dtype(spec.dtype))
        codec.decode_(encoded, change, spec.dtype)
        held.copy_(held.to(change.dtype) + change)

    def digest(self, part_digests: list[bytes] | tuple[bytes, ...]) -> str:
        """Return the digest of a delta, from the digests of its parts."""
        return self.layout.blob_id(part_digests)


class DifferenceWriter:
    """A writer of a delta file: one part at a time, one element range at a time. Use one per thread.

    Codecs have a fixed rate, and each range begins at the start of a tile. So each range can be encoded alone.

    Args:
        downlink: the format of the delta.
        fd: descriptor of the delta file.
        scratch: the thread's scratch memory.
    """

    def __init__(self, downlink: Downlink, fd: int, scratch: Scratch) -> None:
        self._downlink, self._fd, self._scratch = downlink, fd, scratch
        self._part: Part
        self._hasher: blake3
        self._end = 0  # offset in the delta file at which to write next

    def begin(self, part: Part) -> None:
        """Start the part of the delta with the same number as `part`, a part of the version."""
        self._part, self._hasher = self._downlink.parts[part.index], blake3()
        self._end = self._part.start

    def add(self, run: Run, values: Tensor, theta: Tensor | None) -> None:
        """Encode and write the next element range of the part.

        Args:
            run: the range in the version, n elements.
            values: [n]. Of a float parameter: b, changed in place to b'. Of another tensor: the next version's values.
            theta: θ' [n] of a float parameter, in the dtype of accumulation; None for other tensors.
        """
        there = self._downlink.runs.counterpart(run)
        memory = self._zeros(there.stop)[there.start - there.stop :]
        thetas = run.split(values if theta is None else theta)
        for piece, target, held, new in zip(
            there.pieces, there.encoded(memory), run.split(values), thetas, strict=True
        ):
            if theta is None:
                self._downlink.codecs[piece.segment.codec].encode_(held, target, run.spec.dtype)
            else:
                self._downlink.encode_(piece.segment, new, held, target)
        self._write(there.stop)

    def end(self) -> bytes:
        """Pad the part to its end with zeros, and return its BLAKE3 digest."""
        self._zeros(self._part.stop)
        self._write(self._part.stop)
        return self._hasher.digest()

    def _zeros(self, stop: int) -> Tensor:
        """Return a zeroed buffer for the file range from `_end` to `stop`, with the same alignment as in the file."""
        shift = self._end % ALIGN_BYTES
        return self._scratch.raw("delta", shift + stop - self._end)[shift:].zero_()

    def _write(self, stop: int) -> None:
        shift = self._end % ALIGN_BYTES
        data = self._scratch.view("delta", stop - self._end, shift)
        self._hasher.update(data)
        failpoint("pass.delta")
        write_at(self._fd, data, self._end)
        self._end = stop


def _along(version: Layout, delta: Layout) -> Iterator[Part]:
    start = 0
    for part in version.all_parts:
        pieces = tuple(delta.piece(delta.by_name[p.segment.spec.name], p.start, p.stop) for p in part.pieces)
        stop = delta.padded_end(pieces[-1]) if pieces else start
        yield Part(part.index, start, stop, pieces, part.rank)
        start = stop
