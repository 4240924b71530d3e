"""Versions of an asynchronous run while sites go on: which are kept, lost, overtaken or promised."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from async_world import START, Clients, gradient, nesterov, wait_until_durable
from harness.processes import wait_until
from harness.proxy import Fault, Proxy
from kit import joined, post, serve
from kit.client import Client
from kit.sites import diloco
from torch import nn

from atoll.errors import Gone
from atoll.store.journal_tables import VersionRow
from atoll.store.versions import Versions


@pytest.mark.covers("L5")
def test_keeps_a_version_that_a_worker_is_to_pull(world: Callable[..., Clients]) -> None:
    """Two versions are kept in any case; a has a ticket of version 0, and pulls it when the head is at 4."""
    run = world()
    assert run.clients["a"].next_round() == 1
    run.pull("b")
    for number in range(4):
        run.submit("b", gradient(number))
        run.pull("b")
    assert torch.equal(run.clients["a"].pull()["weight"], START)
    run.wait(4)


def test_a_version_that_its_site_trains_from_is_kept_no_longer(world: Callable[..., Clients]) -> None:
    """a has pulled version 1 and says so; when b has brought the run on, no site is to pull it any more."""
    run = world(**{"disk.keep_versions": 1, "network.heartbeat_interval_s": 0.1})
    run.pull("a", "b")
    run.submit("a", gradient(0))
    run.wait(1)
    run.pull("a")
    server = run.server._run
    assert server is not None
    wait_until(lambda: server.roster["a"].beat.version == 1, "the heartbeat that says so")
    for number in (1, 2):
        run.submit("b", gradient(number))
        run.pull("b")
    wait_until(lambda: [row.version for row in server.store.versions.kept()] == [3], "that 1 and 2 are dropped")
    run.submit("a", gradient(3))  # and it counts, all the same
    run.wait(4)
    assert run.behind()[-1] == ("a", 2)


def test_a_worker_too_late_for_a_version_gets_a_newer_one(world: Callable[..., Clients]) -> None:
    run = world(**{"disk.max_pinned_versions": 1, "disk.keep_versions": 1})
    assert run.clients["a"].next_round() == 1
    assert run.clients["c"].next_round() == 1
    run.pull("b")
    for number in range(3):
        run.submit("b", gradient(number))
        run.pull("b")
    run.clients["c"].next_round()  # of version 3, so that version 0 is no longer among the newest that are wanted
    run.submit("b", gradient(3))
    run.pull("b")
    pulled = run.clients["a"].pull()["weight"]
    assert torch.allclose(pulled, nesterov([gradient(n) for n in range(4)]), rtol=0, atol=1e-12)


@pytest.mark.covers("L3")
def test_a_version_that_the_end_of_the_run_took_away_is_no_error(world: Callable[..., Clients]) -> None:
    """a was promised version 0; before it pulls, the run ends with b's update, and keeps its result alone."""
    run = world(rounds=1, **{"disk.keep_versions": 1})
    assert run.clients["a"].next_round() is not None
    run.pull("b")
    run.submit("b", gradient(0))
    wait_until_durable(run.server, 1)
    pulled = run.clients["a"].pull()["weight"]
    assert torch.equal(pulled, run.weight())
    run.clients["a"].submit({"weight": pulled - gradient(1)})  # in vain, and no error
    assert run.clients["a"].next_round() is None
    assert run.behind() == [("b", 0)]


@pytest.mark.covers("L3")
def test_a_look_at_the_newest_model_leaves_the_round_as_it_is(world: Callable[..., Clients]) -> None:
    """a looks while it trains from version 0, when b has brought the run to version 1: its update counts, 1 behind."""
    run = world()
    run.pull("a", "b")
    run.submit("b", gradient(0))
    run.wait(1)
    newest = run.clients["a"].worker.load_into({"weight": torch.zeros_like(START)})
    assert torch.equal(newest["weight"], run.weight())
    run.submit("a", gradient(1))
    run.wait(2)
    assert run.behind() == [("b", 0), ("a", 1)]


def test_a_ticket_asked_for_at_a_commit_is_of_the_version_that_its_digest_names(
    world: Callable[..., Clients], monkeypatch: pytest.MonkeyPatch
) -> None:
    """b's step is in the journal, and the machine hears of it only after a has asked."""
    from atoll.rounds.events import TicketRequested, VersionCommitted
    from atoll.server.coordinator.coordinator import Coordinator

    run = world()
    run.pull("a", "b")
    apply, committed, held = Coordinator.apply, threading.Event(), list[Any]()

    def late(self: Coordinator, event: Any) -> Any:
        if isinstance(event, VersionCommitted):
            held.append(event)
            committed.set()
            return ()
        effects = apply(self, event)
        if held and isinstance(event, TicketRequested):
            asyncio.get_running_loop().call_soon(apply, self, held.pop())
        return effects

    monkeypatch.setattr(Coordinator, "apply", late)
    run.submit("b", gradient(0))
    assert committed.wait(30)
    place = run.clients["a"]._place
    assert place is not None
    reply = place.exchange.ask(wait_s=0.0)
    assert reply.ticket is not None
    assert reply.ticket.base == reply.head
    assert reply.head.number == 1


