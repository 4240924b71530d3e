"""A few threads that do jobs in order, each with torch to itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from typing import TypeVar

from atoll.tensors.alone import stay_alone

Job = TypeVar("Job")


def run_jobs(
    jobs: Iterable[Job],
    threads: int,
    member: Callable[[], Callable[[Job], None]],
    cancelled: threading.Event | None = None,
) -> None:
    """Do every job, on `threads` threads; the calling thread only waits.

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
            stay_alone()
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
