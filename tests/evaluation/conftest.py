"""One nursery for the tests of evaluation: processes that start in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.testing.processes import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery
