"""Which of the workers that are alive a round asks for: client sampling, drawn anew each round.

H. B. McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data. arXiv 1602.05629,
algorithm 1: S_t ← a random set of m = max(C·K, 1) clients.

The draw is a function of seed, fragment, version and the names alone: a restarted server draws the same workers, and
who joins or leaves changes nothing in how the others are ranked among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Collection
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
