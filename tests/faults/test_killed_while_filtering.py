"""The server is killed, or its disk is full, around its filters: same bits as undisturbed, and nobody trains twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fault_world import Result, ServerProcess, Sites, serving
from harness.processes import Nursery

FILTERS: list[dict[str, Any]] = [
    {"path": "norm_clip", "args": {"max_norm": 3.0}},
    {"path": "drop", "args": ["2.bias"], "sites": ["b"]},
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("undisturbed")
    with serving(folder, **{"workflow.result_filters": FILTERS}) as server:
        Sites(server.url, folder).join()
        assert server.wait(60)
    return Result(folder)


@pytest.mark.covers("T8")
@pytest.mark.parametrize(
    ("lives", "deaths"),
    [
        pytest.param("filters.write=kill@9", 1, id="while-it-filters", marks=pytest.mark.covers("F8")),
        pytest.param("accept.after=kill@3", 1, id="after-the-accept", marks=pytest.mark.covers("F9")),
        pytest.param("pass.chunk=kill@2", 1, id="mid-aggregation", marks=pytest.mark.covers("F10")),
        pytest.param("filters.write=enospc@9", 0, id="disk-full"),
    ],
)
def test_killed_around_the_filters(
    nursery: Nursery, tmp_path: Path, undisturbed: Result, lives: str, deaths: int
) -> None:
    with ServerProcess(nursery, tmp_path, (lives,), **{"workflow.result_filters": FILTERS}) as server:
        sites = Sites(server.url, tmp_path)
        sites.join()
        assert server.kept.wait() == 0
        assert server.kept.deaths == deaths
    Result(tmp_path).require_same(undisturbed, sites)
    assert sorted(path.name for path in (tmp_path / "state").iterdir() if path.is_file()) == [
        "audit.head",
        "journal.sqlite",
        "lock",
        "status.json",
    ]
