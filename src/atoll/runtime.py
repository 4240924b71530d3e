"""What is one thing for the whole process: torch's threads, collector, memory, a latch for Ctrl-C, failpoints.

torch is imported when a thread first asks for it, so that commands that only look at a run start quickly.

A failpoint is a place where a test may stop the process. `ATOLL_FAILPOINTS="accept.before=kill;pass.chunk=kill@3"` ends
the process with SIGKILL the first time that `accept.before` is reached, and the third time that `pass.chunk` is. Other
actions: `enospc`, `emfile` and `eio` raise that OSError; `pause:PATH` creates `PATH.reached`, and waits until the file
PATH exists, so that a test can look at a process in a known place; `stop@1,2` stops the process (SIGSTOP) the first and
the second time, after a line on standard error: a test copies what lies on disk, and continues the process (SIGCONT).
Without the variable a failpoint costs one truth test of an empty dict.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

# -- torch's threads
#
# Work on runs that fit a core's cache gains nothing from torch's pool, which would start as many threads again inside
# every operation. How many torch uses is a number per thread, which a thread takes from the process's when it first
# asks; `torch.set_num_threads` sets both. So one new thread looks the process's number up, and another restores it.

_torch_lock = threading.Lock()


@contextmanager
def single_thread() -> Iterator[None]:
    """Run the body's torch operations on the calling thread only, without changing other threads.

    Costs nothing where the thread already does so (`stay_single_threaded`).
    """
    import torch

    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    _set_own_threads(1)
    try:
        yield
    finally:
        _set_own_threads(before)


def stay_single_threaded() -> None:
    """Do as `single_thread` for the rest of the calling thread's life; for threads of a pool, as its `initializer`."""
    import torch

    if torch.get_num_threads() != 1:
        _set_own_threads(1)


def _set_own_threads(threads: int) -> None:
    import torch

    with _torch_lock:
        default = _in_new_thread(torch.get_num_threads)
        torch.set_num_threads(threads)
        _in_new_thread(lambda: torch.set_num_threads(default))


def _in_new_thread(call: Callable[[], T]) -> T:
    result: list[T] = []
    thread = threading.Thread(target=lambda: result.append(call()), name="atoll-threads")
    thread.start()
    thread.join()
    return result[0]


def run_jobs(
    jobs: Iterable[T],
    threads: int,
    member: Callable[[], Callable[[T], None]],
    cancelled: threading.Event | None = None,
) -> None:
    """Do every job, on `threads` threads that use torch single-threaded; the calling thread only waits.

    Args:
        jobs: begun in order.
        threads: at least 1.
        member: called once on each thread; what it returns does that thread's jobs.
        cancelled: no further job is begun once it is set.

    Raises:
        CancelledError: (concurrent.futures) `cancelled` was set before the last job was begun.
        Exception: the first that a job raised; no further one is begun.
    """
    queue, lock, failures, stop = iter(jobs), threading.Lock(), list[BaseException](), threading.Event()

    def work() -> None:
        try:
            stay_single_threaded()
            do = member()
            while not stop.is_set():
                with lock:
                    job = next(queue, queue)
                if job is queue:
                    return
                if cancelled is not None and cancelled.is_set():
                    raise CancelledError
                do(job)  # type: ignore[arg-type]
        except BaseException as error:  # brought to the caller below
            failures.append(error)
            stop.set()

    started = [threading.Thread(target=work, name=f"atoll-pass-{index}", daemon=True) for index in range(threads)]
    try:
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
    finally:
        stop.set()
    if failures:
        raise failures[0]


# -- the garbage collector

_gc_lock = threading.Lock()
_gc_blocks = 0  # `no_gc` blocks of all threads
_gc_enabled = False  # whether the first of them found it on
_gc_mine = threading.local()  # `count`: blocks of this thread


def _add_gc_blocks(count: int) -> None:
    global _gc_blocks, _gc_enabled
    with _gc_lock:
        if not _gc_blocks:
            _gc_enabled = gc.isenabled()
        _gc_blocks += count
        if _gc_blocks:
            gc.disable()
        elif _gc_enabled:
            gc.enable()
    _gc_mine.count = getattr(_gc_mine, "count", 0) + count


@contextmanager
def no_gc() -> Iterator[None]:
    """Within, no collection of cycles begins; a collector that was off stays off.

    What 5,000 tensors need of small objects would set off a hundred collections, one of them of everything: that takes
    0.1 s in a process with torch, as much as to send the tensors.
    """
    _add_gc_blocks(1)
    try:
        yield
    finally:
        _add_gc_blocks(-1)


