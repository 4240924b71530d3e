"""The clocks of server and sites jump by a day, forwards and backwards: nothing stalls, no site is declared dead."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from harness.processes import Nursery, wait_until
from kit import FederatedSites, ForkedServer, ForkedSite, exported, serve, tensors_digest

from atoll.testing import run

LIBRARY = next((path for lib in ("/usr/lib", "/usr/lib64") for path in Path(lib).glob("**/libfaketimeMT.so.1")), None)
DAY = timedelta(days=1)
JUMPS = {2: "+1d", 3: "-1d", 4: "+0"}
"""Round → what the clocks show from its middle on, against the real time."""
SETTINGS = {
    "rounds.total": 4,
    "rounds.quorum": 1,
    "rounds.deadline_s": 3600.0,
    "network.heartbeat_interval_s": 0.2,
    "network.heartbeat_timeout_s": 60.0,
}
"""With a clock that counts, a round would close with one site, and the other would be declared dead."""
SCRIPT = """
import os
import time
from pathlib import Path

import atoll
from kit.models import SITES, build_model, train_

site, model = os.environ["ATOLL_SITE"], build_model()
with atoll.join() as worker:
    for fl_round in worker:
        fl_round.load_into(model)
        print("trains", fl_round.number, time.time(), flush=True)
        train_(model, site, fl_round.number)
        while fl_round.number > 1 and not Path(f"jumped-{fl_round.number}").exists():
            time.sleep(0.01)
        fl_round.submit(model, weight=SITES[site])
"""


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says how wrong the clocks of the processes of `jumping` are."""
    if LIBRARY is None:
        pytest.skip("libfaketime is not installed")
    path = tmp_path / "clock"
    path.write_text("+0")
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(path))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")  # as when a clock is set: monotonic time does not jump
    return path


@pytest.fixture
def jumping(clock: Path, tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> Nursery:
    """Starts processes under libfaketime; another preloaded library keeps the fork server from forking them."""
    (tmp_path / "sitecustomize.py").write_text("import sleep_by_select\n")
    monkeypatch.setenv("LD_PRELOAD", str(LIBRARY))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parent), *sys.path]))
    return nursery


@pytest.mark.slow
@pytest.mark.covers("F20")
def test_trains_every_round_once_though_clocks_jump_by_a_day(tmp_path: Path, clock: Path, jumping: Nursery) -> None:
    straight, folder = tmp_path / "straight", tmp_path / "jumps"
    folder.mkdir()
    with serve(straight, **SETTINGS) as server:
        FederatedSites(server.url, straight).join()
        server.run()
    with ForkedServer(jumping, folder, **SETTINGS) as remote:
        sites = [ForkedSite(jumping, folder, remote.url, site, SCRIPT).start() for site in "ab"]
        for number, jump in JUMPS.items():
            line = f"trains {number} "
            wait_until(lambda line=line: all(line in each.output() for each in sites), f"round {number}")
            clock.write_text(jump)
            _wait_for_heartbeats(remote.url)
            (folder / f"jumped-{number}").touch()
        assert [site.wait(60) for site in sites] == [0, 0]
        assert remote.kept.wait() == 0
    for site in sites:
        trained = [line.split()[1:] for line in site.output().splitlines() if line.startswith("trains ")]
        assert [number for number, _ in trained] == ["1", "2", "3", "4"]
        assert float(trained[2][1]) - float(trained[3][1]) > DAY.total_seconds()  # its clock really went back
    assert _audited(folder) > 1.5 * DAY
    assert tensors_digest(exported(folder)) == tensors_digest(exported(straight))


def _wait_for_heartbeats(url: str) -> None:
    """Until the server has heard from both sites under the new time; both are alive to it."""
    silent = {"a": 0.0, "b": 0.0}

    def heard() -> bool:
        for worker in run.status(url).workers:
            if worker.last_heartbeat_s < silent.get(worker.site, 0.0):
                del silent[worker.site]  # the silence is shorter than it was, so a heartbeat has come
            elif worker.site in silent:
                silent[worker.site] = worker.last_heartbeat_s
        return not silent

    wait_until(heard, "heartbeats after the jump")
    found = run.status(url)
    assert found.deaths == 0
    assert {each.site: (each.state, each.error) for each in found.workers} == {"a": ("alive", ""), "b": ("alive", "")}


def _audited(folder: Path) -> timedelta:
    """Between the earliest and the latest time of the server's audit log."""
    with contextlib.closing(sqlite3.connect(folder / "state" / "journal.sqlite")) as journal:
        times = [datetime.fromisoformat(at) for (at,) in journal.execute("SELECT at FROM audit")]
    return max(times) - min(times)
