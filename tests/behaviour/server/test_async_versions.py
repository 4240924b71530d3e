"""Versions of an asynchronous run while sites go on: which are kept, lost, overtaken or promised."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from async_world import START, Clients, gradient, nesterov
from harness.processes import wait_until
from kit.servers import plain_server
from test_fall_back import wait_until_durable
from torch import nn

import atoll
from atoll.errors import Gone


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


def test_a_version_that_its_site_trains_from_is_kept_no_longer(tmp_path: Path) -> None:
    """a has pulled version 1 and says so; when b has brought the run on, no site is to pull it any more."""
    model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    settings = {
        "async.enabled": True,
        "rounds.sites": 2,
        "disk.keep_versions": 1,
        "network.heartbeat_interval_s": 0.1,
    }
    with ExitStack() as stack:
        server = stack.enter_context(plain_server(tmp_path, model, **settings))
        workers = {s: stack.enter_context(atoll.join(server.url, site=s, folder=tmp_path / "w")) for s in ("a", "b")}
        a, b = (iter(workers[site]) for site in ("a", "b"))
        first, other = next(a), next(b)
        first.load_into(model)
        other.load_into(model)
        first.submit(model)
        held = next(a)
        held.load_into(model)
        run = server._run
        assert run is not None
        wait_until(lambda: run.roster["a"].beat.version == 1, "the heartbeat that says so")
        for _ in range(2):
            other.submit(model)
            other = next(b)
            other.load_into(model)
        wait_until(
            lambda: [row.version for row in run.store.versions.kept()] == [3], "that versions 1 and 2 are dropped"
        )
        held.submit(model)  # and it counts, all the same
        wait_until(lambda: server.status().history[-1].staleness == [2], "its update, two behind")


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
    run = world(**{"rounds.total": 1, "disk.keep_versions": 1})
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
def test_a_look_at_the_newest_model_leaves_the_round_as_it_is(tmp_path: Path) -> None:
    """a looks while it trains from version 0, when b has brought the run to version 1: its update counts, 1 behind."""
    models = {site: nn.Linear(3, 2, bias=False, dtype=torch.float64) for site in ("a", "b", "newest")}
    with ExitStack() as stack:
        settings = {"async.enabled": True, "rounds.sites": 2}
        server = stack.enter_context(plain_server(tmp_path, models["newest"], **settings))
        workers = {s: stack.enter_context(atoll.join(server.url, site=s, folder=tmp_path / "w")) for s in ("a", "b")}
        rounds = {site: next(iter(worker)) for site, worker in workers.items()}
        for site, round_ in rounds.items():
            round_.load_into(models[site])
        with torch.no_grad():
            models["b"].weight += 1
        rounds["b"].submit(models["b"])
        wait_until(lambda: server.status().fragments[0].version == 1, "version 1")
        workers["a"].load_into(models["newest"])
        assert torch.allclose(models["newest"].weight, models["b"].weight, rtol=0, atol=1e-12)
        rounds["a"].submit(models["a"])
        wait_until(lambda: server.status().fragments[0].version == 2, "version 2")
        assert server.status().history[-1].staleness == [1]


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
