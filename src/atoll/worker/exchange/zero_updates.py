"""Told, not silent: an update of which nothing is left once it is encoded, and one that was nothing from the start.

What a codec with error feedback loses comes later, so there a tensor is lost only where nothing of it arrives, update
after update; without, where more than `MOST` of its norm is gone. Most tensors are looked at in their first run only:
as soon as something of one arrives, it is not lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.codecs.base import Codec
from atoll.tensors.schema import Schema
from atoll.worker.log_lines import LOG, told

MOST = 0.99
"""Share of a tensor's norm that may be lost."""
PATIENCE = 3
"""Updates in a row that bring nothing of a tensor, before somebody is told whose codec has error feedback."""
NAMED = 5

Run = tuple[str, int, int]


class Losses:
    """Of one site in one run, while one process takes part.

    Attributes:
        site: whose updates these are; virtual workers of one process take turns.
        warnings: what the user should know at this moment; the server shows it.

    Args:
        site: whose updates these are.
        codec: by which `params` travel.
        schema: of the run.
    """

    def __init__(self, site: str, codec: Codec, schema: Schema) -> None:
        self.site, self._codec = site, codec
        self._narrow = sorted({spec.dtype for spec in schema.tensors if spec.dtype in ("BF16", "F16")})
        self._arrives: set[str] = set()
        self._lost: dict[str, list[float]] = {}  # name → [Σ lost², Σ sent²] of the runs that were looked at
        self._in_a_row: dict[str, int] = {}
        self._told_zero = self._told_lost = ""

    @property
    def warnings(self) -> list[str]:
        return [told(text) for text in (self._told_zero, self._told_lost) if text]

    def begin(self) -> None:
        """An update is about to be formed."""
        self._arrives.clear()
        self._lost.clear()

    def wants(self, runs: Sequence[Run]) -> bool:
        """Whether it is still to be seen what arrives of one of these tensors."""
        return not self._codec.raw and any(run[0] not in self._arrives for run in runs)

    def see(self, runs: Sequence[Run], sizes: Sequence[int], delta: Tensor, decoded: Tensor) -> None:
        """Look at what becomes of some runs.

        Args:
            runs: of which tensors.
            sizes: elements of each run and of the padding behind it, in turn.
            delta: [n], what is to be sent of them, in a row.
            decoded: [n], what arrives.
        """
        alone = len(runs) == 1
        if alone and self._codec.feedback and bool(decoded.any()):
            self._arrives.add(runs[0][0])
            return
        if not alone and int(torch.count_nonzero(delta)) == int(torch.count_nonzero(decoded)):
            self._arrives.update(run[0] for run in runs)  # of small tensors, no element has become zero
            return
        ours, theirs = (torch.split(values, list(sizes))[::2] for values in (delta, decoded))
        for (name, _, _), sent, came in zip(runs, ours, theirs, strict=True):
            whole, lost = (float(torch.linalg.vector_norm(t, dtype=torch.float64)) for t in (sent, sent - came))
            if whole == 0 or not math.isfinite(lost):  # infinite is too large, not too small: the server refuses it
                continue
            if bool(came.any()) if self._codec.feedback else not lost > MOST * whole:
                self._arrives.add(name)
            else:
                sums = self._lost.setdefault(name, [0.0, 0.0])
                sums[0], sums[1] = sums[0] + lost**2, sums[1] + whole**2

    def end(self, is_zero: bool, steps: int, filters: bool) -> None:
        """The update is formed: say what there is to say, of lost tensors once.

        Args:
            is_zero: whether the pseudo-gradient was nothing, before it was encoded.
            steps: local steps behind it; 0 where nobody counts them.
            filters: whether it has passed through filters before.
        """
        self._told_zero = self._zero(steps, filters) if is_zero else ""
        if is_zero:
            LOG.warning("%s: %s", self.site, self._told_zero)
        lost = {name: sums for name, sums in self._lost.items() if name not in self._arrives}
        self._in_a_row = {name: self._in_a_row.get(name, 0) + 1 for name in lost}
        patience = PATIENCE if self._codec.feedback else 1
        silent = {name: sums for name, sums in lost.items() if self._in_a_row[name] >= patience}
        if silent and not self._told_lost:
            self._told_lost = self._few(silent, len(self._arrives | lost.keys()), patience)
            LOG.warning("%s: %s", self.site, self._told_lost)

    def _zero(self, steps: int, filters: bool) -> str:
        text = f"the pseudo-gradient is all zero{f' after {steps} steps' if steps else ''}"
        if filters:
            text += " behind this site's filters"
        text += ". Does the optimizer hold this model's parameters, and is its learning rate above zero?"
        if self._narrow:
            text += (
                f" Weights in {' and '.join(self._narrow)} stay as they are under steps of less than about 1/256 "
                "(F16: 1/2048) of them: train in fp32, with autocast where speed is needed."
            )
        return text

    def _few(self, lost: dict[str, list[float]], changed: int, patience: int) -> str:
        names = ", ".join(list(lost)[:NAMED]) + (f" and {len(lost) - NAMED} more" if len(lost) > NAMED else "")
        gone, whole = (math.fsum(sums[index] for sums in lost.values()) for index in (0, 1))
        share = math.sqrt(gone / whole) if 0 < whole < math.inf else 1.0
        rounds = f", {patience} times in a row" if patience > 1 else ""
        return (
            f"as {self._codec.name}, {len(lost)} of the {changed} tensors that training has changed lose "
            f"{100 * share:.3g} % of their change on the way{rounds}: {names}. It is too small for what the codec can "
            "write. Take more local steps, or a larger learning rate; or have the run use codec = 'none'."
        )
