"""Byte runs: ranges of a file that are read, decoded or summed in one call. A range may contain many small tensors.

Each call has a fixed cost, which is the same for ten elements as for ten thousand, and a model may have thousands of
small tensors. So neighbouring tensors are handled as one tensor. This needs a codec that encodes each element
independently. In a version (a model file), tensors follow one another without gaps. In an update (the file that a
worker submits), each tensor begins at a multiple of 64 bytes; the padding is decoded and summed with the tensors:

    version | tensor 0 | tensor 1 | tensor 2 |
    update  | tensor 0 |..| tensor 1 |..| tensor 2 |        .. padding
    memory  [ 0        ][ ][ 1       ][ ][ 2       ]        the elements of a byte run, with the gaps of the update

Elements do not influence one another, so values in the padding do not matter. `ByteRun.clear_padding` sets them to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from atoll.posix import read_at
from atoll.system_calls import read_into
from atoll.tensors.layout import ALIGN_BYTES, Layout, Part, Piece, Segment
from atoll.tensors.schema import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

MOST_BUFFERS = 512
"""Maximum number of buffers in one read, and of pieces in a byte run. Linux allows 1,024 (IOV_MAX)."""

MOST_RUN_BYTES = 2**21
"""Once a read spans this many bytes, no further buffer is added to it."""

Move = tuple[int, memoryview]
"""(offset in a file, buffer for the bytes from this offset on)"""


def neighbours(items: Iterable[T], joins: Callable[[list[T], T], bool]) -> Iterator[list[T]]:
    """Yield groups of consecutive items. An item joins the current group if `joins(group, item)` is true."""
    group: list[T] = []
    for item in items:
        if group and not joins(group, item):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge consecutive ranges (offset, nbytes) that touch, drop empty ranges, and keep the order."""
    groups = neighbours(filter(lambda each: each[1], ranges), lambda group, each: sum(group[-1]) == each[0])
    return [(group[0][0], sum(nbytes for _, nbytes in group)) for group in groups]


def read_pieces(fd: int, moves: Iterable[Move]) -> None:
    """Read ranges of a file into buffers. One `preadv` call reads several ranges if they are adjacent in the file.

    Args:
        fd: descriptor of the file.
        moves: (file offset, buffer to fill) for each range.

    Raises:
        EOFError: the file ends before a buffer is full.
    """

    def joins(group: list[Move], move: Move) -> bool:
        offset, memory = group[-1]
        is_full = len(group) == MOST_BUFFERS or move[0] - group[0][0] >= MOST_RUN_BYTES
        return offset + len(memory) == move[0] and not is_full

    for group in neighbours(moves, joins):
        if read_into(fd, [memory for _, memory in group], group[0][0]) == sum(len(memory) for _, memory in group):
            continue
        for offset, memory in group:  # `preadv` read less than asked for
            read_at(fd, memory, offset)


