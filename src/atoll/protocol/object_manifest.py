"""What both ends of an object agree on: its key, and a manifest that is what the reference says."""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3
from pydantic import ValidationError

from atoll.blobs.object_file import Extent
from atoll.errors import AuthError, BadRequest, PartCorrupt
from atoll.protocol import messages


def new_id() -> str:
    """An id, or a secret, that nobody can guess."""
    return secrets.token_hex(16)


def seal(secret: str) -> str:
    """What is kept of a secret: it opens nothing."""
    return blake3(secret.encode()).hexdigest()


def require_secret(sent: str | None, sealed: str, object_id: str) -> None:
    """Refuse who does not have the object's reference.

    Raises:
        AuthError: another secret was sent, or none.
    """
    given = (sent or "").encode(errors="surrogateescape")
    if not hmac.compare_digest(blake3(given).hexdigest(), sealed):
        raise AuthError(
            f"The secret that was sent does not open object {object_id[:8]}.",
            "Use the reference as its publisher gave it; one from somewhere else opens nothing here.",
        )


@dataclass(frozen=True)
class Manifest:
    """An object's parts, checked against its reference.

    Attributes:
        extent: sizes.
        digests: BLAKE3 of every part.
        inline: all bytes, where they came within the manifest.
    """

    extent: Extent
    digests: tuple[bytes, ...]
    inline: bytes | None = None

    @property
    def nbytes(self) -> int:
        return self.extent.nbytes

    @property
    def digest(self) -> str:
        return self.extent.digest(self.digests)

    def message(self) -> messages.ObjectManifest:
        """As it travels."""
        return messages.ObjectManifest(
            head_bytes=self.extent.head_bytes,
            nbytes=self.extent.nbytes,
            part_bytes=self.extent.part_bytes,
            digest=self.extent.digest(self.digests),
            part_digests=[digest.hex() for digest in self.digests],
            inline=None if self.inline is None else base64.b64encode(self.inline).decode(),
        )

    @classmethod
    def read(cls, body: bytes | bytearray, digest: str, what: str) -> Manifest:
        """Read a manifest strictly.

        Args:
            digest: the reference's.

        Raises:
            BadRequest: it is none, or its sizes cannot be.
            PartCorrupt: it is not that of the reference, or what came with it is damaged.
        """
        told = _told_in(body, what)
        extent = Extent(told.head_bytes, told.nbytes, told.part_bytes)
        extent.require_sound(what)
        digests = tuple(bytes.fromhex(each) for each in told.part_digests)
        if len(digests) != extent.count:
            raise BadRequest(f"{what} has {extent.count} parts, and digests of {len(digests)}.", "Publish it again.")
        if extent.digest(digests) != digest:
            raise PartCorrupt(
                f"{what} is not what its reference says: the digests of its parts make up another one.",
                "Look who serves it and what lies in between, then publish it again.",
            )
        return cls(extent, digests, None if told.inline is None else _inline(told.inline, extent, digests, what))


@dataclass(frozen=True)
class FileManifest:
    """Of a file that is served as it is; both sides know from elsewhere how it is cut, and what its digest is of.

    Attributes:
        digests: BLAKE3 of every part.
    """

    nbytes: int
    digest: str
    digests: tuple[bytes, ...]

    def message(self) -> messages.ObjectManifest:
        """As it travels."""
        return messages.ObjectManifest(
            head_bytes=0,
            nbytes=self.nbytes,
            part_bytes=0,
            digest=self.digest,
            part_digests=[digest.hex() for digest in self.digests],
        )

    @classmethod
    def read(cls, body: bytes | bytearray, what: str) -> FileManifest:
        """Read one; its digests are held against its digest by whoever knows how.

        Raises:
            BadRequest: it is none.
        """
        told = _told_in(body, what)
        return cls(told.nbytes, told.digest, tuple(bytes.fromhex(each) for each in told.part_digests))


def _inline(text: str, extent: Extent, digests: Sequence[bytes], what: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(f"What came with the manifest of {what} is no base64.", "Publish it again.") from None
    if len(data) != extent.nbytes:
        raise BadRequest(f"{what} has {extent.nbytes} bytes, and {len(data)} came with its manifest.")
    for part in extent.parts():
        if blake3(memoryview(data)[part.start : part.stop]).digest() != digests[part.index]:
            raise PartCorrupt(f"Part {part.index} of {what} came damaged with its manifest.", "Fetch it again.")
    return data


def _told_in(body: bytes | bytearray, what: str) -> messages.ObjectManifest:
    """A manifest as it travels; `BadRequest` where it is none."""
    try:
        return messages.ObjectManifest.model_validate_json(bytes(body))
    except ValidationError as error:
        raise BadRequest(
            f"The manifest of {what} is none: {error.errors()[0]['msg']}.",
            "Look whether Atoll, of the same version, serves it.",
        ) from None
