"""Typed messages between server and workers in a swarm, a run in which workers, not the server, aggregate updates.

The messages contain references to tensors, not tensors. Each answer of the server lists everything that the worker
should store and do. Each report of a worker lists everything that the worker stores and has done. So a lost, late or
repeated message does no harm, and a restarted server learns the whole state from the next reports.
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
"""Concatenated BLAKE3 digests in base64."""


class SwarmPlan(Message):
    """The settings that a worker needs to aggregate a round and step the outer optimizer."""

    settings: dict[str, Any]


class Source(Message):
    """Where a worker offers a version for download: references to the version and its outer optimizer's state."""

    version: Reference
    state: Reference | None = Field(None, description="Reference to the outer state of the version.")


class Held(Message):
    """A version that the reporting worker has completely: it has received and checked every byte."""

    fragment: Count
    version: Count
    digest: Hex32
    state_digest: str = Field("", max_length=64, description="BLAKE3 over the digests of the outer state; empty: none.")
    source: Source


class CollectedUpdate(Message):
    """The result of the order `Collect`: the update was downloaded (valid or not), or could not be downloaded."""

    ticket: Count
    digest: Hex32
    source: Reference
    norm: float = Field(0.0, ge=0)
    bad: Text = Field("", description="Why the update cannot count; empty if it can.")
    failed: Text = Field("", description="Why the update could not be pulled.")


class ReducedRound(Message):
    """The result of aggregating one round: the digests of the new version, or the failure."""

    fragment: Count
    version: Count
    tickets: list[Count] = Field(max_length=4096)
    digest: Hex32 | None = None
    part_digests: Digests = ""
    state_digests: Digests = ""
    grad_norm: float | None = None
    seconds: float = Field(0.0, ge=0)
    failed: Text = ""
    overflows: bool = Field(False, description="Whether the round failed because its result overflows its dtype.")


class Unreached(Message):
    """A worker of the swarm that the reporting worker could not connect to, and the reason."""

    address: Address
    why: Text


class PeerReport(Message):
    """A worker's report to the server of everything that it stores and has done for the swarm."""

    address: Address = Field(description="Address of this worker for other workers.")
    number: Count = Field(description="Number of this report; the server ignores older reports.")
    seen: Count = Field(0, description="Stamp of the orders that the worker has.")
    wait_s: float = Field(0.0, ge=0, le=20.0)
    moved: Count = Field(0, description="Bytes moved by the worker's jobs so far; the same number again: no progress.")
    leaving: bool = Field(False, description="The worker wants to leave the run.")
    held: list[Held] = Field(default_factory=list, max_length=256)
    collected: list[CollectedUpdate] = Field(default_factory=list, max_length=4096)
    closed: list[ReducedRound] = Field(default_factory=list, max_length=256)
    reached: list[Address] = Field(default_factory=list, max_length=1024)
    unreached: list[Unreached] = Field(default_factory=list, max_length=64)


class Hold(Message):
    """The server's order to store a version and its outer optimizer's state.

    A worker downloads what it does not have.
    """

    fragment: Count
    version: Count
    digest: Hex32
    state_digest: str = Field("", max_length=64)
    sources: list[Source] = Field(description="Workers that have the version; empty: the server has it.")


class Collect(Message):
    """The server's order to download another worker's update, and to check it."""

    ticket: Count
    fragment: Count
    site: Site
    digest: Hex32
    source: Reference


class PeerWork(Message):
    """The complete list of what the server orders a worker to store and do. The worker drops everything else."""

    stamp: Count = Field(description="Stamp of these orders; other orders have another stamp.")
    server: Count = Field(0, description="Start time of the server, in ms since 1970.")
    order: Count = Field(0, description="Number of this answer; a worker ignores an answer with a lower number.")
    probe: list[Address] = Field(default_factory=list, description="Addresses of workers; test the connection to each.")
    hold: list[Hold] = Field(default_factory=list)
    collect: list[Collect] = Field(default_factory=list)
    close: list[FrozenRound] = Field(default_factory=list)
    stay: bool = Field(False, description="Other workers still need this worker's data.")
    finished: bool = Field(False, description="The run is finished: the newest versions are its result.")


def in_text(digests: Sequence[bytes]) -> str:
    """Return BLAKE3 digests as text for a message: concatenated, then encoded in base64."""
    return base64.b64encode(b"".join(digests)).decode()


def digests_in(text: str) -> tuple[bytes, ...]:
    """Return the BLAKE3 digests in a text that `in_text` made.

    Raises:
        ValueError: the text is not base64.
    """
    return split(base64.b64decode(text))


def split(data: bytes) -> tuple[bytes, ...]:
    """Split concatenated BLAKE3 digests into single digests of 32 bytes."""
    return tuple(data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES))
