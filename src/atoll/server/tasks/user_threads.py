"""Code of the user's beside the server: in threads that nobody waits for.

A pool's threads are waited for when the pool ends, and when the interpreter does: a filter that hangs would hold up the
parts of everybody else, and then the end of the server. These are daemons, a few at a time. One that takes long is
told of in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from atoll.errors import UsageError
from atoll.tensors.alone import stay_alone

LOG = logging.getLogger("atoll.server")
T = TypeVar("T")

SAY_S = 30.0
"""How long something takes before the log says so."""

AT_ONCE = 8
"""Each holds a few runs of elements."""


class UserThreads:
    """Threads for the user's code; on an event loop."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(AT_ONCE)
        self._turns: dict[str, asyncio.Lock] = {}

    async def run(self, call: Callable[[], T], what: str, whose: str, timeout_s: float | None = None) -> T:
        """What `call` gives or raises, in a thread of its own. It goes on when its caller does not wait any more, and
        then holds up nobody but those of the same `whose`.

        Args:
            what: names whose code is at what, for the log.
            whose: calls of one take turns, since filters keep state from the beginning of a payload to its end.
            timeout_s: how long its turn is waited for at most, and then how long it may take.

        Raises:
            TimeoutError: it was not done in that time.
            UsageError: it called sys.exit, or the like.
        """
        turn = self._turns.setdefault(whose, asyncio.Lock())
        async with asyncio.timeout(timeout_s):
            await turn.acquire()
        result: asyncio.Future[T] | None = None
        try:
            async with self._room:
                result = self._begin(call, what, turn)
                async with asyncio.timeout(timeout_s):
                    return await result
        finally:
            if result is None:  # no thread has come to be, which would do it
                turn.release()

    def _begin(self, call: Callable[[], T], what: str, turn: asyncio.Lock) -> asyncio.Future[T]:
        """Start the thread; its end is that of the turn."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        slow = loop.call_later(SAY_S, LOG.warning, "%s: not done after %g s. Look at their code.", what, SAY_S)

        def tell(end: Callable[[], None]) -> None:
            turn.release()
            slow.cancel()
            if not result.done():
                end()

        def work() -> None:
            stay_alone()
            try:
                end = functools.partial(result.set_result, call())
            except Exception as error:
                end = functools.partial(result.set_exception, error)
            except BaseException as error:  # one that is passed on ends the server
                ended = UsageError(f"{what} ended with {error!r}.", "Let them raise an Exception.")
                end = functools.partial(result.set_exception, ended)
            with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(tell, end)

        try:
            threading.Thread(target=work, name="atoll-user-code", daemon=True).start()
        except BaseException:
            slow.cancel()
            raise
        return result
