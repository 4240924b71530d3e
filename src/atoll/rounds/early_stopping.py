"""Find the best version by a metric, and stop a run that no longer improves. Pure functions.

The workers of a round validate the pulled model first, then train, then submit. So the mean of their metrics belongs to
the version that the round started from, not to the version that the round produces.

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
class Measurement:
    """The metric of a version: the mean over the workers of `round`, which measured it before they trained."""

    version: int
    round: int
    value: float


@dataclass(frozen=True, slots=True)
class MetricProgress:
    """A summary of the measurements so far.

    Args:
        best: best measurement; None if there is none.
        mark: the value of the last improvement; None if there is none. The next improvement must be better than this
            by more than `min_delta`.
        stale: number of measurements since `mark`.
    """

    best: Measurement | None = None
    mark: float | None = None
    stale: int = 0


@dataclass(frozen=True, slots=True)
class Tracking:
    """The settings of best version tracking and early stopping.

    Args:
        metric: name of the aggregated metric; empty if none is tracked.
        mode: whether the largest or the smallest value is best.
        patience: number of measurements without an improvement after which the run ends; 0 disables early stopping.
        min_delta: a value is an improvement only if it is better than the last improvement by more than this.
    """

    metric: str = ""
    mode: Literal["max", "min"] = "max"
    patience: int = 0
    min_delta: float = 0.0

    def follow(self, before: MetricProgress, measured: Measurement) -> MetricProgress:
        """Return the progress after one more measurement. A measurement that is not finite is ignored."""
        value = measured.value
        if not math.isfinite(value):
            return before
        best = before.best
        if best is None or self._gain(value, best.value) > 0:
            best = measured
        if before.mark is None or self._gain(value, before.mark) > self.min_delta:
            return MetricProgress(best, value, 0)
        return MetricProgress(best, before.mark, before.stale + 1)

    def follow_all(self, measured: Iterable[Measurement]) -> MetricProgress:
        """Return the progress after all measurements of a run, given in the order of their rounds."""
        return functools.reduce(self.follow, measured, MetricProgress())

    def stops(self, progress: MetricProgress) -> bool:
        """Return whether the run ends now, because the metric has not improved for `patience` measurements."""
        return bool(self.patience) and progress.stale >= self.patience

    def why(self, progress: MetricProgress) -> str:
        """Return the reason why the run was stopped early, as text; empty if it was not stopped early."""
        if not self.stops(progress) or progress.best is None:
            return ""
        margin = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return (
            f"stopped early: {self.metric} has not improved{margin} for {progress.stale} "
            f"round{'' if progress.stale == 1 else 's'}; the {self.mode}imum is {progress.best.value:.6g}, "
            f"version {progress.best.version}"
        )

    def _gain(self, value: float, than: float) -> float:
        return value - than if self.mode == "max" else than - value
