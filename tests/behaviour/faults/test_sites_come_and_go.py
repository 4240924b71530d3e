"""Sites that come late, are missing, go, die or come back: whether the run waits for them, and what it reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_world import EVERY_SITE_AND_ROUND, KILLED, QUICK, Result, SiteProcess, Sites, said, serve_wide
from harness.processes import Nursery, free_port, wait_until
from kit import DiLoCoSites, FederatedSites, Gate, copy_folder, run_to_end, serve
from kit.models import wide_model
from kit.wire import WireSite
from torch import nn

import atoll
from atoll.errors import SchemaMismatch
from atoll.format_text import number_of

HOSPITALS = ("a", "b", "c")


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """The server's warnings in its log with these words."""
    return lambda words: [each.message for each in caplog.records if words in each.message]


def killed_site(nursery: Nursery, folder: Path, server: atoll.Server, number: int) -> SiteProcess:
    """A site c that was killed while it trained in a round, and was declared dead."""
    site = SiteProcess(nursery, folder, server.url, "c")
    assert site.in_training(number).kill() == KILLED
    wait_until(lambda: server.status().deaths == 1, "the end of its lease")
    return site


@pytest.mark.covers("F33")
def test_a_late_site_counts_from_the_next_round(tmp_path: Path) -> None:
    """A site that joins during an open round takes part from the next round on."""
    gate = Gate(1, "a")
    with serve_wide(tmp_path, sites=1) as server:
        first = Sites(server.url, tmp_path, during=gate, names=["a"])
        gate.wait()
        second = Sites(server.url, tmp_path, names=["b"])
        wait_until(lambda: len(server.status().workers) == 2, "the late joiner")
        assert [missing.site for missing in server.status().fragments[0].waiting_for] == ["a"]
        gate.open()
        run_to_end(server, first, second)
    assert Result(tmp_path).counted() == [("a", 1), ("a", 2), ("a", 3), ("b", 2), ("b", 3)]


@pytest.mark.covers("F34", "L13")
def test_a_run_waits_if_all_its_sites_died(nursery: Nursery, tmp_path: Path) -> None:
    """If all sites have died, the run waits and its status says why. The run goes on when the sites are back."""
    with serve_wide(tmp_path, **QUICK) as server:
        sites = [SiteProcess(nursery, tmp_path, server.url, site) for site in "ab"]
        for process in [site.start(HOLD=f"2:{tmp_path}/never") for site in sites]:
            wait_until(lambda process=process: said(process, "trains", 2), "the second round")
            assert process.kill() == KILLED
        wait_until(lambda: server.status().deaths == 2, "their leases to end")
        told = server.status().fragments[0]
        assert told.version == 1
        assert "waits for another site: only 0 of 2 updates accepted or expected (rounds.min_sites)" in told.reason
        for process in [site.start() for site in sites]:
            assert process.wait(60) == 0
        server.run()
    assert Result(tmp_path).counted() == EVERY_SITE_AND_ROUND


@pytest.mark.covers("F35")
def test_a_round_does_not_close_below_min_sites(tmp_path: Path) -> None:
    """A round with fewer updates than `rounds.min_sites` does not close, even after its deadline."""
    settings = {"rounds.min_sites": 2, "rounds.quorum": 2, "rounds.deadline_s": 0.2}
    with serve_wide(tmp_path, rounds=1, **settings) as server:
        silent = WireSite(server.url, "b")
        alone = Sites(server.url, tmp_path, names=["a"])
        passed = "the deadline has passed with 1 of 2 updates"
        wait_until(lambda: passed in server.status().fragments[0].reason, "the deadline")
        assert server.status().fragments[0].version == 0
        silent.leave()
        wait_until(lambda: "waits for another" in server.status().fragments[0].reason, "the word about it")
        assert server.status().fragments[0].version == 0
        back = Sites(server.url, tmp_path, names=["b"])
        run_to_end(server, alone, back)
    assert Result(tmp_path).counted() == [("a", 1), ("b", 1)]


def test_a_site_that_joins_again_gets_its_open_ticket(tmp_path: Path) -> None:
    """A site that joins and leaves again and again gets the same open ticket each time."""
    with serve_wide(tmp_path, **{"rounds.total": 1, "rounds.min_sites": 1}) as server:
        gate, tickets = Gate(1, "a"), set()
        other = Sites(server.url, tmp_path, during=gate, names=["a"])
        for _ in range(20):
            guest = WireSite(server.url, "b")
            tickets.add(guest.ticket()["id"])
            gate.wait()
            guest.leave()
        assert len(tickets) == 1
        gate.open()
        run_to_end(server, other)
    assert Result(tmp_path).counted() == [("a", 1)]


