"""What tests start is as a user starts it: the fork server, the nursery, and free ports."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from harness.fork_server import fresh_processes
from harness.processes import Nursery, free_port, interruptible, wait_until

from atoll.testing import run

# -- the fork server


PROGRAMS = {
    "prints": "import sys; print(sys.argv, __name__, sys.path[0]); print('err', file=sys.stderr)",
    "reads": "import sys; print(sys.stdin.read())",
    "fails": "def f():\n    raise ValueError(1)\nf()",
    "exits": "raise SystemExit(300)",
    "exits below zero": "import sys; sys.exit(-1)",
    "exits with words": "raise SystemExit('words')",
    "exits in a hook": "import sys; sys.excepthook = lambda *_: sys.exit(7); 1 / 0",
    "knows its error at exit": "import atexit, sys; atexit.register(lambda: print(repr(sys.last_value))); 1 / 0",
    "is interrupted": "raise KeyboardInterrupt",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "has threads": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "ends later": "import atexit; atexit.register(print, 'at exit')",
    "has no other descriptors": "import os; print([os.path.exists(f'/proc/self/fd/{fd}') for fd in range(6)])",
    "handles signals": "import signal as s; print([s.getsignal(n) for n in (2, 13, 15)], s.pthread_sigmask(0, ()))",
    "starts another": (
        "import os, subprocess, sys; code = 'import os; print(os.getppid())'; run = subprocess.run\n"
        "print(int(run([sys.executable, '-c', code], capture_output=True).stdout) == os.getpid())"
    ),
}


@pytest.mark.parametrize(
    ("program", "way"),
    [*((program, "-c") for program in PROGRAMS), *itertools.product(("prints", "fails", "exits"), ("-m", "script"))],
)
def test_forked_programs_behave_like_fresh_processes(tmp_path: Path, program: str, way: str) -> None:
    """A program that the tests' fork server runs has the exit status and the output that it has in a fresh Python
    process.
    """
    (tmp_path / "program.py").write_text(PROGRAMS[program])
    words = {"-c": ["-c", PROGRAMS[program]], "-m": ["-m", "program"], "script": ["program.py"]}[way]
    command = [sys.executable, *words, "--flag"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}

    def outcome() -> tuple[int, str, str]:
        done = subprocess.run(command, cwd=tmp_path, env=environment, input="in", capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    forked = outcome()
    with fresh_processes():
        assert forked == outcome()


def test_a_forked_child_is_as_requested(tmp_path: Path) -> None:
    """A child of the fork server has the requested environment, folder, session and file descriptors, and the pid that
    `Popen` shows.
    """
    code = (
        "import os, sys; os.write(int(sys.argv[1]), b'given'); print(len(sys.modules) > 1000)\n"
        "import torch; print(os.getpid(), os.getppid(), os.getsid(0), torch.get_num_threads(), os.getcwd())"
    )
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", code, str(write)],
        env=os.environ | {"OMP_NUM_THREADS": "3"},
        cwd=tmp_path,
        pass_fds=[write],
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(write)
        words = process.stdout.read().split()
        assert words == ["True", *map(str, (process.pid, os.getpid(), process.pid)), "3", str(tmp_path)]
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"given"


def test_passed_descriptors_reach_the_forked_child() -> None:
    """File descriptors that are passed to a child reach it, even if the fork server uses the same numbers for its own
    descriptors.
    """
    read, write = os.pipe()
    numbers = [fcntl.fcntl(write, fcntl.F_DUPFD_CLOEXEC, 200) for _ in range(12)]
    os.close(write)
    code = "import os, sys; [os.write(int(fd), b'x') for fd in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", code, *map(str, numbers)], pass_fds=numbers, check=True)
    for fd in numbers:
        os.close(fd)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"x" * 12


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.usefixtures("interruptible")
def test_signals_end_a_forked_process(number: int) -> None:
    """SIGINT, SIGTERM and SIGKILL end a process of the fork server, and its exit status shows the signal."""
    code = "import time; print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(20) == -number


def test_orphans_do_not_become_the_tests_children(tmp_path: Path) -> None:
    """If a process that a test started ends before its own child, this child does not become a child of the test
    process.
    """
    # The test process adopts orphans only while it asks for a process.
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=-3, stderr=-3)\n"
        "print(child.pid); child.returncode = 0"
    )
    orphan = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    try:
        with pytest.raises(ChildProcessError):
            os.waitpid(orphan, os.WNOHANG)
    finally:
        os.kill(orphan, signal.SIGKILL)


# -- the nursery, and free ports


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_reaches_processes_despite_ignored_sigint(tmp_path: Path) -> None:
    """Ctrl-C reaches a process of the fork server, even if the tests were started so that they ignore SIGINT."""
    # Guards against tests of Ctrl-C that wait for ever in the background of a shell, where SIGINT is ignored.
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
def test_interruptible_tests_restore_signals() -> None:
    """Within `interruptible`, SIGINT raises `KeyboardInterrupt`. Afterwards, SIGINT has its earlier handler again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruptible(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_free_ports_are_below_the_ephemeral_range() -> None:
    """`free_port` gives ports below the range from which the system chooses ports for sockets."""
    # Guards against a socket of another test that takes the port of a server first.
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest < 32_768:
        pytest.skip("this system gives more ports than Linux does by itself")
    assert 1024 <= min(run._PORTS) <= free_port() <= max(run._PORTS) < lowest


def test_each_process_gets_other_free_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`free_port` gives no port that another process holds or listens on. When that process has ended, its ports are
    free again.
    """
    ports = [free_port() for _ in range(4)]
    for port in ports:
        run.give_back_port(port)
    monkeypatch.setattr(run, "_PORTS", ports)
    monkeypatch.setattr(run, "_HELD_PORTS", {})  # free again behind this test
    (tmp_path / "other.py").write_text(
        f"import json, signal\nfrom atoll.testing import run\nrun._PORTS = {ports[:3]}\n"
        "print(json.dumps([run.free_port(), run.free_port()]), flush=True)\nsignal.pause()\n"
    )
    with closing(Nursery()) as nursery:
        other = nursery.start(str(tmp_path / "other.py"), cwd=tmp_path)
        wait_until(lambda: other.output().endswith("]\n"), "its two ports")
        theirs = json.loads(other.output())
        with socket.create_server(("127.0.0.1", ports[3])):
            ours = free_port()  # of four, two are another process's, and one has a listener
            assert {*theirs, ours} == set(ports[:3])
            with pytest.raises(RuntimeError, match=r"no port of .* is free"):
                free_port()
    assert {free_port() for _ in range(3)} == {*theirs, ports[3]}  # that process has ended, and so has the listener


def test_each_process_stop_is_reported_once(tmp_path: Path) -> None:
    """A process of the nursery reports each of its stops once."""
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
