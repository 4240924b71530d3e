"""DiLoCo loops that miss a version, an answer or their server, of whole models and of fragments: local steps are
carried over, or lost and named, and nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_world import STREAMING, Result, StreamingSites, left_undisturbed, parts_sent, serve_wide
from harness.processes import free_port, wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy, lost_receipt
from kit import Gate, Threads, ask_journal, diloco, run_to_end, serve, take_steps
from kit.by_hand import formed
from kit.digests import same
from kit.models import Weights, wide_model
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.errors import ServerUnreachable
from atoll.protocol.values import Accepted
from atoll.worker.exchange.participation import LoopTerms, Participation, take_part

HALF: dict[str, Any] = {"algorithm.outer_optimizer.lr": 0.5, "algorithm.outer_optimizer.momentum": 0.0}
SETTINGS: dict[str, Any] = HALF | {"algorithm": "diloco", "sites": 1, "rounds": 2, "H": 2, "codec": "none"}


def numbers(*values: float) -> Weights:
    """x, and y where it is given."""
    return Weights(**{name: torch.tensor([value]) for name, value in zip("xy", values, strict=False)})


def values_of(model: nn.Module) -> tuple[float, ...]:
    return tuple(each.item() for each in model.parameters())


def loop_of(url: str, folder: Path, model: nn.Module, **options: Any) -> atoll.DiLoCo:
    """Site a's loop, not started; each inner step takes 1 from every number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return diloco(url, folder, "a", model, optimizer, **{"max_sync_retries": 0} | options)


def step_(loop: atoll.DiLoCo, steps: int = 1) -> None:
    for _ in range(steps):
        for parameter in loop.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        loop.optimizer.step()  # type: ignore[union-attr]


def newest_steps(folder: Path) -> int:
    """Local steps that the newest update speaks of."""
    ((steps,),) = ask_journal(
        folder, "SELECT report ->> '$.steps' FROM tickets WHERE digest IS NOT NULL ORDER BY ticket DESC LIMIT 1"
    )
    return int(steps)


@pytest.mark.covers("L10", "L25")
def test_diloco_keeps_steps_made_after_a_lost_answer(tmp_path: Path) -> None:
    """If the answer to its update is lost, a DiLoCo loop goes on training and applies its later steps to the newest
    version.
    """
    # The outer rate is ½, so base − dec(u) is not the newest version. θ0 = 8. After two steps w = 6 and u = 2. The
    # update counts (θ1 = 8 − ½·2 = 7), but the answer is lost: base ← 8 − 2 = 6. After two more steps w = 4. Rebase: w
    # ← 7 + (4 − 6) = 5, which the function `weight` sees. Then u = 2 and θ2 = 7 − ½·2 = 6.
    with serve(tmp_path, numbers(8.0), **SETTINGS) as server, Proxy(server.port) as proxy:
        model = numbers(0.0)
        seen: list[float] = []

        def weight() -> float:
            seen.append(model.x.item())
            return 1.0

        with loop_of(proxy.url, tmp_path, model, weight=weight) as loop:
            proxy.faults += lost_receipt()
            step_(loop, 2)
            assert (loop.rounds, loop.skipped) == (0, 1)
            step_(loop, 2)
            assert loop.finished
            assert newest_steps(tmp_path) == 2  # those of the first update are not told again
    assert seen == [6.0, 5.0]
    assert values_of(model) == (6.0,)


@pytest.mark.covers("L25", "L10")
def test_a_fragment_keeps_steps_after_a_lost_answer(tmp_path: Path) -> None:
    """If the answer to a fragment's update is lost, a DiLoCo loop applies its later steps to the fragment's newest
    version.
    """
    # The model has two fragments of one number each.
    with serve(tmp_path, numbers(8.0, 20.0), K=2, **SETTINGS) as server, Proxy(server.port) as proxy:
        model = numbers(0.0, 0.0)
        seen: list[tuple[float, ...]] = []
        with loop_of(proxy.url, tmp_path, model) as loop:
            proxy.faults += lost_receipt()
            while not loop.finished:
                step_(loop)
                seen.append(values_of(model))
        assert loop.skipped == 1
    # 1: x is taken, the answer is lost. 2: x is asked for again: its base is 8 − 1 = 7, its head 7½, so w = 6 → 6½.
    #    Its round 2 comes after round 1 of y, which is taken instead: w = 18, u = 2, θ1 = 19.
    # 3: x: w = 5½, u = 2, θ2 = 6½. 4: y: w = 18, u = 1, θ2 = 18½ … and the run is finished.
    assert seen == [(7.0, 19.0), (6.5, 19.0), (6.5, 18.0), (6.5, 18.0)]


