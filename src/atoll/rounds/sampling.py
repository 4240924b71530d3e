"""Draw the sites of a round, and choose the aggregating worker of a swarm.

H. B. McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data. arXiv 1602.05629,
algorithm 1: S_t ← a random set of m = max(C·K, 1) clients.

A draw depends only on the seed, the fragment, the version and the names of the sites. So a restarted server draws the
same sites, and a site that joins or leaves does not change the relative order of the others.

In a swarm, workers aggregate instead of the server. A version is committed only when two workers, the aggregator
and the checker, have it together with the state of the outer optimizer, and the checker has verified it. The checker
aggregates the next round, so that the work rotates, unless the user has named other aggregators.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from blake3 import blake3


@dataclass(frozen=True, slots=True)
class Sampling:
    """The rule by which sites are drawn for a round.

    Args:
        fraction: C, share of the live sites to draw; 1 draws all.
        minimum: minimum number of sites to draw; if fewer are live, all are drawn.
        seed: random seed of the draws.
    """

    fraction: float = 1.0
    minimum: int = 1
    seed: int = 0

    def size(self, sites: int) -> int:
        """Return the number of sites to draw if `sites` sites are live."""
        share = math.ceil(self.fraction * sites - 1e-9)  # 0.1 · 30 is 3.0000000000000004
        return min(sites, max(self.minimum, share))

    def draw(self, sites: Collection[str], fragment: int, base_version: int, at_least: int = 1) -> list[str]:
        """Draw the sites that take part in a round, and return them sorted by name.

        Args:
            sites: the live sites.
            fragment: index of the fragment (part of the model); 0 if the model is not divided.
            base_version: version that the round starts from.
            at_least: minimum number of sites to draw; if fewer are live, all are drawn.
        """
        count = max(at_least, self.size(len(sites)))

        def rank(site: str) -> bytes:
            return blake3(f"{self.seed}/{fragment}/{base_version}/{site}".encode()).digest()

        return sorted(sorted(sites, key=rank)[:count])


HOLDERS = 2
"""In a swarm, at least this many workers hold the newest version and its outer state; fewer if the swarm is smaller."""


def ranking(sites: Collection[str], *, seed: int, fragment: int, version: int, named: Sequence[str] = ()) -> list[str]:
    """Rank the sites of a swarm as aggregators of a round, and return them, the preferred one first.

    Args:
        sites: sites that could aggregate.
        seed: random seed.
        fragment: index of the fragment (part of the model); 0 if the model is not divided.
        version: version that the round starts from.
        named: sites that the user named as aggregators. They come before all others, and take turns in being first.
    """

    def drawn(site: str) -> bytes:
        return hashlib.sha256(f"{seed}/{fragment}/{version}/{site}".encode()).digest()

    start = version % len(named) if named else 0
    first = [site for site in (*named[start:], *named[:start]) if site in sites]
    return [*first, *sorted(set(sites) - set(first), key=drawn)]


def aggregator_of(
    order: Sequence[str],
    holders: Collection[str],
    excluded: Collection[str],
    before: Collection[str],
    named: Collection[str] = (),
) -> str | None:
    """Return the site of a swarm that aggregates a round; None if no site has the base version.

    Args:
        order: sites in order of preference, from `ranking`.
        holders: sites that have the base version.
        excluded: sites that failed in this round, oldest failure first. They are chosen, in this order, only if no
            other site is left.
        before: aggregator of the previous round, and sites that failed in a recent round. Any other site that may be
            chosen and has not failed in this round is preferred to them.
        named: sites that the user named as aggregators. Other sites are chosen only if every named site has failed in
            this round or does not have the base version.
    """
    able = [site for site in order if site in holders]
    fresh = [site for site in able if site not in excluded]
    again = [site for site in excluded if site in able]
    candidates = [site for site in fresh if site in named] or fresh
    return next((site for site in candidates if site not in before), None) or next(iter(candidates or again), None)


def choose_holders(order: Sequence[str], holders: Collection[str]) -> set[str]:
    """Return the sites of a swarm that should store the newest version: at least `HOLDERS`, if there are that many.

    Args:
        order: sites in order of preference; they are added if too few sites have the version.
        holders: sites that have the version.
    """
    others = [site for site in order if site not in holders]
    return {*holders, *others[: max(0, HOLDERS - len(holders))]}
