"""An asyncio event loop in a thread of its own, beside a program that is not asynchronous."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from atoll.errors import UsageError
from atoll.runtime import Latch

T = TypeVar("T")

ANSWER_S = 30.0
"""How long a call waits for the loop."""


class LoopThread:
    """Runs a coroutine in a daemon thread; made for one `start`.

    Args:
        name: of the thread.
        main: the coroutine function. It calls `ready` once calls can be answered, and returns after `stopping` is set.
        at_end: called when the coroutine has returned, or has raised `error`.

    Attributes:
        stopping: set by `stop`; on the loop.
        error: what the coroutine has raised.
    """

    def __init__(
        self, name: str, main: Callable[[], Coroutine[Any, Any, None]], at_end: Callable[[], None] = lambda: None
    ) -> None:
        self._main, self._at_end = main, at_end
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = False
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._ready = Latch()
        self._over = Latch()  # Thread.join, interrupted by a signal, takes the thread for one that has ended
        self.stopping = asyncio.Event()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Return once the coroutine is ready, or raise what it has raised."""
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        self._ready.wait()
        if self.error is not None:
            self._over.wait()
            raise self.error

    def ready(self) -> None:
        """Let `start` return."""
        self._ready.set()

    def call(self, work: Callable[[], T], ended: UsageError) -> T:
        """Call a function on the loop, where nothing else runs meanwhile.

        Raises:
            UsageError: `ended`, if the coroutine has returned.
        """
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def on_loop() -> None:
            if not self._ended and answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(work())
                except BaseException as error:
                    answer.set_exception(error)

        self._calls.add(answer)
        try:
            self._soon(on_loop)
            return answer.result(timeout=ANSWER_S)
        except (RuntimeError, concurrent.futures.CancelledError):
            if not answer.done() or answer.cancelled():
                raise ended from None
            raise
        finally:
            self._calls.discard(answer)

    def stop(self) -> None:
        """Set `stopping`, and wait for the end unless this is the thread itself. Idempotent."""
        if self._loop is None:
            return
        with contextlib.suppress(RuntimeError):
            self._soon(self.stopping.set)
        if self._thread is not threading.current_thread():
            self._over.wait()

    def _soon(self, work: Callable[[], None]) -> None:
        """Schedule a call on the loop. There is no lock, which an interrupt could leave locked.

        Raises:
            RuntimeError: the loop is closed.
        """
        if self._loop is None:
            raise RuntimeError
        self._loop.call_soon_threadsafe(work)

    def wait(self) -> None:
        """Wait for the end, and raise what the coroutine has raised."""
        self._over.wait()
        if self.error is not None:
            raise self.error

    async def _serve(self) -> None:
        try:
            await self._main()
        finally:
            self._ended = True

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self.error = error
        finally:
            for call in list(self._calls):  # none comes after the loop is closed
                call.cancel()
            self._at_end()
            self._ready.set()
            self._over.set()
