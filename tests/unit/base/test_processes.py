"""Processes of Atoll itself: children, messages between them, the latch, and failpoints."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from atoll import child_processes, posix
from atoll import runtime as module
from atoll.child_processes import Children, ProcessPipe
from atoll.runtime import Latch

# -- jobs


@pytest.mark.parametrize(("jobs", "threads", "used"), [(1, 4, 0), (3, 1, 0), (2, 4, 2)])
def test_jobs_use_no_more_threads_than_they_need(jobs: int, threads: int, used: int) -> None:
    """One job, or jobs for one thread, run on the calling thread. Else, no more threads start than there are jobs."""
    members: list[threading.Thread] = []

    def member() -> Callable[[int], None]:
        members.append(threading.current_thread())
        return done.append

    done: list[int] = []
    module.run_jobs(range(jobs), threads, member)
    assert sorted(done) == list(range(jobs))
    assert sum(each is not threading.current_thread() for each in members) == used
    assert len(members) == max(used, 1)


# -- children


def test_any_thread_may_start_child_processes(tmp_path: Path) -> None:
    """A thread other than the main thread can start and end child processes.

    Only the main thread gets signals, and only there a signal handler may be set.
    """
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
def test_an_interrupted_start_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Ctrl-C interrupts the start of a child process, the child is ended.

    The interrupt comes at the worst moment: the child runs, and `Popen` has not returned yet.
    """
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


# -- messages between two processes


@pytest.fixture
def ends() -> Iterator[tuple[ProcessPipe, ProcessPipe]]:
    pair = ProcessPipe.pair()
    for end in pair:
        end.settimeout(30.0)
    one, other = map(ProcessPipe, pair)
    yield one, other
    one.close()
    other.close()


def taken(channel: ProcessPipe) -> tuple[dict[str, Any], bytes | None]:
    """The next message, and what its file holds."""
    message, fd = channel.receive()
    if fd is None:
        return message, None
    assert not os.get_inheritable(fd)
    data = os.pread(fd, 100, 0)
    os.close(fd)
    return message, data


def test_messages_arrive_with_their_files(ends: tuple[ProcessPipe, ProcessPipe], tmp_path: Path) -> None:
    """Messages of any length arrive with their files and leave no file descriptor open. Messages that were sent before
    the pipe was closed still arrive.
    """
    one, other = ends
    path = tmp_path / "file"
    path.write_bytes(b"tensors")
    before = set(os.listdir("/proc/self/fd"))
    for nbytes in (0, 2**16 - 12, 2**16, 500_000):  # with {"text": ""} one of them has just the length of a message
        for with_file in (False, True):
            message = {"text": "x" * nbytes}
            with path.open("rb") as file:
                one.send(message, file.fileno() if with_file else None)
            assert taken(other) == (message, b"tensors" if with_file else None)
    assert set(os.listdir("/proc/self/fd")) == before
    for number in range(5):
        one.send({"number": number})
    one.close()
    assert [taken(other)[0]["number"] for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(OSError, match=r"pipe|closed|reset"):
        other.send({"what": "done"})


# -- the latch that tells of a server's end


def test_setting_a_latch_wakes_all_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting a latch, the process's own event, wakes all waiting threads at once, not only at their next check."""
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


def test_an_interrupted_latch_waiter_blocks_no_thread() -> None:
    """If Ctrl-C interrupts a thread that waits for a latch, the thread that sets the latch and other waiters go on."""
    # Ctrl-C between two instructions of `wait` leaves its lock taken.
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


# -- failpoints


COUNTS = """
from atoll.runtime import failpoint
for turn in range(1, 4):
    try:
        failpoint("here")
        print(turn, "passed", flush=True)
    except OSError as error:
        print(turn, error.errno, flush=True)
"""


def run(failpoints: str, script: str = COUNTS) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"ATOLL_FAILPOINTS": failpoints}
    return subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)


def test_failpoints_without_setting_do_nothing() -> None:
    """If `ATOLL_FAILPOINTS` is empty, failpoints do nothing."""
    assert run("").stdout == "1 passed\n2 passed\n3 passed\n"


@pytest.mark.parametrize(
    ("failpoints", "output"),
    [
        ("here=kill", ""),
        ("here=kill@3", "1 passed\n2 passed\n"),
        ("elsewhere=eio; here = kill@2", "1 passed\n"),
    ],
)
def test_a_kill_failpoint_ends_the_process(failpoints: str, output: str) -> None:
    """The failpoint action `kill@N` kills the process when it reaches the failpoint for the Nth time. Without a number,
    N is 1.
    """
    outcome = run(failpoints)
    assert outcome.returncode == -signal.SIGKILL
    assert outcome.stdout == output


@pytest.mark.parametrize(("action", "number"), [("enospc", 28), ("eio", 5)])
def test_a_disk_error_failpoint_fails_once(action: str, number: int) -> None:
    """The failpoint actions `enospc@2` and `eio@2` raise a disk error at the second time only."""
    # 28 and 5 are ENOSPC and EIO of Linux.
    assert run(f"here={action}@2").stdout == f"1 passed\n2 {number}\n3 passed\n"


def test_a_pause_failpoint_waits_for_its_file(tmp_path: Path) -> None:
    """The failpoint action `pause` creates a file that says it is reached. It then waits until the file in the action
    exists.
    """
    gate, reached = tmp_path / "gate", tmp_path / "gate.reached"
    environ = os.environ | {"ATOLL_FAILPOINTS": f"here=pause:{gate}@2"}
    with subprocess.Popen([sys.executable, "-c", COUNTS], env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "1 passed\n"
        while not reached.exists() and process.poll() is None:
            time.sleep(0.01)
        assert process.poll() is None
        gate.touch()
        assert process.stdout.read() == "2 passed\n3 passed\n"


def test_a_stop_failpoint_stops_each_time() -> None:
    """The failpoint action `stop@1,3` stops the process at the first and at the third time."""
    environ = os.environ | {"ATOLL_FAILPOINTS": "here=stop@1,3"}
    output = []
    with subprocess.Popen([sys.executable, "-c", COUNTS], env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for lines in (0, 2):
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            output.append([process.stdout.readline() for _ in range(lines)])
            process.send_signal(signal.SIGCONT)
        output.append([process.stdout.read()])
    assert output == [[], ["1 passed\n", "2 passed\n"], ["3 passed\n"]]


def test_an_unknown_failpoint_action_is_refused() -> None:
    """If a failpoint has an unknown action, the error lists the known actions."""
    outcome = run("here=explode")
    assert outcome.returncode == 1
    assert "unknown action 'explode' at 'here'; use kill, stop, enospc, emfile, eio or pause:PATH" in outcome.stderr


def test_a_brief_look_at_a_lock_refuses_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that looks whether a folder is locked holds a lock for a moment. A server that starts just then tries
    again, and gets the folder. As long as it has the folder, a look finds it locked.
    """
    look = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    monkeypatch.setattr("atoll.posix.time.sleep", lambda _: os.close(look))
    with closing(posix.take_folder(tmp_path)):
        assert posix.is_locked(tmp_path)
    assert not posix.is_locked(tmp_path)
