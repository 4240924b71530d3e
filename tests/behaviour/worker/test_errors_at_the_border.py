"""What the author of a script sees of an error: one line with the message and the script's own line; the exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kit.servers import plain_server
from torch import nn

import atoll
from atoll import errors
from atoll.errors import AtollError, SchemaMismatch, ServerLost, StateLocked, UsageError

NO_SERVER = "http://127.0.0.1:9"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with plain_server(tmp_path, nn.Linear(8, 4)) as server:
        yield server


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up a server that does not answer at once; put the hook of this process back."""
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "0.001")
    monkeypatch.setattr(errors, "_hook_before", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def other_model(server: atoll.Server, folder: Path) -> None:
    model = nn.Linear(8, 5)
    with atoll.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), server=server.url, site="a", folder=folder):
        pass


def other_model_in_a_round(server: atoll.Server, folder: Path) -> None:
    with atoll.join(server.url, site="a", folder=folder) as worker:
        for fl_round in worker:
            fl_round.load_into(nn.Linear(8, 5))


def twice_the_same_site(server: atoll.Server, folder: Path) -> None:
    with atoll.join(server.url, site="a", folder=folder), atoll.join(server.url, site="a", folder=folder):
        pass


def no_update(server: atoll.Server, folder: Path) -> None:
    with atoll.join(server.url, site="a", folder=folder) as worker:
        for _ in worker:
            pass


CASES: list[tuple[Callable[[atoll.Server, Path], object], type[AtollError]]] = [
    (lambda _, folder: atoll.join(NO_SERVER, site="a", folder=folder), ServerLost),
    (lambda _, folder: atoll.join("box:8512", site="a", folder=folder), UsageError),
    (other_model, SchemaMismatch),
    (other_model_in_a_round, SchemaMismatch),
    (twice_the_same_site, StateLocked),
    (no_update, UsageError),
]


@pytest.mark.covers("X3")
@pytest.mark.parametrize(("script", "kind"), CASES)
def test_a_caught_error_has_no_frames_inside_atoll(
    server: atoll.Server, tmp_path: Path, script: Callable[..., object], kind: type[AtollError]
) -> None:
    with pytest.raises(kind) as raised:
        script(server, tmp_path / "w")
    lines = traceback.format_exception(raised.value)
    assert sum(line.startswith("Traceback") for line in lines) == 1, "".join(lines)
    inside = [frame.name for frame in traceback.extract_tb(raised.tb) if frame.filename != __file__]
    # what the user called, and the one line that lets the error out
    assert inside in (["call"], ["__enter__", "call"], ["__iter__", "call"])
    assert lines[-1].startswith(f"atoll.errors.{kind.__name__}: ")


SCRIPT = """
import sys
import torch
import atoll
address, width = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(8, width)
with atoll.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), server=address) as diloco:
    raise ValueError("this is the script's own error")
"""


@pytest.mark.slow
@pytest.mark.covers("X3", "P6")
@pytest.mark.parametrize(
    ("address", "width", "code", "last"),
    [
        pytest.param(
            *("box:8512", 4, 2, "atoll: 'box:8512' is not a valid server address."),
            marks=pytest.mark.long,
        ),
        ("", 5, 6, "atoll: "),
        ("", 4, 1, "ValueError: this is the script's own error"),
    ],
)
def test_a_script_under_atoll_worker_ends_with_one_line_and_the_exit_code_of_the_error(
    server: atoll.Server, tmp_path: Path, address: str, width: int, code: int, last: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    argv = ["worker", "--server", server.url, "--site", "a", "--", sys.executable, "train.py", address, str(width)]
    outcome = subprocess.run(
        [sys.executable, "-m", "atoll.cli.main", *argv],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == code, outcome.stderr
    line = outcome.stderr.strip().splitlines()[-1]
    assert line.startswith(last)
    assert outcome.stderr.count("Traceback") == (code == 1)  # of the script's own error
    assert line.endswith("train.py, line 7)") == (code != 1)


def test_an_error_in_a_hook_of_the_optimizer_names_the_line_of_the_script_not_torchs(
    server: atoll.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.DiLoCo(model, optimizer, server=server.url, folder=tmp_path, sync_every=1, weight=0.0):
        with pytest.raises(UsageError, match="The weight is 0") as raised:
            optimizer.step()
    line = next(each.lineno for each in traceback.extract_tb(raised.tb) if each.filename == __file__)
    with pytest.raises(SystemExit):
        sys.excepthook(UsageError, raised.value, raised.tb)
    assert capsys.readouterr().err.rstrip().endswith(f"({__file__}, line {line})")


def test_calls_an_earlier_hook_for_all_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    for _ in range(2):  # installed once, or it would call itself
        with pytest.raises(UsageError):
            atoll.join("box:8512", site="a")
    other, ours = ValueError(), StateLocked("Locked.")
    sys.excepthook(ValueError, other, None)
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(StateLocked, ours, None)
    assert seen == [other, ours]
    assert ended.value.code == 4


def test_an_error_ends_no_interactive_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    before = sys.excepthook
    with pytest.raises(UsageError):
        atoll.join("box:8512", site="a")
    assert sys.excepthook is before
