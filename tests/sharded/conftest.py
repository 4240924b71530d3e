"""One nursery for all tests of sharded workers: ranks that start in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.testing import processes


@pytest.fixture(scope="session")
def nursery() -> Iterator[processes.Nursery]:
    with processes.Nursery((*processes._PRELOAD, "torch.distributed.fsdp", "torch.distributed.tensor")) as nursery:
        yield nursery
