"""Which version is the best so far by a metric, and when a run has stopped getting better. Pure.

The metrics of a round describe what its workers pulled: validate the global model first, then train, then submit. So
the mean over a round's updates is credited to the version that the round started from, not to the one it led to.

    version   v ──────── round r ────────► v + 1
              measured by the workers of round r, before they train
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Measured:
    """A version and its metric, as the workers of `round` measured it."""

    version: int
    round: int
    value: float


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of the measurements so far.

    Args:
        best: the best of all.
        mark: the last value that was better by more than `min_delta` than the mark before it.
        stale: measurements since.
    """

    best: Measured | None = None
    mark: float | None = None
    stale: int = 0


@dataclass(frozen=True, slots=True)
class Tracking:
    """What is best, and how long a run may go on without getting better.

    Args:
        metric: name of the aggregated metric; empty: nothing is tracked.
        mode: whether the largest or the smallest value is best.
        patience: measurements without an improvement after which the run ends; 0: it never ends for that.
        min_delta: by how much more a value has to be better to count as an improvement.
    """

    metric: str = ""
    mode: Literal["max", "min"] = "max"
    patience: int = 0
    min_delta: float = 0.0

    def follow(self, before: Progress, measured: Measured) -> Progress:
        """The progress after one more measurement; one that is not finite says nothing."""
        value = measured.value
        if not math.isfinite(value):
            return before
        best = before.best
        if best is None or self._gain(value, best.value) > 0:
            best = measured
        if before.mark is None or self._gain(value, before.mark) > self.min_delta:
            return Progress(best, value, 0)
        return Progress(best, before.mark, before.stale + 1)

    def follow_all(self, measured: Iterable[Measured]) -> Progress:
        """The progress after measurements in the order of their rounds, from the beginning of a run."""
        return functools.reduce(self.follow, measured, Progress())

    def stops(self, progress: Progress) -> bool:
        """Whether the run ends here."""
        return bool(self.patience) and progress.stale >= self.patience

    def why(self, progress: Progress) -> str:
        """Why the run stopped early, in words; empty where it did not."""
        if not self.stops(progress) or progress.best is None:
            return ""
        more = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return (
            f"stopped early: {self.metric} has not improved{more} for {progress.stale} "
            f"round{'' if progress.stale == 1 else 's'}; the best is {progress.best.value:.6g}, "
            f"version {progress.best.version}"
        )

    def _gain(self, value: float, than: float) -> float:
        return value - than if self.mode == "max" else than - value
