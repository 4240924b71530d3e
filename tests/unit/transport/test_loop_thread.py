"""A thread with an event loop that other threads start and stop."""

from __future__ import annotations

import signal
import threading

import pytest

from atoll.transport.loop_thread import LoopThread


def test_an_interrupted_start_leaves_nothing_running() -> None:
    """Ctrl-C, or an interrupted cell, before the coroutine is ready: it is stopped, and the thread has ended."""
    seen: list[str] = []

    async def main() -> None:
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGINT)
        await thread.stopping.wait()
        seen.append("stopped")

    thread = LoopThread("to-be-interrupted", main)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
    assert seen == ["stopped"]
    thread.wait()
    thread.stop()
