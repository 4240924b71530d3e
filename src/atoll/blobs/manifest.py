"""What lets each part of a blob be checked alone: where it is cut, and the digest of each part. The one rule of ids.

An update, a version, a difference, an outer state and an object are all blobs: immutable files that travel in parts.
The id of a blob is BLAKE3 over a digest of where it is cut and over the digests of its parts. Files with a `Layout`
are cut where tensors allow it, and both sides know the layout; all others are cut by `Cuts`, which travel with them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from atoll.errors import BadRequest, PartCorrupt
from atoll.sizes import CHUNK_STEP_BYTES, LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES, is_chunk
from atoll.tensors.layout import ALIGN_BYTES, Layout, Part, blob_id
from atoll.tensors.safetensors_header import MOST_BYTES as MOST_HEAD_BYTES

MOST_PARTS = 400_000
"""Of a blob: their digests are held in memory, and travel in one message of 27 MB."""


@dataclass(frozen=True)
class Cuts:
    """Where a file is cut: its head first, then the rest, every `part_bytes`.

    Attributes:
        head_bytes: of the head, which has parts of its own; 0 for none.
        nbytes: of the file, head included.
        part_bytes: the most bytes of one part.
    """

    head_bytes: int
    nbytes: int
    part_bytes: int

    def require_object(self, what: str) -> None:
        """Refuse sizes that no object has, before memory is taken for it.

        Raises:
            BadRequest: which.
        """
        if not is_chunk(self.part_bytes):
            raise BadRequest(
                f"{what} has parts of {self.part_bytes} bytes.",
                f"Parts have {LEAST_CHUNK_BYTES} to {MOST_CHUNK_BYTES} bytes, a multiple of {CHUNK_STEP_BYTES}.",
            )
        if not 0 < self.head_bytes <= MOST_HEAD_BYTES or self.head_bytes % ALIGN_BYTES or self.head_bytes > self.nbytes:
            raise BadRequest(
                f"{what} has a head of {self.head_bytes} of its {self.nbytes} bytes.",
                "Publish it with Atoll, of the same version on both sides.",
            )
        if self.count > MOST_PARTS:
            raise BadRequest(
                f"{what} would have {self.count} parts, more than {MOST_PARTS}.",
                "Publish it with a larger chunk_bytes.",
            )

    @functools.cached_property
    def digest(self) -> str:
        """BLAKE3 of the three sizes, in hex."""
        return blake3(f"{self.head_bytes} {self.nbytes} {self.part_bytes}".encode()).hexdigest()

    @property
    def head_count(self) -> int:
        """How many parts the head has."""
        return -(-self.head_bytes // self.part_bytes)

    @property
    def count(self) -> int:
        """How many parts there are."""
        return self.head_count - (self.head_bytes - self.nbytes) // self.part_bytes

    def part(self, index: int) -> Part:
        """Return the part of this number; parts cover every byte once."""
        begin, end, number = 0, self.head_bytes, index
        if index >= self.head_count:
            begin, end, number = self.head_bytes, self.nbytes, index - self.head_count
        start = begin + number * self.part_bytes
        return Part(index, start, min(start + self.part_bytes, end), ())

    def parts(self) -> list[Part]:
        """Return all parts, in order."""
        return [self.part(index) for index in range(self.count)]


def state_id(region_digests: Sequence[bytes]) -> str:
    """Return what names an outer state, by the digests of its regions; empty where there is none."""
    return blob_id("", region_digests) if region_digests else ""


@dataclass(frozen=True)
class Manifest:
    """The parts of a blob.

    Attributes:
        cuts: of a file with a layout, its sizes alone.
        layout_digest: of what decides where it is cut: a layout, or the cuts.
        part_digests: BLAKE3 of every part.
    """

    cuts: Cuts
    layout_digest: str
    part_digests: tuple[bytes, ...]

    @classmethod
    def of_cuts(cls, cuts: Cuts, part_digests: Sequence[bytes]) -> Manifest:
        """Return the manifest of a file that is cut by these cuts."""
        return cls(cuts, cuts.digest, tuple(part_digests))

    @classmethod
    def of_layout(cls, layout: Layout, part_digests: Sequence[bytes]) -> Manifest:
        """Return the manifest of a file that is cut by this layout."""
        cuts = Cuts(layout.header_bytes, layout.nbytes, layout.part_bytes)
        return cls(cuts, layout.digest, tuple(part_digests))

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.cuts.nbytes

    @functools.cached_property
    def id(self) -> str:
        """What names the blob, in hex."""
        return blob_id(self.layout_digest, self.part_digests)

    def require_id(self, wanted: str, what: str) -> None:
        """Refuse a manifest of another blob.

        Raises:
            PartCorrupt: its parts make up another id than the one wanted.
        """
        if self.id != wanted:
            raise PartCorrupt(
                f"{what} is not what its reference says: the digests of its parts make up another one.",
                "Check which process serves it and what lies in between, then publish it again.",
            )

    def require_object(self, what: str) -> None:
        """Refuse a manifest that no object has.

        Raises:
            BadRequest: its sizes cannot be, or do not go with its digests.
        """
        self.cuts.require_object(what)
        if len(self.part_digests) != self.cuts.count or self.layout_digest != self.cuts.digest:
            raise BadRequest(
                f"{what} has {self.cuts.count} parts, and digests of {len(self.part_digests)}.", "Publish it again."
            )
