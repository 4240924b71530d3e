"""Layouts: the offset of each tensor in a file, and the division of the file into parts for sending.

A layout is an ordered list of segments, one per tensor. The file is divided into parts of at most `cut_bytes`. A part
consists of consecutive pieces. A piece is a range of one segment and consists of whole tiles (`TILE` elements), so that
each part can be sent, checked, decoded and reduced without the others. Pieces begin at multiples of a tile in every
layout, so the same elements are easy to find in files with different layouts.

    file     | header | tensor 0          | tensor 1 | tensor 2 ...                  |
    segments           [0 ............... ][1 ......  ][2 ...                         ]
    pieces             [0: tiles 0-9][10-12][1 ...... ][2: 0-5][6-15] ...
    parts    [0                     ][1                       ][2 ...                 ]

If workers are sharded over N ranks, a part also ends wherever the next tile belongs to another rank. So each rank sends
and pulls its own parts (`rows_of`, `tiles_of`).

Units: `start` and `stop` count elements from the start of the tensor. `offset` counts bytes from the start of the file,
and `nbytes` is a size in bytes. In `Part`, `start` and `stop` count bytes from the start of the file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from blake3 import blake3

from atoll.tensors.schema import ITEM_BYTES, PARAMS, Schema, TensorSpec

TILE = 4096
"""Number of elements in a tile; divisible by 64. Parts, chunks and codecs cut tensors only at multiples of `TILE`."""

PART_BYTES = 16 * 2**20
WHOLE_BYTES = 4 * 2**20
"""Up to this size, a file is one part, which is one request. A connection takes longer to fill than to send it."""
SHARES = 4
"""Number of parts of a larger file, if they are not above `part_bytes`: several connections then share any file."""
ALIGN_BYTES = 64


class Encoding(Protocol):
    """The properties of a codec that a layout needs: name, encoded size, and whether elements are independent."""

    @property
    def name(self) -> str:
        """The codec's name, as in `Segment.codec` and in the keys of `Layout.encodings`."""
        ...

    @property
    def elementwise(self) -> bool:
        """Whether each element is encoded independently of its neighbours."""
        ...

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        """Return the encoded size of the first `numel` elements of a segment, in bytes.

        If `numel` is a multiple of `TILE`, this is also the offset in the segment at which the next element begins.
        """
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """The range of a file that holds one tensor: bytes [offset, offset + nbytes), encoded by one codec."""

    spec: TensorSpec
    codec: str
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements of the tensor."""
        return self.spec.numel


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a tensor, in whole tiles (`TILE`): elements [start, stop), at the bytes [offset, offset + nbytes)."""

    segment: Segment
    start: int
    stop: int
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements of the piece."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a file: its number, bytes [start, stop), the pieces in it, and the rank that sends and pulls it."""

    index: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    rank: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the part in bytes, padding included."""
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """The layout of a file: a segment (range of the file) for each tensor, and the division into parts for sending.

    Attributes:
        segments: the segments, in file order.
        header_bytes: bytes before the first segment (a safetensors header; 0 for an update).
        nbytes: size of the file.
        part_bytes: maximum size of a part.
        encodings: codec name → encoding, for every codec of a segment.
        ranks: number of ranks of a sharded worker; each part belongs to one rank.
        rank: if set, the property `parts` returns only the parts of this rank; None: the parts of all ranks.
    """

    segments: tuple[Segment, ...]
    header_bytes: int
    nbytes: int
    part_bytes: int
    encodings: Mapping[str, Encoding]
    ranks: int = 1
    rank: int | None = None

    @functools.cached_property
    def digest(self) -> str:
        """BLAKE3 hash, in hex, of everything that determines offsets and parts. Server and worker compare it."""
        table = [
            [s.spec.name, s.spec.dtype, list(s.spec.shape), s.spec.group, s.codec, 0, s.numel, s.offset, s.nbytes]
            for s in self.segments
        ]
        cut = [self.ranks] if self.ranks > 1 else []
        text = json.dumps([self.header_bytes, self.nbytes, self.part_bytes, table, *cut], separators=(",", ":"))
        return blake3(text.encode()).hexdigest()

    @property
    def cut_bytes(self) -> int:
        """Maximum size of a part of this file: `part_bytes`, or less, so that several connections share the file."""
        if self.nbytes <= WHOLE_BYTES or self.ranks > 1:
            return self.part_bytes
        return min(self.part_bytes, -(-self.nbytes // SHARES) + TILE * max(ITEM_BYTES.values()))

    @functools.cached_property
    def all_parts(self) -> tuple[Part, ...]:
        """All parts, in order. They cover every byte of the file once."""
        return tuple(_cut(self))

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of `rank`, with their numbers; all parts if `rank` is None."""
        return tuple(part for part in self.all_parts if self.rank in (None, part.rank))

    def chunks(self, max_elements: int) -> Iterator[tuple[Piece, int, int]]:
        """Divide the pieces of `parts` into chunks of at most `max_elements`. Yield (piece, start, stop) of each."""
        for part in self.parts:
            yield from chunks(part, max_elements)

    @property
    def own_nbytes(self) -> int:
        """Total size of `parts` in bytes."""
        return self.nbytes if self.rank is None else sum(part.nbytes for part in self.parts)

    def of_rank(self, rank: int) -> Layout:
        """Return the same layout with only the parts of one rank in `parts`."""
        return replace(self, rank=rank)

    @functools.cached_property
    def by_name(self) -> dict[str, Segment]:
        """Name of a tensor → its segment, the range of the file that holds it."""
        return {segment.spec.name: segment for segment in self.segments}

    def bytes_before(self, segment: Segment, start: int) -> int:
        """Return the file offset of element `start` of `segment`; `start` must be a multiple of `TILE`."""
        return segment.offset + self.encodings[segment.codec].encoded_bytes(start, segment.spec.dtype)

    def piece(self, segment: Segment, start: int, stop: int) -> Piece:
        """Return the piece with elements [start, stop) of `segment`, which must be whole tiles."""
        offset = self.bytes_before(segment, start)
        end = segment.offset + segment.nbytes if stop == segment.numel else self.bytes_before(segment, stop)
        return Piece(segment, start, stop, offset, end - offset)

    def padded_end(self, piece: Piece) -> int:
        """Return the file offset after a piece and its padding.

        In updates, the last piece of each segment is padded to a multiple of 64 bytes.
        """
        end = piece.offset + piece.nbytes
        if self.header_bytes == 0 and piece.stop == piece.segment.numel:
            return -(-end // ALIGN_BYTES) * ALIGN_BYTES
        return end

    def blob_id(self, part_digests: Sequence[bytes]) -> str:
        """Return the id of a file that has this layout and the given digests of its parts."""
        return blob_id(self.digest, part_digests)


def blob_id(layout_digest: str, part_digests: Sequence[bytes]) -> str:
    """Return the id of a file's content: BLAKE3 over the digests of its layout and parts, in hex."""
    return blake3(bytes.fromhex(layout_digest) + b"".join(part_digests)).hexdigest()


def chunks(part: Part, max_elements: int) -> Iterator[tuple[Piece, int, int]]:
    """Divide the pieces of a part into chunks of at most `max_elements` elements. Yield (piece, start, stop) of each.

    Args:
        part: the part.
        max_elements: maximum size of a chunk; a multiple of `TILE`.
    """
    for piece in part.pieces:
        for start in range(piece.start, piece.stop, max_elements):
            yield piece, start, min(start + max_elements, piece.stop)


def rows_of(spec: TensorSpec, rank: int, ranks: int) -> tuple[int, int]:
    """Return the elements [start, stop) that `Shard(0)` gives to a rank: ⌈rows/ranks⌉ rows, fewer to the last ranks."""
    if not spec.numel or not spec.shape:
        return (0 if rank == 0 else spec.numel), spec.numel
    rows, each = spec.shape[0], -(-spec.shape[0] // ranks)
    row = spec.numel // rows
    return min(rank * each, rows) * row, min((rank + 1) * each, rows) * row


def tiles_of(spec: TensorSpec, rank: int, ranks: int) -> tuple[int, int]:
    """Return the elements [start, stop) that a rank sends and pulls: tiles (`TILE` elements) that begin in its rows.

    Rank 0 sends and pulls all elements of tensors outside the group `params`.
    """
    if spec.group != PARAMS:
        return (0 if rank == 0 else spec.numel), spec.numel
    start, stop = rows_of(spec, rank, ranks)
    return min(-(-start // TILE) * TILE, spec.numel), min(-(-stop // TILE) * TILE, spec.numel)


def update_layout(
    specs: Iterable[TensorSpec],
    encoding_of: Callable[[TensorSpec], Encoding],
    part_bytes: int = PART_BYTES,
    ranks: int = 1,
) -> Layout:
    """Return the layout of an update (a worker's file for one round): one segment per tensor, aligned to 64 bytes.

    Args:
        specs: the tensors, in file order.
        encoding_of: function that returns the encoding of a tensor.
        part_bytes: maximum size of a part.
        ranks: number of ranks of a sharded worker.
    """
    segments: list[Segment] = []
    encodings: dict[str, Encoding] = {}
    offset = 0
    for spec in specs:
        encoding = encoding_of(spec)
        encodings[encoding.name] = encoding
        nbytes = encoding.encoded_bytes(spec.numel, spec.dtype)
        segments.append(Segment(spec, encoding.name, offset, nbytes))
        offset += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return Layout(tuple(segments), 0, offset, part_bytes, encodings, ranks)


def file_layout(specs: Sequence[TensorSpec], header: bytes, part_bytes: int = PART_BYTES, ranks: int = 1) -> Layout:
    """Return the layout of a safetensors file: the header, then the unencoded tensors without gaps."""
    raw = _Raw()
    segments: list[Segment] = []
    offset = len(header)
    for spec in specs:
        segments.append(Segment(spec, raw.name, offset, spec.nbytes))
        offset += spec.nbytes
    return Layout(tuple(segments), len(header), offset, part_bytes, {raw.name: raw}, ranks)


TIED = "atoll.tied"
"""Key in a model file's metadata. Value: JSON, further name of a tied tensor → its first name, so that a new run that
starts from the file ties the names again."""

BUFFER_NAMES = "atoll.buffers"
"""Key in a model file's metadata: a JSON list of the buffers' names. All other tensors are parameters."""


def safetensors_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file with these tensors in this order, padded to a multiple of 64 bytes."""
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
    """Return the header of every version of a model: the same bytes on the server and on each worker."""
    return safetensors_header(schema.tensors, {"format": "pt", "atoll.schema": schema.digest})


def version_layout(schema: Schema, part_bytes: int = PART_BYTES, ranks: int = 1) -> Layout:
    """Return the layout of a version: a safetensors file that holds the schema's tensors."""
    return file_layout(schema.tensors, version_header(schema), part_bytes, ranks)


@dataclass(frozen=True)
class _Raw:
    """The encoding `none`, which stores elements unchanged."""

    name: str = "none"
    elementwise: bool = True

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        return numel * ITEM_BYTES[dtype]


def _cut(layout: Layout) -> Iterator[Part]:
    """Yield the parts of a layout. Each has as many whole tiles as fit into `cut_bytes`.

    A tile that is larger than `cut_bytes` is a part by itself. The header belongs to rank 0; if it is larger than
    `cut_bytes`, the first parts contain only pieces of the header.
    """
    cut_bytes = layout.cut_bytes
    index, start, end, pieces, owner = 0, 0, layout.header_bytes, list[Piece](), 0
    while end - start > cut_bytes:
        yield Part(index, start, start + cut_bytes, ())
        index, start = index + 1, start + cut_bytes
    for segment in layout.segments:
        for rank, at, stop in _shares(segment, layout.ranks):
            if rank != owner and end > start:
                yield Part(index, start, end, tuple(pieces), owner)
                index, start, pieces = index + 1, end, []
            owner = rank
            while at < stop or segment.numel == 0:
                piece = _largest_piece(layout, segment, at, stop, start + cut_bytes)
                if piece is None and end > start:
                    yield Part(index, start, end, tuple(pieces), owner)
                    index, start, pieces = index + 1, end, []
                    continue
                piece = piece or layout.piece(segment, at, min(at + TILE, stop))
                pieces.append(piece)
                end = layout.padded_end(piece)
                at = piece.stop
                if segment.numel == 0:
                    break
    if end > start or index == 0:
        yield Part(index, start, end, tuple(pieces), owner)


def _shares(segment: Segment, ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, start, stop): the elements of a segment that each rank sends. An empty segment belongs to rank 0."""
    if ranks == 1 or segment.numel == 0:
        yield 0, 0, segment.numel
        return
    for rank in range(ranks):
        start, stop = tiles_of(segment.spec, rank, ranks)
        if start < stop:
            yield rank, start, stop


def _largest_piece(layout: Layout, segment: Segment, start: int, stop: int, limit: int) -> Piece | None:
    """Return the largest piece of whole tiles in [start, stop) that ends at or before the file offset `limit`.

    Returns:
        The piece; None if not even one tile fits.
    """
    rest = layout.piece(segment, start, stop)
    if layout.padded_end(rest) <= limit:
        return rest
    tile_bytes = layout.encodings[segment.codec].encoded_bytes(TILE, segment.spec.dtype)
    tiles = (limit - rest.offset) // tile_bytes
    end = start + tiles * TILE
    return layout.piece(segment, start, end) if tiles > 0 and end < stop else None
