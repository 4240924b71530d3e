"""Streaming runs: lost answers, networks that break, workers that are killed, begin anew or come later.

`test_kill_matrix` kills their server.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_world import (
    KILLED,
    PART_BYTES,
    STREAMING,
    Result,
    ServerProcess,
    SiteProcess,
    StreamingSites,
    beside,
    left_undisturbed,
    lines,
    same,
    serving,
)
from harness.processes import Nursery
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import local_step
from kit.models import wide_model

import atoll
from atoll.errors import ServerUnreachable


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What the run leaves without a fault."""
    return left_undisturbed(tmp_path_factory.mktemp("undisturbed"), StreamingSites, **STREAMING)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with serving(tmp_path, **STREAMING | {"network.connections": 1}) as server:
        yield server


@pytest.mark.covers("L10")
def test_a_broken_transfer_of_a_fragment_resumes_at_the_part(
    tmp_path: Path, server: atoll.Server, streamed: Result
) -> None:
    """The connection breaks within the second part of a fragment's update: the first is not sent again."""
    with Proxy(server.port) as proxy:
        broken = Fault("PUT .*/parts/1 ", "up", at=1000, action="reset")
        proxy.faults.append(broken)
        a = StreamingSites(proxy.url, tmp_path, names=["a"])
        b = StreamingSites(server.url, tmp_path, names=["b"])
        assert broken.reached.wait(60)
        a.join()
        b.join()
        hit = next(line for line in proxy.requests if "/parts/1 " in line).split("/parts/")[0]
        sent = [line.split("/parts/")[1].split()[0] for line in proxy.requests if line.startswith(f"{hit}/parts/")]
    server.run()
    assert sent.count("0") == 1
    assert sent.count("1") >= 2
    Result(tmp_path).require_same(streamed)


@pytest.mark.covers("L10", "F8")
def test_an_answer_that_is_lost_counts_once_and_nothing_is_lost(
    tmp_path: Path, server: atoll.Server, streamed: Result
) -> None:
    with Proxy(server.port) as proxy:
        proxy.faults.append(Fault("POST .*/complete ", "down", at=BEFORE_HEADER, action="reset"))
        a = StreamingSites(proxy.url, tmp_path, names=["a"])
        b = StreamingSites(server.url, tmp_path, names=["b"])
        a.join()
        b.join()
    server.run()
    Result(tmp_path).require_same(streamed)


