"""One Ray for the tests of simulations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """Ray in the test's process, which simulations use and leave as it is."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'atoll[ray]'")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