@dataclass(frozen=True, slots=True)
class ByteRun:
    """A byte run: consecutive pieces (ranges of tensors) of a file, all of one dtype and group. No piece is empty.

    Attributes:
        pieces: the pieces, in file order.
        item_bytes: size of one encoded element, if one call can encode or decode the whole run with its padding. 0 if
            each piece needs its own call: then the decoded pieces are stored one after another without padding.
        numel: number of decoded elements, padding included.
        sizes: number of elements of each piece; if `is_padded`, of piece and padding in turn: piece, padding, piece, …
        is_padded: whether there is padding between pieces.
    """

    pieces: tuple[Piece, ...]
    item_bytes: int
    numel: int
    sizes: list[int]
    is_padded: bool

    @classmethod
    def of(cls, pieces: Sequence[Piece], item_bytes: int) -> ByteRun:
        """Return the byte run that consists of these consecutive pieces. For `item_bytes`, see the class."""
        sizes, first, last = [piece.numel for piece in pieces], pieces[0], pieces[-1]
        nbytes = last.offset + last.nbytes - first.offset
        if len(pieces) == 1 or not item_bytes or nbytes == sum(sizes) * item_bytes:
            return cls(tuple(pieces), item_bytes, sum(sizes), sizes, False)
        gaps = [(after.offset - piece.offset - piece.nbytes) // item_bytes for piece, after in pairwise(pieces)]
        in_turn = [size for pair in zip(sizes, [*gaps, 0], strict=True) for size in pair]
        return cls(tuple(pieces), item_bytes, nbytes // item_bytes, in_turn, True)

    @property
    def spec(self) -> TensorSpec:
        """Name, dtype, shape and group of the first piece's tensor. Dtype and group are the same for all pieces."""
        return self.pieces[0].segment.spec

    @property
    def codec(self) -> str:
        """Name of the first piece's codec. If `item_bytes` is not 0, all pieces have this codec."""
        return self.pieces[0].segment.codec

    @property
    def is_whole(self) -> bool:
        """Whether one call encodes or decodes the whole run."""
        return self.item_bytes > 0 or len(self.pieces) == 1

    @property
    def start(self) -> int:
        """File offset at which the run begins."""
        return self.pieces[0].offset

    @property
    def stop(self) -> int:
        """File offset at which the run ends (exclusive)."""
        return self.pieces[-1].offset + self.pieces[-1].nbytes

    def split(self, values: Tensor) -> Sequence[Tensor]:
        """Split `values` (1-D, the elements of this byte run) into one view for each piece; leave out the padding."""
        views: Sequence[Tensor] = values.split_with_sizes(self.sizes)  # `torch.split` takes twice as long
        return views[::2] if self.is_padded else views

    def encoded(self, memory: Tensor) -> Iterator[Tensor]:
        """Split `memory` (the bytes of this byte run in the file): yield a view of the encoded bytes of each piece."""
        for piece in self.pieces:
            yield memory[piece.offset - self.start : piece.offset - self.start + piece.nbytes]

    def views(self, memory: memoryview, item_bytes: int) -> Iterator[tuple[Piece, memoryview]]:
        """Yield each piece with its decoded bytes, a view of `memory`.

        Args:
            memory: the run's decoded elements, padding included.
            item_bytes: size of one decoded element.
        """
        offset, sizes = 0, self.sizes if self.is_padded else [size for each in self.sizes for size in (each, 0)]
        for piece, size, gap in zip(self.pieces, sizes[::2], sizes[1::2], strict=True):
            yield piece, memory[offset * item_bytes : (offset + size) * item_bytes]
            offset += size + gap

    def clear_padding(self, memory: memoryview, item_bytes: int) -> None:
        """Set the padding between the pieces to zero.

        Args:
            memory: the run's decoded elements, padding included.
            item_bytes: size of one decoded element.
        """
        if not self.is_padded:
            return
        offset = 0
        for size, gap in zip(self.sizes[::2], self.sizes[1::2], strict=True):
            offset += size
            if gap:
                memory[offset * item_bytes : (offset + gap) * item_bytes] = bytes(gap * item_bytes)
                offset += gap


class RunTable:
    """Divides the parts of a file into byte runs, and caches them.

    A piece with more than `max_elements` elements is cached whole, and is cut into several runs each time it is used.

    Args:
        layout: layout of the file: its parts, and the offset of each tensor.
        max_elements: maximum number of elements in a run, padding included; a multiple of `TILE`.
    """

    def __init__(self, layout: Layout, max_elements: int) -> None:
        self.layout, self.max_elements = layout, max_elements
        self._tables: dict[int, tuple[ByteRun | Piece, ...]] = {}
        self._counterparts: dict[tuple[int, int], ByteRun] = {}

    def limit(self, max_elements: int) -> None:
        """Set the maximum number of elements in a run. A new value drops the cached runs."""
        if max_elements != self.max_elements:
            self.max_elements = max_elements
            self._tables.clear()

    def of(self, part: Part) -> Iterator[ByteRun]:
        """Yield the byte runs of a part, in file order."""
        table = self._tables.get(part.index)
        if table is None:
            groups = neighbours((piece for piece in part.pieces if piece.numel), self._joins)
            table = self._tables[part.index] = tuple(
                ByteRun.of(each, self._item_bytes(each[0].segment)) if each[0].numel <= self.max_elements else each[0]
                for each in groups
            )
        for entry in table:
            if isinstance(entry, ByteRun):
                yield entry
                continue
            for start in range(entry.start, entry.stop, self.max_elements):
                stop = min(start + self.max_elements, entry.stop)
                yield self.run(entry.segment, start, stop)

    def run(self, segment: Segment, start: int, stop: int) -> ByteRun:
        """Return elements [start, stop) of one tensor as a byte run."""
        return ByteRun.of([self.layout.piece(segment, start, stop)], self._item_bytes(segment))

    def counterpart(self, run: ByteRun) -> ByteRun:
        """Return the byte run of this layout that has the same elements as `run`, a byte run of another layout.

        All calls must pass runs of the same other layout, because results are cached by the offsets of `run`.
        """
        key = (run.start, run.stop)
        found = self._counterparts.get(key)
        if found is None:
            segments = [(self.layout.by_name[piece.segment.spec.name], piece) for piece in run.pieces]
            pieces = [self.layout.piece(segment, piece.start, piece.stop) for segment, piece in segments]
            is_alike = len({segment.codec for segment, _ in segments}) == 1
            found = ByteRun.of(pieces, self._item_bytes(segments[0][0]) if is_alike else 0)
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
        """Return the size of one encoded element of the tensor, in bytes; 0 if each tensor needs its own call.

        Each tensor needs its own call if the codec does not encode elements independently, or if a tensor may begin at
        an offset that is not a multiple of the element's size.
        """
        encoding = self.layout.encodings[segment.codec]
        if not encoding.elementwise:
            return 0
        nbytes = encoding.encoded_bytes(1, segment.spec.dtype)
        return 0 if ALIGN_BYTES % nbytes else nbytes
