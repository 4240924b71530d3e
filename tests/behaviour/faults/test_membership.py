"""Who comes late, goes, dies, comes back or never stops coming; and clocks that jump."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from fault_world import EVERY_SITE_AND_ROUND, Result, SiteProcess, Sites, build, said, serving, train_
from harness.processes import Nursery, free_port, wait_until
from kit.servers import new_server
from torch import nn

import atoll
from atoll.protocol.values import UpdateInfo
from atoll.worker.exchange.participation import take_part


@pytest.mark.covers("F33")
def test_a_late_joiner_counts_from_the_next_round_on(tmp_path: Path) -> None:
    late, begun = threading.Event(), threading.Event()

    def early(site: str, number: int) -> None:
        if number == 1:
            begun.set()
            assert late.wait(30)

    with serving(tmp_path, **{"rounds.sites": 1}) as server:
        first = Sites(server.url, tmp_path, early, names=["a"])
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
        processes = [site.start(hold=never) for site in sites]
        for process in processes:
            wait_until(lambda process=process: said(process, "trains", 2), "the second round")
        for process in processes:
            assert process.kill() == -signal.SIGKILL
        wait_until(lambda: server.status().deaths == 2, "their leases to end")
        told = server.status().fragments[0]
        assert told.version == 1
        assert "waits for another site: 0 of rounds.min_sites 2 alive" in told.reason
        back = [site.start(hold=f"2:{tmp_path}/go") for site in sites]
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
        silent = take_part(server.url, "b", folder=tmp_path / "workers")
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

        other = Sites(server.url, tmp_path, during, names=["a"])
        tickets = set()
        for _ in range(20):
            place = take_part(server.url, "b", folder=tmp_path / "workers")
            reply = place.exchange.ask()
            assert reply.ticket is not None
            tickets.add(reply.ticket.id)
            assert steady.wait(30)
            place.leave()
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
        sites = Sites(server.url, tmp_path, during)
        sites.join()
        status = server.status()
        server.run()
    assert status.deaths == 0
    assert all(worker.last_heartbeat_s < 20.0 for worker in status.workers)
    assert Result(tmp_path).counted() == EVERY_SITE_AND_ROUND


def linear() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(8.0)
    return model


@pytest.mark.covers("L10", "F6")
def test_diloco_trains_on_without_its_server_and_brings_everything_in_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """H = 2, inner SGD with lr 1 on a gradient of 1: each step moves the weight by −1; outer SGD with lr 1.

    Steps 1, 2 make round one. The server is away in steps 3 to 6, so two synchronisations are skipped; the one at step
    8 brings in all of 3 … 8. So after two rounds the global weight is 8 − 2 − 6 = 0: no step is lost, none doubled.
    """
    settings = {
        "algorithm.name": "diloco",
        "rounds.sites": 1,
        "rounds.total": 2,
        "diloco.sync_every": 2,
        "aggregation.upload_codec.name": "none",
        "algorithm.outer_optimizer.lr": 1.0,
        "algorithm.outer_optimizer.momentum": 0.0,
        "network.port": free_port(),
        "disk.state_dir": tmp_path / "state",
        "network.heartbeat_interval_s": 0.5,
        "network.heartbeat_timeout_s": 60.0,
    }
    caplog.set_level("INFO", "atoll")
    server = new_server(linear(), **settings).start()
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()

    with atoll.DiLoCo(
        model, optimizer, server=server.url, site="a", folder=tmp_path / "workers", max_sync_retries=1
    ) as diloco:
        try:
            step(), step()
            assert diloco.rounds == 1
            server.stop()
            for _ in range(4):
                step()
            assert diloco.skipped == 2
            assert model.weight.item() == 2.0
            assert "synchronisation at step 4 skipped; training goes on" in caplog.text
            server = new_server(linear(), **settings).start()
            step(), step()
            assert (diloco.rounds, diloco.finished) == (2, True)
            assert model.weight.item() == 0.0
            assert caplog.text.count("a: the server is back; synchronised at step 8") == 1
        finally:
            server.stop()


@pytest.mark.covers("L10")
def test_diloco_advances_by_what_was_counted_while_the_answer_was_lost(tmp_path: Path) -> None:
    """The update of round one is in, but the worker never hears of it; it is not submitted a second time.

    As above: after round one the global weight is 8 − 2 = 6, though the worker believes the synchronisation skipped.
    Steps 3 and 4 are the only local progress of the next one: 6 − 2 = 4 after round two.
    """
    from harness.proxy import BEFORE_HEADER, Fault, Proxy

    settings = {
        "algorithm.name": "diloco",
        "rounds.sites": 1,
        "rounds.total": 2,
        "diloco.sync_every": 2,
        "aggregation.upload_codec.name": "none",
        "algorithm.outer_optimizer.lr": 1.0,
        "algorithm.outer_optimizer.momentum": 0.0,
        "network.port": 0,
        "disk.state_dir": tmp_path / "state",
        "network.heartbeat_interval_s": 0.5,
    }
    with new_server(linear(), **settings) as server, Proxy(server.port) as proxy:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with atoll.DiLoCo(
            model, optimizer, server=proxy.url, site="a", folder=tmp_path / "workers", max_sync_retries=0
        ) as diloco:
            proxy.faults.append(Fault("POST .*/complete ", "down", at=BEFORE_HEADER, action="reset"))
            for number in range(1, 5):
                optimizer.zero_grad()
                model.weight.sum().backward()
                optimizer.step()
                if number == 2:
                    assert (diloco.rounds, diloco.skipped) == (0, 1)
            assert diloco.finished
            assert model.weight.item() == 4.0


@pytest.mark.covers("F4", "F8")
def test_an_update_that_an_earlier_process_left_is_sent_by_the_next_one(tmp_path: Path) -> None:
    """A process that formed its update and could send nothing: its successor does, without training."""
    from atoll.tensors.module_tensors import named_tensors

    with serving(tmp_path, **{"rounds.sites": 1, "rounds.total": 1}) as server:
        first = take_part(server.url, "a", folder=tmp_path / "workers")
        reply = first.exchange.ask()
        assert reply.ticket is not None
        model = build()
        tensors = named_tensors(model)[0]
        first.exchange.pull(reply.ticket.base, tensors)
        train_(model, "a", 1)
        first.exchange.form(reply.ticket, tensors, UpdateInfo(1.0, 1, {}))
        first.leave()
        sites = Sites(server.url, tmp_path, names=["a"])
        sites.join()
        server.run()
    assert sites.trained == {}
    assert Result(tmp_path).counted() == [("a", 1)]
