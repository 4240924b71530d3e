"""Tests with a Lightning Trainer run with both of its packages."""

from __future__ import annotations

import lightning_world
import pytest

EACH = [
    pytest.param(lightning_world.PACKAGES[0], id=pytest.HIDDEN_PARAM),
    *(pytest.param(name, marks=pytest.mark.long) for name in lightning_world.PACKAGES[1:]),
]


@pytest.fixture
def each_package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The usual package of `lightning_world` is each in turn, unless the test names packages itself."""
    usual: str = getattr(request, "param", lightning_world.PACKAGES[0])
    monkeypatch.setattr(lightning_world, "usual", usual)
    return usual


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "each_package" in metafunc.fixturenames and "name" not in metafunc.fixturenames:
        metafunc.parametrize("each_package", EACH, indirect=True)
