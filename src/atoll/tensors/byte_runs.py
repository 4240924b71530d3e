"""Neighbouring pieces of tensors and files, moved or computed on by one call.

A call costs as much for ten elements as for ten thousand, and a model may have thousands of small tensors. In a version
they follow one another without gaps; in an update each begins at a multiple of 64 bytes. Where a codec writes each
element by itself, neighbours with the padding between them are encoded, decoded and summed as one tensor:

    version | tensor 0 | tensor 1 | tensor 2 |
    update  | tensor 0 |..| tensor 1 |..| tensor 2 |        .. padding
    memory  [ 0        ][ ][ 1       ][ ][ 2       ]        the elements of a run, as far apart as in the update

Elements do not influence each other, so what lies in the padding means nothing; `Run.clear_padding` makes it zero.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from atoll.posix import read_at
from atoll.tensors.layout import ALIGN_BYTES, Layout, Part, Piece, Segment
from atoll.tensors.schema import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

MOST_BUFFERS = 512
"""Buffers of one read, and so the most pieces of a run; Linux takes 1,024 (IOV_MAX)."""

MOST_BYTES = 2**21
"""A read that has this many bytes takes no further piece."""

Move = tuple[int, memoryview]
"""(byte of the file, memory of as many bytes as are read or written there)"""


def neighbours(items: Iterable[T], joins: Callable[[list[T], T], bool]) -> Iterator[list[T]]:
    """Group items in their order: each goes to the group before it if `joins(group, item)` says so."""
    group: list[T] = []
    for item in items:
        if group and not joins(group, item):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the (offset, nbytes) ranges in their order, joined where they touch, without the empty ones."""
    groups = neighbours(filter(lambda each: each[1], ranges), lambda group, each: sum(group[-1]) == each[0])
    return [(group[0][0], sum(nbytes for _, nbytes in group)) for group in groups]


def read_pieces(fd: int, moves: Iterable[Move]) -> None:
    """Fill each memory from its byte of the file; one `preadv` reads what lies side by side in the file.

    Raises:
        EOFError: the file ends before.
    """

    def joins(group: list[Move], move: Move) -> bool:
        offset, memory = group[-1]
        is_full = len(group) == MOST_BUFFERS or move[0] - group[0][0] >= MOST_BYTES
        return offset + len(memory) == move[0] and not is_full

    for group in neighbours(moves, joins):
        if os.preadv(fd, [memory for _, memory in group], group[0][0]) == sum(len(memory) for _, memory in group):
            continue
        for offset, memory in group:  # the read ended early
            read_at(fd, memory, offset)


