"""What tests start is as a user starts it, however the suite itself was started."""

from __future__ import annotations

import json
import signal
import socket
from contextlib import closing
from pathlib import Path

import pytest
from harness.processes import Nursery, free_port, interruptible, wait_until

from atoll.testing import run


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_reaches_what_it_starts_where_it_was_started_to_ignore_it(tmp_path: Path) -> None:
    """A shell has what it starts in the background ignore SIGINT: tests of Ctrl-C waited there for ever."""
    script = tmp_path / "waits.py"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with closing(Nursery()) as nursery:
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


def test_a_free_port_is_not_one_that_a_socket_may_be_given() -> None:
    """Guards against a server whose port a silent listener of another test took first: who joined it waited in vain."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest < 32_768:
        pytest.skip("this system gives more ports than Linux does by itself")
    assert 1024 <= min(run._PORTS) <= free_port() <= max(run._PORTS) < lowest


def test_gives_each_process_another_free_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = [free_port() for _ in range(4)]
    for name in run._HELD_PORTS[-4:]:
        name.close()
    monkeypatch.setattr(run, "_PORTS", ports)
    monkeypatch.setattr(run, "_HELD_PORTS", [])  # free again behind this test
    (tmp_path / "other.py").write_text(
        f"import json, signal\nfrom atoll.testing import run\nrun._PORTS = {ports[:3]}\n"
        "print(json.dumps([run.free_port(), run.free_port()]), flush=True)\nsignal.pause()\n"
    )
    with closing(Nursery()) as nursery:
        other = nursery.start(str(tmp_path / "other.py"), cwd=tmp_path)
        wait_until(lambda: other.output().endswith("]\n"), "its two ports")
        theirs = json.loads(other.output())
        with socket.create_server(("127.0.0.1", ports[3])):
            ours = free_port()  # of four, two are another process's, and somebody listens at one
            assert {*theirs, ours} == set(ports[:3])
            with pytest.raises(RuntimeError, match=r"no port of .* is free"):
                free_port()
    assert {free_port() for _ in range(3)} == {*theirs, ports[3]}  # that process has ended, and so has the listener


def test_reports_each_stop_of_a_process_once(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("from atoll.runtime import failpoint\nfailpoint('here')\nfailpoint('here')\n")
    with closing(Nursery()) as nursery:
        process = nursery.start(str(script), cwd=tmp_path, failpoints="here=stop@1,2")
        for _ in range(2):
            wait_until(process.stopped, "the stop")
            assert not process.stopped()
            assert process.poll() is None
            process.go_on()
        assert process.wait() == 0
        assert not process.stopped()


def test_stops_a_process_and_lets_it_go_on(tmp_path: Path) -> None:
    script = tmp_path / "counts.py"
    script.write_text("import time\nfor n in range(10_000):\n    print(n, flush=True)\n    time.sleep(0.001)\n")
    with closing(Nursery()) as nursery:
        process = nursery.start(str(script), cwd=tmp_path)
        wait_until(lambda: "5\n" in process.output(), "some lines")
        process.stop()
        before = process.output()
        assert process.output() == before
        process.go_on()
        wait_until(lambda: process.output() != before, "further lines")
        process.kill()
        process.stop()
