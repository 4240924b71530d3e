"""`atoll worker`: the environment of the script, its exit code, its restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

SHOW = "import os; print({key: value for key, value in os.environ.items() if key.startswith('ATOLL_')})"


@pytest.mark.covers("P6")
def test_the_script_finds_its_server_in_the_environment(canned, atoll_command, tmp_path) -> None:
    outcome = atoll_command(
        "worker", "--server", canned.url, "--site", "a", "--dir", "files", "--", sys.executable, "-c", SHOW
    )
    assert outcome.returncode == 0, outcome.stderr
    expected = {"ATOLL_SERVER": canned.url, "ATOLL_SITE": "a", "ATOLL_DIR": str(tmp_path / "files")}
    assert outcome.stdout.strip() == str(expected)


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


def test_a_server_that_does_not_answer_is_exit_5_and_the_command_is_not_started(atoll_command, tmp_path) -> None:
    outcome = atoll_command("worker", "--server", "http://127.0.0.1:9", "--", sys.executable, "-c", "open('ran', 'w')")
    assert outcome.returncode == 5
    assert outcome.stderr.startswith("atoll: http://127.0.0.1:9 does not answer")
    assert len(outcome.stderr.splitlines()) == 1
    assert not (tmp_path / "ran").exists()


def test_something_else_than_atoll_is_told(canned, atoll_command) -> None:
    canned.answers = {"/v1/run": (200, "<html>hello</html>")}
    outcome = atoll_command("worker", "--server", canned.url, "--", "true")
    assert outcome.returncode == 6
    assert "RunInfo" in outcome.stderr


@pytest.mark.covers("F32")
def test_another_protocol_version_says_which_side_to_upgrade(canned, atoll_command) -> None:
    status, body = canned.answers["/v1/run"]
    canned.answers["/v1/run"] = (status, body.replace('"protocol":1', '"protocol":2'))
    outcome = atoll_command("worker", "--server", canned.url, "--", "true")
    assert outcome.returncode == 6
    assert "Upgrade Atoll at this worker" in outcome.stderr


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


def test_restarts_need_a_name_that_stays(canned, atoll_command) -> None:
    outcome = atoll_command("worker", "--server", canned.url, "--restarts", "1", "--", "true")
    assert outcome.returncode == 2
    assert "--site" in outcome.stderr


def test_a_command_that_does_not_exist_is_told(canned, atoll_command) -> None:
    outcome = atoll_command("worker", "--server", canned.url, "--", "no-such-command")
    assert outcome.returncode == 2
    assert "no-such-command" in outcome.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command_and_ends_restarts(canned, number: signal.Signals) -> None:
    script = (
        "import signal, sys, time\n"
        "def end(*_):\n    print('told', flush=True); sys.exit(4)\n"
        f"signal.signal({int(number)}, end)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    argv = [sys.executable, "-m", "atoll.cli.main", "worker", "--server", canned.url, "--site", "a", "--restarts", "3"]
    process = subprocess.Popen(
        [*argv, "--", sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.readline() == "told\n"
    assert process.wait(20) == 4
    process.stdout.close()
