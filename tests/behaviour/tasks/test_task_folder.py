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


def test_makes_the_folder_that_a_script_names(url: str, tmp_path: Path) -> None:
    """A worker for tasks has a folder like one for rounds, without an environment variable."""
    with atoll.tasks(url, "a", folder=tmp_path / "files" / "of a") as worker:
        assert (tmp_path / "files" / "of a").is_dir()
        assert worker._models._folder == tmp_path / "files" / "of a"


@pytest.mark.covers("X3")
def test_refuses_an_impossible_folder(url: str, tmp_path: Path) -> None:
    """A folder that cannot be made is refused before the site joins.

    The error names the folder; the site has not joined.
    """
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/files"):
        atoll.tasks(url, "a", folder=str(tmp_path / "file" / "files"))
