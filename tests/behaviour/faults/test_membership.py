"""Sites that come late, go, die, come back or never stop coming; and clocks that jump."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
from fault_world import EVERY_SITE_AND_ROUND, Result, SiteProcess, Sites, said, serving
from harness.processes import Nursery, wait_until
from kit.wire import WireSite


@pytest.mark.covers("F33")
def test_a_late_joiner_counts_from_the_next_round_on(tmp_path: Path) -> None:
    late, begun = threading.Event(), threading.Event()

    def early(site: str, number: int) -> None:
        if number == 1:
            begun.set()
            assert late.wait(30)

    with serving(tmp_path, **{"rounds.sites": 1}) as server:
        first = Sites(server.url, tmp_path, during=early, names=["a"])
        assert begun.wait(30)
        second = Sites(server.url, tmp_path, names=["b"])
        wait_until(lambda: len(server.status().workers) == 2, "the late joiner")
        assert [missing.site for missing in server.status().fragments[0].waiting_for] == ["a"]
        late.set()
        first.join()
        second.join()
        server.run()
    assert Result(tmp_path).counted() == [("a", 1), ("a", 2), ("a", 3), ("b", 2), ("b", 3)]


@pytest.mark.covers("F34", "L13")
def test_all_workers_die_the_run_waits_says_why_and_goes_on_when_they_are_back(
    nursery: Nursery, tmp_path: Path
) -> None:
    never = f"2:{tmp_path}/never"
    with serving(tmp_path, **{"network.heartbeat_interval_s": 0.2, "network.heartbeat_timeout_s": 2.0}) as server:
        sites = [SiteProcess(nursery, tmp_path, server.url, site) for site in "ab"]
        processes = [site.start(HOLD=never) for site in sites]
        for process in processes:
            wait_until(lambda process=process: said(process, "trains", 2), "the second round")
        for process in processes:
            assert process.kill() == -signal.SIGKILL
        wait_until(lambda: server.status().deaths == 2, "their leases to end")
        told = server.status().fragments[0]
        assert told.version == 1
        assert "waits for another site: 0 alive, rounds.min_sites is 2" in told.reason
        back = [site.start(HOLD=f"2:{tmp_path}/go") for site in sites]
        for process in back:
            wait_until(lambda process=process: said(process, "trains", 2), "their return")
        (tmp_path / "go").touch()
        for process in back:
            assert process.wait(60) == 0
        server.run()
    assert Result(tmp_path).counted() == EVERY_SITE_AND_ROUND


@pytest.mark.covers("F35")
def test_below_min_sites_a_round_never_closes(tmp_path: Path) -> None:
    with serving(
        tmp_path, **{"rounds.min_sites": 2, "rounds.quorum": 2, "rounds.deadline_s": 0.2, "rounds.total": 1}
    ) as server:
        silent = WireSite(server.url, "b")
        alone = Sites(server.url, tmp_path, names=["a"])
        wait_until(
            lambda: "the deadline has passed, 1 of 2 updates are in" in server.status().fragments[0].reason, "it"
        )
        assert server.status().fragments[0].version == 0
        silent.leave()
        wait_until(lambda: "waits for another" in server.status().fragments[0].reason, "the word about it")
        assert server.status().fragments[0].version == 0
        back = Sites(server.url, tmp_path, names=["b"])
        alone.join()
        back.join()
        server.run()
    assert Result(tmp_path).counted() == [("a", 1), ("b", 1)]


@pytest.mark.covers("F36")
def test_a_command_that_fails_again_and_again_is_started_ever_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.cli import worker

    pauses: list[float] = []
    monkeypatch.setattr(worker, "_pause", lambda told, seconds: pauses.append(seconds))
    monkeypatch.setattr(worker, "_require_server", lambda address, told: None)  # it answers each time
    assert worker._run(["false"], {"ATOLL_SERVER": "http://127.0.0.1:1"}, restarts=8) == 1
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_worker_that_comes_and_goes_disturbs_no_other(tmp_path: Path) -> None:
    """It gets its open ticket again each time; every lease that it gave back is refused."""
    with serving(tmp_path, **{"rounds.total": 1, "rounds.min_sites": 1}) as server:
        steady, done = threading.Event(), threading.Event()

        def during(site: str, number: int) -> None:
            steady.set()
            assert done.wait(60)

        other = Sites(server.url, tmp_path, during=during, names=["a"])
        tickets = set()
        for _ in range(20):
            guest = WireSite(server.url, "b")
            tickets.add(guest.ticket()["id"])
            assert steady.wait(30)
            guest.leave()
        assert len(tickets) == 1
        done.set()
        other.join()
        server.run()
    assert Result(tmp_path).counted() == [("a", 1)]


@pytest.mark.covers("F20")
@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_a_clock_that_jumps_by_a_day_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    real = time.time

    def during(site: str, number: int) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + number * jump_s)

    with serving(
        tmp_path,
        **{
            "network.heartbeat_interval_s": 0.1,
            "network.heartbeat_timeout_s": 20.0,
            "rounds.quorum": 2,
            "rounds.deadline_s": 30.0,
        },
    ) as server:
        sites = Sites(server.url, tmp_path, during=during)
        sites.join()
        status = server.status()
        server.run()
    assert status.deaths == 0
    assert all(worker.last_heartbeat_s < 20.0 for worker in status.workers)
    assert Result(tmp_path).counted() == EVERY_SITE_AND_ROUND


@pytest.mark.covers("F4", "F8")
def test_an_update_that_an_earlier_process_left_is_sent_by_the_next_one(nursery: Nursery, tmp_path: Path) -> None:
    """A process that formed its update, and was killed before it could complete it: its successor does, untrained."""
    with serving(tmp_path, **{"rounds.sites": 1, "rounds.total": 1}) as server:
        first = SiteProcess(nursery, tmp_path, server.url, "a").start("outbox.sealed=kill")
        assert first.wait() == -signal.SIGKILL
        sites = Sites(server.url, tmp_path, names=["a"])
        sites.join()
        server.run()
    assert sites.trained == {}
    assert Result(tmp_path).counted() == [("a", 1)]
