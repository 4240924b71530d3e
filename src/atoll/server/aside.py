"""Code of the user's beside the server: in threads that nobody waits for.

A pool's threads are waited for when the pool ends, and when the interpreter does: a filter that hangs would hold up the
parts of everybody else, and then the end of the server. These are daemons, a few at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TypeVar

from atoll.tensors.alone import stay_alone

T = TypeVar("T")

AT_ONCE = 8
"""Each holds a few runs of elements."""


class Aside:
    """Threads for the user's code; on an event loop."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(AT_ONCE)

    async def run(self, call: Callable[[], T]) -> T:
        """What `call` gives or raises, in a thread of its own. It goes on when its caller does not wait any more."""
        await self._room.acquire()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def tell(end: Callable[[], None]) -> None:
            self._room.release()
            if not result.done():
                end()

        def work() -> None:
            stay_alone()
            try:
                end = functools.partial(result.set_result, call())
            except BaseException as error:
                end = functools.partial(result.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(tell, end)

        threading.Thread(target=work, name="atoll-aside", daemon=True).start()
        return await result
