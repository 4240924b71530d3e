"""Messages between the server of a swarm and its workers. No tensor is among them, only where each is.

Each answer of the server says all that a worker should have and do. Each report of a worker says all that it has and
has done. So a message that is lost, late or repeated changes nothing, and a server that was killed learns everything
anew.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from atoll.protocol import messages
from atoll.protocol.messages import Count, Hex32, Message, Reference, Site, Text
from atoll.protocol.routes import DIGEST_BYTES
from atoll.protocol.values import FrozenRound

Address = Annotated[messages.Address, StringConstraints(pattern=r"^https?://")]
Digests = Annotated[str, StringConstraints(max_length=2**22, pattern=r"^[A-Za-z0-9+/=]*$")]
"""BLAKE3 digests, one after the other, in base64."""


class SwarmPlan(Message):
    """The settings that decide how a round is reduced and stepped."""

    settings: dict[str, Any]


class Source(Message):
    """A worker that has a version."""

    version: Reference
    state: Reference | None = Field(None, description="Of the outer state beside it.")


class Held(Message):
    """A version that the worker has, with every byte checked."""

    fragment: Count
    version: Count
    digest: Hex32
    state_digest: str = Field("", max_length=64, description="BLAKE3 over the digests of the outer state; or none.")
    source: Source


class CollectedUpdate(Message):
    """What became of an update that was to be collected."""

    ticket: Count
    digest: Hex32
    source: Reference
    norm: float = Field(0.0, ge=0)
    bad: Text = Field("", description="Why it cannot count.")
    failed: Text = Field("", description="Why it could not be pulled.")


class ReducedRound(Message):
    """What became of a round that was to be reduced."""

    fragment: Count
    version: Count
    tickets: list[Count] = Field(max_length=4096)
    digest: Hex32 | None = None
    part_digests: Digests = ""
    state_digests: Digests = ""
    grad_norm: float | None = None
    seconds: float = Field(0.0, ge=0)
    failed: Text = ""
    overflows: bool = Field(False, description="Whether it failed because the result overflows its dtype.")


class Unreached(Message):
    """Another worker of the swarm that the reporting one could not reach, and why."""

    address: Address
    why: Text


class PeerReport(Message):
    """What a worker has and has done."""

    address: Address = Field(description="Where other workers reach it.")
    number: Count = Field(description="Counts its reports; an older one that comes later is ignored.")
    seen: Count = Field(0, description="The stamp of the work that it has.")
    wait_s: float = Field(0.0, ge=0, le=20.0)
    moved: Count = Field(
        0, description="Bytes that its work has moved so far; while it stays the same, the worker stands still."
    )
    leaving: bool = Field(False, description="It would leave the run.")
    held: list[Held] = Field(default_factory=list, max_length=256)
    collected: list[CollectedUpdate] = Field(default_factory=list, max_length=4096)
    closed: list[ReducedRound] = Field(default_factory=list, max_length=256)
    reached: list[Address] = Field(default_factory=list, max_length=1024)
    unreached: list[Unreached] = Field(default_factory=list, max_length=64)


class Hold(Message):
    """A version that the worker is to have, with the outer state beside it."""

    fragment: Count
    version: Count
    digest: Hex32
    state_digest: str = Field("", max_length=64)
    sources: list[Source] = Field(description="The workers that have it; if there are none, the server does.")


class Collect(Message):
    """An update that the worker is to pull and to look at."""

    ticket: Count
    fragment: Count
    site: Site
    digest: Hex32
    source: Reference


class PeerWork(Message):
    """All that a worker is to have and to do; it drops everything else."""

    stamp: Count = Field(description="Of this work; another stamp is other work.")
    server: Count = Field(0, description="When it was started, in ms since 1970.")
    order: Count = Field(0, description="Rises from answer to answer of one server: the highest counts.")
    probe: list[Address] = Field(default_factory=list, description="Other workers, which it is to try to reach.")
    hold: list[Hold] = Field(default_factory=list)
    collect: list[Collect] = Field(default_factory=list)
    close: list[FrozenRound] = Field(default_factory=list)
    stay: bool = Field(False, description="Others still need what it has.")
    finished: bool = Field(False, description="The run is: the newest versions are its result.")


def in_text(digests: Sequence[bytes]) -> str:
    """Return BLAKE3 digests as a message carries them."""
    return base64.b64encode(b"".join(digests)).decode()


def digests_in(text: str) -> tuple[bytes, ...]:
    """Return what `in_text` was given.

    Raises:
        ValueError: the text is no base64.
    """
    return split(base64.b64decode(text))


def split(data: bytes) -> tuple[bytes, ...]:
    """Return digests that lie one behind the other."""
    return tuple(data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES))
