"""A run that has begun, its journal, and failpoints in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_world import OPENED, new_run

from atoll.runtime import switch_failpoints_on
from atoll.store.journal import Journal
from atoll.store.store import Store


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_run(tmp_path)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite", "process")
    yield journal
    journal.close()


@pytest.fixture
def arm() -> Iterator[Callable[[str], object]]:
    before = switch_failpoints_on("")
    yield switch_failpoints_on
    switch_failpoints_on(before)
