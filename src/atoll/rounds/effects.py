"""What the round machine wants done: its outputs. Values only; the server and the simulator do it, in order.

An effect marked [journal] must be in the journal before anybody is answered and before the next event is
handled; `machine.restore` starts from those. They may be written one by one, in order: `restore` mends what a
crash left between two.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.rounds.best import Measured


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """[journal] `site` takes part under `lease`; every earlier lease of it is void."""

    site: str
    lease: int


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """[journal] `site` no longer takes part. `why` is `dead`, `left` or `failed`.

    Parts that it has not been acknowledged for may be dropped; its open ticket stays until the round closes.
    """

    site: str
    lease: int
    why: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LeaseRefused:
    """The sender's lease is void. It may join again, unless `superseded`: a newer process has its place."""

    site: str
    reason: str
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """[journal] The round from `base_version` of `fragment` waits for exactly `expected`."""

    fragment: int
    base_version: int
    expected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExpectedChanged:
    """[journal] Whom an open round waits for changed: a death, a departure, a refusal, a return."""

    fragment: int
    base_version: int
    expected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TicketIssued:
    """[journal where `new`] Give `site` this ticket; the same one again as long as it is open."""

    site: str
    ticket: int
    fragment: int
    base_version: int
    new: bool


FINISHED = "finished"
"""The reason of a `TicketWithheld` when there will be no further round."""


ENDS = "it submits nothing more"
"""The reason of a `TicketWithheld` to a site that has said so."""


@dataclass(frozen=True, slots=True)
class TicketWithheld:
    """`site` has to wait: its update is in, no round is open, it counts from the next one; or `FINISHED`, or `ENDS`."""

    site: str
    fragment: int
    reason: str


@dataclass(frozen=True, slots=True)
class TicketsExpired:
    """[journal] These tickets can no longer be used; what was spooled for them is dropped."""

    tickets: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RoundReopened:
    """[journal] The round from `base_version` is open again, and so are these tickets: their updates come once more."""

    fragment: int
    base_version: int
    tickets: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """[journal] Freeze the round and reduce exactly these tickets, in this order (by site name)."""

    fragment: int
    base_version: int
    tickets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BestFound:
    """This version is better than all before it; it is kept until a better one is. The journal's metrics say it too."""

    measured: Measured


@dataclass(frozen=True, slots=True)
class RunFinished:
    """[journal] The last round is committed; workers are told, and the result is exported."""


@dataclass(frozen=True, slots=True)
class Woken:
    """Whoever waits on `fragment` should ask again."""

    fragment: int


Effect = (
    LeaseGranted
    | LeaseEnded
    | LeaseRefused
    | RoundOpened
    | ExpectedChanged
    | TicketIssued
    | TicketWithheld
    | TicketsExpired
    | RoundReopened
    | RoundClosed
    | BestFound
    | RunFinished
    | Woken
)


def for_journal(effect: Effect) -> bool:
    """Whether `effect` is marked [journal]."""
    kept = (
        LeaseGranted
        | LeaseEnded
        | RoundOpened
        | ExpectedChanged
        | TicketsExpired
        | RoundReopened
        | RoundClosed
        | RunFinished
    )
    return isinstance(effect, kept) or (isinstance(effect, TicketIssued) and effect.new)
