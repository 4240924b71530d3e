"""Warnings of sites, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Gives what sites have warned of since its last call."""

    def since() -> list[str]:
        records = [record for record in caplog.records if (record.name, record.levelname) == ("atoll", "WARNING")]
        caplog.clear()
        return [record.getMessage() for record in records]

    return since
