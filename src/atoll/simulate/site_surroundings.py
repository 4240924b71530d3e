"""What a script finds at a site, simulated or not: its random numbers, and its place among all sites."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from blake3 import blake3


class SiteSeeds:
    """Seeds torch, random and NumPy, so that a site draws the same numbers in every process, simulated or not.

    Args:
        seed: the run's seed.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        built_for = (torch.version.cuda, torch.version.hip, getattr(torch.version, "xpu", None))  # opens no device
        is_cpu = not any(built_for) and not torch.backends.mps.is_built()
        # torch.manual_seed also seeds all devices, which takes 100 × longer
        self._seed_torch = torch.default_generator.manual_seed if is_cpu else torch.manual_seed

    def begin(self, site: str = "", round_: int = 0) -> None:
        """Begin the random numbers of a site's round, by the run's seed, the site's name and the number of the round.

        Args:
            site: the site; empty for what is drawn while the script is loaded.
            round_: the round; 0 for what the site draws before its rounds: it is the same in each of them.
        """
        drawn = int.from_bytes(blake3(f"{self._seed} {round_} {site}".encode()).digest(8), "little")
        self._seed_torch(drawn)
        random.seed(drawn)
        np.random.seed(drawn % 2**32)


@contextmanager
def environment_of(places: Mapping[str, int], site: str) -> Iterator[None]:
    """Set ATOLL_SITE_NUMBER and ATOLL_SITES inside the `with` block: the site's place among all sites, and how many.

    Args:
        places: name of a site → its place, from 1.
        site: the site.
    """
    own = {"ATOLL_SITE_NUMBER": str(places.get(site, 1)), "ATOLL_SITES": str(len(places))}
    os.environ |= own
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)
