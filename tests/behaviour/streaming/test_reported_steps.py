"""The local steps that a worker reports with an update are those between taking it and taking the one before."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from kit import DiLoCoSites, serve


def reported(folder: Path) -> dict[tuple[int, int], int]:
    """(fragment, version that came of it) → the steps in its update."""
    with contextlib.closing(sqlite3.connect(folder / "state" / "journal.sqlite")) as journal:
        rows = journal.execute("SELECT fragment, base_version, steps FROM tickets WHERE state = 'counted'").fetchall()
    return {(fragment, base + 1): steps for fragment, base, steps in rows}


@pytest.mark.covers("L7")
@pytest.mark.parametrize("tau", [0, 1])
def test_steps_count_from_taking_an_update_not_from_merging_its_result(tmp_path: Path, tau: int) -> None:
    """H = 4, K = 2: fragment 0 is taken after the steps 2, 6 and 10, fragment 1 after 4, 8 and 12.

    What comes between taking and merging, τ later, is part of the next update: it is counted there.
    """
    with serve(tmp_path, algorithm="diloco", sites=1, K=2, H=4, tau=tau, alpha=0.5, rounds=3) as server:
        DiLoCoSites(server.url, tmp_path, 20, names=["a"]).join()
        server.run()
    assert reported(tmp_path) == {(0, 1): 2, (0, 2): 4, (0, 3): 4, (1, 1): 4, (1, 2): 4, (1, 3): 4}


@pytest.mark.covers("L7")
def test_steps_of_a_whole_model_with_tau(tmp_path: Path) -> None:
    """H = 3, K = 1: taken after the steps 3, 6 and 9, merged one later."""
    with serve(tmp_path, algorithm="diloco", sites=1, H=3, tau=1, alpha=0.5, rounds=3) as server:
        DiLoCoSites(server.url, tmp_path, 20, names=["a"]).join()
        server.run()
    assert reported(tmp_path) == {(0, 1): 3, (0, 2): 3, (0, 3): 3}
