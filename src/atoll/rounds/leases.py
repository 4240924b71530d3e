"""Which sites take part: leases that fence; silence for `network.heartbeat_timeout_s` ends one.

Pure functions over a mapping site → member. A lease is a number that only rises. The holder of the newest one of a site
speaks for the site; every other process of it is told so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.rounds.events import LeaseRefused
from atoll.rounds.transitions import MEMBER, advance


@dataclass(frozen=True, slots=True)
class Member:
    """A site that has joined at least once. `why` it no longer takes part is `dead`, `left` or `failed`."""

    site: str
    lease: int
    alive: bool
    why: str = ""

    @property
    def state(self) -> str:
        """Its row in the table `MEMBER`."""
        return "alive" if self.alive else self.why


Members = Mapping[str, Member]


def alive(members: Members) -> list[Member]:
    """Return the sites that take part, oldest lease first."""
    return sorted((member for member in members.values() if member.alive), key=lambda member: member.lease)


def changed(members: Members, site: str, event: str, lease: int | None = None) -> dict[str, Member]:
    """The members after `event` (of the table `MEMBER`) happened to `site`; `lease` is new when it joins.

    Raises:
        IllegalTransition: the event cannot happen to this member.
    """
    member = members.get(site)
    state = advance(f"Member {site!r}", MEMBER, member.state if member else "unknown", event)
    number = lease if lease is not None else member.lease if member else 0
    is_alive = state == "alive"
    return {**members, site: Member(site, number, is_alive, "" if is_alive else state)}


def refusal(members: Members, site: str, lease: int) -> LeaseRefused | None:
    """Why the holder of `lease` may not speak for `site`; None where it may."""
    member = members.get(site)
    if member is None:
        return LeaseRefused(site, f"{site!r} has not joined this run")
    if lease < member.lease:
        return LeaseRefused(site, f"a newer process has joined as {site!r}", superseded=True)
    if lease > member.lease:
        return LeaseRefused(site, f"lease {lease} of {site!r} is not known here")
    if not member.alive:
        because = {"dead": "was silent for too long and was declared dead"}.get(member.why, f"has {member.why}")
        return LeaseRefused(site, f"{site!r} {because}")
    return None