@pytest.mark.covers("L25")
def test_fedavg_says_how_many_steps_it_loses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the answer to an update is lost under FedAvg, the loop goes back to the newest version and logs how many local
    steps are lost.
    """
    # By hand: steps 3 and 4 are lost and w ← θ1 = 7. After two more steps w = 5 and θ2 = 7 − ½·2 = 6.
    settings = SETTINGS | {"algorithm": "fedavg", "H": None}
    with serve(tmp_path, numbers(8.0), **settings) as server, Proxy(server.port) as proxy:
        model = numbers(0.0)
        seen: list[float] = []
        with loop_of(proxy.url, tmp_path, model, sync_every=2) as loop:
            proxy.faults += lost_receipt()
            for _ in range(6):
                step_(loop)
                seen.append(model.x.item())
                loop.report(loss=model.x.item())
            assert loop.finished
            assert newest_steps(tmp_path) == 2  # neither those that counted nor those that were lost
        # of the last report before the second and the sixth step
        assert [row.metrics for row in server.status().history] == [{"loss": 7.0}, {"loss": 6.0}]
    assert seen == [7.0, 6.0, 5.0, 7.0, 6.0, 6.0]
    assert "the run went on to version 1 without this worker; its 2 local steps since version 0 are lost" in caplog.text


@pytest.mark.covers("L10", "F6")
def test_diloco_goes_on_training_without_its_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All steps that a DiLoCo loop makes while its server is away count when the server is back."""
    # Steps 1 and 2 make round 1. The server is away during steps 3 to 6, so two synchronisations are skipped. The
    # synchronisation at step 8 submits steps 3 to 8. With an outer rate of 1 the result is 8 − 2 − 6 = 0: every step
    # counts exactly once.
    settings = SETTINGS | {"algorithm.outer_optimizer.lr": 1.0, "network.port": free_port()}
    caplog.set_level("INFO", "atoll")
    model = numbers(0.0)
    with serve(tmp_path, numbers(8.0), **settings) as server:
        loop = loop_of(server.url, tmp_path, model, max_sync_retries=1).start()
        step_(loop, 2)
        assert loop.rounds == 1
    step_(loop, 4)
    assert (loop.skipped, values_of(model)) == (2, (2.0,))
    assert "synchronisation at step 4 skipped; training continues" in caplog.text
    with serve(tmp_path, numbers(8.0), **settings):
        step_(loop, 2)
        assert (loop.rounds, loop.finished, values_of(model)) == (2, True, (0.0,))
        assert caplog.text.count("a: the server answers again; synchronised at step 8") == 1
        loop.stop()


def joined_as(server: atoll.Server, folder: Path, site: str) -> Participation:
    """A site of which a test takes the steps one by one."""
    return take_part(server.url, site, folder=folder / "workers", loop=LoopTerms())


def submit_two_steps(place: Participation) -> None:
    """8 → 6 in the round that is open; then the process ends."""
    formed(place, lambda tensors: tensors["x"].sub_(2.0), steps=2)
    assert isinstance(place.exchange.deliver(), Accepted)
    place.leave()


