"""Which sites a round asks for, and which worker of a swarm aggregates it.

H. B. McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data. arXiv 1602.05629,
algorithm 1: S_t ← a random set of m = max(C·K, 1) clients.

The draw is a function of seed, fragment, version and the names alone: a restarted server draws the same workers, and
who joins or leaves changes nothing in how the others are ranked among themselves.

Whoever aggregates has the version and the outer state beside it, and so has at least one other worker: the next version
is real only once a second one has it. That second one aggregates the next round, so that in each round it is another;
not where the user has named who is to aggregate, and the second one is not among them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from blake3 import blake3


@dataclass(frozen=True, slots=True)
class Sampling:
    """How many are drawn, and from what.

    Args:
        fraction: C, of those alive; 1: everybody.
        minimum: drawn at least, as far as there are so many.
        seed: of the draws.
    """

    fraction: float = 1.0
    minimum: int = 1
    seed: int = 0

    def size(self, sites: int) -> int:
        """How many of so many sites a round asks for."""
        share = math.ceil(self.fraction * sites - 1e-9)  # 0.1 · 30 is 3.0000000000000004
        return min(sites, max(self.minimum, share))

    def draw(self, sites: Collection[str], fragment: int, base_version: int, at_least: int = 1) -> list[str]:
        """The sites of the round that starts from `base_version`, sorted; `at_least` so many, where there are."""
        count = max(at_least, self.size(len(sites)))

        def rank(site: str) -> bytes:
            return blake3(f"{self.seed}/{fragment}/{base_version}/{site}".encode()).digest()

        return sorted(sorted(sites, key=rank)[:count])


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
