"""Streaming runs under fire: killed servers, lost answers, networks that break."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_world import ServerProcess, build, serving
from harness.processes import Nursery
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit.servers import new_server
from stream_world import EVERY_UPDATE, FRAGMENTS, SETTINGS, Left, StreamingSites, local_step, same
from torch import nn

import atoll
from atoll.codecs.encoded_layout import codecs_of, encoded_layout
from atoll.errors import ServerUnreachable
from atoll.protocol.values import Lost
from atoll.tensors.fragments import split
from atoll.tensors.module_tensors import schema_of
from atoll.worker.exchange.exchange import Exchange
from atoll.worker.session.session import Session
from atoll.worker.training import synchroniser


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Left:
    folder = tmp_path_factory.mktemp("undisturbed")
    with ServerProcess(nursery, folder, **SETTINGS) as server:
        sites = StreamingSites(server.url, folder)
        sites.join()
        assert server.kept.wait() == 0
        assert server.kept.deaths == 0
    assert same(sites.models["a"], sites.models["b"])
    left = Left(folder)
    assert left.counted == EVERY_UPDATE
    return left


LIVES = [
    pytest.param(["part.recorded=kill@3"], id="a-part-of-the-first-fragment"),
    pytest.param(["accept.before=kill@3"], id="before-an-accept-of-the-second-fragment"),
    pytest.param(["accept.after=kill@6"], id="after-the-last-accept-of-a-cycle"),
    pytest.param(["pass.write=kill@2"], id="while-the-second-fragment-is-written"),
    pytest.param(["head.before=kill@5"], id="before-the-head-of-the-second-fragment-moves"),
    pytest.param(["head.after=kill@4"], id="after-the-head-of-the-first-fragment-moved"),
    pytest.param(["head.after=kill@5", "recover.midway=kill@2", "accept.after=kill@3"], id="again-and-again"),
    pytest.param(["head.after=kill@2"], id="while-it-begins-with-one-of-three-first-versions"),
]


@pytest.mark.covers("L10", "L11", "F6")
@pytest.mark.parametrize("lives", LIVES)
def test_a_server_killed_in_the_middle_of_a_cycle(
    nursery: Nursery, tmp_path: Path, undisturbed: Left, lives: list[str]
) -> None:
    with ServerProcess(nursery, tmp_path, tuple(lives), **SETTINGS) as server:
        sites = StreamingSites(server.url, tmp_path)
        sites.join()
        assert server.kept.wait() == 0
        assert server.kept.deaths == len(lives), "a failpoint did not fire"
    left = Left(tmp_path)
    assert left.bits == undisturbed.bits
    assert left.counted == EVERY_UPDATE
    assert [loop.sync_metrics["skipped"] for loop in sites.loops.values()] == [0, 0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with serving(tmp_path, **SETTINGS, **{"network.connections": 1}) as server:
        yield server


@pytest.mark.covers("L10")
def test_a_broken_transfer_of_a_fragment_resumes_at_the_part(
    tmp_path: Path, server: atoll.Server, undisturbed: Left
) -> None:
    """The connection breaks within the second part of a fragment's update: the first is not sent again."""
    codecs = codecs_of("int8", {})
    layouts = [
        encoded_layout(part, "int8", codecs, SETTINGS["network.part_bytes"])
        for part in split(schema_of(build()), 3).schemas
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
    left = Left(tmp_path)
    assert left.bits == undisturbed.bits
    assert left.counted == EVERY_UPDATE


@pytest.mark.covers("L10", "F8")
def test_an_answer_that_is_lost_counts_once_and_nothing_is_lost(
    tmp_path: Path, server: atoll.Server, undisturbed: Left
) -> None:
    with Proxy(server.port) as proxy:
        proxy.faults.append(Fault("POST .*/complete ", "down", at=BEFORE_HEADER, action="reset"))
        a = StreamingSites(proxy.url, tmp_path, names=["a"])
        b = StreamingSites(server.url, tmp_path, names=["b"])
        a.join()
        b.join()
    server.run()
    assert Left(tmp_path).bits == undisturbed.bits
    assert Left(tmp_path).counted == EVERY_UPDATE


@pytest.mark.covers("L25", "L10")
def test_local_progress_of_a_fragment_is_carried_over_to_its_head(tmp_path: Path) -> None:
    """As with a whole model, for two fragments of one number each; inner steps of −1, H = 2, outer SGD with lr ½."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.y = (nn.Parameter(torch.tensor([value])) for value in (8.0, 20.0))

    options: dict[str, Any] = {
        "algorithm.name": "diloco",
        "rounds.total": 2,
        "diloco.sync_every": 2,
        "diloco.num_fragments": 2,
    }
    options |= {
        "aggregation.upload_codec.name": "none",
        "network.port": 0,
        "algorithm.outer_optimizer.lr": 0.5,
        "algorithm.outer_optimizer.momentum": 0.0,
    }
    with new_server(Two(), **options, **{"disk.state_dir": tmp_path / "s"}) as server, Proxy(server.port) as proxy:
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        seen: list[tuple[float, float]] = []
        with atoll.DiLoCo(
            model, optimizer, server=proxy.url, site="a", folder=tmp_path / "w", max_sync_retries=0
        ) as diloco:
            proxy.faults.append(Fault("POST .*/complete ", "down", at=BEFORE_HEADER, action="reset"))
            while not diloco.finished:
                optimizer.zero_grad()
                (model.x.sum() + model.y.sum()).backward()
                optimizer.step()
                seen.append((model.x.item(), model.y.item()))
        assert diloco.skipped == 1
    # 1: x is taken, the answer is lost. 2: x is asked for again: its base is 8 − 1 = 7, its head 7½, so w = 6 → 6½.
    #    Its round 2 comes after round 1 of y, which is taken instead: w = 18, u = 2, θ1 = 19.
    # 3: x: w = 5½, u = 2, θ2 = 6½. 4: y: w = 18, u = 1, θ2 = 18½ … and the run is finished.
    assert seen == [(7.0, 19.0), (6.5, 19.0), (6.5, 18.0), (6.5, 18.0)]


@pytest.mark.covers("L10")
def test_training_goes_on_without_the_server_and_nothing_is_lost(
    nursery: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is away for a while: turns are skipped, and what was trained meanwhile counts afterwards."""
    caplog.set_level("INFO", "atoll")
    settings = SETTINGS | {
        "rounds.sites": 1,
        "rounds.total": 3,
        "algorithm.outer_optimizer.lr": 1.0,
        "algorithm.outer_optimizer.momentum": 0.0,
        "aggregation.upload_codec.name": "none",
    }
    with ServerProcess(nursery, tmp_path, **settings) as server, Proxy(server.port) as proxy:
        model = build()
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
    assert [(fragment, version) for fragment, version, _ in Left(tmp_path).versions] == [
        (fragment, version) for fragment in range(3) for version in range(4)
    ]


@pytest.mark.covers("L10")
def test_while_the_server_is_away_the_first_turn_is_patient_and_the_others_try_once(
    tmp_path: Path, server: atoll.Server, monkeypatch: pytest.MonkeyPatch
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

        a = StreamingSites(proxy.url, tmp_path, during, names=["a"], steps=100, max_sync_retries=2)
        b = StreamingSites(server.url, tmp_path, names=["b"], steps=100)
        a.join()
        b.join()
    server.run()
    assert attempts[0] == 2
    assert attempts[1:] == [0] * (len(attempts) - 1)
    assert a.loops["a"].sync_metrics["skipped"] == len(attempts) >= 2
    assert Left(tmp_path).counted == EVERY_UPDATE
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
    settings = SETTINGS | {
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
    assert all(times == 1 for *_, times in Left(tmp_path).counted)
