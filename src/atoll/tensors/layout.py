"""Where each element of each tensor lies in a file or on the wire: the only arithmetic of offsets.

A layout is an ordered list of segments. It is cut into parts of at most `part_bytes`; a part is a run of pieces, and
a piece is whole tiles of one segment. So every part can be sent, checked, decoded and reduced alone, and a chunk
of any tensor starts at a multiple of the tile from the tensor's start, in every layout of the same tensors.

    file     | header | tensor 0          | tensor 1 | tensor 2 ...                  |
    segments           [0 ............... ][1 ......  ][2 ...                         ]
    pieces             [0: tiles 0-9][10-12][1 ...... ][2: 0-5][6-15] ...
    parts    [0                     ][1                       ][2 ...                 ]

Units: `start` and `stop` count elements from the tensor's start, `offset` and `nbytes` count bytes from the file's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3

from atoll.tensors.schema import ITEM_BYTES, Schema, TensorSpec

TILE = 4096
"""Elements. Parts, chunks and codecs cut tensors only at multiples of it; 64 divides it, for chunked outer steps."""

PART_BYTES = 16 * 2**20
ALIGN_BYTES = 64


class Encoding(Protocol):
    """What a layout needs to know about a codec: its name and its fixed rate."""

    @property
    def name(self) -> str: ...

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        """Bytes of `numel` elements from the start of a segment; additive over multiples of `TILE`."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of one tensor, encoded by one codec, at [offset, offset + nbytes) of the file."""

    spec: TensorSpec
    codec: str
    start: int
    stop: int
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole tiles of a segment: elements [start, stop) of `segment.spec`, at [offset, offset + nbytes) of the file."""

    segment: Segment
    start: int
    stop: int
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Part:
    """One numbered part: bytes [start, stop) of the file and the pieces that they hold."""

    index: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Segments in file order, and the parts they are cut into.

    Attributes:
        segments: in file order.
        header_bytes: bytes before the first segment (a safetensors header; 0 for an update).
        nbytes: size of the file.
        part_bytes: the most bytes a part may have.
        encodings: codec name → fixed rate, for every codec that a segment names.
    """

    segments: tuple[Segment, ...]
    header_bytes: int
    nbytes: int
    part_bytes: int
    encodings: Mapping[str, Encoding]

    @functools.cached_property
    def digest(self) -> str:
        """BLAKE3 of what decides every offset, in hex; the ticket carries it, so both sides cut alike."""
        table = [
            [s.spec.name, s.spec.dtype, list(s.spec.shape), s.spec.group, s.codec, s.start, s.stop, s.offset, s.nbytes]
            for s in self.segments
        ]
        text = json.dumps([self.header_bytes, self.nbytes, self.part_bytes, table], separators=(",", ":"))
        return blake3(text.encode()).hexdigest()

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """The numbered parts, which cover every byte once."""
        return tuple(_cut(self))

    @functools.cached_property
    def by_name(self) -> dict[str, Segment]:
        """Tensor name → its segment; for layouts in which each tensor has one."""
        return {segment.spec.name: segment for segment in self.segments}

    def bytes_before(self, segment: Segment, start: int) -> int:
        """File offset of element `start` of `segment`; `start - segment.start` is a multiple of `TILE`."""
        return segment.offset + self.encodings[segment.codec].encoded_bytes(start - segment.start, segment.spec.dtype)

    def piece(self, segment: Segment, start: int, stop: int) -> Piece:
        """The piece of `segment` with the elements [start, stop); both at tile borders, or at the segment's end."""
        offset = self.bytes_before(segment, start)
        end = segment.offset + segment.nbytes if stop == segment.stop else self.bytes_before(segment, stop)
        return Piece(segment, start, stop, offset, end - offset)

    def update_digest(self, part_digests: Sequence[bytes]) -> str:
        """BLAKE3 over this layout's digest and the part digests in order, in hex: names a file by its content."""
        hasher = blake3(bytes.fromhex(self.digest))
        for digest in part_digests:
            hasher.update(digest)
        return hasher.hexdigest()


def chunks(part: Part, max_elements: int) -> Iterator[tuple[Piece, int, int]]:
    """(piece, start, stop) for runs of at most `max_elements` (a multiple of `TILE`) elements of each piece."""
    for piece in part.pieces:
        for start in range(piece.start, piece.stop, max_elements):
            yield piece, start, min(start + max_elements, piece.stop)


