"""A part of an update that is on disk, looked at once in fixed memory: digest, finite or not, sum of squares.

One pass does for both numbers: the sum of squares in fp64 of fp32 values (or narrower) is finite exactly when all of
them are, and costs less than looking at each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from blake3 import blake3

from atoll.aggregation.scratch import WIDEST_BYTES, Scratch, read_at
from atoll.codecs.base import Codec
from atoll.tensors.alone import alone
from atoll.tensors.layout import Layout, Part, Piece
from atoll.tensors.schema import PARAMS

ELEMENTS = 2**17
"""Looked at in one go: 1 MiB of fp64."""

_local = threading.local()


@dataclass(frozen=True, slots=True)
class PartStats:
    """What a part holds.

    Attributes:
        digest: BLAKE3 of its bytes.
        sumsq: of all `params` in it, decoded, in fp64; not finite where they are not.
        bad: what is wrong with it, naming the tensor; None where nothing is.
    """

    digest: bytes
    sumsq: float
    bad: str | None


def inspect_part(
    fd: int, layout: Layout, part: Part, codecs: Mapping[str, Codec], scratch: Scratch | None = None
) -> PartStats:
    """Look at `part` of the update in `fd`.

    Args:
        fd: the spool, with all bytes of the part written.
        layout: the update's.
        part: one of `layout.parts`.
        codecs: by name, every one that the layout names.
        scratch: of at least `ELEMENTS`; by default one that the calling thread keeps.

    Raises:
        StateCorrupt: the file ends before the part does.
    """
    with alone():
        return _inspect(fd, layout, part, codecs, scratch or _own_scratch())


def _inspect(fd: int, layout: Layout, part: Part, codecs: Mapping[str, Codec], memory: Scratch) -> PartStats:
    hasher, sumsq, bad = blake3(), 0.0, None
    for start, stop, pieces in _spans(layout, part):
        view = memory.view("source", stop - start)
        read_at(fd, view, start)
        hasher.update(view)
        source = memory.raw("source", stop - start)
        for piece in pieces:
            spec = piece.segment.spec
            if not spec.is_float or not piece.numel:
                continue
            encoded = source[piece.offset - start : piece.offset - start + piece.nbytes]
            values = memory.tensor("values", torch.float64, piece.numel)
            codecs[piece.segment.codec].decode_(encoded, values, spec.dtype)
            squares = float(torch.dot(values, values))
            if spec.group == PARAMS:
                sumsq += squares
            # fp64 values can be finite and their squares not, so those are looked at one by one
            if (
                bad is None
                and not squares < float("inf")
                and not (spec.dtype == "F64" and bool(values.isfinite().all()))
            ):
                bad = f"{spec.name} holds NaN or Inf"
    return PartStats(hasher.digest(), sumsq, bad)


def _own_scratch() -> Scratch:
    if not hasattr(_local, "scratch"):
        _local.scratch = Scratch(ELEMENTS)
    scratch: Scratch = _local.scratch
    return scratch


def _spans(layout: Layout, part: Part) -> Iterator[tuple[int, int, list[Piece]]]:
    """(start, stop, pieces): runs of bytes that cover the part, each with whole pieces of at most `ELEMENTS`.

    A span has at most `ELEMENTS` × 8 bytes and the padding on both sides; an update has no header.
    """
    start = end = part.start
    held: list[Piece] = []
    for piece in _small_pieces(layout, part):
        if held and piece.offset + piece.nbytes - start > ELEMENTS * WIDEST_BYTES:
            yield start, end, held
            start, held = end, []
        held.append(piece)
        end = piece.offset + piece.nbytes
    if part.stop > start:
        yield start, part.stop, held


def _small_pieces(layout: Layout, part: Part) -> Iterator[Piece]:
    for piece in part.pieces:
        if piece.numel <= ELEMENTS:
            yield piece
            continue
        for start in range(piece.start, piece.stop, ELEMENTS):
            yield layout.piece(piece.segment, start, min(start + ELEMENTS, piece.stop))
