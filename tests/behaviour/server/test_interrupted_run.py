"""A signal that breaks off `server.run()`: the server is ended all the same, and its end is waited for."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest
from kit.servers import plain_server
from torch import nn

from atoll.server.coordinator.coordinator import Coordinator


@pytest.mark.usefixtures("interruptible")
def test_stop_waits_for_the_end_behind_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `Thread.join`: broken off by a signal, it takes a thread that runs for one that has ended."""
    ended, stop = threading.Event(), Coordinator.stop

    async def slowly(self: Coordinator) -> None:
        await asyncio.sleep(0.3)  # long enough for a `stop` that does not wait to be found out
        await stop(self)
        ended.set()

    monkeypatch.setattr(Coordinator, "stop", slowly)
    server = plain_server(tmp_path, nn.Linear(1, 1)).start()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        server.run()
    server.stop()
    assert ended.is_set()
    timer.join()
