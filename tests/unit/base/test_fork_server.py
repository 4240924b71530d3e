"""A process that the fork server starts is one as Python itself starts it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.fork_server import fresh_processes

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
    "has threads of torch": "import os, torch; print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])",
    "starts another": (
        "import os, subprocess, sys; code = 'import os; print(os.getppid())'; run = subprocess.run\n"
        "print(int(run([sys.executable, '-c', code], capture_output=True).stdout) == os.getpid())"
    ),
}


@pytest.mark.parametrize(
    ("program", "way"),
    [*((program, "-c") for program in PROGRAMS), *itertools.product(("prints", "fails", "exits"), ("-m", "script"))],
)
def test_does_what_a_fresh_process_does(tmp_path: Path, program: str, way: str) -> None:
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


def test_is_a_child_with_the_pid_environment_group_and_descriptors_that_were_asked_for(tmp_path: Path) -> None:
    code = (
        "import os, sys; os.write(int(sys.argv[1]), b'given')\n"
        "print(os.getpid(), os.getppid(), os.getsid(0), os.environ['X'], os.getcwd(), len(sys.modules) > 1000)"
    )
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", code, str(write)],
        env=os.environ | {"X": "x"},
        cwd=tmp_path,
        pass_fds=[write],
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(write)
        assert process.stdout is not None
        words = process.stdout.read().split()
        assert words == [*map(str, (process.pid, os.getpid(), process.pid)), "x", str(tmp_path), "True"]
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"given"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.usefixtures("interruptible")
def test_signals_end_it(number: int) -> None:
    code = "import time; print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(20) == -number


def test_what_its_own_parent_leaves_behind_is_no_child_of_the_test(tmp_path: Path) -> None:
    """The test's process adopts orphans only while it asks for a process."""
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
