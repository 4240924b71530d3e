"""Windows reduced by a few threads, ahead of the one that steps, writes and hashes them in order.

A part is one job of a pass: with fewer parts than threads some would be idle, and to reduce the updates of many sites
takes far longer than all that follows from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future

from atoll.aggregation.scratch import Scratch
from atoll.aggregation.windows import Window

MANY_UPDATES = 100
"""Fewer are reduced in about the time that it takes to hand a window from thread to thread."""
LEAST_ELEMENTS = 2**16
"""Of a window that is cut smaller to be shared: with shorter ones the calls take longer than what they do."""


def helpers_for(threads: int, parts: int, updates: int) -> int:
    """How many of a pass' threads reduce ahead, for each that has a part; 0 where every one has, or little to do.

    Where a reducer takes all rows together none is worth it, and each would need memory for as many rows.
    """
    helpers = threads // max(parts, 1)
    return helpers if helpers > 1 and updates >= MANY_UPDATES else 0


def elements_for(helpers: int, part_elements: int) -> int:
    """Of a window, so that each helper has one of the largest part; a quarter more, as a bias goes with its weight."""
    return max(LEAST_ELEMENTS, part_elements * 5 // (4 * helpers))


class Ahead:
    """The windows of one thread at a time, with what they were reduced to.

    Args:
        reduce_: brings the reduction of a window into a scratch; called by several threads, each with its own.
        scratch: of the thread itself, which reduces where it has no helpers.
        pool: the threads of helpers, shared.
        helpers: how many of them may work for this one; each needs memory.
        elements: of a scratch.
    """

    def __init__(
        self,
        reduce_: Callable[[Window, Scratch], None],
        scratch: Scratch,
        pool: Executor | None,
        helpers: int,
        elements: int,
    ) -> None:
        self._reduce, self._own, self._pool = reduce_, scratch, pool
        self._free = [Scratch(elements) for _ in range(helpers + 1)] if pool is not None else []

    def of(self, windows: Iterable[Window]) -> Iterator[tuple[Window, Scratch]]:
        """Each window in order, and the scratch that holds what it was reduced to until the next one is asked for.

        Raises:
            Exception: what reducing it has raised.
        """
        if self._pool is None:
            for window in windows:
                self._reduce(window, self._own)
                yield window, self._own
            return
        begun: deque[tuple[Window, Scratch, Future[None]]] = deque()
        coming = iter(windows)
        try:
            while self._begin(coming, begun, self._pool):
                window, scratch, reduced = begun.popleft()
                reduced.result()
                yield window, scratch
                self._free.append(scratch)
        finally:
            for _, _, reduced in begun:
                reduced.cancel()

    def _begin(
        self, coming: Iterator[Window], begun: deque[tuple[Window, Scratch, Future[None]]], pool: Executor
    ) -> bool:
        """Have as many windows reduced as there is memory for; whether any is left."""
        while self._free and (window := next(coming, None)) is not None:
            scratch = self._free.pop()
            begun.append((window, scratch, pool.submit(self._reduce, window, scratch)))
        return bool(begun)
