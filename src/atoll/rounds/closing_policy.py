"""When a round closes, and with which updates. Why it still waits, and for which sites: `waiting`.

A policy is a small frozen value with one pure function over a view of the round. It decides; the machine
keeps the floor (`min_sites`, quorum, never zero) whatever a policy says.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.rounds.transitions import Ticket


@dataclass(frozen=True, slots=True)
class RoundView:
    """What a policy may look at.

    Args:
        expected: sites of updates that the round waits for or has, sorted.
        accepted: the tickets of updates that are in and not taken, sorted by site.
        floor: the fewest updates with which this round may close, at least 1.
        floor_name: the setting that it comes from.
        opened_s: when the round opened, on the clock of `now_s`.
        number: of the round; the first is 1.
        first_s: since when an update waits to be applied; None where none does.
        elsewhere: sites that wait for a step of another fragment, and submit nothing here before it.
    """

    fragment: int
    head_version: int
    opened_s: float
    expected: tuple[str, ...]
    accepted: tuple[Ticket, ...]
    floor: int
    floor_name: str
    number: int = 1
    first_s: float | None = None
    elsewhere: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """Expected sites without an update."""
        here = {ticket.site for ticket in self.accepted}
        return tuple(site for site in self.expected if site not in here)


@dataclass(frozen=True, slots=True)
class Close:
    """Reduce these tickets in this order."""

    tickets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing yet. `reason` continues "the round …"; `until_s` is when time alone may change the answer."""

    reason: str
    until_s: float | None = None


class Policy(ABC):
    """Decides over an open round. Pure: the same view and time give the same answer. `str()` is for people.

    Rounds wait for workers, and tickets end with their round, unless a policy says otherwise.

    Attributes:
        quorum: the fewest updates with which it ever closes a round; 0 leaves that to `min_sites`.
    """

    __slots__ = ()
    quorum: int

    def is_async(self, number: int) -> bool:
        """Return whether updates against earlier versions count in this round, and tickets outlive it."""
        return False

    def awaited(self, view: RoundView) -> tuple[str, ...]:
        """Return the sites that hold this round up."""
        return view.missing

    def steps_before(self, waiting: int) -> int:
        """Return the rounds that close before that of the next update, where `waiting` updates are in and not taken."""
        return 0

    @abstractmethod
    def decide(self, view: RoundView, now_s: float) -> Close | Wait:
        """Close with some of `view.accepted`, at least `view.floor` of them, or wait."""


@dataclass(frozen=True, slots=True)
class Barrier(Policy):
    """Closes when the update of every expected worker is in."""

    quorum = 0

    def __str__(self) -> str:
        return "barrier"

    def decide(self, view: RoundView, now_s: float) -> Close | Wait:
        """Close with every accepted update once no expected site is missing, and at least `view.floor` are expected."""
        if len(view.expected) < view.floor:
            return Wait(f"waits for another site: {len(view.expected)} of {view.floor_name} {view.floor} alive")
        if missing := view.missing:
            return Wait(f"waits for {listed(missing)}")
        return Close(tuple(ticket.id for ticket in view.accepted))


@dataclass(frozen=True, slots=True)
class QuorumDeadline(Policy):
    """A barrier until `deadline_s` seconds after the opening; from then on `quorum` updates suffice."""

    quorum: int
    deadline_s: float

    def __str__(self) -> str:
        return f"quorum {self.quorum} after {self.deadline_s:g} s"

    def decide(self, view: RoundView, now_s: float) -> Close | Wait:
        """Decide as a barrier; after the deadline close as soon as `view.floor` updates are in, with all of them."""
        decision = Barrier().decide(view, now_s)
        if isinstance(decision, Close):
            return decision
        deadline_s = view.opened_s + self.deadline_s
        if now_s < deadline_s:
            return Wait(decision.reason, until_s=deadline_s)
        if len(view.accepted) >= view.floor:
            return Close(tuple(ticket.id for ticket in view.accepted))
        return Wait(f"{decision.reason}; the deadline has passed, {len(view.accepted)} of {view.floor} updates are in")


@dataclass(frozen=True, slots=True)
class Async(Policy):
    """Applies updates in the order in which they were accepted, `buffer` at a time; no site waits for one that trains.

    With a buffer: FedBuff (Nguyen et al., arXiv 2106.06639), except that a site waits for the step that its update is
    part of. A step does not wait for sites that are not there: it is taken once every live site has an update in. Nor
    for sites that wait in another fragment: two sites would wait for each other.

    Args:
        buffer: K, updates of one step.
        grace_s: seconds that a step waits for more updates, from its first one on; infinite: for all sites.
        sync_rounds_first: the first rounds are barriers: from scratch, asynchronous training loses much (Liu et al.,
            arXiv 2401.09135, section 6).
    """

    quorum = 0
    buffer: int = 1
    grace_s: float = 0.0
    sync_rounds_first: int = 0

    def __str__(self) -> str:
        more = [
            f"{self.buffer} updates a step" if self.buffer > 1 else "",
            f"grace {self.grace_s:g} s" if self.grace_s else "",
            f"{self.sync_rounds_first} synchronous rounds first" if self.sync_rounds_first else "",
        ]
        return ", ".join(filter(None, ["async", *more]))

    def is_async(self, number: int) -> bool:
        """Return False for the rounds of `sync_rounds_first`, True for all later ones."""
        return number > self.sync_rounds_first

    def awaited(self, view: RoundView) -> tuple[str, ...]:
        """Return the free sites that a begun step waits for, by its buffer or grace; none where it has neither.

        In a synchronous round these are the missing sites.
        """
        if not self.is_async(view.number):
            return view.missing
        return _free(view) if view.accepted and (self.buffer > 1 or self.grace_s) else ()

    def steps_before(self, waiting: int) -> int:
        """Return how many full buffers wait; 0 with a grace time, since a step then takes all that wait."""
        return 0 if self.grace_s else waiting // self.buffer

    def decide(self, view: RoundView, now_s: float) -> Close | Wait:
        """Close once the buffer is full and the grace is over, or once no free site is missing.

        A step takes the `buffer` earliest updates; with a grace time all of them. A synchronous round is a barrier.
        """
        if not self.is_async(view.number):
            return Barrier().decide(view, now_s)
        if len(view.expected) < view.floor:
            return Wait(f"waits for another site: {len(view.expected)} of {view.floor_name} {view.floor} alive")
        if len(view.accepted) < view.floor:
            return Wait("waits for an update")
        if missing := _free(view):
            if len(view.accepted) < self.buffer:
                return Wait(f"waits for {self.buffer - len(view.accepted)} more updates of {self.buffer}")
            until_s = (now_s if view.first_s is None else view.first_s) + self.grace_s
            if self.grace_s and now_s < until_s:
                at_most = f", {self.grace_s:g} s at most" if math.isfinite(self.grace_s) else ""
                return Wait(f"waits for {listed(missing)}{at_most}", until_s)
        waiting = sorted(view.accepted, key=lambda ticket: ticket.order)
        taken = waiting if self.grace_s else waiting[: self.buffer]
        return Close(tuple(ticket.id for ticket in sorted(taken, key=lambda ticket: ticket.site)))


def _free(view: RoundView) -> tuple[str, ...]:
    """Return the sites that may submit a missing update."""
    return tuple(site for site in view.missing if site not in view.elsewhere)


def listed(names: Sequence[str], most: int = 3) -> str:
    """`a`, `a and b`, `a, b and c`, `a, b, c and 5 others`."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"{len(names) - most} others" if len(names) > most + 1 else names[most])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
