"""Drop tensors, clip the norm and add noise, round to fewer digits.

H. B. McMahan et al., *Learning Differentially Private Recurrent Language Models*, arXiv 1710.06963, algorithm 1 (the
flat clip), with the noise added at the site, so that the update never leaves it without noise:

    Δ ← Δ · min(1, C / ‖Δ‖₂) + N(0, (z·C)²)
"""

from __future__ import annotations

import math
import secrets
from fnmatch import fnmatchcase

import torch
from blake3 import blake3
from torch import Tensor

from atoll.errors import UsageError
from atoll.filters.base import Filter, Outgoing
from atoll.registry import nearest
from atoll.tensors.schema import TensorSpec


class Drop(Filter):
    """Do not send the tensors with matching names.

    The mean counts the change of this site to them as zero. What the site has trained in them is overwritten when it
    loads the next version. The payload of a task has None in their places.

    Args:
        patterns: names, or patterns as in a shell: `"head.*"`, `"*.running_mean"`.
    """

    def __init__(self, *patterns: str) -> None:
        if not patterns:
            raise UsageError("Drop() names no tensor.", 'Give it names or patterns: Drop("head.*").')
        self.patterns = patterns

    def __repr__(self) -> str:
        return f"Drop({', '.join(map(repr, self.patterns))})"

    def begin(self, update: Outgoing) -> None:
        """Refuse a pattern that matches no tensor: what it was to hold back would leave.

        Raises:
            UsageError: naming it.
        """
        what, remedy = "model", "Print the names with `[name for name in model.state_dict()]`."
        if update.about.task:
            what, remedy = "payload", "A tensor is called by its path in the payload, as in 'model.w'."
        names = [*update.tensors, *update.aliases, *update.model]
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    f"{self!r}: no tensor of the {what} is called {pattern!r}; nothing was sent.",
                    nearest(pattern, names, remedy),
                )

    def keeps(self, spec: TensorSpec) -> bool:
        """Return False for a name that matches one of the patterns; case matters."""
        return not any(fnmatchcase(spec.name, pattern) for pattern in self.patterns)


class NormClip(Filter):
    """Scale the update down to a norm, and add Gaussian noise to every element.

    The norm is over all float tensors that are sent, buffers included. The (ε, δ) that this gives depends on how often
    a record is used and on the number of rounds: compute it with a privacy accountant.

    Args:
        max_norm: C, the largest L2 norm that leaves.
        noise: z, the noise multiplier: the standard deviation is z·C for every element.
        seed: 32 bytes for tests, which determine the noise of each site and round. By default they are drawn anew for
            every update, and kept secret: two updates for one round (the first was refused) never share their noise.
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
        """Compute ‖Δ‖₂ in fp64, in one pass over the update, and draw a new key for the noise."""
        squares = math.fsum(float(values.double().square().sum()) for _, _, values in update.runs())
        norm = math.sqrt(squares)
        self._scale = min(1.0, self.max_norm / norm) if norm else 1.0
        self._key = self._seed or secrets.token_bytes(32)
        self._site, self._round = update.about.site, update.about.round

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        """Scale the run in place by the factor that `begin` found, then add noise from the key of this update."""
        values = values.mul_(self._scale)
        if self.noise:
            values += torch.randn(len(values), generator=self._generator(name, start), dtype=values.dtype).mul_(
                self.noise * self.max_norm
            )
        return values

    def _generator(self, name: str, start: int) -> torch.Generator:
        """Return the generator of the noise for one run, which depends on run, round and site alone."""
        key = blake3(f"{self._site}\n{self._round}\n{start}\n{name}".encode(), key=self._key).digest(8)
        return torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Cast(Filter):
    """Round what is sent to the values of a narrower dtype.

    The number of bytes stays the same: the codec decides it.

    Args:
        dtype: `bf16` or `fp16`; fp16 cannot hold more than 65504, and what is beyond becomes infinite, which the server
            refuses.
    """

    def __init__(self, dtype: str) -> None:
        if dtype not in _DTYPES:
            raise UsageError(f"Cast({dtype!r}): it casts to {' and '.join(_DTYPES)}.", nearest(dtype, _DTYPES))
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Cast({self.dtype!r})"

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        """Round to the narrower dtype and back, so that shape and dtype of `values` stay."""
        return values.to(_DTYPES[self.dtype]).to(values.dtype)
