"""`atoll status` names the fragment of each round in its history."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness.processes import Nursery
from kit import DiLoCoSites, serve


def rounds_shown(nursery: Nursery, url: str, folder: Path) -> list[str]:
    """The lines of rounds that `atoll status` prints."""
    log = folder / "status.log"
    assert nursery.start("atoll", "status", "--server", url, cwd=folder, log=log).wait(60.0) == 0
    return [line for line in log.read_text().splitlines() if line.startswith("round ")]


@pytest.mark.covers("X4")
def test_names_the_fragment_of_each_round(nursery: Nursery, tmp_path: Path) -> None:
    with serve(tmp_path, algorithm="diloco", H=4, K=2, rounds=50) as server:
        DiLoCoSites(server.url, tmp_path, steps=10).join()
        lines = rounds_shown(nursery, server.url, tmp_path)
        history = server.status().history
    shown = [re.match(r"round (\d+) of fragment (\d+): version (\d+) ", line) for line in lines]
    assert all(shown), lines
    found = [tuple(map(int, match.groups())) for match in shown if match]
    assert found == [(each.round, each.fragment, each.version) for each in history]
    assert {fragment for _, fragment, _ in found} == {0, 1}


def test_names_no_fragment_of_a_whole_model(nursery: Nursery, tmp_path: Path) -> None:
    with serve(tmp_path, algorithm="diloco", H=4, rounds=50) as server:
        DiLoCoSites(server.url, tmp_path, steps=10).join()
        lines = rounds_shown(nursery, server.url, tmp_path)
    assert len(lines) == 2
    assert not any("fragment" in line for line in lines)
