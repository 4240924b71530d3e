"""What the tests of the pass share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pass_world
import pytest


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while pass_world.OPENED:
        os.close(pass_world.OPENED.pop())
