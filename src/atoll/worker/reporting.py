"""What a worker says while it works: plain lines, one an event, with bytes, rate and time left.

Lines go to the logger `atoll`. A program that has set up logging decides what becomes of them; otherwise they are
printed on standard error, so that nobody sits in front of a silent terminal.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.wire.units import size as size

LOG = logging.getLogger("atoll")
_EVERY_S = 5.0


def ensure_lines() -> None:
    """Print Atoll's lines on standard error, unless the program has set up logging."""
    if LOG.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s atoll: %(message)s", datefmt="%H:%M:%S"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False


class Progress:
    """Bytes of one transfer; says how far it is every few seconds, and at the end where that took longer."""

    def __init__(self, what: str, total_bytes: int, *, every_s: float = _EVERY_S) -> None:
        self._what, self._total, self._every_s = what, total_bytes, every_s
        self._begin = self._said = time.monotonic()
        self.done_bytes = 0

    def add(self, nbytes: int) -> None:
        self.done_bytes += nbytes
        now = time.monotonic()
        if now - self._said >= self._every_s:
            self._said = now
            rate = self.done_bytes / max(now - self._begin, 1e-9)
            left_s = max(self._total - self.done_bytes, 0) / max(rate, 1.0)
            LOG.info(
                "%s: %s of %s, %s/s, %.0f s left",
                self._what,
                size(self.done_bytes),
                size(self._total),
                size(rate),
                left_s,
            )

    def end(self) -> None:
        seconds = time.monotonic() - self._begin
        level = logging.INFO if seconds >= 1.0 else logging.DEBUG
        LOG.log(
            level,
            "%s: %s in %.1f s (%s/s)",
            self._what,
            size(self.done_bytes),
            seconds,
            size(self.done_bytes / max(seconds, 1e-9)),
        )


@contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Progress]:
    """A `Progress` that says its last line when the block ends without an error."""
    reporter = Progress(what, total_bytes)
    yield reporter
    reporter.end()
