"""A DiLoCo loop that missed a version: its local steps are carried over to it, or lost and named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import Threads
from kit.servers import new_server
from torch import nn

import atoll
from atoll.protocol.values import UpdateInfo
from atoll.worker.exchange.participation import Participation, take_part


@pytest.mark.covers("L25")
def test_local_progress_is_carried_over_to_the_head_before_the_next_update(tmp_path: Path) -> None:
    """H = 2, inner steps of −1, outer SGD with lr ½: so base − dec(u) is not the head.

    θ0 = 8; after two steps w = 6, u = 2; it counts (θ1 = 8 − ½·2 = 7) but the answer is lost: base ← 8 − 2 = 6.
    After two more steps w = 4. Rebase: w ← 7 + (4 − 6) = 5, which `weight` sees; then u = 2, θ2 = 7 − ½·2 = 6.
    """
    start = nn.Linear(1, 1, bias=False)
    nn.init.constant_(start.weight, 8.0)
    options = {
        "algorithm.name": "diloco",
        "rounds.sites": 1,
        "rounds.total": 2,
        "diloco.sync_every": 2,
        "aggregation.upload_codec.name": "none",
        "network.port": 0,
    }
    with (
        new_server(
            start,
            **options,
            **{
                "algorithm.outer_optimizer.lr": 0.5,
                "algorithm.outer_optimizer.momentum": 0.0,
                "disk.state_dir": tmp_path / "s",
            },
        ) as server,
        Proxy(server.port) as proxy,
    ):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        seen: list[float] = []

        def weight() -> float:
            seen.append(model.weight.item())
            return 1.0

        with atoll.DiLoCo(
            model, optimizer, server=proxy.url, site="a", folder=tmp_path / "w", max_sync_retries=0, weight=weight
        ) as diloco:
            proxy.faults.append(Fault("POST .*/complete ", "down", at=BEFORE_HEADER, action="reset"))
            for _ in range(4):
                optimizer.zero_grad()
                model.weight.sum().backward()
                optimizer.step()
            assert diloco.finished
            assert diloco._place is not None
            assert diloco._place.exchange.outbox.note is not None
            assert diloco._place.exchange.outbox.note.steps == 2  # those of the first update are not told again
    assert seen == [6.0, 5.0]
    assert model.weight.item() == 6.0


@pytest.mark.covers("L25")
def test_where_the_algorithm_says_reset_local_progress_is_lost_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As above, under FedAvg: steps 3 and 4 are lost, w ← θ1 = 7; after two more w = 5, θ2 = 7 − ½·2 = 6."""
    start = nn.Linear(1, 1, bias=False)
    nn.init.constant_(start.weight, 8.0)
    options = {"algorithm.name": "fedavg", "rounds.sites": 1, "rounds.total": 2, "network.port": 0}
    with (
        new_server(
            start, **options, **{"algorithm.outer_optimizer.lr": 0.5, "disk.state_dir": tmp_path / "s"}
        ) as server,
        Proxy(server.port) as proxy,
    ):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        seen: list[float] = []
        with atoll.DiLoCo(
            model, optimizer, server=proxy.url, site="a", folder=tmp_path / "w", sync_every=2, max_sync_retries=0
        ) as diloco:
            proxy.faults.append(Fault("POST .*/complete ", "down", at=BEFORE_HEADER, action="reset"))
            for _ in range(6):
                optimizer.zero_grad()
                model.weight.sum().backward()
                optimizer.step()
                seen.append(model.weight.item())
                diloco.report(loss=model.weight.item())
            assert diloco.finished
            assert diloco._place is not None
            assert diloco._place.exchange.outbox.note is not None
            assert diloco._place.exchange.outbox.note.steps == 2  # neither those that counted nor those that were lost
        # of the last report before the second and the sixth step
        assert [row.metrics for row in server.status().history] == [{"loss": 7.0}, {"loss": 6.0}]
    assert seen == [7.0, 6.0, 5.0, 7.0, 6.0, 6.0]
    assert "the run moved on to version 1; 2 local steps since version 0 are lost" in caplog.text


def submit_two_steps(place: Participation) -> None:
    """8 → 6 in the round that is open."""
    ticket = place.exchange.ask(wait_s=5.0).ticket
    assert ticket is not None
    tensors = {"weight": torch.zeros(1, 1)}
    place.exchange.pull(ticket.base, tensors)
    place.exchange.submit(ticket, {"weight": tensors["weight"] - 2.0}, UpdateInfo(1.0, 2, {}))
    place.leave()


@pytest.mark.covers("F4", "L25")
def test_a_site_restarted_after_its_acknowledgement_waits_for_the_round(tmp_path: Path) -> None:
    """An earlier process of `a` has submitted u = 2 against θ0 = 8, and round 1 still waits for b's, 2 too: θ1 = 6.

    The new process begins from 6, trains to 4 and submits 2: θ2 = 4. Had it begun from 8 meanwhile, its update would be
    a round old; had it taken the old update for one that was lost on the way, its base would have moved to 6.
    """
    start = nn.Linear(1, 1, bias=False)
    nn.init.constant_(start.weight, 8.0)
    options = {
        "algorithm.name": "diloco",
        "rounds.sites": 2,
        "rounds.total": 2,
        "diloco.sync_every": 2,
        "aggregation.upload_codec.name": "none",
        "network.port": 0,
    }
    with new_server(
        start,
        **options,
        **{
            "algorithm.outer_optimizer.lr": 1.0,
            "algorithm.outer_optimizer.momentum": 0.0,
            "disk.state_dir": tmp_path / "s",
        },
    ) as server:
        b = take_part(server.url, "b", folder=tmp_path / "w")
        submit_two_steps(take_part(server.url, "a", folder=tmp_path / "w"))

        def submit_once_a_waits() -> None:
            def waits(each: Any) -> bool:
                return each.site == "a" and each.labels == {"start": "2"} and "wait" in each.doing

            wait_until(lambda: any(map(waits, server.status().workers)), "the new process of a")
            submit_two_steps(b)

        other = Threads(submit_once_a_waits)
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with atoll.DiLoCo(
            model, optimizer, server=server.url, site="a", folder=tmp_path / "w", labels={"start": "2"}
        ) as diloco:
            assert model.weight.item() == 6.0
            for _ in range(2):
                optimizer.zero_grad()
                model.weight.sum().backward()
                optimizer.step()
            assert diloco.finished
        other.join()
    assert model.weight.item() == 4.0
