"""Who aggregates a fragment of a swarm, and who holds its newest version: decided without IO, the same every time.

Whoever aggregates has the version and the outer state beside it, and so has at least one other worker: the next version
is real only once a second one has it. That second one aggregates the next round, so that in each round it is another;
not where the user has named who is to aggregate, and the second one is not among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

HOLDERS = 2
"""Workers that have the newest version and the outer state beside it, at least, where there are so many."""


def turn(sites: Collection[str], *, seed: int, fragment: int, version: int, named: Sequence[str] = ()) -> list[str]:
    """In which order workers are asked to aggregate the round from a version.

    Args:
        sites: who could.
        named: the user's choice, who are asked first, in turn: one round the first, the next round the second.
    """

    def drawn(site: str) -> bytes:
        return hashlib.sha256(f"{seed}/{fragment}/{version}/{site}".encode()).digest()

    start = version % len(named) if named else 0
    first = [site for site in (*named[start:], *named[:start]) if site in sites]
    return [*first, *sorted(set(sites) - set(first), key=drawn)]


def appointed(
    order: Sequence[str],
    holders: Collection[str],
    excluded: Collection[str],
    before: Collection[str],
    named: Collection[str] = (),
) -> str | None:
    """Who aggregates: the first in order who has the version and has not failed at it; nobody where nobody has it.

    Args:
        excluded: who has failed in this round, longest ago first; asked again in that order where nobody else is.
        before: who aggregated the round before, and who has failed in one of the last: asked last of the others.
        named: the user's choice; the others are asked only where none of these is able, though it be `before`.
    """
    able = [site for site in order if site in holders]
    fresh = [site for site in able if site not in excluded]
    again = [site for site in excluded if site in able]
    asked = [site for site in fresh if site in named] or fresh
    return next((site for site in asked if site not in before), None) or next(iter(asked or again), None)


def to_hold(order: Sequence[str], holders: Collection[str]) -> set[str]:
    """Who is to have the newest version: those who have it, and others until they are `HOLDERS`."""
    others = [site for site in order if site not in holders]
    return {*holders, *others[: max(0, HOLDERS - len(holders))]}
