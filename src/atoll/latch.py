"""An event that is set once, by a thread that nobody who waits for it can hold up."""

from __future__ import annotations

import contextlib
import threading
import time

LOOK_S = 1.0
"""A waiter that an interrupt ended may have taken the lock along; the others look again after so long."""


class Latch:
    """As `threading.Event`, but `set` never waits.

    That one is made of a lock in Python: Ctrl-C within `wait` may leave it locked, and `set` then waits for ever.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let all go on who wait, now and later. Idempotent."""
        self._is_set = True
        self._release()

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set; False when the time is over before."""
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_set and (left_s := until_s - time.monotonic()) > 0:
            if self._lock.acquire(timeout=min(left_s, LOOK_S)):
                self._release()  # for the next one
        return self._is_set

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is free already
            self._lock.release()
