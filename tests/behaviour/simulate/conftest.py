"""One Ray for the tests of simulations, and the file that sites train by."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from simulated_world import MOVES


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """Ray in the test's process, which simulations use and leave as it is."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'atoll[ray]'")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def client(tmp_path: Path) -> str:
    """The name of a function that moves a model."""
    (tmp_path / "client.py").write_text(MOVES)
    return f"{tmp_path / 'client.py'}:train"
