"""Python's search for cycles, put off where tens of thousands of small objects are made that have none."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_within = 0  # blocks of all threads that put it off
_enabled = False  # whether the first of them found it on
_mine = threading.local()  # `count`: blocks of this thread


def _add(count: int) -> None:
    global _within, _enabled
    with _lock:
        if not _within:
            _enabled = gc.isenabled()
        _within += count
        if _within:
            gc.disable()
        elif _enabled:
            gc.enable()
    _mine.count = getattr(_mine, "count", 0) + count


@contextmanager
def no_collections() -> Iterator[None]:
    """Within, no collection of cycles begins; who has switched them off finds them off.

    What 5,000 tensors need of small objects would set off a hundred collections, one of them of everything: that takes
    0.1 s in a process with torch, as much as to send the tensors.
    """
    _add(1)
    try:
        yield
    finally:
        _add(-1)


@contextmanager
def collections_as_usual() -> Iterator[None]:
    """For code of the user's within `no_collections`, which may take long: this thread puts nothing off."""
    count: int = getattr(_mine, "count", 0)
    _add(-count)
    try:
        yield
    finally:
        _add(count)
