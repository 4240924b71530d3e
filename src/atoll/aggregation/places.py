"""Where a window lies in an update, and how far apart its runs are in memory: tables that follow from the layouts.

In the version tensors follow each other without gaps; in an update each begins at a border of 64 bytes. Rows are
decoded as far apart as their runs are there: then one call decodes a window, or none where values are raw. What lies
between runs is reduced with them, since elements do not influence each other, and nobody looks at it.

    update   | run 0 |..| run 1 |....| run 2 |        .. padding
    row      [ ... 0 ][ ][ .. 1 ][    ][ .. 2 ]        n elements
    version  | run 0 | run 1 | run 2 |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from atoll.aggregation.windows import Window
from atoll.codecs.base import Codec
from atoll.tensors.layout import ALIGN_BYTES, Layout, Piece


@dataclass(frozen=True, slots=True)
class Place:
    """How the rows of a window lie in memory.

    Attributes:
        numel: elements of a row, with the padding between runs.
        starts: where each run begins.
        sizes: elements of each run and of the padding behind it, in turn.
        gaps: elements [low, high) of the padding.
    """

    numel: int
    starts: list[int]
    sizes: list[int]
    gaps: list[tuple[int, int]]


@dataclass(slots=True)
class Strip:
    """Bytes [offset, offset + nbytes) of an update that decode to elements [start, start + numel) of a row."""

    codec: str
    offset: int
    nbytes: int
    start: int
    numel: int


Reads = list[list[Strip]]
"""Strips by the read that brings them."""


class Places:
    """Where windows lie in updates; what is asked again for windows of many runs is remembered.

    Args:
        codecs: by name, all that updates' layouts name.
        max_bytes: of one read.
    """

    def __init__(self, codecs: Mapping[str, Codec], max_bytes: int) -> None:
        self._codecs, self._max_bytes = codecs, max_bytes
        self._places: dict[tuple[str, int], Place] = {}
        self._reads: dict[tuple[str, str, int], Reads] = {}

    def of(self, window: Window, leading: Layout) -> Place:
        """How rows lie in memory: as far apart as in the update of the round that leads, its first."""
        key = (leading.digest, window.offset)
        place = self._places.get(key)
        if place is None:
            place = self._place(window, leading)
            if len(window.extents) > 1:
                self._places[key] = place
        return place

    def reads(self, window: Window, layout: Layout, leading: Layout) -> Reads:
        """What is read of an update with this layout; as a rule all updates of a round have the leading one."""
        key = (layout.digest, leading.digest, window.offset)
        reads = self._reads.get(key)
        if reads is None:
            strips = self._strips(window, layout, self.of(window, leading))
            reads = list(_reads(strips, self._max_bytes))
            if len(window.extents) > 1:
                self._reads[key] = reads
        return reads

    def _place(self, window: Window, layout: Layout) -> Place:
        pieces = list(_pieces(window, layout))
        starts, gaps, end = list[int](), list[tuple[int, int]](), 0
        apart = self._elementwise_bytes(pieces)
        for piece in pieces:
            start = (piece.offset - pieces[0].offset) // apart if apart else end
            starts.append(start)
            if start > end:
                gaps.append((end, start))
            end = start + piece.numel
        sizes = []
        for start, size, following in zip(starts, window.sizes, [*starts[1:], end], strict=True):
            sizes += [size, following - start - size]
        return Place(end, starts, sizes, gaps)

    def _elementwise_bytes(self, pieces: list[Piece]) -> int:
        """Bytes of an encoded element, where borders of segments are borders of elements too; else 0."""
        first = pieces[0].segment
        codec = self._codecs[first.codec]
        if not codec.elementwise or any(piece.segment.codec != first.codec for piece in pieces):
            return 0
        nbytes = codec.encoded_bytes(1, first.spec.dtype)
        return 0 if ALIGN_BYTES % nbytes else nbytes

    def _strips(self, window: Window, layout: Layout, place: Place) -> Iterator[Strip]:
        """Where the runs lie in an update; those as far apart in it as in the row are joined where the codec allows."""
        strip: Strip | None = None
        for piece, start in zip(_pieces(window, layout), place.starts, strict=True):
            codec = piece.segment.codec
            if strip is not None and strip.codec == codec and self._codecs[codec].elementwise:
                nbytes = self._codecs[codec].encoded_bytes(1, piece.segment.spec.dtype)
                if piece.offset - strip.offset == (start - strip.start) * nbytes:
                    strip.nbytes = piece.offset + piece.nbytes - strip.offset
                    strip.numel = start + piece.numel - strip.start
                    continue
            if strip is not None:
                yield strip
            strip = Strip(codec, piece.offset, piece.nbytes, start, piece.numel)
        if strip is not None:
            yield strip


def _pieces(window: Window, layout: Layout) -> Iterator[Piece]:
    for extent in window.extents:
        yield layout.piece(layout.by_name[extent.spec.name], extent.start, extent.stop)


def _reads(strips: Iterator[Strip], max_bytes: int) -> Iterator[list[Strip]]:
    """Strips that are read at once, the padding between them included: tiny tensors may be mostly padding."""
    held: list[Strip] = []
    for strip in strips:
        if held and strip.offset + strip.nbytes - held[0].offset > max_bytes:
            yield held
            held = []
        held.append(strip)
    if held:
        yield held
