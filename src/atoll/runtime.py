"""Process-wide tools: torch's threads, garbage collection, freed memory, log lines, a latch for Ctrl-C, failpoints.

torch is imported on first use, so that commands that only read a run's status start quickly.

A failpoint is a named place in the code where a test can make the process fail. For example,
`ATOLL_FAILPOINTS="accept.before=kill;pass.chunk=kill@3"` kills the process (SIGKILL) when it first reaches
`accept.before`, or when it reaches `pass.chunk` for the third time. The actions are:

    kill                  send SIGKILL to this process
    stop                  print a line on standard error, then send SIGSTOP. A test can copy the files on disk and
                          continue the process with SIGCONT.
    enospc, emfile, eio   raise this OSError
    pause:PATH            create the file PATH.reached, then wait until the file PATH exists

`@3` limits an action to the third time, `@1,2` to the first and second time. The default is `@1`. Without the variable,
a failpoint only checks whether a dict is empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any, TypeVar

from atoll.errors import LOG, end_with_one_line
from atoll.format_text import JsonLines, VisibleLines, log_level, logs_json

T = TypeVar("T")

# -- torch's threads
#
# Atoll's threads work on chunks that fit a core's cache. torch's own pool would start as many threads again inside each
# operation, for no gain. torch stores a number of threads for the process, and one for each thread. A thread copies the
# process's number on first use. `torch.set_num_threads` changes both numbers. So `_set_own_threads` first reads
# the process's number in a new thread, and finally restores it from another new thread.

_torch_lock = threading.Lock()


@contextmanager
def single_thread() -> Iterator[None]:
    """Run the block's torch operations on the calling thread alone, without torch's thread pool.

    Other threads are not affected.

    If `stay_single_threaded` was called on this thread, this does nothing.
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
    """Run all later torch operations of this thread without torch's pool. Use this as a thread pool's `initializer`."""
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
    jobs: Sequence[T],
    threads: int,
    member: Callable[[], Callable[[T], None]],
    cancelled: threading.Event | None = None,
) -> None:
    """Run all jobs on new threads, and wait for them; on the calling thread if one is enough.

    These threads use torch single-threaded.

    Args:
        jobs: the jobs; they are started in order.
        threads: maximum number of threads, at least 1.
        member: a function that each thread calls first. It returns the function that does one job.
        cancelled: an event; after it is set, no further job is started.

    Raises:
        CancelledError: `cancelled` was set before all jobs were started (the class is from concurrent.futures).
        Exception: the first error of a job. After an error, no further job is started.
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
        except BaseException as error:  # raised in the calling thread below
            failures.append(error)
            stop.set()

    count = min(threads, len(jobs))
    if count == 1:
        with single_thread():
            work()
    new = range(count if count > 1 else 0)
    started = [threading.Thread(target=work, name=f"atoll-pass-{index}", daemon=True) for index in new]
    try:
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
    finally:
        stop.set()
    if failures:
        raise failures[0]


# -- random numbers

OWN_RANDOM = random.SystemRandom()
"""Random numbers for Atoll's own pauses and choices. They leave the global generators, and so a user's seed, alone."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block with the global random numbers of torch, NumPy and Python drawn from `seed`, then restore them."""
    import numpy as np
    import torch

    of_numpy, of_python = np.random.get_state(), random.getstate()
    of_torch, before = torch.get_rng_state(), torch.initial_seed()
    devices = [each for each in (torch.cuda, torch.xpu, torch.mps) if _is_used(each)]
    of_devices = [each.get_rng_state() if each is torch.mps else each.get_rng_state_all() for each in devices]
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.manual_seed(before)  # for devices that were not in use before
        torch.set_rng_state(of_torch)
        for each, state in zip(devices, of_devices, strict=True):
            each.set_rng_state(state) if each is torch.mps else each.set_rng_state_all(state)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def _is_used(device: Any) -> bool:
    """Return whether a kind of device has begun to work in this process. Asking must not begin it."""
    import torch

    if device is torch.mps:
        return torch.backends.mps.is_available()
    return bool(device.is_initialized())


# -- the garbage collector

_gc_lock = threading.Lock()
_gc_blocks = 0  # number of open `no_gc` blocks in all threads
_gc_enabled = False  # whether the collector was enabled before the first of these blocks
_gc_mine = threading.local()  # `count`: number of open blocks in this thread


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
    """Disable the cyclic garbage collector within the block, then restore its state.

    To read or write a message with 5,000 tensors, Atoll makes so many small objects that Python would run a hundred
    collections, one of them a full one. In a process with torch, these take 0.1 s: as long as sending the tensors.
    """
    _add_gc_blocks(1)
    try:
        yield
    finally:
        _add_gc_blocks(-1)


