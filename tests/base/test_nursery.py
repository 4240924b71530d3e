"""What tests start is as a user starts it, however the suite itself was started."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from atoll.testing.processes import Nursery, interruptible, wait_until


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_reaches_what_it_starts_where_it_was_started_to_ignore_it(tmp_path: Path) -> None:
    """A shell has what it starts in the background ignore SIGINT: tests of Ctrl-C waited there for ever."""
    script = tmp_path / "waits.py"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Nursery(preload=()) as nursery:
        process = nursery.start(str(script), cwd=tmp_path)
        wait_until(lambda: "ready" in process.output(), "that the script waits")
        process.send(signal.SIGINT)
        process.wait(20)
        assert "KeyboardInterrupt" in process.output()


@pytest.mark.usefixtures("interruptible")
def test_what_a_test_makes_interruptible_is_as_before_behind_it() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruptible(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
