"""A DiLoCo loop that missed a version, an answer or its server: its local steps are carried over, or lost and named.

Models are of one or two numbers. Inner SGD at a rate of 1 on a gradient of 1 moves each by −1 a step, and H = 2.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import free_port, wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import Threads, ask_journal, serve
from kit.client import Client
from torch import nn

import atoll

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
    assert "the run is now at version 1; 2 local steps since version 0 are lost" in caplog.text


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
