"""Objects as they travel: opened, sent in parts, completed, pulled."""

from __future__ import annotations

from pydantic import Field

from atoll.wire.messages import NUMBER_BELOW, Count, Hex16, Hex32, Message


class ObjectOpen(Message):
    """Ask the server to keep an object. Its parts come next, then `ObjectComplete`."""

    head_bytes: int = Field(gt=0, lt=NUMBER_BELOW, description="Of its head; a multiple of 64.")
    nbytes: int = Field(gt=0, lt=NUMBER_BELOW, description="Of the whole, head included.")
    part_bytes: int = Field(gt=0, lt=NUMBER_BELOW, description="The most bytes of one part; a multiple of 64.")
    inline: bool = Field(False, description="Whether its manifest is to hold its bytes.")
    expires_s: float = Field(gt=0, description="Seconds that it should be kept; the server may keep it shorter.")


class ObjectOpened(Message):
    object: Hex16
    secret: Hex16 = Field(description="To be shown with every request for the object.")
    expires_s: float = Field(description="Seconds that the server keeps it.")


class ObjectPartReceipt(Message):
    object: Hex16
    part: Count
    digest: Hex32


class ObjectComplete(Message):
    """All parts are there: from now on it can be pulled, and never changes."""

    digest: Hex32 = Field(description="BLAKE3 over the sizes and the part digests in order.")


class ObjectManifest(Message):
    """An object's parts; names, dtypes and shapes are in its head, which is the first of them."""

    head_bytes: Count
    nbytes: Count
    part_bytes: Count
    digest: Hex32
    part_digests: list[Hex32]
    inline: str | None = Field(None, description="All of its bytes in base64, where it is small and asked for.")
