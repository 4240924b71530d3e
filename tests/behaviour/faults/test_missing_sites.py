"""A site of a run is missing: whether the run waits, and what it reports."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault_world import KILLED, SiteProcess, Sites, said, serving
from harness.processes import Nursery, wait_until
from kit import DiLoCoSites
from kit.models import wide_model
from torch import nn

import atoll
from atoll import Server
from atoll.errors import SchemaMismatch

HOSPITALS = ("a", "b", "c")
QUICK = {"rounds.sites": 3, "network.heartbeat_interval_s": 0.2, "network.heartbeat_timeout_s": 1.5}


@contextmanager
def killed(nursery: Nursery, folder: Path, server: Server, in_round: int) -> Iterator[SiteProcess]:
    """A site c that was killed while it trained in a round, and was declared dead."""
    site = SiteProcess(nursery, folder, server.url, "c")
    process = site.start(HOLD=f"{in_round}:{folder}/never")
    wait_until(lambda: said(process, "trains", in_round), "its training")
    assert process.kill() == KILLED
    wait_until(lambda: server.status().deaths == 1, "the end of its lease")
    yield site


@pytest.mark.covers("F35")
def test_a_federated_run_waits_for_a_dead_site_and_names_both_remedies(
    nursery: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "atoll.server")
    with serving(tmp_path, **QUICK) as server:
        others = Sites(server.url, tmp_path, "ab")
        with killed(nursery, tmp_path, server, in_round=2) as site:
            wait_until(lambda: not server.status().fragments[0].waiting_for, "the updates of the others")
            status = server.status()
            assert status.version == 1
            (told,) = status.warnings
            assert "c is dead" in told
            assert "Start c again" in told
            assert "rounds.min_sites = 2" in told
            assert [record.message for record in caplog.records if "rounds.min_sites = 2" in record.message]
            back = site.start()
        others.join()
        assert back.wait() == 0
        server.run()
        status = server.status()
    assert [sorted(each.workers) for each in status.history] == [list(HOSPITALS)] * 3
    assert status.warnings == []


@pytest.mark.covers("F35")
def test_asks_for_as_many_sites_as_are_needed_and_for_none_with_another_model(tmp_path: Path) -> None:
    with serving(tmp_path, **{"rounds.sites": 3, "rounds.min_sites": 1}) as server:
        one, other, wrong = [atoll.join(server.url, site=site, folder=tmp_path / "workers") for site in HOSPITALS]
        with pytest.raises(SchemaMismatch), wrong:
            next(iter(wrong)).load_into(nn.Linear(2, 1))
        one.leave()
        other.leave()
        (told,) = wait_until(lambda: server.status().warnings, "the warning")
    assert told.startswith("0 sites take part (a has left, b has left and c failed), but a round needs at least ")
    assert told.endswith(
        "needs at least 1 (rounds.min_sites): the run waits. Start 1 of a and b again under the same name"
    )


@pytest.mark.covers("F35")
def test_asks_for_another_site_if_the_only_one_has_another_model(tmp_path: Path) -> None:
    with serving(tmp_path, **{"rounds.sites": 1, "rounds.min_sites": 1}) as server:
        worker = atoll.join(server.url, site="a", folder=tmp_path / "workers")
        with pytest.raises(SchemaMismatch), worker:
            next(iter(worker)).load_into(nn.Linear(2, 1))
        (told,) = wait_until(lambda: server.status().warnings, "the warning")
    assert told.startswith("0 sites take part (a failed), but a round needs at least 1 (rounds.min_sites)")
    assert told.endswith("the run waits. Start another site")


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
def test_the_fewest_updates_of_a_federated_round_follow_from_the_settings(
    tmp_path: Path, settings: dict[str, object], floor: int
) -> None:
    """All three sites join and leave again in the first round: the status tells how many a round needs."""
    with serving(
        tmp_path,
        **{"rounds.sites": 3},
        **{"algorithm.outer_optimizer.name": None, "algorithm.outer_optimizer.momentum": None, **settings},
    ) as server:
        for worker in [atoll.join(server.url, site=site, folder=tmp_path / "workers") for site in HOSPITALS]:
            with worker:
                pass
        wait_until(lambda: all(each.state == "left" for each in server.status().workers), "their leaving")
        assert server.status().fragments[0].reason.endswith(f" is {floor}")


@pytest.mark.covers("L9")
@pytest.mark.parametrize("place", ["empty", "taken by d"])
def test_a_round_without_one_of_the_sites_is_reported_with_its_name(
    nursery: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    caplog.set_level(logging.WARNING, "atoll.server")
    settings, later = ({"rounds.min_sites": 2}, "ab") if place == "empty" else ({}, "abd")
    with serving(tmp_path, **QUICK, **settings) as server:
        others = Sites(server.url, tmp_path, "ab")
        with killed(nursery, tmp_path, server, in_round=2):
            replacement = Sites(server.url, tmp_path, set(later) - set("ab"))
            others.join()
            replacement.join()
        server.run()
        status = server.status()
    assert ["".join(sorted(each.workers)) for each in status.history] == ["abc", later, later]
    assert [each.expected for each in status.history] == [3, 3, 3]
    (told,) = status.warnings
    assert "without c" in told
    reports = [record for record in caplog.records if "without c" in record.message]
    assert [record.levelname for record in reports] == ["WARNING"]


@pytest.mark.covers("L9")
def test_a_site_that_was_not_drawn_is_not_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three of six sites are drawn; the first that is begins to train, and comes no further."""
    caplog.set_level(logging.WARNING, "atoll.server")
    held: list[str] = []
    lock, over = threading.Lock(), threading.Event()

    def during(site: str, number: int) -> None:
        with lock:
            if not held:
                held.append(site)
        if site in held:
            over.wait()

    settings = {
        "rounds.sites": 6,
        "rounds.sample_fraction": 0.5,
        "rounds.quorum": 2,
        "rounds.deadline_s": 2.0,
        "rounds.total": 4,
    }
    with serving(tmp_path, **{**QUICK, **settings}) as server:
        Sites(server.url, tmp_path, "abcdef", during=during)
        assert server.wait(60)
        status = server.status()
        over.set()
    assert len(status.history[0].workers) == 2
    assert [each.expected for each in status.history] == [3] * 4
    (site,) = held
    (told,) = status.warnings
    reports = [record.message for record in caplog.records if "its version contains no training" in record.message]
    assert len(reports) == 1
    for text in (told, *reports):
        assert f"without {site}:" in text


@pytest.mark.covers("L9")
def test_a_diloco_run_goes_on_without_a_dead_worker_and_reports_it(nursery: Nursery, tmp_path: Path) -> None:
    diloco = {
        "algorithm.name": "diloco",
        "rounds.sites": 2,
        "diloco.sync_every": 2,
        "aggregation.upload_codec.name": "none",
    }
    with serving(tmp_path, **{**QUICK, **diloco}) as server:
        other = DiLoCoSites(server.url, tmp_path, steps=6, names=["a"], build=wide_model)
        with killed(nursery, tmp_path, server, in_round=1):
            other.join()
        server.run()
        status = server.status()
    assert [each.workers for each in status.history] == [["a"]] * 3
    assert ["without c" in told for told in status.warnings] == [True]
