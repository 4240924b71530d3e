"""Immutable results of a worker's requests for tickets, of its uploads and of its downloads.

An expected outcome of an upload or a download, such as a refused update, is one of these values, which the caller
handles with `match`. Exceptions are only for bugs, local disk failures and user errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from pydantic import Field

from atoll.config.bounds import MAX_WEIGHT
from atoll.errors import AtollError, Gone, TicketClosed, UpdateRefused
from atoll.protocol import messages
from atoll.protocol.messages import Count, Hex32, Many, Message, Report, Site, Ticket, VersionRef

T = TypeVar("T")


# -- Answers to a request for a ticket.


@dataclass(frozen=True)
class Next:
    """The answer to a request for a ticket: `Open`, `Wait` or `Finished`.

    An instance of `Next` itself means that this worker submits no more updates.

    Attributes:
        head: newest version of the fragment.
        round: number of the open round, or of the next round.
        reason: what the round waits for, or why the run has ended.
        previous: state of the site's previous ticket and update; None if there is none.
        tasks: whether the run sends tasks now, before or after its rounds.
        global_step: local steps that the head has behind it.
        local_steps, config: without a ticket, what one would say for the current round.
    """

    head: VersionRef
    round: int = 0
    reason: str = ""
    previous: messages.Outcome | None = None
    tasks: bool = False
    global_step: int = 0
    local_steps: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Open(Next):
    """The answer that has a ticket for the open round.

    Attributes:
        ticket: the ticket.
        counted: the site's last counted update, in runs where sites keep local state; else None.
    """

    ticket: Ticket = field(kw_only=True)
    counted: messages.Counted | None = None


class Wait(Next):
    """No round is open for this site yet; ask again."""


class Finished(Next):
    """The run is over. The head is its result."""


def next_of(reply: messages.TicketReply, fragment: int) -> Next:
    """Convert a `TicketReply` message to `Open`, `Wait` or `Finished`; to a plain `Next` if its status is `ended`."""
    head = VersionRef(fragment, reply.head_version, reply.head_digest)
    told = (reply.global_step, reply.local_steps, reply.config)
    fields = (head, reply.round, reply.reason, reply.previous, reply.tasks, *told)
    if reply.ticket is not None:
        return Open(*fields, ticket=reply.ticket, counted=reply.counted)
    return {"finished": Finished, "wait": Wait}.get(reply.status, Next)(*fields)


# -- Outcomes of uploads and downloads.


class Accepted(NamedTuple):
    """The server has recorded the update in its journal. The update counts when a version made from it is committed."""

    digest: str


class SatOut(NamedTuple):
    """The server has recorded in its journal that the site sits out the round."""


class Refused(NamedTuple):
    """The server has refused the update for good, for example because it contains NaN, or a filter refused it."""

    error: UpdateRefused


class TooLate(NamedTuple):
    """The server no longer accepts the update under its ticket, usually because the round closed without the update.

    The update may still be needed later, if a crash makes the server lose versions and repeat the round.
    """

    error: TicketClosed | Gone


class Lost(NamedTuple):
    """All retries failed because of the network or the server's disk. The worker's files stay valid."""

    error: AtollError


def require(answer: T | Lost) -> T:
    """Return an answer. If it is a `Lost`, raise its error.

    Use this function for requests that are retried without limit: such a request fails only if the worker leaves, or if
    a program that is not the run's server answers at the address.

    Raises:
        AtollError: the answer is a `Lost`.
    """
    if isinstance(answer, Lost):
        raise answer.error
    return answer


Delivered = Accepted | Refused | TooLate | Lost


class Pulled(NamedTuple):
    """The version was downloaded.

    Attributes:
        version: the downloaded version.
        newer: the server's answer that named the version, if it is newer than the requested one; else None.
    """

    version: VersionRef
    newer: Next | None = None


class VersionGone(NamedTuple):
    """The server has deleted the version. Ask for the newest version (the head) instead."""

    error: Gone


Pull = Pulled | VersionGone | Lost


class FrozenUpdate(Message):
    """One update of a closed round.

    In a swarm, the aggregating worker gets what the pass needs. The report as a whole stays at the server.
    """

    ticket: Count
    site: Site
    digest: Hex32
    weight: float = Field(gt=0)
    steps: Count
    norm: float = Field(ge=0)
    scale: float = Field(gt=0, description="Factor for the update's weight because of staleness.")
    staleness: Count = Field(0, description="Versions between the update's base and the round's base.")
    report: Report = Field(default_factory=Report, exclude=True)
    nbytes: Count = Field(0, exclude=True)


class FrozenRound(Message):
    """A closed round: the base version and the ordered updates from which the next version is made."""

    fragment: Count
    number: Count = Field(description="Number of the round.")
    base_version: Count
    version: Count = Field(description="Number of the new version.")
    updates: Many[FrozenUpdate]
    expected: Count = Field(0, description="Number of updates if no site is missing; 0: an asynchronous step.")
    population: Count = Field(0, description="Number of sites that had joined the run.")
    population_weight: float = Field(0.0, ge=0, description="Estimated weight of all sites; 0: not needed.")
    population_scale: float = Field(
        1.0, ge=0, le=MAX_WEIGHT, description="Previous round's population weight, divided by this round's."
    )
    from_zero: bool = Field(False, description="The base version's tensors of the algorithm count as zero.")
    global_step: float = Field(0.0, exclude=True)
    sat_out: Many[Site] = Field(default_factory=list, exclude=True)

    @property
    def tickets(self) -> list[int]:
        """Ticket numbers of the updates, in the order of `updates`."""
        return [update.ticket for update in self.updates]
