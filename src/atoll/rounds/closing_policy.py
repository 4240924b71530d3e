"""Closing policies: they decide when a round closes, and with which updates.

A policy decides from a `RoundView`, the facts about the round, and has no state of its own. Whatever it decides, the
round machine enforces the minimum number of updates (`RoundView.floor`).

`StayOpen.reason` says why a round waits. `State.why` in state.py passes this text on, and the coordinator adds what is
known of the missing sites.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from atoll.format_text import listed, number_of
from atoll.rounds.transitions import IssuedTicket


@dataclass(frozen=True, slots=True)
class RoundView:
    """The facts about a round from which a policy decides.

    Args:
        fragment: index of the fragment (part of the model); 0 if the model is not divided.
        head_version: version that the round starts from.
        opened_s: time when the round opened, on the same clock as `now_s`.
        expected: sites that take part in this round, with or without an accepted update, sorted.
        accepted: tickets of accepted updates that are not being aggregated yet, sorted by site.
        floor: minimum number of updates with which this round may close, at least 1.
        floor_name: name of the setting that determines `floor`.
        number: number of the round; the first is 1.
        first_s: time when the round first had an accepted update: the start of the grace time; None if it has none.
        elsewhere: sites that wait for a new version of another fragment. Until they have it, they submit no update of
            this fragment.
    """

    fragment: int
    head_version: int
    opened_s: float
    expected: tuple[str, ...]
    accepted: tuple[IssuedTicket, ...]
    floor: int
    floor_name: str
    number: int = 1
    first_s: float | None = None
    elsewhere: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """Expected sites without an accepted update."""
        accepted_sites = {ticket.site for ticket in self.accepted}
        return tuple(site for site in self.expected if site not in accepted_sites)


@dataclass(frozen=True, slots=True)
class Close:
    """The decision to close the round, and to aggregate the updates of exactly these tickets, in this order."""

    tickets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StayOpen:
    """The decision that the round stays open.

    Args:
        reason: what the round waits for; it completes a sentence that begins with "the round".
        until_s: time at which the decision may change without an event; None if there is no such time.
    """

    reason: str
    until_s: float | None = None


class Policy(ABC):
    """The rule that decides when an open round closes. Its methods are pure. `str(policy)` describes it for users.

    The methods of this base class are those of synchronous rounds: such a round waits for all missing sites, and its
    open tickets expire when it closes.

    Attributes:
        quorum: minimum number of updates with which the policy closes a round; 0: `rounds.min_sites` decides.
    """

    __slots__ = ()
    quorum: int

    def is_async(self, number: int) -> bool:
        """Return whether round `number` is asynchronous: it accepts updates that were trained from earlier versions."""
        return False

    def awaited(self, view: RoundView) -> tuple[str, ...]:
        """Return the sites that this round waits for."""
        return view.missing

    def steps_before(self, waiting: int) -> int:
        """Return how many rounds the waiting updates fill.

        The next update that arrives belongs to the round after these.

        Args:
            waiting: number of accepted updates that are not being aggregated yet.
        """
        return 0

    @abstractmethod
    def decide(self, view: RoundView, now_s: float) -> Close | StayOpen:
        """Decide whether to close with at least `view.floor` of the tickets in `view.accepted`, or to wait.

        Args:
            view: the open round.
            now_s: current time in seconds.
        """


@dataclass(frozen=True, slots=True)
class Barrier(Policy):
    """The policy of synchronous runs: a round closes when the updates of all expected sites are accepted."""

    quorum = 0

    def __str__(self) -> str:
        return "waits for all sites"

    def decide(self, view: RoundView, now_s: float) -> Close | StayOpen:
        """Close with all accepted updates when every expected site has one, and there are at least `view.floor`."""
        if len(view.expected) < view.floor:
            updates = (
                f"{len(view.expected)} of {number_of(view.floor, 'update')}"  # a dead site's accepted update counts
            )
            return StayOpen(f"waits for another site: only {updates} accepted or expected ({view.floor_name})")
        if missing := view.missing:
            return StayOpen(f"waits for {listed(missing)}")
        return Close(tuple(ticket.id for ticket in view.accepted))


@dataclass(frozen=True, slots=True)
class QuorumDeadline(Policy):
    """A barrier with a deadline: when a round has been open for `deadline_s` seconds, `quorum` updates are enough."""

    quorum: int
    deadline_s: float

    def __str__(self) -> str:
        return f"quorum {self.quorum} after {self.deadline_s:g} s"

    def decide(self, view: RoundView, now_s: float) -> Close | StayOpen:
        """Decide as `Barrier` does. After the deadline, also close if at least `view.floor` updates are accepted."""
        decision = Barrier().decide(view, now_s)
        if isinstance(decision, Close):
            return decision
        deadline_s = view.opened_s + self.deadline_s
        if now_s < deadline_s:
            return StayOpen(decision.reason, until_s=deadline_s)
        if len(view.accepted) >= view.floor:
            return Close(tuple(ticket.id for ticket in view.accepted))
        return StayOpen(
            f"{decision.reason}; the deadline has passed with {len(view.accepted)} of {number_of(view.floor, 'update')}"
        )


@dataclass(frozen=True, slots=True)
class AsyncBuffer(Policy):
    """The policy of asynchronous runs: a step of the outer optimizer applies the `buffer` earliest updates.

    With `buffer` > 1 this is FedBuff (Nguyen et al., arXiv 2106.06639), with one difference: a site waits for the step
    that applies its update. So if every live site has submitted, the step does not wait for a full buffer. The step
    also does not wait for sites that wait for another fragment: otherwise sites could wait for each other forever.

    Args:
        buffer: K, number of updates that one step waits for and applies. With `grace_s`, the step applies all updates
            that have arrived, even more than K.
        grace_s: seconds for which a step waits for more updates, counted from its first update; infinity: until all
            sites have submitted.
        sync_rounds_first: number of rounds at the start that are barriers. Asynchronous training from a random
            initialisation loses much quality (Liu et al., arXiv 2401.09135, section 6).
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
        """Return False for the first `sync_rounds_first` rounds, True for all later rounds."""
        return number > self.sync_rounds_first

    def awaited(self, view: RoundView) -> tuple[str, ...]:
        """Return the sites that the next step waits for.

        In a synchronous round, these are the missing sites. In an asynchronous round with a buffer above 1 or a grace
        time, these are the missing sites that can submit; but before the first update arrives, return no sites. In an
        asynchronous round with neither, always return no sites.
        """
        if not self.is_async(view.number):
            return view.missing
        return _free(view) if view.accepted and (self.buffer > 1 or self.grace_s) else ()

    def steps_before(self, waiting: int) -> int:
        """Return how many times `waiting` updates fill the buffer.

        With a grace time, return 0: one step applies all updates.
        """
        return 0 if self.grace_s else waiting // self.buffer

    def decide(self, view: RoundView, now_s: float) -> Close | StayOpen:
        """Close when the buffer is full and the grace time is over, or once no missing site can submit.

        Close with the `buffer` earliest updates; with a grace time, close with all updates. In a synchronous round, or
        if fewer than `view.floor` sites are expected, decide as `Barrier` does.
        """
        if not self.is_async(view.number) or len(view.expected) < view.floor:
            return Barrier().decide(view, now_s)
        if len(view.accepted) < view.floor:
            return StayOpen("waits for an update")
        if missing := _free(view):
            if len(view.accepted) < self.buffer:
                return StayOpen(f"waits for {self.buffer - len(view.accepted)} more of {self.buffer} updates")
            until_s = (now_s if view.first_s is None else view.first_s) + self.grace_s
            if self.grace_s and now_s < until_s:
                at_most = f", {self.grace_s:g} s at most" if math.isfinite(self.grace_s) else ""
                return StayOpen(f"waits for {listed(missing)}{at_most}", until_s)
        waiting = sorted(view.accepted, key=lambda ticket: ticket.order)
        taken = waiting if self.grace_s else waiting[: self.buffer]
        return Close(tuple(ticket.id for ticket in sorted(taken, key=lambda ticket: ticket.site)))


def _free(view: RoundView) -> tuple[str, ...]:
    """Return the missing sites that do not wait for another fragment."""
    return tuple(site for site in view.missing if site not in view.elsewhere)
