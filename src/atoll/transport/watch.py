"""End calls that a silent network would hold up: packets are dropped, no connection is refused or reset.

While a call is unanswered, heartbeats are sent. As long as they are answered, the call may wait: the server waits for
other sites. Two in a row that stay unanswered mean that the network is lost; every call that began before them ends.

One unanswered heartbeat is enough to distrust every older connection: the network may be back and have forgotten it, as
a firewall does. Heartbeats on new connections are answered then, and the old call never would be. So a call that began
before an unanswered heartbeat ends with the next answered one, and is tried again on a new connection.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Call(Protocol):
    """One call, or one transfer."""

    @property
    def moved_s(self) -> float:
        """When it began, or when a byte of it moved last; by `time.monotonic`."""
        ...

    def give_up(self) -> None:
        """End it with an error, from another thread."""
        ...


class Watch:
    """Watches the calls to one server. Without `begin` it does nothing.

    Attributes:
        is_lost: two heartbeats in a row stayed unanswered, and nothing was answered since.
        losses: how many heartbeats stayed unanswered. A connection from before one may be half-open.
    """

    def __init__(self) -> None:
        self.is_lost, self.losses = False, 0
        self._changed = threading.Condition()
        self._calls: set[Call] = set()
        self._heard_s = time.monotonic()
        self._missed_s = -math.inf  # when a heartbeat was given up last
        self._answers: Callable[[], bool] = lambda: True
        self._every_s = 0.0
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin(self, answers: Callable[[], bool], every_s: float) -> None:
        """Watch from now on.

        Args:
            answers: sends a heartbeat; returns whether it was answered, after `every_s` at the latest. Calls `missed`
                where it was not.
            every_s: how long a call may be unanswered before that.
        """
        if self._thread is None:
            self._answers, self._every_s = answers, every_s
            self._thread = threading.Thread(target=self._run, name="atoll-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Watch no more; returns at once."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def answered(self) -> None:
        """The server has answered something."""
        self._heard_s, self.is_lost = time.monotonic(), False

    def missed(self) -> None:
        """A heartbeat was not answered: no connection that was made before is trusted any more."""
        with self._changed:
            self._missed_s = time.monotonic()
            self.losses += 1
            self._changed.notify()

    def is_back(self) -> bool:
        """Whether the network is not lost; one that was is tried with one heartbeat."""
        if self.is_lost and self._answers():
            self.answered()
        return not self.is_lost

    @contextmanager
    def waiting(self, call: Call) -> Iterator[None]:
        """Within, the call is watched."""
        with self._changed:
            self._calls.add(call)
            if len(self._calls) == 1:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._calls.discard(call)

    def _run(self) -> None:
        while self._wait_for_quiet():
            begin_s = time.monotonic()
            if self._try(begin_s) or self._try(begin_s):
                self._give_up(min(self._missed_s, time.monotonic() - self._every_s))
                continue
            self.is_lost = True
            self._give_up(begin_s)

    def _wait_for_quiet(self) -> bool:
        """Wait until a call has been unanswered for `every_s`; False once this is closed."""
        with self._changed:
            while not self._closed:
                if not self._calls:
                    self._changed.wait()
                    continue
                since_s = min(call.moved_s for call in self._calls)
                if since_s > self._missed_s:
                    since_s = max(self._heard_s, since_s)  # else answers on new connections say nothing of this one
                left_s = since_s + self._every_s - time.monotonic()
                if left_s <= 0:
                    return True
                self._changed.wait(left_s)
        return False

    def _try(self, begin_s: float) -> bool:
        """Send a heartbeat; returns whether it was answered, or no call waits for it any more."""
        end_s = time.monotonic() + self._every_s
        if self._answers():
            self.answered()
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._closed, max(0.0, end_s - time.monotonic()))  # it may fail at once
            if self._closed:
                return True
        return self._heard_s > begin_s or not self._quiet_since(begin_s)

    def _give_up(self, since_s: float) -> None:
        """End the calls of which nothing has moved since then."""
        calls = self._quiet_since(since_s)
        with self._changed:
            self._calls.difference_update(calls)  # one that still connects ends later, and is waited for no more
        for call in calls:
            call.give_up()

    def _quiet_since(self, begin_s: float) -> list[Call]:
        with self._changed:
            return [call for call in self._calls if call.moved_s <= begin_s]
