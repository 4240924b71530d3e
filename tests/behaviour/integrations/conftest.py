"""Tests with a Lightning Trainer run with both of its packages; and a server for tests with Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning_world
import pytest
import transformers_world
from kit.servers import plain_server

import atoll

EACH = [
    pytest.param(lightning_world.PACKAGES[0], id=pytest.HIDDEN_PARAM),
    *(pytest.param(name, marks=pytest.mark.long) for name in lightning_world.PACKAGES[1:]),
]


@pytest.fixture
def each_package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The usual package of `lightning_world` is each in turn; the second in long runs, unless a test names both."""
    usual: str = getattr(request, "param", lightning_world.PACKAGES[0])
    monkeypatch.setattr(lightning_world, "usual", usual)
    return usual


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "each_package" in metafunc.fixturenames and "each_package" not in named:
        metafunc.parametrize("each_package", EACH, indirect=True)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., atoll.Server]]:
    """Starts servers of runs of the model of `transformers_world`, and stops them at the end."""
    with ExitStack() as stack:

        def start(algorithm: str = "fedavg", **options: Any) -> atoll.Server:
            model = transformers_world.One()
            given = {"rounds": transformers_world.ROUNDS, "algorithm": algorithm} | options
            server = plain_server(tmp_path, model, **given)
            stack.callback(server.stop)
            return server.start()

        yield start