@dataclass(frozen=True, slots=True)
class Run:
    """Pieces of one dtype and group that follow one another in a file; none is empty.

    Attributes:
        pieces: in file order.
        item_bytes: of an encoded element, where one call encodes or decodes all pieces and the padding between them; 0
            where each piece needs a call of its own. In memory the pieces then lie side by side.
        numel: elements in memory, from the first piece to the last, padding included.
        sizes: elements of each piece, or of each piece and the padding behind it, in turn, where there is padding.
        is_padded: whether there is.
    """

    pieces: tuple[Piece, ...]
    item_bytes: int
    numel: int
    sizes: list[int]
    is_padded: bool

    @classmethod
    def of(cls, pieces: Sequence[Piece], item_bytes: int) -> Run:
        """Make a run of pieces that follow one another."""
        sizes, first, last = [piece.numel for piece in pieces], pieces[0], pieces[-1]
        nbytes = last.offset + last.nbytes - first.offset
        if len(pieces) == 1 or not item_bytes or nbytes == sum(sizes) * item_bytes:
            return cls(tuple(pieces), item_bytes, sum(sizes), sizes, False)
        gaps = [(after.offset - piece.offset - piece.nbytes) // item_bytes for piece, after in pairwise(pieces)]
        in_turn = [size for pair in zip(sizes, [*gaps, 0], strict=True) for size in pair]
        return cls(tuple(pieces), item_bytes, nbytes // item_bytes, in_turn, True)

    @property
    def spec(self) -> TensorSpec:
        """Of the first piece; dtype and group are those of all."""
        return self.pieces[0].segment.spec

    @property
    def codec(self) -> str:
        """Of the first piece; of all, where `item_bytes` is not 0."""
        return self.pieces[0].segment.codec

    @property
    def is_whole(self) -> bool:
        """Whether one call encodes or decodes all of it."""
        return self.item_bytes > 0 or len(self.pieces) == 1

    @property
    def start(self) -> int:
        """First byte in the file."""
        return self.pieces[0].offset

    @property
    def stop(self) -> int:
        """Byte behind the last piece in the file."""
        return self.pieces[-1].offset + self.pieces[-1].nbytes

    def split(self, values: Tensor) -> Sequence[Tensor]:
        """Return the elements of each piece, as views of the run's elements `values` [numel]."""
        views: Sequence[Tensor] = values.split_with_sizes(self.sizes)  # `torch.split` takes twice as long
        return views[::2] if self.is_padded else views

    def encoded(self, memory: Tensor) -> Iterator[Tensor]:
        """Give the bytes of each piece, as views of the run's bytes `memory`, as in the file."""
        for piece in self.pieces:
            yield memory[piece.offset - self.start : piece.offset - self.start + piece.nbytes]

    def views(self, memory: memoryview, item_bytes: int) -> Iterator[tuple[Piece, memoryview]]:
        """Give each piece with its bytes, where `memory` holds the run's elements of `item_bytes` each."""
        at, sizes = 0, self.sizes if self.is_padded else [size for each in self.sizes for size in (each, 0)]
        for piece, size, gap in zip(self.pieces, sizes[::2], sizes[1::2], strict=True):
            yield piece, memory[at * item_bytes : (at + size) * item_bytes]
            at += size + gap

    def clear_padding(self, memory: memoryview, item_bytes: int) -> None:
        """Write zeros between the pieces, where `memory` holds the run's elements of `item_bytes` each."""
        if not self.is_padded:
            return
        at = 0
        for size, gap in zip(self.sizes[::2], self.sizes[1::2], strict=True):
            at += size
            if gap:
                memory[at * item_bytes : (at + gap) * item_bytes] = bytes(gap * item_bytes)
                at += gap


class RunTable:
    """The runs of a layout's parts. They are made once and kept; no table grows with the size of a tensor.

    Args:
        layout: of the tensors that are cut into runs.
        max_elements: of a run, padding included; a multiple of the tile.
    """

    def __init__(self, layout: Layout, max_elements: int) -> None:
        self.layout, self.max_elements = layout, max_elements
        self._tables: dict[int, tuple[Run | Piece, ...]] = {}
        self._counterparts: dict[tuple[int, int], Run] = {}

    def cut(self, max_elements: int) -> None:
        """Have runs of at most so many elements from now on."""
        if max_elements != self.max_elements:
            self.max_elements = max_elements
            self._tables.clear()

    def of(self, part: Part) -> Iterator[Run]:
        """Give the runs of a part, in file order."""
        table = self._tables.get(part.index)
        if table is None:
            groups = neighbours((piece for piece in part.pieces if piece.numel), self._joins)
            table = self._tables[part.index] = tuple(
                Run.of(group, self._item_bytes(group[0].segment)) if group[0].numel <= self.max_elements else group[0]
                for group in groups
            )
        for entry in table:
            if isinstance(entry, Run):
                yield entry
                continue
            for start in range(entry.start, entry.stop, self.max_elements):
                stop = min(start + self.max_elements, entry.stop)
                yield self.run(entry.segment, start, stop)

    def run(self, segment: Segment, start: int, stop: int) -> Run:
        """Return elements [start, stop) of one tensor as a run."""
        return Run.of([self.layout.piece(segment, start, stop)], self._item_bytes(segment))

    def counterpart(self, run: Run) -> Run:
        """Return where the elements of another layout's run lie in this one; all runs asked for are of one layout."""
        key = (run.start, run.stop)
        found = self._counterparts.get(key)
        if found is None:
            segments = [(self.layout.by_name[piece.segment.spec.name], piece) for piece in run.pieces]
            pieces = [self.layout.piece(segment, piece.start, piece.stop) for segment, piece in segments]
            is_alike = len({segment.codec for segment, _ in segments}) == 1
            found = Run.of(pieces, self._item_bytes(segments[0][0]) if is_alike else 0)
            if len(pieces) > 1:
                self._counterparts[key] = found
        return found

    def _joins(self, group: list[Piece], piece: Piece) -> bool:
        first, segment = group[0].segment, piece.segment
        kind, other = ((s.spec.dtype, s.spec.group, s.codec) for s in (first, segment))
        item_bytes = self._item_bytes(segment)
        nbytes = piece.offset + piece.nbytes - group[0].offset
        fits = len(group) < MOST_BUFFERS and nbytes <= self.max_elements * item_bytes
        return kind == other and fits

    def _item_bytes(self, segment: Segment) -> int:
        """Bytes of an encoded element, where segments begin and end at borders of elements; else 0."""
        encoding = self.layout.encodings[segment.codec]
        if not encoding.elementwise:
            return 0
        nbytes = encoding.encoded_bytes(1, segment.spec.dtype)
        return 0 if ALIGN_BYTES % nbytes else nbytes
