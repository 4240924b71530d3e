"""A worker is killed while an update is formed and sent whose codec has error feedback: the bits are the same."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fault_world import EVERY_SITE_AND_ROUND, Result, SiteProcess, Sites, serving

from atoll.testing.processes import Nursery

KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("undisturbed-int4")
    with serving(folder, codec="int4") as server:
        Sites(server.url, folder).join()
        server.run()
    return Result(folder)


@pytest.mark.slow
@pytest.mark.covers("L16")
@pytest.mark.parametrize("place", ["worker.write=kill@20", "outbox.seal=kill@2", "worker.acknowledged=kill@2"])
def test_what_was_left_over_is_added_once(nursery: Nursery, tmp_path: Path, undisturbed: Result, place: str) -> None:
    """In its second round: amid the files, with all written and nothing said, and with all sent and nothing heard."""
    with serving(tmp_path, codec="int4") as server:
        other = Sites(server.url, tmp_path, names=["b"])
        site = SiteProcess(nursery, tmp_path, server.url, "a")
        assert site.start(place).wait(60) == KILLED
        assert site.start().wait(60) == 0
        other.join()
        server.run()
    result = Result(tmp_path)
    assert result.counted() == EVERY_SITE_AND_ROUND
    assert result.bits == undisturbed.bits