@pytest.mark.covers("F4", "L25")
def test_a_restarted_site_waits_for_its_updates_round(tmp_path: Path) -> None:
    """If a site has submitted and is then restarted, it waits until the round of this update closes."""
    # The earlier process of site `a` has submitted u = 2 against θ0 = 8. Round 1 still waits for the update of site
    # `b`, also 2: θ1 = 6. The new process starts from 6, trains to 4 and submits 2: θ2 = 4. If it started from 8, its
    # update would be a round old. If it took the old update for a lost one, its base would move to 6.
    changed = {"sites": 2, "algorithm.outer_optimizer.lr": 1.0}
    with serve(tmp_path, numbers(8.0), **SETTINGS | changed) as server:
        b = joined_as(server, tmp_path, "b")
        submit_two_steps(joined_as(server, tmp_path, "a"))

        def submit_once_a_waits() -> None:
            def waits(each: Any) -> bool:
                return each.site == "a" and each.labels == {"start": "2"} and "wait" in each.doing

            wait_until(lambda: any(map(waits, server.status().workers)), "the new process of a")
            submit_two_steps(b)

        other = Threads(submit_once_a_waits)
        model = numbers(0.0)
        with loop_of(server.url, tmp_path, model, labels={"start": "2"}) as loop:
            assert values_of(model) == (6.0,)
            step_(loop, 2)
            assert loop.finished
        other.join()
    assert values_of(model) == (4.0,)


ONE_ROUND = SETTINGS | {"rounds": 1, "H": 4}


def is_result(model: nn.Module, server: atoll.Server) -> bool:
    result = load_file(server.exports / "model.safetensors")
    return all(torch.equal(value, result[name]) for name, value in model.state_dict().items())


def answers_lost(proxy: Proxy, count: int) -> list[Fault]:
    """The last version, which so many requests for it do not get."""
    faults = [Fault("GET .*/versions/1[ /]", "down", at=BEFORE_HEADER, action="reset") for _ in range(count)]
    proxy.faults += faults
    return faults


@pytest.mark.covers("L7", "L10")
def test_diloco_fetches_each_fragments_last_version(tmp_path: Path) -> None:
    """A DiLoCo loop finishes only when it has fetched the last version of each fragment."""
    # Two fetches fail: the first fetch of the result, and the fetch at the next turn, when the server says that the run
    # is finished.
    with serve_wide(tmp_path, **ONE_ROUND, K=2, tau=1) as server, Proxy(server.port) as proxy:
        with diloco(proxy.url, tmp_path, "a", wide_model(), max_sync_retries=0) as loop:
            take_steps(loop, 3)  # fragment 0 is taken after 2 steps, merged after 3
            lost = answers_lost(proxy, 2)
            take_steps(loop, 40)
            assert loop.finished
            assert all(fault.reached.is_set() for fault in lost)
            assert loop.skipped == 2
        server.run()
        assert is_result(loop.model, server)


@pytest.mark.covers("L7")
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_loop_survives_a_failed_pull_of_the_result(tmp_path: Path, fragments: int) -> None:
    """A DiLoCo loop goes on training if it cannot pull the final model, and pulls the model later.

    The asynchronous run has ended without an update of this site.
    """
    settings = ONE_ROUND | {"sites": 2, "async.enabled": True, "H": 2 * fragments, "K": fragments}
    with serve_wide(tmp_path, **settings) as server, Proxy(server.port) as proxy:
        with diloco(proxy.url, tmp_path, "a", wide_model(), max_sync_retries=0) as a:
            take_steps(a, 1)
            with diloco(server, tmp_path, "b", wide_model()) as b:
                take_steps(b, 2 * fragments, "b")
                assert b.finished
            (lost,) = answers_lost(proxy, 1)
            take_steps(a, 40)
            assert a.finished
            assert lost.reached.is_set()
        server.run()
        assert is_result(a.model, server)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What the run leaves without a fault."""
    return left_undisturbed(tmp_path_factory.mktemp("undisturbed"), StreamingSites, **STREAMING)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with serve_wide(tmp_path, **STREAMING | {"network.connections": 1}) as server:
        yield server


@pytest.mark.covers("L10", "F8")
def test_a_fragments_transfer_resumes_at_the_broken_part(
    tmp_path: Path, server: atoll.Server, streamed: Result
) -> None:
    """If the connection breaks within a part of a fragment's update, the site sends no earlier part again.

    Though the answer to the update is lost, the update counts only once.
    """
    with Proxy(server.port) as proxy:
        proxy.faults.append(Fault("PUT .*/parts/1 ", "up", at=1000, action="reset"))
        proxy.faults.append(Fault("POST .*/complete ", "down", at=BEFORE_HEADER, action="reset"))
        a = StreamingSites(proxy.url, tmp_path, names=["a"])
        b = StreamingSites(server.url, tmp_path, names=["b"])
        a.join()
        b.join()
        assert proxy.faults == []
        sent = parts_sent(proxy.requests, 1)
    server.run()
    assert sent.count(0) == 1
    assert sent.count(1) >= 2
    Result(tmp_path).require_same(streamed)


@pytest.mark.covers("L10")
def test_only_the_first_skipped_synchronisation_retries(
    tmp_path: Path,
    server: atoll.Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    streamed: Result,
) -> None:
    """While the server is away, a DiLoCo loop retries only at the first synchronisation that it skips, and tries once
    at later ones.
    """
    # When the server is back, the steps made meanwhile count.
    from atoll.worker.session.session import Session

    caplog.set_level("INFO", "atoll")

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
    assert caplog.text.count("a: the server answers again; synchronising again from step") == 1
    assert attempts[0] == 2
    assert attempts[1:] == [0] * (len(attempts) - 1)
    assert a.loops["a"].sync_metrics["skipped"] == len(attempts) >= 2
    assert Result(tmp_path).updates == streamed.updates
    assert same(a.models["a"], b.models["b"])


@pytest.mark.covers("L4", "L10")
def test_a_failed_fragment_is_resubmitted_while_another_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A streaming site sends a failed update of one fragment again while it waits for the result of
    another fragment.
    """
    # The update of fragment 0 by site `a` breaks off twice, and the update of fragment 1 by site `b` once. Site `a`
    # waits in fragment 1 for `b`, and site `b` waits in fragment 0 for `a`.
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
    with serve_wide(tmp_path, **STREAMING | {"K": 2, "H": 4, "tau": 3, "inflight": 2}) as server:
        sites = StreamingSites(server.url, tmp_path, steps=200)
        sites.join(40)
        server.run()
    assert broken == []
    assert same(sites.models["a"], sites.models["b"])
    Result(tmp_path).require_once()


