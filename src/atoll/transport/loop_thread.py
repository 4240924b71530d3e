"""An asyncio event loop in a thread of its own, for programs that are not asynchronous."""

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
"""Seconds that `LoopThread.call` waits for its result."""


class LoopThread:
    """A daemon thread with an asyncio event loop that runs one coroutine. Start it only once.

    Args:
        name: name of the thread.
        main: coroutine function. It must call `ready` when other threads may use `call`, and return after `stopping`
            is set.
        at_end: callback at the end of the coroutine, also if the coroutine raises.

    Attributes:
        stopping: asyncio event that `stop` sets.
        error: exception that the coroutine raised; else None.
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
        self._finished = Latch()  # not Thread.join, which after an interrupt reports a running thread as ended
        self.stopping = asyncio.Event()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start the thread, and wait until the coroutine calls `ready`. Re-raise an exception of the coroutine.

        If this thread is interrupted meanwhile, the coroutine is stopped, so that nothing is left running.
        """
        self._loop = asyncio.new_event_loop()
        try:
            self._thread.start()
            self._ready.wait()
        except BaseException:
            if self._thread.ident is not None:  # it has begun, also if `Thread.start` itself was interrupted
                self.stop()
            raise
        if self.error is not None:
            self._finished.wait()
            raise self.error

    def ready(self) -> None:
        """Let `start` return. The coroutine calls this when other threads may use `call`."""
        self._ready.set()

    def call(self, work: Callable[[], T], ended: UsageError) -> T:
        """Call a function in the event loop's thread and return its result. The loop runs nothing else meanwhile.

        Args:
            work: the function.
            ended: error to raise if the event loop's coroutine has ended.

        Raises:
            UsageError: the coroutine has ended.
            TimeoutError: no result within `ANSWER_S` seconds.
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

    def wait_for(self, work: Callable[[], Coroutine[Any, Any, T]], ended: UsageError) -> T:
        """Run a coroutine on the event loop, wait for its end without a limit, and return its result.

        If this thread is interrupted meanwhile, the coroutine is cancelled.

        Args:
            work: returns the coroutine; called on the event loop.
            ended: error to raise if the event loop's coroutine has ended.

        Raises:
            UsageError: the event loop's coroutine has ended.
            Exception: an error of `work` or of the coroutine.
        """
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def begin() -> None:
            task = asyncio.ensure_future(work())
            task.add_done_callback(finish)
            answer.add_done_callback(lambda _: self._cancel_soon(task))  # without effect if the task has ended

        def finish(task: asyncio.Future[T]) -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # the waiting thread was interrupted
                if task.cancelled():
                    answer.cancel()
                elif (error := task.exception()) is not None:
                    answer.set_exception(error)
                else:
                    answer.set_result(task.result())

        self._calls.add(answer)
        try:
            self.call(begin, ended)
            return answer.result()
        except concurrent.futures.CancelledError:
            raise ended from None
        finally:
            answer.cancel()
            self._calls.discard(answer)

    def _cancel_soon(self, task: asyncio.Future[Any]) -> None:
        def cancel() -> None:
            task.cancel()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._soon(cancel)

    def stop(self) -> None:
        """Set `stopping`, and wait until the thread has ended. If called by that thread, do not wait. Idempotent."""
        if self._loop is None:
            return
        with contextlib.suppress(RuntimeError):
            self._soon(self.stopping.set)
        if self._thread is not threading.current_thread():
            self._finished.wait()

    def _soon(self, work: Callable[[], None]) -> None:
        """Schedule a call in the event loop, without a lock: Ctrl-C could leave a lock locked.

        Raises:
            RuntimeError: the loop is closed, or was never started.
        """
        if self._loop is None:
            raise RuntimeError
        self._loop.call_soon_threadsafe(work)

    def wait(self) -> None:
        """Wait for the coroutine's end, and raise its exception if there is one."""
        self._finished.wait()
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
            for call in list(self._calls):  # the loop is closed, so there are no new calls
                call.cancel()
            self._at_end()
            self._ready.set()
            self._finished.set()
