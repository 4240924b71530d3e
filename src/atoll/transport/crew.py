"""Threads that move parts, and their end when whoever waits for them is interrupted.

Ctrl-C reaches the main thread alone, and most often while it waits here. The threads must then neither go on with
files that are about to be closed, nor keep the process alive until a network that stands still has timed out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from atoll.transport.lane import Lane

P = ParamSpec("P")
R = TypeVar("R")


class Crew:
    """The threads of one transfer. `crew` gives it.

    Attributes:
        ended: no part is begun once it is set.
        is_given_up: the network was lost while it waited.
    """

    def __init__(self, size: int) -> None:
        self.ended = threading.Event()
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="atoll-part")
        self._futures: list[Future[Any]] = []
        self._lock = threading.Lock()
        self._lanes: set[Lane] = set()
        self._cut = False
        self.is_given_up = False
        self.moved_s = time.monotonic()

    def moved(self) -> None:
        """Something of the transfer has moved."""
        self.moved_s = time.monotonic()

    def is_silent(self, idle_timeout_s: float) -> bool:
        """Whether nothing of the transfer has moved for so long, over any connection."""
        return time.monotonic() - self.moved_s >= idle_timeout_s

    def submit(self, work: Callable[P, R], *args: P.args, **more: P.kwargs) -> Future[R]:
        future = self._pool.submit(work, *args, **more)
        self._futures.append(future)
        return future

    @contextmanager
    def using(self, lane: Lane) -> Iterator[None]:
        """Within, the connection ends when this crew is cut."""
        with self._lock:
            self._lanes.add(lane)
            if self._cut:
                lane.cut()
        try:
            yield
        finally:
            with self._lock:
                self._lanes.discard(lane)

    def wait(self) -> None:
        """Until everything that was submitted is done."""
        # not by the threads' `join`: once interrupted, it takes a thread that still runs for one that has ended
        wait([future for future in self._futures if not future.cancelled()])
        self._pool.shutdown()

    def break_off(self) -> None:
        """No part is begun, those on their way break off; from any thread, and without waiting for them."""
        self.ended.set()
        with self._lock:
            self._cut = True
            for lane in self._lanes:
                lane.cut()

    def give_up(self) -> None:
        """As `break_off`, because the network is lost."""
        self.is_given_up = True
        self.break_off()

    def cut(self) -> None:
        """End at once: no part is begun, those on their way break off; returns when every thread has ended."""
        self.break_off()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.wait()


@contextmanager
def crew(size: int) -> Iterator[Crew]:
    """Threads for the block; it is left when they are done, or cut off where it is left by an exception."""
    crew = Crew(size)
    try:
        yield crew
        crew.wait()
    except BaseException:
        crew.cut()
        raise
