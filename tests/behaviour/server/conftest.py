"""Fixtures of tests that move the sites of a run one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from async_world import Clients


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., Clients]]:
    with ExitStack() as stack:
        yield lambda **settings: Clients(tmp_path, stack, **settings)
