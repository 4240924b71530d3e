"""Which runs of tensors an update is formed from at once: tables that follow from the layouts, made once.

A call costs as much for a tensor of ten elements as for one of ten thousand, so neighbours are read, subtracted and
encoded as one. In the version they follow each other without gaps, in the update each begins at a border of 64 bytes;
they are brought into memory as they lie in the update, so what is subtracted is one run there:

    version | tensor 0 | tensor 1 | tensor 2 |
    update  | tensor 0 |..| tensor 1 |..| tensor 2 |        .. padding
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from atoll.codecs.base import Codec
from atoll.tensors.chunks import CHUNK_ELEMENTS
from atoll.tensors.layout import ALIGN_BYTES, Layout, Part, Piece
from atoll.tensors.schema import PARAMS, TensorSpec

MOST_TARGETS = 512
"""Of one read, and so the most runs in a stretch; the system takes 1,024."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Runs of one dtype, group and codec, in file order; together, padding included, at most `CHUNK_ELEMENTS`.

    Attributes:
        spec: of the first; dtype and group are those of all.
        codec: that encodes them.
        start: offset of the first run in the update.
        stop: end of the last run there.
        base_offset: of the first run in the version; the others follow it.
        numel: elements from `start` to `stop`, those of the padding included.
        runs: (tensor, first element, last) of each.
        sizes: elements of each run and of the padding behind it, in turn.
        places: bytes [low, high) of the runs in memory that has room for `numel` elements of the version.
        gaps: bytes [low, high) of the padding, from `start` on.
    """

    spec: TensorSpec
    codec: str
    start: int
    stop: int
    base_offset: int
    numel: int
    runs: tuple[tuple[str, int, int], ...]
    sizes: tuple[int, ...]
    places: tuple[Range, ...]
    gaps: tuple[Range, ...] = ()


class Stretches:
    """How the parts of an update are formed.

    Args:
        update: its layout.
        version: the layout of what it is formed against, with the same tensors.
        codecs: by name, all that the update's layout names.
    """

    def __init__(self, update: Layout, version: Layout, codecs: Mapping[str, Codec]) -> None:
        self._update, self._version, self._codecs = update, version, codecs
        self._tables: dict[int, tuple[Stretch | Piece, ...]] = {}

    def of(self, part: Part) -> Iterator[Stretch]:
        """The stretches of a part of the update, in file order."""
        table = self._tables.get(part.index)
        if table is None:
            table = self._tables[part.index] = tuple(self._table(part))
        for entry in table:
            if isinstance(entry, Stretch):
                yield entry
            else:  # cut here, so that no table grows with the size of a tensor
                for start in range(entry.start, entry.stop, CHUNK_ELEMENTS):
                    yield self._alone(entry, start, min(start + CHUNK_ELEMENTS, entry.stop))

    def _table(self, part: Part) -> Iterator[Stretch | Piece]:
        held: list[Piece] = []
        for piece in part.pieces:
            if held and not self._joins(held, piece):
                yield self._together(held) if len(held) > 1 else held[0]
                held = []
            if piece.numel:
                held.append(piece)
        if held:
            yield self._together(held) if len(held) > 1 else held[0]

    def _joins(self, held: list[Piece], piece: Piece) -> bool:
        first, last = held[0].segment, held[-1]
        spec, codec = piece.segment.spec, self._codecs[piece.segment.codec]
        alike = (spec.dtype, spec.group, piece.segment.codec) == (first.spec.dtype, first.spec.group, first.codec)
        if not alike or spec.group != PARAMS or not codec.elementwise or len(held) == MOST_TARGETS:
            return False
        if self._base_offset(last, last.stop) != self._base_offset(piece, piece.start):
            return False
        item_bytes = codec.encoded_bytes(1, spec.dtype)
        nbytes = piece.offset + piece.nbytes - held[0].offset
        return ALIGN_BYTES % item_bytes == 0 and nbytes <= CHUNK_ELEMENTS * item_bytes

    def _together(self, pieces: list[Piece]) -> Stretch:
        first = pieces[0]
        spec, codec = first.segment.spec, first.segment.codec
        encoded = self._codecs[codec].encoded_bytes(1, spec.dtype)
        sizes: list[int] = []
        places: list[Range] = []
        gaps: list[Range] = []
        end = first.offset
        for piece in pieces:
            low = (piece.offset - first.offset) // encoded * spec.item_bytes
            high = low + piece.numel * spec.item_bytes
            if piece.offset > end:
                gaps.append((end - first.offset, piece.offset - first.offset))
            sizes += [(piece.offset - end) // encoded, piece.numel]
            if places and places[-1][1] == low:
                places[-1] = (places[-1][0], high)
            else:
                places.append((low, high))
            end = piece.offset + piece.nbytes
        return Stretch(
            spec=spec,
            codec=codec,
            start=first.offset,
            stop=end,
            base_offset=self._base_offset(first, first.start),
            numel=(end - first.offset) // encoded,
            runs=tuple((piece.segment.spec.name, piece.start, piece.stop) for piece in pieces),
            sizes=(*sizes[1:], 0),
            places=tuple(places),
            gaps=tuple(gaps),
        )

    def _alone(self, piece: Piece, start: int, stop: int) -> Stretch:
        spec = piece.segment.spec
        run = self._update.piece(piece.segment, start, stop)
        return Stretch(
            spec=spec,
            codec=piece.segment.codec,
            start=run.offset,
            stop=run.offset + run.nbytes,
            base_offset=self._base_offset(piece, start),
            numel=stop - start,
            runs=((spec.name, start, stop),),
            sizes=(stop - start, 0),
            places=((0, (stop - start) * spec.item_bytes),),
        )

    def _base_offset(self, piece: Piece, start: int) -> int:
        spec = piece.segment.spec
        return self._version.by_name[spec.name].offset + start * spec.item_bytes
