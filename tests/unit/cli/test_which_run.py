"""Which run a command works on, and its state: names, the newest run, and why an `atoll run` failed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.cli.compare import _values
from atoll.cli.logs import _print
from atoll.cli.which_run import (
    FAILURE,
    FAILURE_CHARS,
    RunState,
    named_run,
    newest_run,
    note_failure,
    noted_failure,
    state_of,
)
from atoll.errors import UsageError
from atoll.protocol.run_events import RoundOpened, RunEvent, RunFinished, SiteLeft
from atoll.protocol.status_messages import RoundSummary, Status
from atoll.simulate import INPUTS_FILE
from atoll.store.journal import JOURNAL


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begun(state_dir: Path, at_s: float) -> Path:
    """A state directory whose journal was changed last at a time."""
    state_dir.mkdir(parents=True)
    (state_dir / JOURNAL).touch()
    os.utime(state_dir / JOURNAL, (at_s, at_s))
    return state_dir


@pytest.mark.parametrize("newest", ["atoll-run", "atoll-simulation", "runs/a-1/state", "runs/b-2/state"])
def test_the_newest_run_is_the_one_that_changed_last(
    here: Path, capsys: pytest.CaptureFixture[str], newest: str
) -> None:
    """Of a server, a simulation and the runs of `atoll run` here, wherever it lies; a line names it."""
    for place in ("atoll-run", "atoll-simulation", "runs/a-1/state", "runs/b-2/state"):
        begun(Path(place), 2000.0 if newest == place else 1000.0)
    found = newest_run()
    assert found is not None
    assert str(found) == newest
    assert capsys.readouterr().err == f"atoll: No run is named. This is the newest one here: {found}\n"


def test_no_run_here_is_no_newest_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "runs" / "empty-1").mkdir(parents=True)
    assert newest_run() is None
    assert capsys.readouterr().err == ""


def test_a_wrong_name_leads_to_runs_that_can_be_read(here: Path) -> None:
    """A message about a name without a run names near or new runs, but no folder without a run."""
    begun(Path("runs/empty-2/state"), 1000.0)
    (here / "runs" / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no run in 'empty'\. Did you mean empty-2\? `atoll runs` lists all"):
        named_run(Path("empty"))


def test_a_failed_start_is_shown_until_the_next(here: Path) -> None:
    """The reason of a failed start is shown until the run is started again. A very long reason is cut."""
    folder = Path("runs/a-1")
    folder.mkdir(parents=True)
    (folder / INPUTS_FILE).touch()
    with pytest.raises(UsageError, match=r"The run in runs/a-1 was never started: its server has not begun\."):
        named_run(Path("a-1"))
    note_failure(folder, "The port 1 is in use.")
    with pytest.raises(UsageError, match=r"runs/a-1 failed before it began: The port 1 is in use\.") as refused:
        named_run(Path("a-1"))
    assert refused.value.remedy == "To start it: atoll run runs/a-1"
    note_failure(folder, "x" * 2 * FAILURE_CHARS)
    assert noted_failure(folder) == "x" * FAILURE_CHARS
    note_failure(folder, "")
    assert noted_failure(folder) == ""
    assert not (folder / FAILURE).exists()


@pytest.mark.parametrize(
    ("more", "served", "state"),
    [
        ({}, True, "running"),
        ({}, False, "interrupted"),
        ({"paused": True}, True, "paused"),
        ({"paused": True}, False, "interrupted"),
        ({"stopping": True, "paused": True}, True, "stopping"),
        ({"stopping": True}, False, "interrupted"),
        ({"finished": True}, True, "finished"),
        ({"finished": True}, False, "finished"),
        ({"finished": True, "stopping": True}, False, "stopped"),
        ({"failed": "no memory"}, True, "failed"),
        ({"failed": "no memory", "paused": True}, False, "failed"),
    ],
)
def test_a_run_has_one_state(more: dict[str, object], served: bool, state: RunState) -> None:
    assert state_of(Status(run="r", protocol=1).model_copy(update=more), is_served=served) == state


def test_metrics_of_the_server_have_names_of_their_own() -> None:
    """In `atoll compare`, a value of `server.evaluate` does not take the place of the sites' mean of the same name."""
    ended = RoundSummary(
        fragment=0, round=1, version=1, metrics={"loss": 2.0}, counts={}, seconds=0, grad_norm=0, bytes_up=0
    )
    assert _values(ended.model_copy(update={"global_metrics": {"loss": 3.0}})) == {"loss": 2.0, "global.loss": 3.0}


def test_sites_that_leave_after_the_end_do_not_undo_it() -> None:
    """`atoll logs --follow` ends with the run, and not only if its last event is that; one that goes on is followed."""
    finished = RunFinished(number=1, at="")
    left = SiteLeft(number=2, at="", site="a")
    opened = RoundOpened(number=3, at="", fragment=0, round=2, version=1, expected=["a"])
    ends: list[tuple[list[RunEvent], bool]] = [
        ([finished, left], True),
        ([finished, left, opened], False),
        ([left], False),
    ]
    for events, ended in ends:
        assert _print(events, None, as_json=False) is ended