@pytest.mark.covers("L4")
def test_a_late_streaming_site_starts_with_each_next_round(tmp_path: Path) -> None:
    """A site that joins a streaming run late takes part in each fragment from that fragment's next round on."""
    # Site `c` joins after the first round of fragment 0, and waits with the other sites.
    gate = Gate(3)
    with serve_wide(tmp_path, **STREAMING | {"rounds": 4, "network.connections": 1}) as server:
        old = StreamingSites(server.url, tmp_path, during=gate, steps=60)
        gate.wait()
        new = StreamingSites(server.url, tmp_path, names=["c"], during=lambda *_: gate.open(), steps=60)
        run_to_end(server, new, old)
    counted = {(fragment, number) for site, fragment, number in Result(tmp_path).updates if site == "c"}
    assert counted == {(1, 2), (2, 2), (0, 3), (1, 3), (2, 3), (0, 4), (1, 4), (2, 4)}
    assert new.loops["c"].finished


def test_a_restarted_site_sends_its_stored_updates(tmp_path: Path, server: atoll.Server) -> None:
    """A restarted streaming site sends the updates of two fragments that its earlier process had stored
    and not sent.
    """
    # The earlier process had no ticket for fragment 2, so there the site counts only in the second round.
    from atoll.protocol.messages import Report
    from atoll.worker.exchange.participation import LoopTerms, take_part

    place = take_part(server.url, "a", folder=tmp_path / "workers", loop=LoopTerms())
    take_part(server.url, "b", folder=tmp_path / "elsewhere", loop=LoopTerms())  # until the next process of b comes
    for fragment in (0, 1):
        exchange = place.exchanges[fragment]
        ticket = exchange.ask_and_resend(10.0).ticket
        assert ticket is not None
        tensors = dict(wide_model().state_dict())
        exchange.pull(ticket.base, None)
        exchange.form(ticket, tensors, Report(steps=2))
    place.leave()
    again = StreamingSites(server.url, tmp_path, names=["a"], steps=53)
    b = StreamingSites(server.url, tmp_path, names=["b"], steps=53)
    run_to_end(server, again, b)
    every = [(site, fragment, number) for site in "ab" for fragment in range(3) for number in (1, 2)]
    assert Result(tmp_path).updates == [each for each in every if each != ("a", 2, 1)]
