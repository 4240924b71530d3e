"""How a command ends: its exit code and its last line for each error and signal."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, wait_until

from atoll import errors
from atoll.child_processes import Terminated
from atoll.cli import simulate, worker
from atoll.cli.main import run_command
from atoll.cli.text import SOME, log_lines, say_stopping
from atoll.simulate.simulation import Simulated


def raises(error: BaseException) -> Callable[[], object]:
    def command() -> None:
        raise error

    return command


def code_of(error: BaseException) -> Any:
    with pytest.raises(SystemExit) as ended:
        run_command(raises(error))
    return ended.value.code


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (Terminated(), 143),
        (errors.ConfigError("It is wrong.", "Correct it."), 2),
        (errors.ServerUnreachable("It is away.", "Wait."), 5),
        (errors.RunFailed("It failed.", "Look."), 9),
        (OSError(errno.ENOSPC, "No space left on device"), errors.DiskFull("", "").exit_code),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), errors.DiskFull("", "").exit_code),
    ],
    ids=["ctrl-c", "terminated", "settings", "unreachable", "failed", "full", "quota"],
)
def test_a_command_ends_with_its_documented_code(
    error: BaseException, code: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that a signal ends has the exit code that shells use. A command that an error ends has the exit code of
    the error's class. Ctrl-C and errors are one line.
    """
    monkeypatch.setattr("os.dup2", lambda *_: None)  # it would take this process's own output
    assert code_of(error) == code
    last = capfd.readouterr().err.splitlines()
    assert len(last) == (0 if code == 143 else 1)


def test_a_command_that_has_said_that_it_stops_says_no_more(capfd: pytest.CaptureFixture[str]) -> None:
    asked = KeyboardInterrupt()
    log_lines()
    say_stopping(asked, "stopping; nothing is lost")
    assert code_of(asked) == 130
    said = capfd.readouterr()
    assert said.out.endswith("stopping; nothing is lost\n")
    assert said.err == ""


def test_other_system_errors_keep_their_traceback() -> None:
    """A system error other than a full disk is raised with its traceback, because it is a bug."""
    with pytest.raises(PermissionError):
        run_command(raises(PermissionError(errno.EACCES, "Permission denied")))


