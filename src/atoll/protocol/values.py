"""What a worker and its run tell each other, as plain frozen values without IO.

What can become of an update or of a pull is a value here, matched once by the code that asked for it. Exceptions are
for bugs, for the own disk and for errors of the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from pydantic import Field

from atoll.errors import AtollError, Gone, TicketClosed, UpdateRefused
from atoll.protocol import messages
from atoll.protocol.messages import Count, Hex32, Message, Site, Ticket, VersionRef

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """What an update says beside its tensors.

    Attributes:
        weight: samples, tokens, or any positive number; the mean of a round is by weight.
        steps: local optimizer steps in the round; 0 where they are not counted.
        metrics: finite numbers by name.
    """

    weight: float = 1.0
    steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


# -- What comes next for one fragment.


@dataclass(frozen=True)
class Next:
    """The answer to a request for a ticket: one of the classes below, or that this worker submits nothing more.

    Attributes:
        head: the newest version of the fragment.
        round: number of the round that is open, or opens next.
        reason: what the round waits for, or why the run has ended.
        previous: what became of this site's ticket before.
        durable: the newest version that survives a power loss of the server; None: none yet.
        tasks: whether tasks are what comes now: before the rounds, or after them.
        left_s: seconds that the run may still take; None: not known.
    """

    head: VersionRef
    round: int = 0
    reason: str = ""
    previous: messages.Outcome | None = None
    durable: int | None = None
    tasks: bool = False
    left_s: float | None = None


@dataclass(frozen=True)
class Open(Next):
    """A round is open, and this site has a ticket for it.

    Attributes:
        counted: in runs with controls: the update of this site that was counted last.
    """

    ticket: Ticket = field(kw_only=True)
    counted: messages.Counted | None = None


class Wait(Next):
    """No round is open for this site yet."""


class Finished(Next):
    """The run is over, and the head is its result."""


def next_of(reply: messages.TicketReply, fragment: int) -> Next:
    """The answer in a message."""
    head = VersionRef(fragment, reply.head_version, reply.head_digest)
    said = (head, reply.round, reply.reason, reply.previous, reply.durable_version, reply.tasks, reply.left_s)
    if reply.ticket is not None:
        return Open(*said, ticket=reply.ticket, counted=reply.counted)
    return {"finished": Finished, "wait": Wait}.get(reply.status, Next)(*said)


# -- What becomes of an update, and of a pull.


class Accepted(NamedTuple):
    """The update is in the server's journal: it counts now, later, or never where its round goes on without it."""

    digest: str


class Refused(NamedTuple):
    """The server looked at the update, and it can never count: not finite, too large, or a filter refused it."""

    error: UpdateRefused


class TooLate(NamedTuple):
    """The round of the ticket went on without the update; a server that falls back may still need it."""

    error: TicketClosed | Gone


class Lost(NamedTuple):
    """The network or the other side's disk did not recover before the retries ran out. Local files stay valid."""

    error: AtollError


def require(answer: T | Lost) -> T:
    """Return an answer that is waited for as long as it takes.

    Raises:
        AtollError: there is none: the worker leaves, or something else answers at the address.
    """
    if isinstance(answer, Lost):
        raise answer.error
    return answer


Delivered = Accepted | Refused | TooLate | Lost


class Pulled(NamedTuple):
    """The version is here.

    Attributes:
        newer: what the server said of this version, where it is newer than the one that was asked for.
    """

    version: VersionRef
    newer: Next | None = None


class VersionGone(NamedTuple):
    """The server no longer keeps the version: ask for the head."""

    error: Gone


Pull = Pulled | VersionGone | Lost


class FrozenUpdate(Message):
    """One update of a round, in its frozen place."""

    ticket: Count
    site: Site
    digest: Hex32
    weight: float = Field(gt=0)
    steps: Count
    norm: float = Field(ge=0)
    scale: float = Field(gt=0, description="What staleness leaves of it.")
    staleness: Count = Field(0, description="Versions between its base and that of the round.")
    metrics: dict[str, float] = Field(default_factory=dict, exclude=True, description="Stay at the server.")
    nbytes: Count = Field(0, exclude=True)


class FrozenRound(Message):
    """A round that is closed with exactly these updates, in this order: all that its next version follows from."""

    fragment: Count
    number: Count = Field(description="Of the round.")
    base_version: Count
    version: Count = Field(description="That comes of it.")
    updates: list[FrozenUpdate]
    expected: Count = Field(0, description="Updates that it has if no site is missing; 0: an asynchronous step.")
    population: Count = Field(0, description="Sites that had joined the run.")
    population_weight: float = Field(0.0, ge=0, description="Of all of them; 0 if no reducer of the run needs it.")
    population_scale: float = Field(1.0, description="The population weight of the base divided by this one.")

    @property
    def tickets(self) -> list[int]:
        """In the frozen order."""
        return [update.ticket for update in self.updates]
