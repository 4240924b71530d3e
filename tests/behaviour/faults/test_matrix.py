"""The table of faults (`matrix.md`): each row names a test that shows it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from behaviours import collect

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ROW = re.compile(r"^\| (F\d+) \| .+ \| .+ \| `([\w./]+)::(\w+)` \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def marked() -> dict[str, list[str]]:
    """Row → the tests that say that they show it."""
    return collect(ROOT)


def test_each_of_44_faults_has_a_test(marked: dict[str, list[str]]) -> None:
    """The table has the rows F1 to F44, in order, and the test of each row has the row's mark."""
    rows = ROW.findall((HERE / "matrix.md").read_text(encoding="utf-8"))
    assert [row for row, _, _ in rows] == [f"F{number}" for number in range(1, 45)]
    for row, file, test in rows:
        path = os.path.relpath((HERE / file).resolve(), ROOT)
        assert f"{path}::{test}" in marked[row], row
