"""The state directory that a path or a name on the command line leads to."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli.stored_status import state_directory
from atoll.store.journal import JOURNAL


@pytest.mark.parametrize("named", ["runs/digits-1/state", "runs/digits-1", "digits-1"])
def test_a_run_is_found_by_folder_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    """A command finds a run of `atoll run` by its state directory, by its folder, and by its name in `runs`."""
    monkeypatch.chdir(tmp_path)
    state = Path("runs/digits-1/state")
    state.mkdir(parents=True)
    (state / JOURNAL).touch()
    assert state_directory(Path(named)) == state


def test_a_folder_without_a_run_stays_as_given(tmp_path: Path) -> None:
    """A path that leads to no run is returned as it is, so that the error names what the user gave."""
    assert state_directory(tmp_path / "nothing") == tmp_path / "nothing"
