"""An event for requests that wait at the server (long polls). It wakes them one at a time.

A new version wakes hundreds of waiting requests. If all woke at once, the event loop would answer all of them before
the next heartbeat. With this event, the loop handles other requests between two wake-ups.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class FairEvent:
    """An event that wakes the waiting tasks of one event loop one by one, in the order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._due: deque[asyncio.Future[None]] = deque()

    def set(self) -> None:
        """Wake all tasks that are waiting now, one after another."""
        is_waking = bool(self._due)
        self._due.extend(self._waiting)
        self._waiting.clear()
        if self._due and not is_waking:
            self._wake_one()

    async def wait(self, timeout_s: float) -> None:
        """Wait for the next `set`, for at most `timeout_s` seconds."""
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
