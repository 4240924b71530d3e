"""Synchronisations that a DiLoCo worker skips while its server is lost: when to say so, and how often to try.

A worker whose turns are a second apart would fill its log with one line a turn, all of one cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.worker.broken_off import NetworkLost
from atoll.worker.log_lines import LOG

REPEAT_S = 300.0
"""While an outage lasts, a line is repeated after this time at the earliest."""


class Outage:
    """The time from the first synchronisation that is skipped for the network to the next one that is not.

    Args:
        clock: seconds, from any origin.

    Attributes:
        is_on: whether the last synchronisation was skipped for the network: the next ones try once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.is_on = False
        self._skipped, self._said_s = 0, 0.0

    def skipped(self, error: BaseException, site: str, what: str, why: str) -> None:
        """A synchronisation was skipped: log it, unless the same outage was logged in the last `REPEAT_S`.

        Args:
            what: the synchronisation, as the log names it.
            why: the reason, as a sentence.
        """
        was_on, self.is_on = self.is_on, isinstance(error, NetworkLost)
        now_s = self._clock()
        if not (was_on and self.is_on):
            self._skipped, self._said_s = 1, now_s
            LOG.warning("%s: synchronisation %s skipped; training goes on. %s", site, what, why)
            return
        self._skipped += 1
        if now_s - self._said_s >= REPEAT_S:
            self._said_s = now_s
            LOG.warning(
                "%s: synchronisation %s skipped, number %d since the server was lost; training goes on. %s",
                site,
                what,
                self._skipped,
                why,
            )

    def ended(self, site: str, told: str) -> None:
        """The server has answered.

        Args:
            told: what happens now, behind "the server is back".
        """
        if self.is_on:
            more = f" ({self._skipped} were skipped)" if self._skipped > 1 else ""
            LOG.info("%s: the server is back; %s%s", site, told, more)
        self.is_on = False
