"""The latch that a server's end is told by: whoever waits, and however that ends, holds nobody up."""

from __future__ import annotations

import threading

import pytest

from atoll import runtime as module
from atoll.runtime import Latch


def test_setting_it_wakes_all_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not when they look again."""
    monkeypatch.setattr(module, "LOOK_S", 60.0)
    latch = Latch()
    assert not latch.wait(0.0)
    assert not latch.wait(0.01)
    threads = [threading.Thread(target=latch.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    latch.set()
    latch.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert latch.is_set()
    assert latch.wait()
    assert latch.wait(0.0)


def test_an_interrupted_waiter_blocks_neither_the_setter_nor_other_waiters() -> None:
    """Ctrl-C between two instructions of `wait` leaves what it has taken: here, all that it takes."""
    latch = Latch()
    for interrupted in ("before it was set", "behind it"):
        setting = threading.Thread(target=latch.set, name=interrupted, daemon=True)
        setting.start()
        setting.join(10)
        assert not setting.is_alive()
        assert latch._lock.acquire(timeout=10)  # and never released
        waiting = threading.Thread(target=latch.wait, daemon=True)
        waiting.start()
        waiting.join(10)
        assert not waiting.is_alive()
