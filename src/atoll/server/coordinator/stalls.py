"""Tells the followers of a run when it has stalled: no update and no version for an unusually long time."""

from __future__ import annotations

import logging

from atoll.format_text import duration
from atoll.protocol import run_events
from atoll.server.coordinator.extension import Extension
from atoll.server.coordinator.run_core import RunCore

LOG = logging.getLogger("atoll.server")

LONGER = 3.0
"""A round that has taken longer than this many times the longest round so far is unusual."""
PROGRESS = (run_events.UpdateAccepted, run_events.RoundEnded, run_events.TaskOpened, run_events.TaskAnswered)


class Stalls(Extension):
    """Watches the progress of a run. It is one of the extensions that Atoll brings."""

    name = "stalls"

    def __init__(self, run: RunCore) -> None:
        super().__init__(run)
        self._core, self._moved_s, self._longest_s, self._is_told = run, run.clock(), 0.0, False
        self._opened_s = dict[int, float]()
        run.events.subscribe("the watch for stalls", self.on_event)

    def on_event(self, event: run_events.Happened) -> None:
        """Note progress, and how long rounds take."""
        now_s = self._core.clock()
        if isinstance(event, run_events.RoundOpened):
            self._opened_s[event.fragment] = now_s
        elif isinstance(event, run_events.RoundEnded) and event.fragment in self._opened_s:
            self._longest_s = max(self._longest_s, now_s - self._opened_s[event.fragment])
        if isinstance(event, PROGRESS):
            self._moved_s, self._is_told = now_s, False

    def tick(self, now_s: float) -> None:
        """Tell once that nothing has moved for too long."""
        run, limit_s = self._core, self._core.settings.server.stall_s
        if run.state.paused:  # it stands still as its admin asked
            self._moved_s = now_s
        still_s = now_s - self._moved_s
        if self._is_told or not limit_s or still_s < max(limit_s, LONGER * self._longest_s):
            return
        if run.state.finished or run.failed is not None:
            return
        self._is_told = True
        reasons = [run.state.why(fragment, now_s) for fragment in range(len(run.state.rounds))]
        reason = "; ".join(dict.fromkeys(filter(None, reasons))) or "waits"
        LOG.warning("nothing has arrived for %s: the run has stalled; it %s", duration(still_s), reason)
        run.events.tell(run_events.RunStalled(reason=reason, seconds=still_s))
