"""Divides the time of a worker into training and standing still, and makes the report of each update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from atoll.protocol.messages import Report


class ReportClock:
    """Measures for how long a script trains, and for how long it waits in Atoll's calls.

    It begins when it is made: when the site joins.

    Args:
        clock: function that returns the time in seconds, as `time.monotonic` does.

    Attributes:
        waited_s: seconds of all finished waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self.waited_s = clock, 0.0
        self._waits_since_s: float | None = None
        self._begun_s = clock()
        self._laps: dict[int, tuple[float, float]] = {}  # fragment → time of its last update, seconds waited until then

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the `with` block as waiting. Do not nest such blocks."""
        self._waits_since_s = since_s = self._clock()
        try:
            yield
        finally:
            self.waited_s += self._clock() - since_s
            self._waits_since_s = None

    def report(self, weight: float, steps: int, metrics: Mapping[str, float], fragment: int = 0) -> Report:
        """Return the report of an update that is about to be formed, with the times since the one before.

        Args:
            weight: weight of the update; 0: the site sits out the round.
            steps: number of local steps; 0: not counted.
            metrics: name → finite number.
            fragment: the fragment. Each has times of its own; the first begin when the clock is made.
        """
        now_s = self._clock()
        waited_s = self.waited_s + (0.0 if self._waits_since_s is None else now_s - self._waits_since_s)
        begun_s, before_s = self._laps.get(fragment, (self._begun_s, 0.0))
        self._laps[fragment] = now_s, waited_s
        wait_s = waited_s - before_s
        train_s = max(0.0, now_s - begun_s - wait_s)
        return Report(weight=weight, steps=steps, metrics=dict(metrics), train_seconds=train_s, wait_seconds=wait_s)
