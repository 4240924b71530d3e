"""Which bytes go through the pass together: a part of the version as windows.

A window is one run of the version file and of each column of the state file, read and written at once: a chunk of a
large tensor, or many small tensors one after the other, all of one kind, group and dtype. Tensors are still stepped
each for itself.

    part     | header | w0 ........ | w1 .. | w2 .. | w3  |
    window             [tensor 0   ][0][0  ][1][2][3] ...

Where a window lies in an update, and how far apart its runs are in memory: tables that follow from the layouts.

In the version tensors follow each other without gaps; in an update each begins at a border of 64 bytes. Rows are
decoded as far apart as their runs are there: then one call decodes a window, or none where values are raw. What lies
between runs is reduced with them, since elements do not influence each other, and nobody looks at it.

    update   | run 0 |..| run 1 |....| run 2 |        .. padding
    row      [ ... 0 ][ ][ .. 1 ][    ][ .. 2 ]        n elements
    version  | run 0 | run 1 | run 2 |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from atoll.codecs.base import Codec
from atoll.outer_optimizers.torch_optimizer import Granularity
from atoll.tensors.layout import ALIGN_BYTES, Layout, Part, Piece, Segment
from atoll.tensors.schema import CONTROL, PARAMS, TensorSpec

Kind = Literal["step", "whole", "mean", "add", "count"]
"""step: parameters; whole: those that were stepped as whole tensors before; mean: buffers; add: controls, to which the
reduction is added; count: integers."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements [start, stop) of one tensor of the version."""

    segment: Segment
    start: int
    stop: int

    @property
    def spec(self) -> TensorSpec:
        return self.segment.spec

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Window:
    """Extents that follow one another in the version file, from byte `offset` on.

    Attributes:
        kind, group, dtype: of all of them.
        numel: elements together.
        sizes: elements of each.
    """

    kind: Kind
    group: str
    dtype: str
    offset: int
    numel: int
    extents: tuple[Extent, ...]
    sizes: list[int]


def kind_of(spec: TensorSpec, granularity: Granularity) -> Kind:
    """What the pass does with a tensor."""
    if not spec.is_float:
        return "count"
    if spec.group == CONTROL:
        return "add"
    if spec.group != PARAMS:
        return "mean"
    return "step" if granularity == "chunk" else "whole"


def window_of(extents: Sequence[Extent], granularity: Granularity) -> Window:
    """The window of extents of one kind, group and dtype that follow one another."""
    first, spec = extents[0], extents[0].spec
    return Window(
        kind=kind_of(spec, granularity),
        group=spec.group,
        dtype=spec.dtype,
        offset=first.segment.offset + first.start * spec.item_bytes,
        numel=sum(extent.numel for extent in extents),
        extents=tuple(extents),
        sizes=[extent.numel for extent in extents],
    )


class Windows:
    """The windows of a version's parts: made once for a layout, and kept.

    Args:
        max_elements: of one window, a multiple of the tile; the padding that updates may have between tensors counts.
        granularity: of the outer optimizer.
    """

    def __init__(self, max_elements: int, granularity: Granularity) -> None:
        self.max_elements, self._granularity = max_elements, granularity
        self._tables: dict[int, tuple[Window | Piece, ...]] = {}

    def of(self, part: Part) -> Iterator[Window]:
        """The windows of `part`, in file order."""
        table = self._tables.get(part.index)
        if table is None:
            table = self._tables[part.index] = tuple(self._table(part))
        for entry in table:
            if isinstance(entry, Window):
                yield entry
            else:  # cut here, so that no table grows with the size of a tensor
                for start in range(entry.start, entry.stop, self.max_elements):
                    extent = Extent(entry.segment, start, min(start + self.max_elements, entry.stop))
                    yield window_of([extent], self._granularity)

    def _table(self, part: Part) -> Iterator[Window | Piece]:
        held: list[Extent] = []
        room = self.max_elements
        alike: object = None
        for piece in part.pieces:
            spec = piece.segment.spec
            # elements are at least a byte each in an update
            needed, now = piece.numel + ALIGN_BYTES, (kind_of(spec, self._granularity), spec.group, spec.dtype)
            if held and (needed > room or now != alike):
                yield window_of(held, self._granularity)
                held = []
            if piece.numel > self.max_elements:
                yield piece
            elif piece.numel:
                if not held:
                    room, alike = self.max_elements, now
                held.append(Extent(piece.segment, piece.start, piece.stop))
                room -= needed
        if held:
            yield window_of(held, self._granularity)


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