@pytest.mark.covers("F35")
def test_a_round_waits_for_a_dead_site(nursery: Nursery, tmp_path: Path, warned: Callable[[str], list[str]]) -> None:
    """A round that needs all sites waits for a dead one. The warning offers two remedies."""
    # The user can start the site again, or lower `rounds.min_sites`.
    with serve_wide(tmp_path, **QUICK, sites=3) as server:
        others = Sites(server.url, tmp_path, "ab")
        site = killed_site(nursery, tmp_path, server, 2)
        wait_until(lambda: not server.status().fragments[0].waiting_for, "the updates of the others")
        status = server.status()
        assert status.version == 1
        (told,) = status.warnings
        assert [words for words in ("c is dead", "Start c again", "rounds.min_sites = 2") if words not in told] == []
        assert warned("rounds.min_sites = 2")
        back = site.start()
        others.join()
        assert back.wait() == 0
        server.run()
        status = server.status()
    assert [sorted(each.workers) for each in status.history] == [list(HOSPITALS)] * 3
    assert status.warnings == []


@pytest.mark.covers("F35")
@pytest.mark.parametrize(
    ("names", "ended", "remedy"),
    [
        ("abc", "a has left, b has left and c failed", "Start 1 of a and b again under the same name"),
        ("a", "a failed", "Start a again after mending its error (see its log)"),
    ],
    ids=["three sites", "one site"],
)
def test_the_warning_asks_for_enough_sites(tmp_path: Path, names: str, ended: str, remedy: str) -> None:
    """If too few sites take part, the warning asks to restart as many of the sites that left as a round needs."""
    # It asks for a site that failed only if no other site has left.
    with serve_wide(tmp_path, sites=len(names), **{"rounds.min_sites": 1}) as server:
        *others, wrong = [atoll.join(server.url, site=site, folder=tmp_path / "workers") for site in names]
        with pytest.raises(SchemaMismatch), wrong:
            next(iter(wrong)).load_into(nn.Linear(2, 1))
        for other in others:
            other.leave()
        (told,) = wait_until(lambda: server.status().warnings, "the warning")
    assert told.startswith(f"0 sites take part ({ended}), but a round needs at least 1 (rounds.min_sites)")
    assert told.endswith(f"the run waits. {remedy}")


@pytest.mark.parametrize(
    ("settings", "floor"),
    [
        ({}, 3),
        ({"algorithm.name": "scaffold"}, 3),
        ({"rounds.sample_fraction": 0.4}, 2),
        ({"rounds.sample_fraction": 0.1, "rounds.sample_min": 2}, 2),
        ({"rounds.quorum": 2, "rounds.deadline_s": 600.0}, 2),
        ({"rounds.min_sites": 1}, 1),
    ],
)
def test_settings_decide_how_many_updates_a_round_needs(
    tmp_path: Path, settings: dict[str, object], floor: int
) -> None:
    """The settings decide how many updates a round needs, and the status shows this number.

    All three sites join and leave again in the first round.
    """
    outer = {"algorithm.outer_optimizer.name": None, "algorithm.outer_optimizer.momentum": None}
    with serve_wide(tmp_path, sites=3, **outer, **settings) as server:
        for worker in [atoll.join(server.url, site=site, folder=tmp_path / "workers") for site in HOSPITALS]:
            with worker:
                pass
        wait_until(lambda: all(each.state == "left" for each in server.status().workers), "their leaving")
        assert (
            server.status()
            .fragments[0]
            .reason.startswith(f"waits for another site: only 0 of {number_of(floor, 'update')} accepted ")
        )


@pytest.mark.covers("L9")
@pytest.mark.parametrize("place", ["empty", "taken by d"])
def test_warns_once_of_a_site_that_a_round_lacks(
    nursery: Nursery, tmp_path: Path, warned: Callable[[str], list[str]], place: str
) -> None:
    """If rounds close without a site that was killed, the status warns of this and the log warns once.

    The site's place stays empty, or another site takes it.
    """
    settings, later = ({"rounds.min_sites": 2}, "ab") if place == "empty" else ({}, "abd")
    with serve_wide(tmp_path, **QUICK, **settings, sites=3) as server:
        others = Sites(server.url, tmp_path, "ab")
        killed_site(nursery, tmp_path, server, 2)
        replacement = Sites(server.url, tmp_path, set(later) - set("ab"))
        run_to_end(server, others, replacement)
        status = server.status()
    assert ["".join(sorted(each.workers)) for each in status.history] == ["abc", later, later]
    assert [each.expected for each in status.history] == [3, 3, 3]
    assert ["without c" in told for told in status.warnings] == [True]
    assert len(warned("without c")) == 1


