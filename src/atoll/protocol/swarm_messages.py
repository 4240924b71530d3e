"""Typed messages between server and workers in a swarm, a run in which workers, not the server, aggregate updates.

The messages contain references to tensors, not tensors. Each answer of the server lists everything that the worker
should store and do. Each report of a worker lists everything that the worker stores and has done. So a lost, late or
repeated message does no harm, and a restarted server learns the whole state from the next reports.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, StringConstraints

from atoll.config.bounds import MAX_WEIGHT
from atoll.protocol.messages import Count, Estimate, Hex32, Message, OptionName, Options, Reference, Site, Text, since
from atoll.protocol.routes import DIGEST_BYTES
from atoll.protocol.values import FrozenRound
from atoll.registry import ReceivedName

MOST_PEERS, MOST_HELD, MOST_UPDATES, MOST_SOURCES = 1024, 4096, 4096, 16
"""Largest number of addresses, of versions and of updates in a message, and of sources of one version."""

Address = Annotated[
    str,
    StringConstraints(
        max_length=300,
        pattern=r"^https?://(\[[0-9a-fA-F:.]{2,45}\]|[0-9A-Za-z]([0-9A-Za-z._-]{0,251}[0-9A-Za-z])?):[1-9][0-9]{0,4}$",
    ),
]
"""Address of a worker, http(s)://host:port: without user, path, query or fragment."""
StateDigest = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")]
Digests = Annotated[str, StringConstraints(max_length=2**22, pattern=r"^[A-Za-z0-9+/=]*$")]
"""Concatenated BLAKE3 digests in base64."""


class Choice(Message):
    """A codec, a reducer or an outer optimizer: its name, which each site looks up, and its keyword arguments."""

    name: ReceivedName
    options: Options = Field(default_factory=dict)


class SwarmPlan(Message):
    """The values that a worker needs to aggregate a round and step the outer optimizer. They are no settings."""

    algorithm: ReceivedName
    reduce: Annotated[dict[OptionName, ReceivedName], Field(max_length=16)] = Field(
        description="Group of tensors → the algorithm's own reducer of the group."
    )
    reducer: Choice = Field(description="The reducer of `params`.")
    outer: Choice = Field(description="The outer optimizer.")
    outer_lr_of: Annotated[
        dict[Annotated[str, StringConstraints(max_length=256)], Annotated[float, Field(gt=0, le=MAX_WEIGHT)]],
        Field(max_length=256),
    ] = Field(default_factory=dict, description="Pattern of parameter names → their outer learning rate.")
    codec: Choice = Field(description="The codec of `params` in an update.")
    part_bytes: int = Field(ge=2**16, le=16 * 2**20, description="Largest size of a part, in bytes.")
    versions: int = Field(ge=1, le=MOST_HELD, description="Most versions of a fragment that a worker has to store.")
    in_files: bool = Field(True, description="Keep versions and updates in files; false: in memory.")


class Source(Message):
    """Where a worker offers a version for download: references to the version and its outer optimizer's state."""

    version: Reference
    state: Reference | None = Field(None, description="Reference to the outer state of the version.")


class Held(Message):
    """A version that the reporting worker has completely: it has received and checked every byte."""

    fragment: Count
    version: Count
    digest: Hex32
    state_digest: StateDigest = Field("", description="BLAKE3 over the digests of the outer state; empty: none.")
    source: Source


class CollectedUpdate(Message):
    """The result of the order `Collect`: the update was downloaded (valid or not), or could not be downloaded."""

    ticket: Count
    digest: Hex32
    source: Reference
    norm: float = Field(0.0, ge=0)
    bad: Text = Field("", description="Why the update cannot count; empty if it can.")
    failed: Text = Field("", description="Why the update could not be pulled or checked.")
    raised: bool = Field(False, description="Whether the run's code, such as its codec, raised an error in the check.")


class ReducedRound(Message):
    """The result of aggregating one round: the digests of the new version, or the failure."""

    fragment: Count
    version: Count
    tickets: list[Count] = Field(max_length=MOST_UPDATES)
    digest: Hex32 | None = None
    part_digests: Digests = ""
    state_digests: Digests = ""
    grad_norm: float | None = Field(None, ge=0)
    seconds: Estimate = 0.0
    failed: Text = ""
    overflows: bool = Field(False, description="Whether the round failed because its result overflows its dtype.")
    raised: bool = Field(False, description="Whether the run's code raised an error, which it would at others, too.")


class Unreached(Message):
    """A worker of the swarm that the reporting worker could not connect to, and the reason."""

    address: Address
    why: Text


class PeerReport(Message):
    """A worker's report to the server of everything that it stores and has done for the swarm."""

    peer: Reference = Field(description="As in `Join`: the address of this worker, and the proof.")
    number: Count = Field(description="Number of this report; the server ignores older reports.")
    seen: Count = Field(0, description="Stamp of the orders that the worker has.")
    wait_s: float = Field(0.0, ge=0, le=20.0)
    moved: Count = Field(0, description="Bytes moved by the worker's jobs so far; the same number again: no progress.")
    leaving: bool = Field(False, description="The worker wants to leave the run.")
    held: list[Held] = Field(default_factory=list, max_length=MOST_HELD)
    collected: list[CollectedUpdate] = Field(default_factory=list, max_length=MOST_UPDATES)
    closed: list[ReducedRound] = Field(default_factory=list, max_length=256)
    reached: list[Address] = Field(default_factory=list, max_length=MOST_PEERS)
    unreached: list[Unreached] = Field(default_factory=list, max_length=64)


class Hold(Message):
    """The server's order to store a version and its outer optimizer's state.

    A worker downloads what it does not have.
    """

    fragment: Count
    version: Count
    digest: Hex32
    state_digest: StateDigest = ""
    sources: list[Source] = Field(
        max_length=MOST_SOURCES, description="Workers that have the version; empty: the server has it."
    )


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
    peers: list[Address] = Field(
        default_factory=list,
        max_length=MOST_PEERS,
        description="Addresses of all other workers, which the server has checked. A worker connects to no others.",
    )
    sites: list[Site] = Field(
        default_factory=list,
        max_length=MOST_PEERS,
        json_schema_extra=since(2),
        description="The site of each of `peers`, in the same order.",
    )
    ended: dict[Site, Count] = Field(
        default_factory=dict,
        max_length=MOST_PEERS,
        json_schema_extra=since(2),
        description="Site → Unix time: certificates that were issued before have ended. Of a revoked site, all have.",
    )
    probe: list[Address] = Field(
        default_factory=list, max_length=MOST_PEERS, description="Test the connection to these; they are in `peers`."
    )
    hold: list[Hold] = Field(default_factory=list, max_length=MOST_HELD)
    collect: list[Collect] = Field(default_factory=list, max_length=MOST_UPDATES)
    close: list[FrozenRound] = Field(default_factory=list, max_length=MOST_HELD)
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
