"""The file that sites train by, and what an undisturbed run comes to."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_here import simulate_here
from simulated_world import MOVES, RULES, result_of


@pytest.fixture
def client(tmp_path: Path) -> str:
    """The name of a function that moves a model."""
    (tmp_path / "client.py").write_text(MOVES)
    return f"{tmp_path / 'client.py'}:train"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations train in this process."""
    simulate_here(monkeypatch)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What a run with RULES comes to, of four sites and three rounds."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        simulate_here(monkeypatch)
        return result_of(tmp_path_factory.mktemp("undisturbed"), **RULES)
