"""Streaming runs under fire: killed servers, lost answers, networks that break."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_world import (
    PART_BYTES,
    STREAMING,
    Result,
    ServerProcess,
    StreamingSites,
    left_undisturbed,
    same,
    serving,
)
from harness.processes import Nursery
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import local_step
from kit.models import wide_model

import atoll
from atoll.codecs.encoded_layout import codecs_of, encoded_layout
from atoll.errors import ServerUnreachable
from atoll.protocol.values import Lost
from atoll.tensors.fragments import split
from atoll.tensors.module_tensors import schema_of
from atoll.worker.exchange.exchange import Exchange
from atoll.worker.session.session import Session
from atoll.worker.training import synchroniser

FRAGMENTS = STREAMING["diloco.num_fragments"]


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
    codecs = codecs_of("int8", {})
    layouts = [
        encoded_layout(part, "int8", codecs, PART_BYTES) for part in split(schema_of(wide_model()), FRAGMENTS).schemas
    ]
    fragment = max(range(FRAGMENTS), key=lambda index: len(layouts[index].parts))
    assert len(layouts[fragment].parts) >= 2
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
            assert caplog.text.count("a: the server is back; synchronising again from step") == 1
        assert server.kept.wait() == 0
    assert [(fragment, version) for fragment, version, _ in Result(tmp_path).versions] == [
        (fragment, version) for fragment in range(3) for version in range(4)
    ]


@pytest.mark.covers("L10")
def test_while_the_server_is_away_the_first_turn_is_patient_and_the_others_try_once(
    tmp_path: Path, server: atoll.Server, monkeypatch: pytest.MonkeyPatch, streamed: Result
) -> None:
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
