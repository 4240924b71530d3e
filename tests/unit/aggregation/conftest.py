"""What the tests of the pass share."""

from __future__ import annotations

from collections.abc import Iterator

import pass_world
import pytest


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    pass_world.close_opened()
