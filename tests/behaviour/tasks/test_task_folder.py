"""The folder that a script gives to `atoll.tasks`."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.servers import serve

import atoll
from atoll.errors import StoreError


@pytest.fixture
def url(tmp_path: Path) -> object:
    with serve(tmp_path) as server:
        yield server.url


def test_a_worker_for_tasks_makes_its_folder(url: str, tmp_path: Path) -> None:
    """A worker for tasks makes the folder that the script gives it, without an environment variable."""
    with atoll.tasks(url, "a", folder=tmp_path / "files" / "of a") as worker:
        assert (tmp_path / "files" / "of a").is_dir()
        assert worker.models._folder == tmp_path / "files" / "of a"


@pytest.mark.covers("X3")
def test_refuses_an_impossible_folder(url: str, tmp_path: Path) -> None:
    """If the folder of a worker for tasks cannot be made, the worker raises an error with the path before it joins."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/files"):
        atoll.tasks(url, "a", folder=str(tmp_path / "file" / "files"))
