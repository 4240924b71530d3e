"""A thread with an event loop that other threads start and stop."""

from __future__ import annotations

import signal
import sys
import threading

import pytest

from atoll.runtime import Latch
from atoll.testing.run import wait_until
from atoll.transport.loop_thread import LoopThread


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_start_leaves_nothing_running() -> None:
    """Ctrl-C, or an interrupted cell, before the coroutine is ready: it is stopped, and the thread has ended."""
    seen: list[str] = []

    async def main() -> None:
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        # Elsewhere, such as in a finalizer, Python may drop the exception of the signal's handler.
        wait_until(lambda: sys._current_frames()[main_thread].f_code is Latch.wait.__code__, "the start to wait")
        signal.pthread_kill(main_thread, signal.SIGINT)
        await thread.stopping.wait()
        seen.append("stopped")

    thread = LoopThread("to-be-interrupted", main)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
    assert seen == ["stopped"]
    thread.wait()
    thread.stop()
