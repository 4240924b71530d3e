"""Which bytes go through the pass together: a part of the version as windows.

A window is one run of the version file and of each column of the state file, read and written at once: a chunk of a
large tensor, or many small tensors one after the other, all of one kind, group and dtype. Tensors are still stepped
each for itself.

    part     | header | w0 ........ | w1 .. | w2 .. | w3  |
    window             [tensor 0   ][0][0  ][1][2][3] ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from atoll.outer_optimizers.torch_optimizer import Granularity
from atoll.tensors.layout import ALIGN_BYTES, Part, Piece, Segment
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
