"""Leases: a lease is the right of one process to act for its site. Pure functions of a run's members (sites).

Each new lease has a higher number. Only the process with a site's newest lease may act for the site; requests with
older leases are refused. If a process sends nothing for `network.heartbeat_timeout_s`, the site's lease ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.rounds.events import LeaseRefused
from atoll.rounds.transitions import MEMBER, advance


@dataclass(frozen=True, slots=True)
class Member:
    """A site that has joined at least once.

    Args:
        site: name of the site.
        lease: number of its newest lease.
        alive: whether the site takes part now.
        why: if the site does not take part, the reason: `dead`, `left` or `failed`.
    """

    site: str
    lease: int
    alive: bool
    why: str = ""

    @property
    def state(self) -> str:
        """State of the site: `alive`, `dead`, `left` or `failed`, as in the table of transitions `MEMBER`."""
        return "alive" if self.alive else self.why


Members = Mapping[str, Member]
"""Site → member."""


def alive(members: Members) -> list[Member]:
    """Return the members that take part now, oldest lease first."""
    return sorted((member for member in members.values() if member.alive), key=lambda member: member.lease)


def changed(members: Members, site: str, event: str, lease: int | None = None) -> dict[str, Member]:
    """Return the members after an event of one site.

    Args:
        members: the members before the event.
        site: the site.
        event: an event of the table of transitions `MEMBER`, such as "joins".
        lease: new lease number if the site joins; None keeps the old number.

    Raises:
        IllegalTransition: the event is not possible in the state of the site.
    """
    member = members.get(site)
    state = advance(f"Member {site!r}", MEMBER, member.state if member else "unknown", event)
    number = lease if lease is not None else member.lease if member else 0
    is_alive = state == "alive"
    return {**members, site: Member(site, number, is_alive, "" if is_alive else state)}


def silent(seen_s: Mapping[str, float], timeout_s: float, now_s: float) -> list[str]:
    """Return the sites that were silent for at least `timeout_s`, sorted: their leases end.

    Args:
        seen_s: live site → time of its last sign of life.
        timeout_s: `network.heartbeat_timeout_s`; 0: no lease ends by silence.
        now_s: the current time, on the same clock.
    """
    return sorted(site for site, last_s in seen_s.items() if timeout_s and now_s >= last_s + timeout_s)


def refusal(members: Members, site: str, lease: int) -> LeaseRefused | None:
    """Return the refusal if the process that holds `lease` may not act for `site`; None if it may."""
    member = members.get(site)
    if member is None:
        return LeaseRefused(site, f"{site!r} has not joined this run")
    if lease < member.lease:
        return LeaseRefused(site, f"a newer process has joined as {site!r}", superseded=True)
    if lease > member.lease:
        return LeaseRefused(site, f"the server has no lease {lease} of {site!r}")
    if not member.alive:
        because = {"dead": "was silent for too long and was declared dead"}.get(member.why, f"has {member.why}")
        return LeaseRefused(site, f"{site!r} {because}")
    return None
