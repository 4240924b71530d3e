"""Those who wait until something changes; let on one at a time.

When a version is there, hundreds of workers ask for their ticket. Woken all at once, they would all be served before
the event loop looks at a heartbeat again; so it looks between any two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class Turnstile:
    """For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._due: deque[asyncio.Future[None]] = deque()

    def open(self) -> None:
        """Whoever waits now goes on, in the order in which they came."""
        under_way = bool(self._due)
        self._due.extend(self._waiting)
        self._waiting.clear()
        if self._due and not under_way:
            self._let_one_on()

    async def wait(self, timeout_s: float) -> None:
        """Return after `open`, or after the time."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await future
        finally:
            self._waiting.pop(future, None)

    def _let_one_on(self) -> None:
        while self._due:
            future = self._due.popleft()
            if not future.done():
                future.set_result(None)
                break
        if self._due:
            asyncio.get_running_loop().call_soon(self._let_one_on)
