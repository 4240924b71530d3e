"""Long polls, woken one at a time.

When a version is there, hundreds of workers ask for their ticket. If all of them woke at once, all would be served
before the event loop takes a heartbeat again. So it takes other work between any two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class FairEvent:
    """Wakes the tasks of one event loop that wait for a change, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._due: deque[asyncio.Future[None]] = deque()

    def set(self) -> None:
        """Wake every task that waits now."""
        under_way = bool(self._due)
        self._due.extend(self._waiting)
        self._waiting.clear()
        if self._due and not under_way:
            self._wake_one()

    async def wait(self, timeout_s: float) -> None:
        """Return after `set`, or after the time."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await future
        finally:
            self._waiting.pop(future, None)

    def _wake_one(self) -> None:
        while self._due:
            future = self._due.popleft()
            if not future.done():
                future.set_result(None)
                break
        if self._due:
            asyncio.get_running_loop().call_soon(self._wake_one)
