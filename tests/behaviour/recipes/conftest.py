"""A project of a user in the current folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_world import project


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, monkeypatch)
