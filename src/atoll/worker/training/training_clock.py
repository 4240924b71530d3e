"""Measures for how long training stands still, and makes the report of each update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from atoll.protocol.messages import Report


class TrainingClock:
    """Measures for how long a script waits in Atoll's calls.

    Args:
        clock: function that returns the time in seconds, as `time.monotonic` does.

    Attributes:
        waited_s: seconds of all finished waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self.waited_s = clock, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the `with` block as waiting. Do not nest such blocks."""
        since_s = self._clock()
        try:
            yield
        finally:
            self.waited_s += self._clock() - since_s

    def report(self, weight: float, steps: int, metrics: Mapping[str, float], fragment: int = 0) -> Report:
        """Return the report of an update that is about to be formed.

        Args:
            weight: weight of the update; 0: the site sits out the round.
            steps: number of local steps; 0: not counted.
            metrics: name → finite number.
            fragment: the fragment.
        """
        return Report(weight=weight, steps=steps, metrics=dict(metrics))
