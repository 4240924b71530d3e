"""DiLoCo loops that miss a version, an answer or their server, of whole models and of fragments: local steps are
carried over, or lost and named, and nothing counts twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_world import STREAMING, Result, StreamingSites, left_undisturbed, same, serving
from harness.processes import free_port, wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import Threads, ask_journal, local_step, serve
from kit.client import Client
from kit.models import wide_model
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.errors import ServerUnreachable

SETTINGS: dict[str, Any] = {
    "algorithm.name": "diloco",
    "rounds.sites": 1,
    "rounds.total": 2,
    "diloco.sync_every": 2,
    "aggregation.upload_codec.name": "none",
    "algorithm.outer_optimizer.lr": 0.5,
    "algorithm.outer_optimizer.momentum": 0.0,
}


class Numbers(nn.Module):
    """x, and y where it is given."""

    def __init__(self, x: float, y: float | None = None) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([x]))
        if y is not None:
            self.y = nn.Parameter(torch.tensor([y]))

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(each.item() for each in self.parameters())

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        sum(each.sum() for each in self.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def lose_an_answer(proxy: Proxy) -> None:
    """The next update is in, and its worker never hears of it."""
    proxy.faults.append(Fault("POST .*/complete ", "down", at=BEFORE_HEADER, action="reset"))


def newest_steps(folder: Path) -> int:
    """Local steps that the newest update speaks of."""
    ((steps,),) = ask_journal(folder, "SELECT steps FROM tickets WHERE digest IS NOT NULL ORDER BY ticket DESC LIMIT 1")
    return int(steps)


@pytest.mark.covers("L10", "L25")
def test_local_progress_is_carried_over_to_the_head_before_the_next_update(tmp_path: Path) -> None:
    """With an outer rate of ½, so base − dec(u) is not the head.

    θ0 = 8; after two steps w = 6, u = 2; it counts (θ1 = 8 − ½·2 = 7) but the answer is lost: base ← 8 − 2 = 6.
    After two more steps w = 4. Rebase: w ← 7 + (4 − 6) = 5, which `weight` sees; then u = 2, θ2 = 7 − ½·2 = 6.
    """
    with serve(tmp_path, Numbers(8.0), **SETTINGS) as server, Proxy(server.port) as proxy:
        model = Numbers(0.0)
        optimizer = inner(model)
        seen: list[float] = []

        def weight() -> float:
            seen.append(model.x.item())
            return 1.0

        with atoll.DiLoCo(
            model, optimizer, server=proxy.url, site="a", folder=tmp_path / "w", max_sync_retries=0, weight=weight
        ) as diloco:
            lose_an_answer(proxy)
            for number in range(1, 5):
                model.step(optimizer)
                assert number != 2 or (diloco.rounds, diloco.skipped) == (0, 1)
            assert diloco.finished
            assert newest_steps(tmp_path) == 2  # those of the first update are not told again
    assert seen == [6.0, 5.0]
    assert model.values == (6.0,)


@pytest.mark.covers("L25", "L10")
def test_local_progress_of_a_fragment_is_carried_over_to_its_head(tmp_path: Path) -> None:
    """As with a whole model, for two fragments of one number each."""
    with serve(tmp_path, Numbers(8.0, 20.0), K=2, **SETTINGS) as server, Proxy(server.port) as proxy:
        model = Numbers(0.0, 0.0)
        optimizer = inner(model)
        seen: list[tuple[float, ...]] = []
        with atoll.DiLoCo(
            model, optimizer, server=proxy.url, site="a", folder=tmp_path / "w", max_sync_retries=0
        ) as diloco:
            lose_an_answer(proxy)
            while not diloco.finished:
                model.step(optimizer)
                seen.append(model.values)
        assert diloco.skipped == 1
    # 1: x is taken, the answer is lost. 2: x is asked for again: its base is 8 − 1 = 7, its head 7½, so w = 6 → 6½.
    #    Its round 2 comes after round 1 of y, which is taken instead: w = 18, u = 2, θ1 = 19.
    # 3: x: w = 5½, u = 2, θ2 = 6½. 4: y: w = 18, u = 1, θ2 = 18½ … and the run is finished.
    assert seen == [(7.0, 19.0), (6.5, 19.0), (6.5, 18.0), (6.5, 18.0)]


@pytest.mark.covers("L25")
def test_where_the_algorithm_says_reset_local_progress_is_lost_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As above, under FedAvg: steps 3 and 4 are lost, w ← θ1 = 7; after two more w = 5, θ2 = 7 − ½·2 = 6."""
    settings = SETTINGS | {"algorithm.name": "fedavg", "diloco.sync_every": None}
    with serve(tmp_path, Numbers(8.0), **settings) as server, Proxy(server.port) as proxy:
        model = Numbers(0.0)
        optimizer = inner(model)
        seen: list[float] = []
        with atoll.DiLoCo(
            model, optimizer, server=proxy.url, site="a", folder=tmp_path / "w", sync_every=2, max_sync_retries=0
        ) as diloco:
            lose_an_answer(proxy)
            for _ in range(6):
                model.step(optimizer)
                seen.append(model.x.item())
                diloco.report(loss=model.x.item())
            assert diloco.finished
            assert newest_steps(tmp_path) == 2  # neither those that counted nor those that were lost
        # of the last report before the second and the sixth step
        assert [row.metrics for row in server.status().history] == [{"loss": 7.0}, {"loss": 6.0}]
    assert seen == [7.0, 6.0, 5.0, 7.0, 6.0, 6.0]
    assert "the run went on to version 1 without this worker; its 2 local steps since version 0 are lost" in caplog.text


