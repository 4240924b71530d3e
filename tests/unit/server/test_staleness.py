"""How many rounds an update is behind, where versions were lost."""

from __future__ import annotations

import pytest

from atoll.server.coordinator.accept_update import staleness


@pytest.mark.covers("L13")
@pytest.mark.parametrize(("version", "rounds"), [(0, 3), (1, 2), (2, 2), (3, 1), (4, 0), (5, 0)])
def test_staleness_counts_rounds_not_numbers(version: int, rounds: int) -> None:
    """The run has the versions 0, 1, 3 and 4. A worker may still train from 2 or 5, which were lost."""
    assert staleness(4, version, lost=(2,)) == rounds
