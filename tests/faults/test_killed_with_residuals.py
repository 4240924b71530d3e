"""A worker is killed while an update is formed and sent whose codec has error feedback: the bits are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_world import Result, SiteProcess, Sites, beside, left_undisturbed, serving
from harness.processes import Nursery


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return left_undisturbed(tmp_path_factory.mktemp("undisturbed-int4"), **{"aggregation.upload_codec.name": "int4"})


@pytest.mark.slow
@pytest.mark.covers("L16")
@pytest.mark.parametrize("place", ["worker.write=kill@20", "outbox.seal=kill@2", "worker.acknowledged=kill@2"])
def test_what_was_left_over_is_added_once(nursery: Nursery, tmp_path: Path, undisturbed: Result, place: str) -> None:
    """In its second round: amid the files, with all written and nothing said, and with all sent and nothing heard."""
    with (
        serving(tmp_path, **{"aggregation.upload_codec.name": "int4"}) as server,
        beside(server, Sites(server.url, tmp_path, names=["b"])),
    ):
        SiteProcess(nursery, tmp_path, server.url, "a").killed_and_again(place)
    Result(tmp_path).require_same(undisturbed)