@pytest.mark.covers("L9")
def test_warns_only_of_missing_sites_that_were_drawn(tmp_path: Path, warned: Callable[[str], list[str]]) -> None:
    """If sites are drawn for each round, the server warns of a missing site only if it was drawn."""
    # Three of six sites are drawn. The first site that trains never submits.
    held: list[str] = []
    lock, over = threading.Lock(), threading.Event()

    def during(site: str, number: int) -> None:
        with lock:
            if not held:
                held.append(site)
        if site in held:
            over.wait()

    settings = {"rounds.sample_fraction": 0.5, "rounds.quorum": 2, "rounds.deadline_s": 1.0}
    with serve_wide(tmp_path, **QUICK, **settings, sites=6, rounds=4) as server:
        Sites(server.url, tmp_path, "abcdef", during=during)
        assert server.wait(60)
        status = server.status()
        over.set()
    assert len(status.history[0].workers) == 2
    assert [each.expected for each in status.history] == [3] * 4
    (told,), (report,) = status.warnings, warned("its version contains no training")
    assert f"without {held[0]}:" in told
    assert f"without {held[0]}:" in report


@pytest.mark.covers("L9")
def test_a_diloco_run_reports_a_dead_site(tmp_path: Path) -> None:
    """A DiLoCo run goes on without a dead site, and its status warns of this."""
    with serve_wide(tmp_path, **QUICK, algorithm="diloco", H=2, codec="none") as server:
        other = DiLoCoSites(server.url, tmp_path, steps=6, names=["a"], build=wide_model)
        WireSite(server.url, "c").ticket()  # then it is silent
        wait_until(lambda: server.status().deaths == 1, "the end of its lease")
        run_to_end(server, other)
        status = server.status()
    assert [each.workers for each in status.history] == [["a"]] * 3
    assert ["without c" in told for told in status.warnings] == [True]


@pytest.mark.covers("F23", "L10")
@pytest.mark.usefixtures("pulled_apart")
def test_a_site_that_pulls_late_joins_the_newest_round(tmp_path: Path) -> None:
    """If rounds close between a site's ticket and its pull, the site pulls the newest version and trains the newest
    round.
    """
    late, resumed = Gate(1, "a"), Gate(5, "b")

    def during(site: str, number: int) -> None:
        if number == 1:
            late.wait()
        resumed(site, number)

    with serve(tmp_path, **{"rounds.quorum": 1, "rounds.deadline_s": 0.3, "rounds.total": 6}) as server:
        a = FederatedSites(server.url, tmp_path, ["a"], before=late)
        b = FederatedSites(server.url, tmp_path, ["b"], during=during)
        wait_until(lambda: server.status().fragments[0].version == 4, "four rounds without the late site")
        late.open()
        wait_until(lambda: a.trained, "a round of the late site")
        resumed.open()
        run_to_end(server, a, b)
    assert min(number for _, number in a.trained) == 5


@pytest.mark.covers("F42")
@pytest.mark.usefixtures("pulled_apart")
def test_a_site_with_a_newer_ticket_survives_a_restore(tmp_path: Path) -> None:
    """A site goes on after the server is restored from a backup that is older than the site's ticket."""
    # The server goes back to version 1 while site `a` has a ticket for round 4 and has not pulled yet. Then `a` trains
    # rounds 2 and 3 again, and round 4 once.
    state, backup, port = tmp_path / "state", tmp_path / "backup", free_port()
    backed_up, late, restored = Gate(2), Gate(4, "a"), Gate(4, "b")

    def during(site: str, number: int) -> None:
        backed_up(site, number)
        restored(site, number)

    with serve(tmp_path, **{"network.port": port, "rounds.total": 4}) as server:
        sites = FederatedSites(server.url, tmp_path, before=late, during=during)
        wait_until(lambda: server.status().fragments[0].version == 1, "the first version")
    copy_folder(state, backup)
    with serve(tmp_path, **{"network.port": port, "rounds.total": 4}) as server:
        backed_up.open()
        late.wait()
        restored.wait()
    state.rename(tmp_path / "newer")
    backup.rename(state)
    with serve(tmp_path, **{"network.port": port, "rounds.total": 4}) as server:
        assert server.status().fragments[0].version == 1
        late.open()
        restored.open()
        run_to_end(server, sites)
    assert [sites.trained["a", number] for number in (1, 2, 3, 4)] == [1, 2, 2, 1]
    assert sites.trained["b", 4] == 2


@pytest.mark.covers("F20")
def test_clocks_that_jump_by_a_day_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system clock jumps by a day, no round closes too early and no site is declared dead."""
    real, jumps_s = time.time, {1: 86_400.0, 2: -86_400.0, 3: 0.0}

    def during(site: str, number: int) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + jumps_s[number])

    settings = {"network.heartbeat_interval_s": 0.1, "rounds.quorum": 1, "rounds.deadline_s": 3600.0}
    with serve_wide(tmp_path, **settings) as server:
        Sites(server.url, tmp_path, during=during).join()
        status = server.status()
        server.run()
    assert status.deaths == 0
    assert all(worker.last_heartbeat_s < 20.0 for worker in status.workers)
    assert Result(tmp_path).counted() == EVERY_SITE_AND_ROUND
