"""For all tests of this folder: a site that leaves waits for the end of its last request for work, so that is short."""

from __future__ import annotations

import pytest

from atoll.protocol import routes


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "LONG_POLL_S", 2.0)