def test_an_export_that_is_overtaken_does_not_keep_a_version_from_becoming_durable(
    world: Callable[..., Clients], monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.server.coordinator.background_writes import Exports

    def overtaken(*_: Any) -> None:
        raise Gone("Version 1 is no longer kept.")

    monkeypatch.setattr(Exports, "save", overtaken)
    run = world(**{"disk.export_every": 1})
    run.pull("a")
    run.submit("a", gradient(0))
    wait_until_durable(run.server, 1)


@pytest.mark.covers("L3")
def test_a_ticket_names_a_version_by_its_own_digest_though_the_head_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head moves on right after the server has looked at it, each time."""
    head, asked = Versions.head, threading.Event()

    def moving(versions: Versions, fragment: int = 0) -> VersionRow:
        row = head(versions, fragment)
        if not asked.is_set() and threading.current_thread().name == "atoll-server":
            looks.append(row)
            return replace(row, version=row.version + len(looks) - 1, digest=f"{len(looks):064x}")
        return row

    looks: list[VersionRow] = []
    with serve(tmp_path, algorithm="diloco", sites=1, **{"async.enabled": True}) as server:
        lease = joined(server.url, "a")
        monkeypatch.setattr(Versions, "head", moving)
        status, reply = post(server.url, "/v1/tickets", {"fragment": 0}, lease)
        asked.set()
        assert status == 200, reply
    ticket = reply["ticket"]
    assert ticket["base_version"] == looks[0].version
    versions = {row.version + look: f"{look + 1:064x}" for look, row in enumerate(looks)}
    assert ticket["base_digest"] == versions[ticket["base_version"]]
    assert reply["head_digest"] == versions[reply["head_version"]]


SIZE = 200
"""320 kB in fp64 are five parts of 64 KiB."""


PULL = r"GET .*/versions/\d+/[0-9a-f]{64} "


class Breaking(Clients):
    """An asynchronous run that adds updates up; b brings it on, and the line to a breaks in the midst of a pull.

    Attributes:
        moved: how far down every weight of the run should have moved.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        settings: dict[str, Any] = {
            "rounds.sites": 2,
            "algorithm.outer_optimizer.lr": 1.0,
            "algorithm.outer_optimizer.momentum": 0.0,
            "diloco.sync_every": 1,
            "disk.keep_versions": 1,
            "network.part_bytes": 2**16,
            "network.connections": 1,
        }
        super().__init__(folder, stack, sites="b", start=torch.randn(SIZE, SIZE, dtype=torch.float64), **settings)
        self.moved, self.b = 0.0, self.clients["b"]
        self.line = stack.enter_context(Proxy(self.options["network.port"]))

    def break_the_next_pull(self) -> Fault:
        """Some of it has come when b has brought the run on by four versions, and the server has started again."""
        fault = Fault(PULL, "down", at=1000, action="reset", wait=self._forget)
        self.line.faults.append(fault)
        return fault

    def _forget(self) -> None:
        at = self.version
        for further in range(1, 5):
            assert self.b.next_round() is not None
            self.submit_less(self.b, self.b.pull(), 0.25)
            self.wait(at + further)
        self.restart()

    def submit_less(self, client: Client, state: dict[str, torch.Tensor], by: float) -> None:
        client.submit({"weight": state["weight"] - by})
        self.moved += by

    @property
    def version(self) -> int:
        return self.server.status().version

    @property
    def expected(self) -> torch.Tensor:
        return self.start - self.moved


@pytest.fixture
def breaking(tmp_path: Path) -> Iterator[Breaking]:
    with ExitStack() as stack:
        yield Breaking(tmp_path, stack)


@pytest.mark.covers("L3", "L10")
def test_a_federated_site_pulls_the_head_instead(breaking: Breaking) -> None:
    broken = breaking.break_the_next_pull()
    with Client(breaking.line.url, site="a", folder=breaking.folder / "w") as a:
        assert a.next_round() is not None
        state = a.pull()
        assert broken.reached.is_set()
        assert torch.allclose(state["weight"], breaking.expected, rtol=0, atol=1e-12)
        breaking.submit_less(a, state, 1.0)
        breaking.wait(5)
    assert breaking.behind()[-1] == ("a", 0)
    breaking.require_weight(breaking.expected)


@pytest.mark.covers("L3", "L10")
def test_a_loop_that_pulls_after_its_update_loses_no_step(breaking: Breaking) -> None:
    """Each step takes 1 from every weight; none is lost or counted twice when the server ends."""
    model = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        model.weight.grad = torch.ones_like(model.weight)
        breaking.moved += 1.0
        optimizer.step()

    with diloco(breaking.line.url, breaking.folder, "a", model, optimizer) as loop:
        step()
        broken = breaking.break_the_next_pull()
        step()
        assert broken.reached.is_set()
        assert torch.allclose(model.weight, breaking.expected, rtol=0, atol=1e-12)
        step()
        assert (loop.rounds, loop.skipped) == (3, 0)
    breaking.wait(7)
    breaking.require_weight(breaking.expected)
