"""Manifests and blob ids. A manifest lists the parts of a blob with their digests, to check each part as it arrives.

A blob is an immutable file that is sent in parts: a version of the model, a worker's update, the difference between two
versions, the state of the outer optimizer, or an object that a user has published. The id of a blob is a BLAKE3 hash
over one digest that describes how the file is divided, and the digests of all parts.

If a file has a `Layout`, which both sides know, the layout determines the parts. All other files are divided by `Cuts`,
and the cuts are sent with the file.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from atoll.config.bounds import CHUNK_STEP_BYTES, LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES, is_chunk
from atoll.errors import BadRequest, PartCorrupt
from atoll.format_text import where_different
from atoll.tensors.layout import ALIGN_BYTES, Layout, Part, blob_id

MOST_PARTS = 200_000
"""Maximum number of parts of a blob. The digests of all parts are sent in one message of 13 MB, of which a receiver
makes 40 MB in memory. That is 1.6 TB in parts of 8 MiB."""


MOST_OBJECT_HEAD_BYTES = 24 * 2**20
"""Maximum size of an object's head. Its inline tensors have at most 15 MiB, which are 20 MiB as text."""


@dataclass(frozen=True)
class Cuts:
    """The division of a file into parts of `part_bytes` bytes. The file's head and the rest are divided separately.

    Attributes:
        head_bytes: size of the head, in bytes; 0 for a file without a head. No part has bytes of both head and rest.
        nbytes: size of the file including the head, in bytes.
        part_bytes: largest size of a part, in bytes.
    """

    head_bytes: int
    nbytes: int
    part_bytes: int

    def require_object(self, what: str) -> None:
        """Raise an error if no object can have these sizes. Call this before memory for the object is allocated.

        Args:
            what: the object's name, for messages.

        Raises:
            BadRequest: a size is out of range, or there would be too many parts.
        """
        if not is_chunk(self.part_bytes):
            raise BadRequest(
                f"{what} has parts of {self.part_bytes} bytes, which is not allowed.",
                f"Use a part size from {LEAST_CHUNK_BYTES} to {MOST_CHUNK_BYTES} bytes, a multiple of "
                f"{CHUNK_STEP_BYTES}.",
            )
        if (
            not 0 < self.head_bytes <= MOST_OBJECT_HEAD_BYTES
            or self.head_bytes % ALIGN_BYTES
            or self.head_bytes > self.nbytes
        ):
            raise BadRequest(
                f"{what} claims to have a header of {self.head_bytes} bytes and {self.nbytes} bytes in all, which no "
                "object can have.",
                "Use the same version of Atoll on both sides, then publish it again.",
            )
        if self.count > MOST_PARTS:
            raise BadRequest(
                f"{what} would have {self.count} parts, more than {MOST_PARTS}.",
                "Publish it with a larger chunk_bytes.",
            )

    @functools.cached_property
    def digest(self) -> str:
        """BLAKE3 digest of the three sizes, in hex."""
        return blake3(f"{self.head_bytes} {self.nbytes} {self.part_bytes}".encode()).hexdigest()

    @property
    def head_count(self) -> int:
        """Number of parts of the head."""
        return -(-self.head_bytes // self.part_bytes)

    @property
    def count(self) -> int:
        """Number of all parts."""
        return self.head_count - (self.head_bytes - self.nbytes) // self.part_bytes

    def part(self, index: int) -> Part:
        """Return the part with this number, counted from 0. Parts cover every byte of the file once."""
        begin, end, number = 0, self.head_bytes, index
        if index >= self.head_count:
            begin, end, number = self.head_bytes, self.nbytes, index - self.head_count
        start = begin + number * self.part_bytes
        return Part(index, start, min(start + self.part_bytes, end), ())

    def parts(self) -> list[Part]:
        """Return all parts, in order."""
        return [self.part(index) for index in range(self.count)]


def state_id(region_digests: Sequence[bytes]) -> str:
    """Return the id of an outer state file from the digests of its regions; empty if there are no regions."""
    return blob_id("", region_digests) if region_digests else ""


@dataclass(frozen=True)
class Manifest:
    """The division of a blob into parts, and the digest of each part.

    Attributes:
        cuts: sizes of the file and its parts. They determine the parts only if the file has no `Layout`.
        layout_digest: digest of the layout; for a file without one, digest of the cuts.
        part_digests: BLAKE3 digest of each part.
    """

    cuts: Cuts
    layout_digest: str
    part_digests: tuple[bytes, ...]

    @classmethod
    def of_cuts(cls, cuts: Cuts, part_digests: Sequence[bytes]) -> Manifest:
        """Return the manifest of a file without a layout."""
        return cls(cuts, cuts.digest, tuple(part_digests))

    @classmethod
    def of_layout(cls, layout: Layout, part_digests: Sequence[bytes]) -> Manifest:
        """Return the manifest of a file with a layout."""
        cuts = Cuts(layout.header_bytes, layout.nbytes, layout.part_bytes)
        return cls(cuts, layout.digest, tuple(part_digests))

    @property
    def nbytes(self) -> int:
        """Size of the file, in bytes."""
        return self.cuts.nbytes

    @functools.cached_property
    def id(self) -> str:
        """The id of the blob, in hex."""
        return blob_id(self.layout_digest, self.part_digests)

    def require_id(self, expected: str, what: str) -> None:
        """Raise an error if this is the manifest of another blob.

        Args:
            expected: the expected id.
            what: the blob's name, for messages.

        Raises:
            PartCorrupt: the manifest's id is not the expected id.
        """
        if self.id != expected:
            mine, wanted = where_different(self.id, expected)
            raise PartCorrupt(
                f"{what} is not the expected one: its content has the id {mine}, not {wanted}.",
                "Use the same release of Atoll on both sides. Check which process answers at this address, and any "
                "proxy in between.",
            )

    def require_object(self, what: str) -> None:
        """Raise an error if no object can have this manifest.

        Args:
            what: the object's name, for messages.

        Raises:
            BadRequest: a size is out of range, or the sizes do not match the digests.
        """
        self.cuts.require_object(what)
        if len(self.part_digests) != self.cuts.count or self.layout_digest != self.cuts.digest:
            raise BadRequest(
                f"The sizes of {what} do not match its {len(self.part_digests)} part digests.", "Publish it again."
            )
