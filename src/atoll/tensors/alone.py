"""torch to oneself: operations of the calling thread run on that thread, and nobody else's setting changes.

Work on runs that fit a core's cache gains nothing from torch's pool, which would start as many threads again inside
every operation. How many torch uses is a number per thread, which a thread takes from the process's when it first
asks; `torch.set_num_threads` sets both. So the process's number is looked up and put back, each in a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")

_lock = threading.Lock()


@contextmanager
def alone() -> Iterator[None]:
    """Run the body's torch operations on the calling thread only. Free where the thread already does (`stay_alone`)."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    _set_own(1)
    try:
        yield
    finally:
        _set_own(before)


def stay_alone() -> None:
    """`alone` for the rest of the calling thread's life; for threads of a pool, as its `initializer`."""
    if torch.get_num_threads() != 1:
        _set_own(1)


def _set_own(threads: int) -> None:
    with _lock:
        default = _in_new_thread(torch.get_num_threads)
        torch.set_num_threads(threads)
        _in_new_thread(lambda: torch.set_num_threads(default))


def _in_new_thread(call: Callable[[], Result]) -> Result:
    result: list[Result] = []
    thread = threading.Thread(target=lambda: result.append(call()), name="atoll-alone")
    thread.start()
    thread.join()
    return result[0]
