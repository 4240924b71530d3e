"""The file that sites train by, and what an undisturbed run comes to."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_here import simulate_here
from simulated_world import MOVES, model_of, simulation


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
    """What SCAFFOLD comes to, of four sites and three rounds."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as monkeypatch:
        simulate_here(monkeypatch)
        simulation(folder, **{"algorithm.name": "scaffold"}).run()
    return model_of(folder / "state")
