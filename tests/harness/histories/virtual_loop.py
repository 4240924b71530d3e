"""Virtual time: an event loop with a clock that jumps to the next timer, and workers that run on it without threads.

A worker's code is synchronous, and waits in threads. Here, each of its threads is a greenlet (`Green`). Where it would
wait, it switches to the event loop, which runs all else that is due, and comes back to it. So one thread runs a server
and all its sites, in an order that the seed decides.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from typing import Any

from greenlet import getcurrent, greenlet


class Stalled(Exception):
    """Nothing is going to happen any more, or too much at one moment."""


class Killed(BaseException):
    """The process that this code belongs to was killed."""


MOST_AT_ONCE = 50_000
"""Rounds of the loop without virtual time passing, after which a history is a loop without an end."""


class _NoFiles(selectors.BaseSelector):
    """A selector without files, which asyncio asks for."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        raise NotImplementedError

    unregister = modify = get_map = select = register  # type: ignore[assignment]


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a virtual clock. What would run in a thread runs on the loop, some time later.

    Args:
        delay_s: returns how long the next piece of work for a thread takes.

    Attributes:
        now_s: the time.
    """

    def __init__(self, delay_s: Callable[[], float]) -> None:
        self.now_s, self.at_once, self._delay_s = 0.0, 0, delay_s
        super().__init__(_NoFiles())

    def _run_once(self) -> None:
        """Do what asyncio's loop does in one round, where to wait is to move the clock."""
        ready, timers = self._ready, self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            if not timers:
                raise Stalled("nothing is due any more")
            if timers[0]._when > self.now_s:
                self.now_s, self.at_once = timers[0]._when, 0
        self.at_once += 1
        if self.at_once > MOST_AT_ONCE:
            raise Stalled("a loop without an end")
        while timers and timers[0]._when <= self.now_s:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def time(self) -> float:
        return self.now_s

    def _make_self_pipe(self) -> None:
        self._ssock = self._csock = None  # type: ignore[assignment]  # no other thread wakes this loop

    def _close_self_pipe(self) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()

        def run() -> None:
            if not future.cancelled():
                settle(future, func, *args)

        self.call_later(self._delay_s(), run)
        return future


def settle(future: Any, work: Callable[..., Any], *args: Any) -> None:
    """Give a future the result or the error of `work`."""
    try:
        result = work(*args)
    except BaseException as error:
        if not future.done():
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(f"ended by {error!r}"))
    else:
        if not future.done():  # the work itself may have led to its cancellation
            future.set_result(result)


class InlineExecutor:
    """An executor with a `submit` that runs the work at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        settle(future, lambda: work(*args, **more))
        return future

    def shutdown(self, **_: Any) -> None:
        """Do nothing: there is no thread."""


def run_jobs(jobs: Iterable[Any], threads: int, member: Callable[[], Callable[[Any], None]], *_: Any) -> None:
    """Do what `atoll.runtime.run_jobs` does, without threads."""
    do = member()
    for job in jobs:
        do(job)


# -- greenlets in the place of threads


class Process:
    """A process of a site: its greenlets end together.

    Attributes:
        killed: whether it was killed. frozen: whether it stands still (SIGSTOP), so that it goes on with `thaw`.
    """

    def __init__(self, name: str, loop: VirtualLoop) -> None:
        self.name, self.loop, self.killed, self.frozen = name, loop, False, False
        self.greens: list[Green] = []
        self._held: list[Green] = []

    def spawn(self, work: Callable[[], object]) -> Green:
        green = Green(self, work)
        self.greens.append(green)
        self.loop.call_soon(green.resume)
        return green

    def kill(self) -> None:
        """End all greenlets: where they wait, they raise `Killed`. None of them waits any more."""
        self.killed = True
        for green in self.greens:
            self.loop.call_soon(green.resume)

    def hold(self, green: Green) -> None:
        self._held.append(green)

    def thaw(self) -> None:
        self.frozen = False
        held, self._held = self._held, []
        for green in held:
            self.loop.call_soon(green.resume)

    @property
    def ended(self) -> bool:
        return all(green.dead for green in self.greens)


class Green:
    """A thread of a site's process, as a greenlet under the one of the event loop."""

    def __init__(self, process: Process, work: Callable[[], object]) -> None:
        self.process, self._work, self._done = process, work, process.loop.create_future()
        self._greenlet = _Greenlet(self._run)
        self._greenlet.green = self
        self.awaited: asyncio.Future[Any] | None = None

    @property
    def dead(self) -> bool:
        return self._done.done()

    def _run(self) -> None:
        try:
            if not self.process.killed:
                self._work()
        except Killed:
            pass
        finally:
            self._done.set_result(None)

    def resume(self) -> None:
        """Go on, called by the event loop, if what the greenlet waits for is there."""
        if self.dead or (self.awaited is not None and not self.awaited.done() and not self.process.killed):
            return
        if self.awaited is None and self._greenlet:  # it runs, or has just begun to wait for something else
            return
        if self.process.frozen and not self.process.killed:
            self.process.hold(self)
            return
        self._greenlet.parent = getcurrent()
        self._greenlet.switch()

    def join(self, timeout_s: float | None = None) -> None:
        wait_for(self._done, timeout_s)


