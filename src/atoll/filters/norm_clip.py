"""A bound on how far one site moves the model in a round, and noise that hides what is left.

H. B. McMahan et al., *Learning Differentially Private Recurrent Language Models*, arXiv 1710.06963, algorithm 1 (the
flat clip), with the noise added at the site, so that nobody else sees the update without it:

    Δ ← Δ · min(1, C / ‖Δ‖₂) + N(0, (z·C)²)
"""

from __future__ import annotations

import math
import secrets

import torch
from blake3 import blake3
from torch import Tensor

from atoll.errors import UsageError
from atoll.filters.base import Filter, Outgoing


class NormClip(Filter):
    """Scale the update down to a norm, and add Gaussian noise to every element.

    The norm is over all float tensors that are sent, buffers included. Which (ε, δ) this gives depends on how often a
    record is used and on the number of rounds: an accountant says it, this filter does not.

    Args:
        max_norm: C, the largest L2 norm that leaves.
        noise: z, the noise multiplier: the standard deviation is z·C for every element.
        seed: 32 bytes for tests, from which site and round make the noise; by default drawn anew for every update, and
            told to nobody: two updates of one round (the first one was refused) never share their noise.
    """

    def __init__(self, max_norm: float, noise: float = 0.0, *, seed: bytes | None = None) -> None:
        if not (math.isfinite(max_norm) and max_norm > 0):
            raise UsageError(f"NormClip: the norm {max_norm:g} is not a positive number.", "Say NormClip(1.0).")
        if not (math.isfinite(noise) and noise >= 0):
            raise UsageError(f"NormClip: the noise {noise:g} is not a number of at least 0.", "0 adds none.")
        self.max_norm, self.noise = max_norm, noise
        self._seed = seed
        self._key, self._site, self._round, self._scale = b"", "", 0, 1.0

    def __repr__(self) -> str:
        return f"NormClip({self.max_norm:g}, noise={self.noise:g})"

    def begin(self, update: Outgoing) -> None:
        """One pass over the update for ‖Δ‖₂, in fp64; and new noise."""
        squares = math.fsum(float(values.double().square().sum()) for _, _, values in update.runs())
        norm = math.sqrt(squares)
        self._scale = min(1.0, self.max_norm / norm) if norm else 1.0
        self._key = self._seed or secrets.token_bytes(32)
        self._site, self._round = update.about.site, update.about.round

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        values = values.mul_(self._scale)
        if self.noise:
            values += torch.randn(len(values), generator=self._generator(name, start), dtype=values.dtype).mul_(
                self.noise * self.max_norm
            )
        return values

    def _generator(self, name: str, start: int) -> torch.Generator:
        """Of the noise for one run: the same if the run is asked for twice, another for every run, round and site."""
        key = blake3(f"{self._site}\n{self._round}\n{start}\n{name}".encode(), key=self._key).digest(8)
        return torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))
