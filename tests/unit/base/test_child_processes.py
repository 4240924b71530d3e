"""Processes that a command answers for."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from atoll import child_processes
from atoll.child_processes import Children


def test_a_thread_may_start_processes_too(tmp_path: Path) -> None:
    """Signals come to the main thread alone, and only there a handler may be set."""
    ended: list[int | None] = []

    def start() -> None:
        with Children() as some:
            some.spawn("sleeper", ["-c", "import signal; signal.pause()"], environment={}, log=tmp_path / "log")
        ended.append(some.processes["sleeper"].returncode)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(30)
    assert ended == [-signal.SIGTERM]


@pytest.mark.covers("X1")
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_a_process_is_started_leaves_none_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst of moments: the process is there, and `Popen` has not returned."""
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args: object, **more: object) -> None:
            super().__init__(*args, **more)
            started.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(child_processes.subprocess, "Popen", Interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Children() as some:
        some.spawn("sleeper", ["-c", "import signal; signal.pause()"], environment={}, log=tmp_path / "log")
    assert [process.poll() for process in started] == [-signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is handler
    assert sys.executable in started[0].args