@pytest.mark.covers("L10", "F6")
def test_diloco_trains_on_without_its_server_and_brings_everything_in_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps 1, 2 make round one. The server is away in steps 3 to 6, so two synchronisations are skipped; the one at
    step 8 brings in all of 3 … 8. With an outer rate of 1 the result is 8 − 2 − 6 = 0: no step is lost, none doubled.
    """
    settings = SETTINGS | {"algorithm.outer_optimizer.lr": 1.0, "network.port": free_port()}
    caplog.set_level("INFO", "atoll")
    model = Numbers(0.0)
    optimizer = inner(model)
    with ExitStack() as stack:
        with serve(tmp_path, Numbers(8.0), **settings) as server:
            diloco = stack.enter_context(
                atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w", max_sync_retries=1)
            )
            for _ in range(2):
                model.step(optimizer)
            assert diloco.rounds == 1
        for _ in range(4):
            model.step(optimizer)
        assert (diloco.skipped, model.values) == (2, (2.0,))
        assert "synchronisation at step 4 skipped; training continues" in caplog.text
        with serve(tmp_path, Numbers(8.0), **settings):
            for _ in range(2):
                model.step(optimizer)
            assert (diloco.rounds, diloco.finished, model.values) == (2, True, (0.0,))
            assert caplog.text.count("a: the server answers again; synchronised at step 8") == 1
            diloco.stop()


def submit_two_steps(client: Client) -> None:
    """8 → 6 in the round that is open; then the process ends."""
    assert client.next_round() is not None
    client.submit({"x": client.pull()["x"] - 2.0}, steps=2)
    client.close()


@pytest.mark.covers("F4", "L25")
def test_a_site_restarted_after_its_acknowledgement_waits_for_the_round(tmp_path: Path) -> None:
    """An earlier process of a has submitted u = 2 against θ0 = 8, and round 1 still waits for b's, 2 too: θ1 = 6.

    The new process begins from 6, trains to 4 and submits 2: θ2 = 4. Had it begun from 8 meanwhile, its update would be
    a round old; had it taken the old update for one that was lost on the way, its base would have moved to 6.
    """
    changed = {"rounds.sites": 2, "algorithm.outer_optimizer.lr": 1.0}
    with serve(tmp_path, Numbers(8.0), **SETTINGS | changed) as server:
        b = Client(server.url, "b", folder=tmp_path / "w").register()
        submit_two_steps(Client(server.url, "a", folder=tmp_path / "w"))

        def submit_once_a_waits() -> None:
            def waits(each: Any) -> bool:
                return each.site == "a" and each.labels == {"start": "2"} and "wait" in each.doing

            wait_until(lambda: any(map(waits, server.status().workers)), "the new process of a")
            submit_two_steps(b)

        other = Threads(submit_once_a_waits)
        model = Numbers(0.0)
        optimizer = inner(model)
        with atoll.DiLoCo(
            model, optimizer, server=server.url, site="a", folder=tmp_path / "w", labels={"start": "2"}
        ) as diloco:
            assert model.values == (6.0,)
            for _ in range(2):
                model.step(optimizer)
            assert diloco.finished
        other.join()
    assert model.values == (4.0,)


ONE_ROUND = SETTINGS | {"rounds.total": 1, "diloco.sync_every": 4}
LAST_VERSION = "GET .*/versions/1[ /]"


def is_result(model: nn.Module, server: atoll.Server) -> bool:
    result = load_file(server.exports / "model.safetensors")
    return all(torch.equal(value, result[name]) for name, value in model.state_dict().items())


def train_on(loop: atoll.DiLoCo, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Site a's steps from this one on, until it knows that the run is finished."""
    while not loop.finished:
        assert steps < 40, "it never learns that the run is finished"
        local_step(model, optimizer, "a", steps)
        steps += 1


