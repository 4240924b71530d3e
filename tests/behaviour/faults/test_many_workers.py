"""Two hundred workers that lose their server at once come back, and the server takes little more memory."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from fault_world import Result, ServerProcess, Sites
from harness.process_figures import Peaks
from harness.processes import Nursery, wait_until

MANY = 200
MORE_MB = 100.0
"""For all of them together, of connections, requests and scratches; their updates alone are 68 MB."""


@pytest.mark.slow
@pytest.mark.covers("F37")
@pytest.mark.parametrize("many", [60, pytest.param(MANY, marks=pytest.mark.long)])
def test_many_workers_that_lose_their_server_at_once_come_back(nursery: Nursery, tmp_path: Path, many: int) -> None:
    submitting = threading.Barrier(many + 1)
    names = [f"site-{number:03d}" for number in range(many)]
    peaks = Peaks()
    with ServerProcess(nursery, tmp_path, **{"rounds.sites": many, "rounds.total": 1}) as server:
        wait_until(lambda: "listening" in server.log.read_text(), "the server")
        sites = Sites(server.url, tmp_path, names, during=lambda *_: submitting.wait(60))
        submitting.wait(60)  # all of them send at once, and
        server.kept.now.kill()
        wait_until(lambda: server.kept.deaths == 1, "a new start")
        wait_until(lambda: server.log.read_text().count("listening") == 2, "the server once more")
        peaks.begin(server.kept.now.pid)
        sites.join()
        peak_mb = peaks.peak_mb(server.kept.now.pid)
        assert server.kept.wait() == 0
    peaks.close()
    assert 0.0 < peak_mb < MORE_MB
    assert sites.trained == {(site, 1): 1 for site in names}
    assert Result(tmp_path).counted() == [(site, 1) for site in names]