def update_layout(
    specs: Iterable[TensorSpec], encoding_of: Callable[[TensorSpec], Encoding], part_bytes: int = PART_BYTES
) -> Layout:
    """The layout of an update: one aligned segment per tensor, encoded by the codec of its group."""
    segments: list[Segment] = []
    encodings: dict[str, Encoding] = {}
    offset = 0
    for spec in specs:
        encoding = encoding_of(spec)
        encodings[encoding.name] = encoding
        nbytes = encoding.encoded_bytes(spec.numel, spec.dtype)
        segments.append(Segment(spec, encoding.name, 0, spec.numel, offset, nbytes))
        offset += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return Layout(tuple(segments), 0, offset, part_bytes, encodings)


def file_layout(specs: Sequence[TensorSpec], header: bytes, part_bytes: int = PART_BYTES) -> Layout:
    """The layout of a safetensors file: its header, then the tensors without gaps, as they are."""
    raw = _Raw()
    segments: list[Segment] = []
    offset = len(header)
    for spec in specs:
        segments.append(Segment(spec, raw.name, 0, spec.numel, offset, spec.nbytes))
        offset += spec.nbytes
    return Layout(tuple(segments), len(header), offset, part_bytes, {raw.name: raw})


TIED = "atoll.tied"
"""In a file's metadata: further name → name of the tensor that it is, as JSON; for a run that begins with the file."""

BUFFER_NAMES = "atoll.buffers"
"""Likewise: the names of the buffers, as a JSON list; every other tensor is a parameter."""


def safetensors_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The 8-byte length and the JSON of a safetensors file with these tensors in this order, padded to 64 bytes."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def version_header(schema: Schema) -> bytes:
    """The header of every version of a model: the same bytes on the server and on each worker."""
    return safetensors_header(schema.tensors, {"format": "pt", "atoll.schema": schema.digest})


def version_layout(schema: Schema, part_bytes: int = PART_BYTES) -> Layout:
    """The layout of a version: a safetensors file that holds the schema's tensors."""
    return file_layout(schema.tensors, version_header(schema), part_bytes)


@dataclass(frozen=True)
class _Raw:
    """Elements as they lie in memory."""

    name: str = "none"

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        return numel * ITEM_BYTES[dtype]


def _cut(layout: Layout) -> Iterator[Part]:
    """Greedy: fill a part up to `part_bytes`, cut at the last tile that fits; at least one tile per part.

    Only a header may be cut anywhere: that of thousands of tensors is larger than the smallest parts.
    """
    index, start, end, pieces = 0, 0, layout.header_bytes, list[Piece]()
    while end - start > layout.part_bytes:
        yield Part(index, start, start + layout.part_bytes, ())
        index, start = index + 1, start + layout.part_bytes
    for segment in layout.segments:
        at = segment.start
        while at < segment.stop or segment.numel == 0:
            piece = _largest_piece(layout, segment, at, start + layout.part_bytes)
            if piece is None and end > start:
                yield Part(index, start, end, tuple(pieces))
                index, start, pieces = index + 1, end, []
                continue
            piece = piece or layout.piece(segment, at, min(at + TILE, segment.stop))
            pieces.append(piece)
            end = _padded_end(layout, piece)
            at = piece.stop
            if segment.numel == 0:
                break
    if end > start or index == 0:
        yield Part(index, start, end, tuple(pieces))


def _largest_piece(layout: Layout, segment: Segment, at: int, limit: int) -> Piece | None:
    """The most whole tiles of `segment` from `at` that end at or before the file offset `limit`; None if none does."""
    rest = layout.piece(segment, at, segment.stop)
    if _padded_end(layout, rest) <= limit:
        return rest
    tile_bytes = layout.encodings[segment.codec].encoded_bytes(TILE, segment.spec.dtype)
    tiles = (limit - rest.offset) // tile_bytes
    stop = at + tiles * TILE
    return layout.piece(segment, at, stop) if tiles > 0 and stop < segment.stop else None


def _padded_end(layout: Layout, piece: Piece) -> int:
    """Where the next piece may start: the padding behind a segment belongs to the part of its last piece."""
    end = piece.offset + piece.nbytes
    if layout.header_bytes == 0 and piece.stop == piece.segment.stop:
        return -(-end // ALIGN_BYTES) * ALIGN_BYTES
    return end