@pytest.mark.covers("L7", "L10")
def test_a_fragment_without_its_last_version_is_not_finished(tmp_path: Path) -> None:
    """Twice: where the result is fetched, and at the next turn, when the server says that all is over."""
    model = wide_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with serving(tmp_path, **ONE_ROUND, K=2, tau=1) as server, Proxy(server.port) as proxy:
        with atoll.DiLoCo(
            model, optimizer, server=proxy.url, site="a", folder=tmp_path / "w", max_sync_retries=0
        ) as diloco:
            for step in range(3):  # fragment 0 is taken after 2 steps, merged after 3
                local_step(model, optimizer, "a", step)
            lost = [Fault(LAST_VERSION, "down", at=BEFORE_HEADER, action="reset") for _ in range(2)]
            proxy.faults.extend(lost)
            train_on(diloco, model, optimizer, 3)
            assert all(fault.reached.is_set() for fault in lost)
            assert diloco.skipped == 2
        server.run()
        assert is_result(model, server)


@pytest.mark.covers("L7")
@pytest.mark.parametrize("fragments", [1, 2])
def test_an_asynchronous_run_that_ends_without_us_does_not_end_our_loop_where_its_model_cannot_be_pulled(
    tmp_path: Path, fragments: int
) -> None:
    model, other = wide_model(), wide_model()
    mine, others = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    settings = ONE_ROUND | {"rounds.sites": 2, "async.enabled": True, "diloco.sync_every": 2 * fragments}
    with serving(tmp_path, **settings, K=fragments) as server, Proxy(server.port) as proxy:
        a = atoll.DiLoCo(model, mine, server=proxy.url, site="a", folder=tmp_path / "a", max_sync_retries=0)
        b = atoll.DiLoCo(other, others, server=server.url, site="b", folder=tmp_path / "b")
        with a:
            local_step(model, mine, "a", 0)
            with b:
                for step in range(2 * fragments):
                    local_step(other, others, "b", step)
                assert b.finished
            lost = Fault(LAST_VERSION, "down", at=BEFORE_HEADER, action="reset")
            proxy.faults.append(lost)
            train_on(a, model, mine, 1)
            assert lost.reached.is_set()
        server.run()
        assert is_result(model, server)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What the run leaves without a fault."""
    return left_undisturbed(tmp_path_factory.mktemp("undisturbed"), StreamingSites, **STREAMING)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with serving(tmp_path, **STREAMING | {"network.connections": 1}) as server:
        yield server


@pytest.mark.covers("L10", "F8")
def test_transfers_of_fragments_that_break_resume_at_the_part_and_lost_answers_count_once(
    tmp_path: Path, server: atoll.Server, streamed: Result
) -> None:
    """The connection breaks within the second part of a fragment's update: the first is not sent again."""
    with Proxy(server.port) as proxy:
        proxy.faults.append(Fault("PUT .*/parts/1 ", "up", at=1000, action="reset"))
        proxy.faults.append(Fault("POST .*/complete ", "down", at=BEFORE_HEADER, action="reset"))
        a = StreamingSites(proxy.url, tmp_path, names=["a"])
        b = StreamingSites(server.url, tmp_path, names=["b"])
        a.join()
        b.join()
        assert proxy.faults == []
        hit = next(line for line in proxy.requests if "/parts/1 " in line).split("/parts/")[0]
        sent = [line.split("/parts/")[1].split()[0] for line in proxy.requests if line.startswith(f"{hit}/parts/")]
    server.run()
    assert sent.count("0") == 1
    assert sent.count("1") >= 2
    Result(tmp_path).require_same(streamed)


@pytest.mark.covers("L10")
def test_while_the_server_is_away_the_first_turn_is_patient_and_the_others_try_once(
    tmp_path: Path,
    server: atoll.Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    streamed: Result,
) -> None:
    """Turns are skipped, and what was trained meanwhile counts afterwards."""
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
