"""What the journal holds, as values. Times are ISO 8601 in UTC; digests of parts are BLAKE3 bytes, of files hex."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

MemberState = Literal["alive", "dead", "left", "failed"]
RoundState = Literal["open", "frozen", "committed"]
TicketState = Literal["open", "accepted", "counted", "refused", "expired"]


@dataclass(frozen=True, slots=True)
class RunRow:
    """The run of a state directory; written once."""

    run_id: str
    settings_json: str
    schema_json: str
    schema_digest: str
    torch_build: str
    cpu_capability: str
    created_at: str


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A site and its newest lease, held by `process`: its id and the seal of its secret.

    Attributes:
        weight: of its first update that counts, which it keeps in a run with controls; 0: it has none yet.
    """

    site: str
    lease: int
    state: MemberState
    joined_at: str
    host: str
    labels_json: str
    detail: str
    rounds_counted: int
    process: str
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundRow:
    """The round from `base_version`; `tickets` are the frozen ones, in order.

    Attributes:
        population: how many workers had ever joined when it was frozen.
        total_weight: of all of them, as far as it was known then; 0 in a run without controls.
    """

    fragment: int
    base_version: int
    state: RoundState
    expected: tuple[str, ...]
    tickets: tuple[int, ...]
    opened_at: str
    population: int
    total_weight: float


@dataclass(frozen=True, slots=True)
class TicketRow:
    """A ticket and, once accepted, its update.

    Attributes:
        slot: number of its spool, while it has one.
        digest: of the update, hex.
        version: the version it went into, once counted.
        bytes: size of the accepted update.
        accepted_order: its place among all that were accepted, from 1 on; 0: it was not.
    """

    ticket: int
    site: str
    fragment: int
    base_version: int
    state: TicketState
    reason: str = ""
    slot: int | None = None
    digest: str | None = None
    weight: float = 0.0
    steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    norm: float = 0.0
    version: int | None = None
    bytes: int = 0
    accepted_order: int = 0

    @property
    def is_live(self) -> bool:
        """Whether an update may still come under it, or waits to be reduced."""
        return self.state in ("open", "accepted")

    @property
    def is_in(self) -> bool:
        """Whether its update was acknowledged."""
        return self.state in ("accepted", "counted")


@dataclass(frozen=True, slots=True)
class PartRow:
    """A part that is on disk and was looked at."""

    ticket: int
    part: int
    digest: bytes
    sumsq: float


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A committed version that is still kept.

    Attributes:
        slot: number of its file.
        state_slot: number of the outer state's file; None where there is none, or it is no longer kept.
        digest: of the version, hex.
        part_digests: one per region of the version's shape; `state_digests` likewise, empty without outer state.
    """

    fragment: int
    version: int
    slot: int
    state_slot: int | None
    digest: str
    part_digests: tuple[bytes, ...]
    state_digests: tuple[bytes, ...]
    summary_json: str
    created_at: str


@dataclass(frozen=True, slots=True)
class DeltaRow:
    """What goes down of a committed version to who has its base.

    Attributes:
        slot: number of its file.
        base_version, base_digest: of the version that it leads from.
        digest: of the delta, hex; `part_digests` one per region of its shape.
    """

    fragment: int
    version: int
    slot: int
    base_version: int
    base_digest: str
    digest: str
    part_digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """What is remembered of every version for ever."""

    fragment: int
    version: int
    digest: str
    summary_json: str
    created_at: str


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One entry of the audit log; `hash` is BLAKE3 over the rest, `prev_hash` that of the entry before."""

    seq: int
    at: str
    what: str
    detail_json: str
    prev_hash: str
    hash: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the whole run. `bytes` are those of accepted updates."""

    versions: int
    counted: int
    refused: int
    expired: int
    deaths: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """Where the run stands after a start.

    Attributes:
        rounds: open and frozen ones; a frozen one has to be run again.
        tickets: the open and accepted ones, and every one of a round from a head.
        heads: fragment → its head; a fragment without version 0 is missing.
        lost: fragment → how many numbers below its head belong to versions that were lost; they are not used again.
        started: fragments in which a round has ever been opened.
        fell_back: one sentence where a head did not verify and an earlier version took its place; else empty.
        warnings: what else was dropped because its file was not what its digest says.
    """

    members: tuple[MemberRow, ...]
    rounds: tuple[RoundRow, ...]
    tickets: tuple[TicketRow, ...]
    heads: Mapping[int, VersionRow]
    started: frozenset[int]
    next_ticket: int
    next_lease: int
    finished: bool
    lost: Mapping[int, int] = field(default_factory=dict)
    fell_back: str = ""
    warnings: tuple[str, ...] = ()


def now() -> str:
    """This moment, as rows write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
