"""Compressed downloads: a version encoded as its difference (delta) from the previous version.

    Δ = C(θ' − b)        b' = b + dec(Δ)

    θ, θ'    the server's full-precision parameter before and after the round
    b, b'    the parameter in the versions published before and after, in the model's dtype; the same at all workers
    C, dec   the codec's encoding and decoding

The encoding error stays in θ' − b', so the next difference contains it. This is error feedback that needs no file.
Server and workers both compute b' with `advance_`: add in fp32 (fp64 for fp64), then cast to the model's dtype. The
digest of b' shows whether they agree. Tensors other than float parameters are sent as their new values, not as
differences.

A file is transferred in parts. A delta is encoded like an update, but has the same parts as the version: part n of the
delta turns part n of the previous version into part n of the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from atoll.codecs import build_codecs, sent_name
from atoll.codecs.base import Codec
from atoll.posix import write_at
from atoll.registry import Name, ReceivedName
from atoll.runtime import failpoint
from atoll.tensors.byte_runs import ByteRun, RunTable
from atoll.tensors.layout import ALIGN_BYTES, TILE, Layout, Part, Segment, update_layout
from atoll.tensors.schema import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.tensors.chunks import Scratch


@dataclass(frozen=True)
class Downlink:
    """The format of compressed downloads (deltas) of one fragment of the model.

    Attributes:
        name: name of the codec in messages.
        codecs: name → codec, for all codecs in `layout`.
        layout: the codec, offset and size of each tensor in a delta.
        parts: the delta's parts: one for each part of the version that belongs to this rank. Some are empty.
        count: number of parts of the version, for all ranks together.
    """

    name: ReceivedName
    codecs: Mapping[str, Codec]
    layout: Layout
    parts: tuple[Part, ...]
    count: int

    @classmethod
    def of(cls, version: Layout, codec: Name | None, options: Mapping[str, Any]) -> Downlink | None:
        """Return the format of compressed downloads. None for the codec `none`: workers download whole versions.

        Args:
            version: layout of the versions.
            codec: name of the codec of float parameters; None: `none`.
            options: the codec's keyword arguments.

        Raises:
            ConfigError: the codec's name is unknown, or an option is unknown or has a wrong value.
        """
        if codec is None or codec.text == "none":
            return None
        codecs, name = build_codecs(codec, options, setting="aggregation.download_codec"), codec.text

        def encoding(spec: TensorSpec) -> Codec:
            return codecs[name if spec.is_stepped else "none"]

        layout = update_layout((segment.spec for segment in version.segments), encoding, version.part_bytes)
        parts = tuple(part for part in _along(version, layout) if version.rank in (None, part.rank))
        return cls(sent_name(codec, codecs), codecs, layout, parts, len(version.all_parts))

    @functools.cached_property
    def runs(self) -> RunTable:
        """The delta's bytes, divided into ranges of at most one tile."""
        return RunTable(self.layout, TILE)

    def encode_(self, segment: Segment, theta: Tensor, held: Tensor, target: Tensor) -> None:
        """Encode the difference θ' − b for a range of a parameter into `target`, and change `held` from b to b'.

        Args:
            segment: the parameter's place and codec in the delta.
            theta: θ' [n], the server's new values at full precision, in fp32 (fp64 for fp64).
            held: b [n], the values in the previous published version, in the model's dtype; changed in place to b', the
                values in the next version.
            target: buffer for the encoded range: uint8, of the size that `layout.piece` gives.
        """
        self.codecs[segment.codec].encode_(theta - held.to(theta.dtype), target, segment.spec.dtype)
        self.advance_(segment, held, target)

    def advance_(self, segment: Segment, held: Tensor, encoded: Tensor) -> None:
        """Change a range of a tensor, in place, from the previous published version b to the next one b'.

        Add the decoded difference to a float parameter. Replace any other tensor by the decoded values.

        Args:
            segment: the tensor's place and codec in the delta.
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
    """Writes a delta file part by part, and each part range by range. Use one per thread.

    Each range begins at the start of a tile, and the encoded size depends only on the number of elements. So each range
    can be encoded alone.

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
        """Start the part of the delta that has the same number as `part`, a part of the version."""
        self._part, self._hasher = self._downlink.parts[part.index], blake3()
        self._end = self._part.start

    def add(self, run: ByteRun, values: Tensor, theta: Tensor | None) -> None:
        """Encode the next elements of the part, and write them.

        Args:
            run: these n elements, as a range of the version's file.
            values: [n]. For a float parameter: the previous version's values; they are changed in place to the next
                version's. For any other tensor: the next version's values.
            theta: [n], the server's new full-precision values of a float parameter, in fp32 (fp64 for fp64); None for
                other tensors.
        """
        encoded_run = self._downlink.runs.counterpart(run)
        memory = self._zeros(encoded_run.stop)[encoded_run.start - encoded_run.stop :]
        thetas = run.split(values if theta is None else theta)
        for piece, target, held, new in zip(
            encoded_run.pieces, encoded_run.encoded(memory), run.split(values), thetas, strict=True
        ):
            if theta is None:
                self._downlink.codecs[piece.segment.codec].encode_(held, target, run.spec.dtype)
            else:
                self._downlink.encode_(piece.segment, new, held, target)
        self._write(encoded_run.stop)

    def end(self) -> bytes:
        """Pad the part to its end with zeros, and return its BLAKE3 digest."""
        self._zeros(self._part.stop)
        self._write(self._part.stop)
        return self._hasher.digest()

    def _zeros(self, stop: int) -> Tensor:
        """Return a zeroed buffer for the file's bytes from `_end` to `stop`, with the same alignment as in the file."""
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
