"""`atoll worker`: the environment of the script, its exit code, its restarts."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness.processes import free_port, wait_until
from kit import serve
from torch import nn

import atoll
from atoll.errors import ConfigError, VersionSkew

SHOW = """
import os
print({key: value for key, value in os.environ.items() if key.startswith('ATOLL_') and key != 'ATOLL_LEASES'})
"""


@pytest.mark.covers("P6")
@pytest.mark.usefixtures("fresh_processes")
def test_the_script_finds_its_server_in_the_environment(canned, atoll_command, tmp_path) -> None:
    outcome = atoll_command(
        "worker", "--server", canned.url, "--site", "a", "--dir", "files", "--", sys.executable, "-c", SHOW
    )
    assert outcome.returncode == 0, outcome.stderr
    expected = {"ATOLL_SERVER": canned.url, "ATOLL_SITE": "a", "ATOLL_DIR": str(tmp_path / "files")}
    assert outcome.stdout.strip() == str(expected)


@pytest.mark.covers("L23")
def test_sync_retries_reach_the_script(canned, atoll_command, monkeypatch) -> None:
    """How often a lost server is then asked, tests/behaviour/worker shows."""
    flags = ("--server", canned.url, "--max-sync-retries", "2")
    outcome = atoll_command("worker", *flags, "--", sys.executable, "-c", SHOW)
    assert "'ATOLL_MAX_SYNC_RETRIES': '2'" in outcome.stdout
    monkeypatch.setenv("ATOLL_MAX_SYNC_RETRIES", "few")
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="ATOLL_MAX_SYNC_RETRIES is 'few'"):
        atoll.DiLoCo(model, torch.optim.SGD(model.parameters()), server=canned.url, site="a")


def test_the_commands_own_flags_are_left_to_it(canned, atoll_command) -> None:
    script = "import sys; print(sys.argv[1:])"
    outcome = atoll_command("worker", "--server", canned.url, sys.executable, "-c", script, "--site", "x", "--help")
    assert outcome.stdout.strip() == "['--site', 'x', '--help']"


def test_the_token_goes_with_the_question_and_never_into_a_command_line(canned, atoll_command) -> None:
    outcome = atoll_command("worker", "--server", canned.url, "--", sys.executable, "-c", "pass", ATOLL_TOKEN="secret")
    assert outcome.returncode == 0
    assert canned.asked == ["Bearer secret"]
    assert "token" not in atoll_command("worker", "--help").stdout.replace("ATOLL_TOKEN", "").replace(
        "A token comes", ""
    )


@pytest.mark.parametrize(("end", "code"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_its_exit_code_is_the_commands(canned, atoll_command, end: str, code: int) -> None:
    assert atoll_command("worker", "--server", canned.url, "--", sys.executable, "-c", end).returncode == code


def test_a_server_that_is_not_up_yet_is_waited_for(nursery, tmp_path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    script = ("--", sys.executable, "-c", "raise SystemExit(3)")
    process = nursery.start("atoll", "worker", "--server", url, *script, cwd=tmp_path)
    wait_until(process.output, "that it waits")
    with serve(tmp_path, **{"network.port": port, "run.name": "late"}):
        assert process.wait() == 3
    waiting, started = process.output().splitlines()
    assert waiting.startswith(f"atoll: waiting for {url} ")
    assert started == f"atoll: {url} answers, run late; starting {sys.executable}"


@pytest.mark.covers("X2", "X4")
def test_it_says_at_once_what_it_starts_but_not_the_arguments(canned, atoll_command) -> None:
    outcome = atoll_command("worker", "--server", canned.url, "--", sys.executable, "-c", "pass", "secret")
    assert outcome.stderr == f"atoll: {canned.url} answers, run canned; starting {sys.executable}\n"


def test_a_restart_waits_for_the_server_and_counts_one_that_is_away(atoll_command) -> None:
    argv = ["worker", "--server", "http://127.0.0.1:9", "--site", "a", "--restarts", "1", "--", "true"]
    outcome = atoll_command(*argv, ATOLL_GIVE_UP_S="0.01")
    assert outcome.returncode == 5
    lines = outcome.stderr.splitlines()
    assert len([line for line in lines if "does not answer" in line and "; restart 1 of 1" in line]) == 1


def test_something_else_than_atoll_is_told(canned, atoll_command) -> None:
    canned.answers = {"/v1/run": (200, "<html>hello</html>")}
    outcome = atoll_command("worker", "--server", canned.url, "--", "true")
    assert outcome.returncode == 6
    assert canned.url in outcome.stderr


@pytest.mark.covers("F32")
def test_another_protocol_version_says_which_side_to_upgrade(canned, tmp_path) -> None:
    status, body = canned.answers["/v1/run"]
    canned.answers["/v1/run"] = (status, body.replace('"protocol": 1', '"protocol": 2'))
    with pytest.raises(VersionSkew, match="Upgrade Atoll at this worker"):
        atoll.join(canned.url, site="a", folder=tmp_path)


def test_a_command_that_fails_is_started_again_so_often(canned, atoll_command) -> None:
    script = (
        "from pathlib import Path; mark = Path('tried'); tried = mark.exists(); mark.touch(); print('run');"
        "raise SystemExit(0 if tried else 9)"
    )
    outcome = atoll_command(
        "worker", "--server", canned.url, "--site", "a", "--restarts", "5", "--", sys.executable, "-c", script
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.split() == ["run", "run"]
    assert "restart 1 of 5" in outcome.stderr


@contextmanager
def started(url: str, handled: Sequence[int], *flags: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """`atoll worker` with a command that says `told N` for each of these signals, and ends with 4."""
    script = (
        "import signal, sys, time\n"
        "def end(number, _):\n    print('told', number, flush=True); sys.exit(4)\n"
        f"for number in {[*map(int, handled)]}:\n    signal.signal(number, end)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    argv = [sys.executable, "-m", "atoll.cli.main", "worker", "--server", url, "--site", "a", *flags]
    process = subprocess.Popen(
        [*argv, "--", sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, **options
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.wait(20)
    process.stdout.close()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_command_and_ends_restarts(canned, number: signal.Signals) -> None:
    def usual() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup

    with started(canned.url, [number], "--restarts", "3", preexec_fn=usual) as process:
        process.send_signal(number)
        assert process.stdout.read() == f"told {int(number)}\n"
    assert process.returncode == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_it_was_started_to_ignore_stays_ignored(canned, number: signal.Signals) -> None:
    """As `nohup` does it, and a script's shell for what it starts in the background."""

    def ignores() -> None:
        signal.signal(number, signal.SIG_IGN)

    with started(canned.url, [number, signal.SIGTERM], preexec_fn=ignores) as process:
        process.send_signal(number)  # it is not forwarded, or this would be the first that the command tells
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == f"told {int(signal.SIGTERM)}\n"
    assert process.returncode == 4


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children")
def test_a_killed_wrapper_does_not_leave_its_command(canned) -> None:
    with started(canned.url, [signal.SIGTERM]) as process:
        process.kill()
        assert process.stdout.readline() == f"told {int(signal.SIGTERM)}\n"