@contextmanager
def gc_as_usual() -> Iterator[None]:
    """For code of the user's within `no_gc`, which may take long: this thread delays no collection."""
    count: int = getattr(_gc_mine, "count", 0)
    _add_gc_blocks(-count)
    try:
        yield
    finally:
        _add_gc_blocks(count)


# -- the C library's memory

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)


def return_freed_memory(least_bytes: int = 3 * 2**19) -> None:
    """Let freed blocks of at least `least_bytes` go back to the system, where the C library is glibc.

    By itself glibc keeps such blocks once it has freed one, up to 32 MiB each; small ones that live on lie between
    them, and a server of 8 MB takes 60. A variable of glibc's (`MALLOC_MMAP_THRESHOLD_`) has precedence. The runs of
    1 MiB that a download takes are smaller: each again from the system, they cost a tenth of the server's CPU time.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, least_bytes)
        mallopt(_TRIM_THRESHOLD, least_bytes)


# -- a latch

LOOK_S = 1.0
"""A waiter that an interrupt ended may have taken the lock along; the others look again after so long."""


class Latch:
    """As `threading.Event`, but it is set once, and `set` never blocks.

    `threading.Event` takes a lock to set: Ctrl-C within `wait` may leave it locked, and `set` then waits forever.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wake all threads that wait, now and later. Idempotent."""
        self._is_set = True
        self._release()

    def is_set(self) -> bool:
        """Return whether it was set."""
        return self._is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set; return False if the time is over before."""
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_set and (left_s := until_s - time.monotonic()) > 0:
            if self._lock.acquire(timeout=min(left_s, LOOK_S)):
                self._release()  # for the next one
        return self._is_set

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is free already
            self._lock.release()


# -- failpoints

FAILPOINTS_VARIABLE = "ATOLL_FAILPOINTS"


def _parse(text: str) -> dict[str, tuple[str, frozenset[int]]]:
    """Read `name=action[@nth[,nth]]`, separated by `;`, as {name: (action, times)}."""
    actions: dict[str, tuple[str, frozenset[int]]] = {}
    for item in filter(None, text.split(";")):
        name, _, action = item.partition("=")
        action, _, times = action.partition("@")
        actions[name.strip()] = (action.strip(), frozenset(map(int, (times or "1").split(","))))
    return actions


_text = os.environ.get(FAILPOINTS_VARIABLE, "")
_actions = _parse(_text)
_reached: dict[str, int] = {}
_reached_lock = threading.Lock()


def switch_failpoints_on(text: str) -> str:
    """Switch these failpoints on in place of the present ones, and count from zero; returns what was on before."""
    global _text, _actions
    with _reached_lock:
        before, _text = _text, text
        _actions = _parse(text)
        _reached.clear()
    return before


def times_reached(name: str) -> int:
    """Return how often the failpoint `name` was reached since it was switched on."""
    return _reached.get(name, 0)


def failpoint(name: str) -> None:
    """Do what a test has switched on for this place; else nothing.

    Raises:
        OSError: ENOSPC, EMFILE or EIO, where the action is `enospc`, `emfile` or `eio`.
    """
    if not _actions or name not in _actions:
        return
    action, times = _actions[name]
    with _reached_lock:
        _reached[name] = nth = _reached.get(name, 0) + 1
    if nth in times:
        _act(name, action, nth)


def _act(name: str, action: str, nth: int) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # other threads may run for a moment; this one must not go past the point
    elif action == "stop":
        os.write(2, f"failpoint {name} stops the process: {nth}\n".encode())
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread: it does not go past the point
    elif action == "enospc":
        raise OSError(errno.ENOSPC, f"failpoint {name}: no space left on device")
    elif action == "emfile":
        raise OSError(errno.EMFILE, f"failpoint {name}: too many open files")
    elif action == "eio":
        raise OSError(errno.EIO, f"failpoint {name}: input/output error")
    elif action.startswith("pause:"):
        path = action.removeprefix("pause:")
        with open(f"{path}.reached", "w"):
            pass
        while not os.path.exists(path):
            time.sleep(0.01)
    else:
        known = "kill, stop, enospc, emfile, eio or pause:PATH"
        raise ValueError(f"{FAILPOINTS_VARIABLE}: unknown action {action!r} at {name!r}; use {known}")
