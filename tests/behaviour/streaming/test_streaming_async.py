"""Streaming runs in which no site waits for another: refusals, codecs both ways, turns, shorter turns of slow sites."""

from __future__ import annotations

import math
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from kit.sites import DiLoCoSites, together
from six_layers import data
from streaming_world import Sites, build, copied, local_step, loop_of, serve, step_, versions
from torch import Tensor, nn

import atoll


class Alike(Sites):
    """Sites with the same data, that of a.

    Where no site waits, it is chance which updates are the last and how many local steps lie in one. On random targets,
    a model that one site has trained for long is worse for the other than none; where they learn the same, whatever
    comes last, it is better for both.
    """

    def _traced(self, model: nn.Module, optimizer: torch.optim.Optimizer, site: str, step: int) -> None:
        local_step(model, optimizer, "a")
        self.traces[site].append(copied(model))


def loss_of(state: dict[str, Tensor]) -> float:
    """Of a model, on the data of site a."""
    model = build()
    model.load_state_dict(state)
    inputs, targets = data("a")
    with torch.no_grad():
        return float((model(inputs) - targets).square().mean())


def train(folder: Path, **settings: Any) -> tuple[atoll.Server, Sites]:
    server = serve(folder, sites=2, **settings)
    pacer = threading.Event()  # where no site waits, a turn is passed over while an exchange is under way
    with server:
        sites = Alike(server.url, folder, ["a", "b"], steps=20_000, during=lambda *_: pacer.wait(0.002) and None)
        sites.join()
        server.run()
    return server, sites


@pytest.mark.covers("L4", "L14")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_refused_update_of_a_fragment_is_not_sent_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """No other site closes the round: the site is asked again at once, for an update of the same version."""
    caplog.set_level("INFO", "atoll")

    def step_(model: nn.Module, optimizer: torch.optim.Optimizer, site: str, number: int) -> None:
        optimizer.zero_grad()
        (model(data("a")[0]) - data("a")[1]).square().mean().backward()
        if number == 0:
            next(model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
        optimizer.step()

    with serve(tmp_path, K=2, H=2, rounds=2, **{"async.enabled": mode == "async"}) as server:
        sites = DiLoCoSites(server.url, tmp_path, 8, ["a"], build=build, step=step_)
        sites.join()
        assert sites.loops["a"].finished
        assert server.status().refused == 1
    assert "submitting again" not in caplog.text
    assert "a: local steps of fragment 0 since version 0 are lost" in caplog.text


@pytest.mark.covers("L3")
def test_an_infinite_grace_streams_to_the_same_bits_as_a_barrier(tmp_path: Path) -> None:
    results = []
    for mode in ({}, {"async.enabled": True, "async.grace_s": math.inf}):
        server, _ = train(tmp_path / str(len(results)), K=2, H=4, rounds=3, **{"async.momentum_every": 2}, **mode)
        results.append(safetensors.torch.load_file(server.exports / "model.safetensors"))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@pytest.mark.covers("L3", "L16")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_fragments_with_codecs_both_ways(tmp_path: Path, mode: str) -> None:
    """int4 up and int8 down: every worker ends with what workers hold; the export has the masters."""
    rounds = 8 if mode == "sync" else 16
    server, sites = train(
        tmp_path,
        K=2,
        H=4,
        tau=1,
        rounds=rounds,
        codec="int4",
        **{
            "async.enabled": mode == "async",
            "aggregation.download_codec.name": "int8",
            "algorithm.outer_optimizer.momentum": 0.0,
            "algorithm.outer_optimizer.lr": 0.4,
        },
    )
    ends = [sites.traces[site][-1] for site in "ab"]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    result = safetensors.torch.load_file(server.exports / "model.safetensors")
    assert not all(torch.equal(value, ends[0][name]) for name, value in result.items())
    assert all(torch.allclose(value, ends[0][name], atol=0.02) for name, value in result.items())
    start = {name: value.detach() for name, value in build().state_dict().items()}
    assert loss_of(result) < 0.9 * loss_of(start)


@pytest.mark.covers("L3", "L6")
def test_a_turn_skipped_in_the_first_synchronous_rounds_is_taken_next(tmp_path: Path) -> None:
    """a is behind by a turn, as after a lost answer. Going on in its cycle, it would wait for b, and b for it."""
    skipped, pacer = threading.Event(), threading.Event()

    def during(site: str, step: int) -> None:
        pacer.wait(0.002)
        if site == "a" and step == 1:  # fragment 0 is due after the next step
            sync = sites.loops["a"]._sync
            assert sync is not None
            sync._order._next = 1
            skipped.set()

    run = {"async.enabled": True, "async.sync_rounds_first": 4}
    with serve(tmp_path, sites=2, K=2, H=4, rounds=4, **run) as server:
        sites = Sites(server.url, tmp_path, ["a", "b"], steps=20_000, during=during)
        sites.join()
        assert versions(server) == [4, 4]
    assert skipped.is_set()
    assert all(diloco.finished for diloco in sites.loops.values())


@pytest.mark.covers("L18")
def test_a_slow_site_s_steps_under_dylu_are_a_multiple_of_the_fragments(tmp_path: Path) -> None:
    """A third of the speed: of H = 12 with K = 2 it is asked for 2·⌊6/3⌋ = 4 steps, give or take a measurement."""
    server = serve(
        tmp_path,
        K=2,
        H=12,
        sites=2,
        **{"async.enabled": True, "diloco.dynamic_local_steps": True, "network.heartbeat_interval_s": 0.1},
    )
    asked: list[int] = []
    enough, pacer = threading.Event(), threading.Event()

    def work(site: str, pause_s: float) -> None:
        with loop_of(server.url, tmp_path, site) as loop:
            while not enough.is_set():
                pacer.wait(pause_s)
                step_(loop, site[0])
                if site == "slow":
                    sync = loop._sync
                    assert sync is not None
                    asked[:] = [each.local_steps for each in sync._fragments]
                    if all(0 < steps < 12 for steps in asked) and loop.rounds > 4:
                        enough.set()

    with server:
        together(partial(work, "fast", 0.01), partial(work, "slow", 0.03))
    assert all(steps % 2 == 0 and 2 <= steps <= 10 for steps in asked), asked