@pytest.mark.covers("L10")
def test_training_goes_on_without_the_server_and_nothing_is_lost(
    nursery: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is away for a while: turns are skipped, and what was trained meanwhile counts afterwards."""
    caplog.set_level("INFO", "atoll")
    settings = STREAMING | {
        "rounds.sites": 1,
        "rounds.total": 3,
        "algorithm.outer_optimizer.lr": 1.0,
        "algorithm.outer_optimizer.momentum": 0.0,
        "aggregation.upload_codec.name": "none",
    }
    with ServerProcess(nursery, tmp_path, **settings) as server, Proxy(server.port) as proxy:
        model = wide_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with atoll.DiLoCo(
            model, optimizer, server=proxy.url, site="a", folder=tmp_path / "w", max_sync_retries=0
        ) as diloco:
            for step in range(60):
                if step == 4:
                    proxy.cut()
                if step == 11:
                    proxy.heal()
                local_step(model, optimizer, "a", step)
                if diloco.finished:
                    break
            assert diloco.finished
            assert diloco.skipped > 0
            assert caplog.text.count("a: the server answers again; synchronising again from step") == 1
        assert server.kept.wait() == 0
    assert [(fragment, version) for fragment, version, _ in Result(tmp_path).versions] == [
        (fragment, version) for fragment in range(3) for version in range(4)
    ]


@pytest.mark.covers("L10")
def test_while_the_server_is_away_the_first_turn_is_patient_and_the_others_try_once(
    tmp_path: Path, server: atoll.Server, monkeypatch: pytest.MonkeyPatch, streamed: Result
) -> None:
    from atoll.worker.session.session import Session

    attempts: list[int | None] = []
    patiently = Session.patiently

    def counting(self: Session, ask: Any, max_retries: int | None, what: str) -> Any:
        try:
            return patiently(self, ask, max_retries, what)
        except ServerUnreachable:
            attempts.append(max_retries)
            raise

    monkeypatch.setattr(Session, "patiently", counting)
    with Proxy(server.port) as proxy:

        def during(site: str, step: int) -> None:
            if site == "a" and step == 1:
                proxy.cut()
            if site == "a" and step == 9:
                proxy.heal()

        a = StreamingSites(proxy.url, tmp_path, during=during, names=["a"], steps=100, max_sync_retries=2)
        b = StreamingSites(server.url, tmp_path, names=["b"], steps=100)
        a.join()
        b.join()
    server.run()
    assert attempts[0] == 2
    assert attempts[1:] == [0] * (len(attempts) - 1)
    assert a.loops["a"].sync_metrics["skipped"] == len(attempts) >= 2
    assert Result(tmp_path).updates == streamed.updates
    assert same(a.models["a"], b.models["b"])


@pytest.mark.covers("L4", "L10")
def test_submits_a_broken_off_update_while_it_waits_for_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a's update of fragment 0 breaks off twice, and b's of fragment 1: a waits in 1 for b, and b in 0 for a."""
    from atoll.protocol.values import Lost
    from atoll.worker.exchange.exchange import Exchange
    from atoll.worker.training import synchroniser

    broken = [("a", 0), ("a", 0), ("b", 1)]
    send = Exchange.deliver

    def breaking_off(self: Exchange, retries: int | None = None) -> Any:
        if (self.site, self.fragment) in broken:
            broken.remove((self.site, self.fragment))
            return Lost(ServerUnreachable("The line broke."))
        return send(self, retries)

    monkeypatch.setattr(Exchange, "deliver", breaking_off)
    monkeypatch.setattr(synchroniser, "LOOK_S", 0.2)
    settings = STREAMING | {
        "diloco.num_fragments": 2,
        "diloco.sync_every": 4,
        "diloco.fragment_sync_delay": 3,
        "diloco.max_inflight": 2,
    }
    with serving(tmp_path, **settings) as server:
        sites = StreamingSites(server.url, tmp_path, steps=200)
        sites.join(40)
        server.run()
    assert broken == []
    assert same(sites.models["a"], sites.models["b"])
    Result(tmp_path).require_once()


class Stopped(Exception):
    pass


@pytest.mark.covers("L4", "L8", "F2")
def test_a_worker_that_begins_anew_in_the_middle_of_a_cycle_is_in_it_at_once(
    tmp_path: Path, server: atoll.Server
) -> None:
    """a ends after fragment 0 was merged and fragment 1 taken; its next process goes on with fragments 1 or 2.

    b never waits for a site that waits for b: both come to the end, with every round of every fragment counted.
    """

    def during(site: str, step: int) -> None:
        if step == 4:
            raise Stopped

    b = StreamingSites(server.url, tmp_path, names=["b"], steps=60)
    first = StreamingSites(server.url, tmp_path, names=["a"], during=during)
    with pytest.raises(Stopped):
        first.join()
    second = StreamingSites(server.url, tmp_path, names=["a"], steps=60)
    second.join()
    b.join()
    server.run()
    assert [(fragment, version) for fragment, version, _ in Result(tmp_path).versions] == [
        (fragment, version) for fragment in range(3) for version in range(3)
    ]
    Result(tmp_path).require_once()
    assert same(second.models["a"], b.models["b"])


@pytest.mark.covers("L4")
def test_a_joiner_falls_in_with_the_cycle(tmp_path: Path) -> None:
    """c comes when fragment 0 has had its first round: it waits with the others, and counts from the next rounds on."""
    joined = threading.Event()
    at_step = threading.Barrier(3)

    def during(site: str, step: int) -> None:
        if step == 3:
            at_step.wait(30)
            assert joined.wait(30)

    with serving(tmp_path, **STREAMING | {"rounds.total": 4, "network.connections": 1}) as server:
        old = StreamingSites(server.url, tmp_path, during=during, steps=60)
        at_step.wait(30)

        def begun(site: str, step: int) -> None:
            joined.set()

        new = StreamingSites(server.url, tmp_path, names=["c"], during=begun, steps=60)
        new.join()
        old.join()
        server.run()
    counted = {(fragment, number) for site, fragment, number in Result(tmp_path).updates if site == "c"}
    assert counted == {(1, 2), (2, 2), (0, 3), (1, 3), (2, 3), (0, 4), (1, 4), (2, 4)}
    for loop in new.loops.values():
        assert loop.finished


def test_an_earlier_process_left_updates_of_two_fragments(tmp_path: Path, server: atoll.Server) -> None:
    """Both outboxes are sent by the next process; of fragment 2, whose ticket it never had, its second round counts."""
    from atoll.protocol.values import UpdateInfo
    from atoll.worker.exchange.participation import LoopTerms, take_part

    place = take_part(server.url, "a", folder=tmp_path / "workers", loop=LoopTerms())
    take_part(server.url, "b", folder=tmp_path / "elsewhere", loop=LoopTerms())  # until the next process of b comes
    for fragment in (0, 1):
        exchange = place.exchanges[fragment]
        ticket = exchange.ask_and_resend(10.0).ticket
        assert ticket is not None
        tensors = dict(wide_model().state_dict())
        exchange.pull(ticket.base, None)
        exchange.form(ticket, tensors, UpdateInfo(1.0, 2, {}))
    place.leave()
    again = StreamingSites(server.url, tmp_path, names=["a"], steps=53)
    b = StreamingSites(server.url, tmp_path, names=["b"], steps=53)
    again.join()
    b.join()
    server.run()
    every = [(site, fragment, number) for site in "ab" for fragment in range(3) for number in (1, 2)]
    assert Result(tmp_path).updates == [each for each in every if each != ("a", 2, 1)]


@pytest.mark.covers("L10", "F1")
def test_killed_while_a_fragment_comes_down_it_resumes_at_the_part(
    nursery: Nursery, tmp_path: Path, server: atoll.Server
) -> None:
    """Of the first result of fragment 0 three parts had come when it was killed; the bases of the others are whole."""
    from atoll.tensors.fragments import split
    from atoll.tensors.layout import version_layout
    from atoll.tensors.module_tensors import schema_of

    parts = [version_layout(each, PART_BYTES).parts for each in split(schema_of(wide_model()), 3).schemas]
    assert len(parts[0]) > 3
    with beside(server, StreamingSites(server.url, tmp_path, names=["b"], steps=100)):
        site = SiteProcess(nursery, tmp_path, server.url, "a", "stream_worker.py")
        again = site.killed_and_again(f"pull.part=kill@{sum(map(len, parts)) + 3}")
    assert next(lines(again))["down"] == sum(part.nbytes for part in parts[0][3:])
    Result(tmp_path).require_once()


@pytest.mark.covers("L8", "F3")
def test_killed_with_an_update_half_sent_its_next_process_sends_the_rest(
    nursery: Nursery, tmp_path: Path, server: atoll.Server
) -> None:
    others = StreamingSites(server.url, tmp_path, names=["b"], steps=100)
    with beside(server, others), Proxy(server.port) as proxy:
        stall = Fault("PUT .*/parts/1 ", "up", at=1000, action="stall")
        proxy.faults.append(stall)
        site = SiteProcess(nursery, tmp_path, proxy.url, "a", "stream_worker.py")
        first = site.start()
        assert stall.reached.wait(60)
        assert first.kill() == KILLED
        before = len(proxy.requests)
        again = site.start()
        assert again.wait(90) == 0
        ticket = next(line for line in proxy.requests[:before] if "/parts/1 " in line).split("/parts/")[0]
        sent = [line.split("/parts/")[1].split()[0] for line in proxy.requests[before:] if line.startswith(ticket)]
    assert "1" in sent
    assert "0" not in sent
    Result(tmp_path).require_once()