class _Greenlet(greenlet):
    green: Green


def current_green() -> Green | None:
    """The greenlet that runs; None on the event loop itself."""
    return getattr(getcurrent(), "green", None)


def wait_for(future: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
    """Let the calling greenlet wait for a future. Return whether it is done.

    Raises:
        Killed: the process was killed.
    """
    green = current_green()
    assert green is not None, "only a site may wait here"
    loop, process = green.process.loop, green.process
    if process.killed:
        raise Killed
    due = loop.create_future()
    timer = None if timeout_s is None else loop.call_later(max(0.0, timeout_s), _end, due)

    def end(_: object) -> None:
        _end(due)

    future.add_done_callback(end)
    due.add_done_callback(lambda _: green.resume())
    green.awaited = due
    if future.done():
        _end(due)
    green._greenlet.parent.switch()
    green.awaited = None
    future.remove_done_callback(end)
    if timer is not None:
        timer.cancel()
    if process.killed:
        raise Killed
    return future.done()


def _end(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(None)


def sleep(seconds: float) -> None:
    """Let the calling greenlet wait."""
    green = current_green()
    assert green is not None
    wait_for(green.process.loop.create_future(), seconds)


class GreenEvent:
    """`threading.Event` and `atoll.runtime.Latch` for greenlets."""

    def __init__(self) -> None:
        self._is_set, self._waiting = False, list[asyncio.Future[Any]]()

    def set(self) -> None:
        self._is_set = True
        for future in self._waiting:
            _end(future)
        self._waiting.clear()

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        if not self._is_set and (timeout_s is None or timeout_s > 0):
            green = current_green()
            assert green is not None
            future = green.process.loop.create_future()
            self._waiting.append(future)
            wait_for(future, timeout_s)
        return self._is_set


class GreenLock:
    """`threading.Lock` for greenlets."""

    def __init__(self) -> None:
        self._free: GreenEvent | None = None

    def __enter__(self) -> None:
        while self._free is not None:
            self._free.wait()
        self._free = GreenEvent()

    def __exit__(self, *_: object) -> None:
        free, self._free = self._free, None
        if free is not None:
            free.set()


class GreenThread:
    """`threading.Thread` as a greenlet of the calling one's process."""

    def __init__(self, *, target: Callable[..., object], name: str = "", daemon: bool = True) -> None:
        self._target, self._green = target, None

    def start(self) -> None:
        green = current_green()
        assert green is not None
        self._green = green.process.spawn(self._target)

    def join(self, timeout_s: float | None = None) -> None:
        if self._green is not None:
            self._green.join(timeout_s)

    def is_alive(self) -> bool:
        return self._green is not None and not self._green.dead


class GreenThreading:
    """What the worker uses of the module `threading`."""

    Event, Lock, RLock, Thread = GreenEvent, GreenLock, threading.RLock, GreenThread


class GreenExecutor:
    """`ThreadPoolExecutor` with a greenlet for each piece of work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any, **more: Any) -> Future[Any]:
        future, green = Future[Any](), current_green()
        assert green is not None

        def run() -> None:
            try:
                settle(future, lambda: work(*args, **more))
            finally:
                if not future.done():
                    future.cancel()

        made = green.process.spawn(run)
        future.green = made  # type: ignore[attr-defined]
        return future

    def shutdown(self, **_: Any) -> None:
        """Do nothing: greenlets end by themselves."""


def wait_for_all(futures: Sequence[Future[Any]], return_when: str = "") -> tuple[set[Future[Any]], set[Future[Any]]]:
    """Do what `concurrent.futures.wait` does, for the futures of a `GreenExecutor`."""
    for future in futures:
        future.green.join()  # type: ignore[attr-defined]
        if return_when == FIRST_EXCEPTION and future.exception() is not None:
            break
    done = {future for future in futures if future.done()}
    return done, set(futures) - done