@contextmanager
def gc_as_usual() -> Iterator[None]:
    """Let garbage collection run in this block, even inside a `no_gc` block of this thread. Use it around user code."""
    count: int = getattr(_gc_mine, "count", 0)
    _add_gc_blocks(-count)
    try:
        yield
    finally:
        _add_gc_blocks(count)


# -- the C library's memory

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
RETURNED_BYTES = 5 * 2**19


def return_freed_memory() -> None:
    """Make glibc return freed blocks of at least `RETURNED_BYTES` to the system. With other C libraries, do nothing.

    After the first free of a large block, glibc by default keeps blocks of up to 32 MiB. Small live blocks between them
    fragment the heap: a server that needs 8 MB then takes 60 MB. If the environment variable `MALLOC_MMAP_THRESHOLD_`
    is set, it takes precedence.

    `RETURNED_BYTES` is above 2 MiB, the chunk size of downloads. If the memory of each chunk came from the system, this
    would cost a tenth of the server's CPU time. For the same reason, free memory at the top of the heap is returned
    only if it is at least 8 × `RETURNED_BYTES`. With parts of 16 MiB, this avoids three out of four page
    faults, and saves 2 % of the server's CPU time.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, RETURNED_BYTES)
        mallopt(_TRIM_THRESHOLD, 8 * RETURNED_BYTES)


# -- log lines

_lines_lock = threading.Lock()


def ensure_lines() -> None:
    """Print Atoll's log lines on standard error, unless the program has set up logging.

    If the logger `atoll` has a level already, the level stays; otherwise it becomes INFO.
    """
    with _lines_lock:  # servers and training loops may start in several threads at once
        if LOG.handlers or logging.getLogger().handlers:
            return
        if logs_json():
            end_with_one_line()
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines() if logs_json() else VisibleLines("atoll: "))
        LOG.addHandler(handler)
        LOG.propagate = False
        if LOG.level == logging.NOTSET:
            LOG.setLevel(log_level())


# -- a latch

LOOK_S = 1.0
"""Seconds after which a waiting thread checks again, because a waiter that Ctrl-C ended may still hold the lock."""


class Latch:
    """An event like `threading.Event` that cannot be cleared, and for which `set` never blocks.

    `threading.Event.set` takes a lock. If Ctrl-C interrupts `wait`, the lock can stay locked, and `set` would then wait
    forever.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Set the latch: wake all waiting threads. Later calls of `wait` return at once. Idempotent."""
        self._is_set = True
        self._release()

    def is_set(self) -> bool:
        """Return whether the latch is set."""
        return self._is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the latch is set. Return False if it is not set after `timeout_s` seconds (None: no limit)."""
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_set and (left_s := until_s - time.monotonic()) > 0:
            if self._lock.acquire(timeout=min(left_s, LOOK_S)):
                self._release()  # for the next waiter
        return self._is_set

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # the lock is already free
            self._lock.release()


# -- failpoints

FAILPOINTS_VARIABLE = "ATOLL_FAILPOINTS"


def _parse(text: str) -> dict[str, tuple[str, frozenset[int]]]:
    """Parse failpoints `name=action[@nth[,nth]]`, separated by `;`, into name → (action, the numbers in nth)."""
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
    """Replace the active failpoints by those in `text`, and count from 0 again. Return the previous text."""
    global _text, _actions
    with _reached_lock:
        before, _text = _text, text
        _actions = _parse(text)
        _reached.clear()
    return before


def times_reached(name: str) -> int:
    """Return how often a failpoint was reached since `switch_failpoints_on`; 0 if the failpoint is not active."""
    return _reached.get(name, 0)


def failpoint(name: str) -> None:
    """Do the failpoint's action if a test has switched this failpoint on; else do nothing.

    Raises:
        OSError: ENOSPC, EMFILE or EIO, if the action is `enospc`, `emfile` or `eio`.
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
        threading.Event().wait()  # the signal takes a moment: meanwhile this thread must not go on
    elif action == "stop":
        os.write(2, f"failpoint {name} stops the process: {nth}\n".encode())
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # to this thread, so that it stops right here
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
        actions = "kill, stop, enospc, emfile, eio or pause:PATH"
        raise ValueError(f"{FAILPOINTS_VARIABLE}: unknown action {action!r} at {name!r}; use {actions}")
