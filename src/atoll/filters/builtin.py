"""Built-in filters: drop tensors (`Drop`), clip the norm and add noise (`NormClip`), round to fewer digits (`Cast`).

`NormClip` follows H. B. McMahan et al., *Learning Differentially Private Recurrent Language Models*, arXiv 1710.06963,
algorithm 1 (the flat clip). Unlike in the paper, each site adds the noise, so that no update without noise is sent:

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
    """A filter that leaves out the tensors with matching names.

    In rounds, the mean counts this site's change of a dropped tensor as zero. The site's own training of the tensor is
    lost when the site loads the next version. In tasks, the payload has None in place of a dropped tensor.

    Args:
        patterns: names, or shell-style patterns: `"head.*"`, `"*.running_mean"`.
    """

    def __init__(self, *patterns: str) -> None:
        if not patterns:
            raise UsageError("Drop() needs at least one tensor name.", 'Pass names or patterns: Drop("head.*").')
        self.patterns = patterns

    def __repr__(self) -> str:
        return f"Drop({', '.join(map(repr, self.patterns))})"

    def begin(self, update: Outgoing) -> None:
        """Refuse a pattern that matches no tensor: if it is misspelt, the tensor that was meant would be sent.

        Raises:
            UsageError: a pattern matches no tensor. The message names the pattern.
        """
        what, remedy = "model", "Print the names: `[name for name in model.state_dict()]`."
        if update.about.task:
            what, remedy = "payload", "The name of a tensor is its path in the payload, for example 'model.w'."
        names = [*update.tensors, *update.aliases, *update.model]
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    f"{self!r}: no tensor of the {what} matches {pattern!r}; nothing was sent.",
                    nearest(pattern, names, remedy),
                )

    def keeps(self, spec: TensorSpec) -> bool:
        """Return False if the tensor's name matches a pattern. Patterns are case-sensitive."""
        return not any(fnmatchcase(spec.name, pattern) for pattern in self.patterns)


class NormClip(Filter):
    """A filter that scales the update down to a maximum norm, and adds Gaussian noise to every element.

    The norm covers all float tensors that are sent, including buffers. The privacy guarantee (ε, δ) depends on how
    often a record is used and on the number of rounds. Compute it with a privacy accountant.

    Args:
        max_norm: C, the maximum L2 norm.
        noise: z, the noise multiplier: the noise of each element has the standard deviation z·C.
        seed: 32 bytes that determine the noise of each site and round; only for tests. By default, every update gets a
            new secret seed: if the server refuses an update, the next one of that round has other noise.
    """

    def __init__(self, max_norm: float, noise: float = 0.0, *, seed: bytes | None = None) -> None:
        if not (math.isfinite(max_norm) and max_norm > 0):
            raise UsageError(f"NormClip: max_norm {max_norm:g} is not positive and finite.", "Write NormClip(1.0).")
        if not (math.isfinite(noise) and noise >= 0):
            raise UsageError(f"NormClip: the noise {noise:g} is negative or not finite.", "Use 0 for no noise.")
        self.max_norm, self.noise = max_norm, noise
        self._seed = seed
        self._key, self._site, self._round, self._scale = b"", "", 0, 1.0

    def __repr__(self) -> str:
        return f"NormClip({self.max_norm:g}, noise={self.noise:g})"

    def begin(self, update: Outgoing) -> None:
        """Compute the update's L2 norm in fp64, in one pass over the data, and draw a new secret key for the noise.

        If squares of huge fp64 values overflow, two more passes find the largest value, then the norm of all values
        divided by it.
        """
        largest, norm = 1.0, _norm(update, 1.0)
        if math.isinf(norm):
            largest = max(float(values.abs().max()) for _, _, values in update.runs())
            norm = _norm(update, largest) if math.isfinite(largest) else norm
        self._scale = min(1.0, self.max_norm / largest / norm) if norm else 1.0
        self._key = self._seed or secrets.token_bytes(32)
        self._site, self._round = update.about.site, update.about.round

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        """Scale the elements in place by the factor from `begin`. Add noise, which is drawn with this update's key."""
        values = values.mul_(self._scale)
        if self.noise:
            values += torch.randn(len(values), generator=self._generator(name, start), dtype=values.dtype).mul_(
                self.noise * self.max_norm
            )
        return values

    def _generator(self, name: str, start: int) -> torch.Generator:
        """Return a noise generator for one range of elements, seeded with key, site, round, tensor name and `start`."""
        # one for each range, since a range may be filtered again, and must get the same noise
        key = blake3(f"{self._site}\n{self._round}\n{start}\n{name}".encode(), key=self._key).digest(8)
        return torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))


def _norm(update: Outgoing, unit: float) -> float:
    """Return the L2 norm of an update's values / `unit`; infinity if it overflows fp64."""
    try:
        return math.sqrt(math.fsum(float((values.double() / unit).square().sum()) for _, _, values in update.runs()))
    except OverflowError:  # of a sum of finite squares
        return math.inf


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Cast(Filter):
    """A filter that rounds all values to those of a narrower dtype.

    This does not reduce the number of bytes that are sent, which depends on the codec.

    Args:
        dtype: `bf16` or `fp16`. In fp16, magnitudes above 65,504 become infinite, and the server refuses the update.
    """

    def __init__(self, dtype: str) -> None:
        if dtype not in _DTYPES:
            raise UsageError(f"Cast({dtype!r}): only {' and '.join(_DTYPES)} are possible.", nearest(dtype, _DTYPES))
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Cast({self.dtype!r})"

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        """Round `values` to the narrower dtype, and cast them back to their own dtype."""
        return values.to(_DTYPES[self.dtype]).to(values.dtype)
