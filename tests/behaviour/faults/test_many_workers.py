"""Two hundred workers that lose their server at once come back, and the server takes little more memory."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from fault_world import Result, ServerProcess, build, train_
from harness.processes import Nursery, wait_until

import atoll

MANY = 200
MORE_MB = 100.0
"""For all of them together, of connections, requests and scratches; their updates alone are 68 MB."""


def anonymous_mb(pid: int) -> float:
    """What the process has at this moment; 0 once it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith("RssAnon"))


@pytest.mark.slow
@pytest.mark.covers("F37")
@pytest.mark.parametrize("many", [60, pytest.param(MANY, marks=pytest.mark.long)])
def test_many_workers_that_lose_their_server_at_once_come_back(nursery: Nursery, tmp_path: Path, many: int) -> None:
    submitting = threading.Barrier(many + 1)
    errors: list[BaseException] = []
    trained: list[str] = []

    def work(site: str) -> None:
        try:
            model = build()
            with atoll.join(server.url, site=site, folder=tmp_path / "workers") as worker:
                for fl_round in worker:
                    fl_round.load_into(model)
                    trained.append(site)
                    train_(model, site, fl_round.number)
                    submitting.wait(60)
                    fl_round.submit(model)
        except BaseException as error:
            errors.append(error)

    with ServerProcess(nursery, tmp_path, **{"rounds.sites": many, "rounds.total": 1}) as server:
        wait_until(lambda: "listening" in server.log.read_text(), "the server")
        before_mb = anonymous_mb(server.kept.now.pid)
        sites = [f"site-{number:03d}" for number in range(many)]
        threads = [threading.Thread(target=work, args=(site,), daemon=True) for site in sites]
        for thread in threads:
            thread.start()
        submitting.wait(60)  # all of them send at once, and
        server.kept.now.kill()
        wait_until(lambda: server.kept.deaths == 1, "a new start")
        peak_mb = 0.0
        while any(thread.is_alive() for thread in threads) and not errors:
            peak_mb = max(peak_mb, anonymous_mb(server.kept.now.pid))
            threads[0].join(0.02)
        assert errors == []
        assert server.kept.wait() == 0
    assert 0.0 < peak_mb < before_mb + MORE_MB
    assert sorted(trained) == sites
    assert Result(tmp_path).counted() == [(site, 1) for site in sites]
