"""Failpoints in a process of their own, switched on by the environment as tests of other rooms do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def test_without_the_variable_nothing_happens() -> None:
    assert run("").stdout == "1 passed\n2 passed\n3 passed\n"


@pytest.mark.parametrize(
    ("failpoints", "output"),
    [
        ("here=kill", ""),
        ("here=kill@3", "1 passed\n2 passed\n"),
        ("elsewhere=eio; here = kill@2", "1 passed\n"),
    ],
)
def test_kill_ends_the_process_at_the_nth_time(failpoints: str, output: str) -> None:
    outcome = run(failpoints)
    assert outcome.returncode == -signal.SIGKILL
    assert outcome.stdout == output


@pytest.mark.parametrize(("action", "number"), [("enospc", 28), ("eio", 5)])
def test_a_disk_error_comes_once_at_the_nth_time(action: str, number: int) -> None:
    """28 and 5 are ENOSPC and EIO of Linux."""
    assert run(f"here={action}@2").stdout == f"1 passed\n2 {number}\n3 passed\n"


def test_pause_says_that_it_is_there_and_waits_for_the_file(tmp_path: Path) -> None:
    gate, reached = tmp_path / "gate", tmp_path / "gate.reached"
    environ = os.environ | {"ATOLL_FAILPOINTS": f"here=pause:{gate}@2"}
    with subprocess.Popen([sys.executable, "-c", COUNTS], env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1 passed\n"
        while not reached.exists() and process.poll() is None:
            time.sleep(0.01)
        assert process.poll() is None
        gate.touch()
        assert process.stdout.read() == "2 passed\n3 passed\n"


def test_stop_stops_the_process_each_time_that_is_named() -> None:
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


def test_an_unknown_action_is_an_error_that_lists_the_known_ones() -> None:
    outcome = run("here=explode")
    assert outcome.returncode == 1
    assert "unknown action 'explode' at 'here'; use kill, stop, enospc, emfile, eio or pause:PATH" in outcome.stderr
