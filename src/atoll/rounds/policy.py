"""When a round closes, and with which updates.

A policy is a small frozen value with one pure function over a view of the round. It decides; the machine
keeps the floor (`min_workers`, quorum, never zero) whatever a policy says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class AcceptedUpdate:
    """An update that is in the journal."""

    ticket: int
    site: str
    base_version: int


@dataclass(frozen=True, slots=True)
class RoundView:
    """What a policy may look at.

    Args:
        expected: sites whose update the round waits for or has, sorted.
        accepted: sorted by site.
        floor: the fewest updates with which this round may close, at least 1.
        floor_name: the setting that it comes from.
        opened_s: when the round opened, on the clock of `now_s`.
    """

    fragment: int
    head_version: int
    opened_s: float
    expected: tuple[str, ...]
    accepted: tuple[AcceptedUpdate, ...]
    floor: int
    floor_name: str

    @property
    def missing(self) -> tuple[str, ...]:
        """Expected sites whose update is not in."""
        here = {update.site for update in self.accepted}
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


class Policy(Protocol):
    """Decides over an open round. Pure: the same view and time give the same answer. `str()` is for people."""

    @property
    def quorum(self) -> int:
        """The fewest updates with which it ever closes a round; 0 leaves that to `min_workers`."""
        ...

    def decide(self, view: RoundView, now_s: float) -> Close | Wait:
        """Close with some of `view.accepted`, at least `view.floor` of them, or wait."""
        ...


@dataclass(frozen=True, slots=True)
class Barrier:
    """Closes when the update of every expected worker is in."""

    quorum: ClassVar[int] = 0

    def __str__(self) -> str:
        return "barrier"

    def decide(self, view: RoundView, now_s: float) -> Close | Wait:
        if len(view.expected) < view.floor:
            return Wait(f"{len(view.expected)} of {view.floor_name} {view.floor} alive: waits for another")
        if view.missing:
            return Wait(f"waits for {listed(view.missing)}")
        return Close(tuple(update.ticket for update in view.accepted))


@dataclass(frozen=True, slots=True)
class QuorumDeadline:
    """A barrier until `deadline_s` seconds after the opening; from then on `quorum` updates suffice."""

    quorum: int
    deadline_s: float

    def __str__(self) -> str:
        return f"quorum {self.quorum} after {self.deadline_s:g} s"

    def decide(self, view: RoundView, now_s: float) -> Close | Wait:
        decision = Barrier().decide(view, now_s)
        if isinstance(decision, Close):
            return decision
        deadline_s = view.opened_s + self.deadline_s
        if now_s < deadline_s:
            return Wait(decision.reason, until_s=deadline_s)
        if len(view.accepted) >= view.floor:
            return Close(tuple(update.ticket for update in view.accepted))
        return Wait(f"{decision.reason}; the deadline has passed, {len(view.accepted)} of {view.floor} updates are in")


def listed(names: Sequence[str], most: int = 3) -> str:
    """`a`, `a and b`, `a, b and c`, `a, b, c and 5 others`."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"{len(names) - most} others" if len(names) > most + 1 else names[most])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
