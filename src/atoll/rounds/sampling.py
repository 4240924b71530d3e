"""Which sites a round asks for, and which worker of a swarm aggregates it.

H. B. McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data. arXiv 1602.05629,
algorithm 1: S_t ← a random set of m = max(C·K, 1) clients.

The draw is a function of seed, fragment, version and the names alone: a restarted server draws the same sites, and a
site that joins or leaves does not change how the others are ranked among themselves.

The worker that aggregates has the version and the outer state beside it, and so has at least one other: the next
version is real only once a second worker has it. That second one aggregates the next round, so that the work moves on;
except if the user has named aggregators and it is not among them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from blake3 import blake3


@dataclass(frozen=True, slots=True)
class Sampling:
    """How many sites are drawn.

    Args:
        fraction: C, of the live sites; 1: all of them.
        minimum: sites that are drawn at least, as far as there are so many.
        seed: of the draws.
    """

    fraction: float = 1.0
    minimum: int = 1
    seed: int = 0

    def size(self, sites: int) -> int:
        """Return how many of so many sites a round asks for."""
        share = math.ceil(self.fraction * sites - 1e-9)  # 0.1 · 30 is 3.0000000000000004
        return min(sites, max(self.minimum, share))

    def draw(self, sites: Collection[str], fragment: int, base_version: int, at_least: int = 1) -> list[str]:
        """Return the sites of the round from `base_version`, sorted; `at_least` so many, if there are."""
        count = max(at_least, self.size(len(sites)))

        def rank(site: str) -> bytes:
            return blake3(f"{self.seed}/{fragment}/{base_version}/{site}".encode()).digest()

        return sorted(sorted(sites, key=rank)[:count])


HOLDERS = 2
"""Workers that hold the newest version and its outer state at least, if there are so many."""


def turn(sites: Collection[str], *, seed: int, fragment: int, version: int, named: Sequence[str] = ()) -> list[str]:
    """Return the order in which workers are asked to aggregate the round from a version.

    Args:
        sites: of the workers that could.
        named: the user's choice, asked first, in turn: one round the first, the next round the second.
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
    """Return the site that aggregates: the first in order with the version that has not failed; None if none has it.

    Args:
        excluded: sites that failed in this round, oldest failure first; asked again in that order if no other is left.
        before: the aggregator of the round before, and sites that failed in a recent one: asked last of the others.
        named: the user's choice; others are asked only if none of these is able, even one of `before`.
    """
    able = [site for site in order if site in holders]
    fresh = [site for site in able if site not in excluded]
    again = [site for site in excluded if site in able]
    asked = [site for site in fresh if site in named] or fresh
    return next((site for site in asked if site not in before), None) or next(iter(asked or again), None)


def to_hold(order: Sequence[str], holders: Collection[str]) -> set[str]:
    """Return the sites that shall have the newest version: its holders, and others until they are `HOLDERS`."""
    others = [site for site in order if site not in holders]
    return {*holders, *others[: max(0, HOLDERS - len(holders))]}