@pytest.mark.covers("X3")
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_simulation_cleanly(
    nursery: Nursery, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """If a signal ends `atoll simulate` while a site trains, the command has the exit code that shells use and says how
    to go on.
    """
    (tmp_path / "script.py").write_text(
        "import pathlib, time, torch\n"
        "def build():\n    return torch.nn.Linear(2, 1)\n"
        "def train(worker):\n"
        "    for fl_round in worker:\n"
        "        pathlib.Path(__file__).with_name('trains').touch()\n"
        "        time.sleep(60)\n"
    )
    (tmp_path / "run.toml").write_text(
        'model.source = "script.py:build"\nrun.script = "script.py:train"\nalgorithm.name = "fedavg"\n'
        "rounds.total = 1\nrounds.sites = 1\n"
    )
    process = nursery.start("atoll", "simulate", "run.toml", cwd=tmp_path)
    wait_until((tmp_path / "trains").exists, "the training")
    process.send(number)
    assert process.wait(60) == code, process.output()
    assert "start the same command again" in process.output()


# -- restarts of `atoll worker`


def test_pauses_between_restarts_double_up_to_a_minute() -> None:
    """The pauses between restarts are 1, 2, 4, 8, 16 and 32 s, then always 60 s."""
    assert [worker.restart_pause_s(attempt) for attempt in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The server answers `atoll worker` at once, and no time passes between restarts; the lines that it prints."""
    lines: list[str] = []
    monkeypatch.setattr(worker, "_require_server", lambda *_: "r")
    monkeypatch.setattr(worker, "RESTART_PAUSE_S", 0.0)
    monkeypatch.setattr(worker, "print_line", lines.append)
    return lines


def ran(script: str, restarts: int = 0) -> int:
    environment = {"ATOLL_SERVER": "http://127.0.0.1:1", "PATH": "/usr/bin:/bin"}
    return worker._run([sys.executable, "-c", script], environment, restarts)


def test_a_killed_command_has_the_shells_exit_code(answered: list[str]) -> None:
    """If a signal kills the command of `atoll worker`, the exit code is 128 plus the signal's number, here 128 + 9. A
    line names the signal.
    """
    assert ran("import os; os.kill(os.getpid(), 9)") == 137
    assert answered[-1] == "atoll: SIGKILL ended the command"


def test_restarts_end_with_the_last_exit_code(answered: list[str], tmp_path: Path) -> None:
    """After its restarts, `atoll worker` ends with the last exit code of its command."""
    # A command that fails with 3, 4 and 5 is restarted twice and ends with 5. Each restart has its number in a line.
    tries = tmp_path / "tries"
    script = f"import sys; t = open({str(tries)!r}, 'a+'); t.write('x'); t.seek(0); sys.exit(2 + len(t.read()))"
    assert ran(script, restarts=2) == 5
    assert tries.read_text() == "xxx"
    restarts = [line for line in answered if "restart " in line]
    assert restarts == [
        "atoll: the command ended with exit code 3; restart 1 of 2",
        "atoll: the command ended with exit code 4; restart 2 of 2",
    ]


def test_a_command_that_succeeds_is_not_started_again(answered: list[str], tmp_path: Path) -> None:
    """If the command of `atoll worker` ends with exit code 0, it is not restarted."""
    tries = tmp_path / "tries"
    assert ran(f"open({str(tries)!r}, 'a').write('x')", restarts=5) == 0
    assert tries.read_text() == "x"


@pytest.mark.parametrize(("name", "remedy"), [("no-such-command", "-- python train.py"), ("script", "-- python ")])
def test_a_command_that_cannot_start_is_named(answered: list[str], tmp_path: Path, name: str, remedy: str) -> None:
    """If the command of `atoll worker` does not exist or is not executable, the error names it and has a remedy for
    each case.
    """
    (tmp_path / "script").write_text("print()")
    with pytest.raises(errors.UsageError, match=name) as refused:
        worker._run([str(tmp_path / name)], {"ATOLL_SERVER": "http://127.0.0.1:1"}, 0)
    assert remedy in refused.value.remedy


# -- the last line of `atoll simulate`


def simulated(**more: Any) -> Simulated:
    given: dict[str, Any] = {
        "version": 3,
        "rounds": 3,
        "worker_rounds": 12,
        "seconds": 4.0,
        "bytes_up": 12_000_000,
        "bytes_down": 24_000_000,
        "late": 0,
        "refused": {},
        "failed": {},
        "metrics": {"loss": 0.5},
        "model": Path("model.safetensors"),
        "metrics_file": Path("metrics.jsonl"),
    }
    return Simulated(**given | more)


def test_a_simulation_is_summed_up_in_one_line() -> None:
    """`atoll simulate` sums up its run in one line. The line counts late and refused updates and names only some of the
    failed sites.
    """
    # 12 worker-rounds in 4 s are 3 in a second.
    assert simulate.summary(simulated()) == (
        "finished at version 3 after 4.0 s; 3 rounds, 12 worker-rounds, 3 worker-rounds/s; "
        "a run with real sites would have sent 12.0 MB up and 24.0 MB down; loss 0.5; model.safetensors"
    )
    failed = {f"site-{number}": "ValueError" for number in range(SOME + 2)}
    line = simulate.summary(simulated(late=1, refused={"a": 2, "b": 1}, failed=failed))
    assert "1 update too late to count; 3 updates refused: a, b; " in line
    assert f"{SOME + 2} simulated sites failed: " in line
    assert " and 2 more" in line


def test_the_summary_names_versions_without_an_evaluation() -> None:
    one = simulate.summary(simulated(not_evaluated={2: "ValueError: no data here"}, not_evaluated_count=1))
    assert "; loss 0.5; no complete evaluation of version 2: ValueError: no data here; model" in one
    given = simulated(not_evaluated={1: "KeyError: 'w'", 2: "ValueError: no data here"}, not_evaluated_count=100)
    told = "; 100 versions without a complete evaluation, the last one version 2: ValueError: no data here; "
    assert told in simulate.summary(given)


def test_a_finished_simulation_says_that_nothing_was_trained() -> None:
    """If the simulation was already finished, the last line of `atoll simulate` says that nothing was trained."""
    line = simulate.summary(simulated(rounds=0, worker_rounds=0))
    assert line == "the simulation was already finished, at version 3; nothing was trained; model.safetensors"
