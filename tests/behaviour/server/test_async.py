"""Asynchronous runs: what is applied when, to what, how far behind it was, and which versions are kept or lost."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from harness.proxy import Fault, Proxy
from kit.manual_site import ManualSite
from kit.servers import PLAIN_DILOCO, plain_server
from kit.sites import diloco, together
from kit.wire import WireSite
from kit.world import World, require_close
from torch import Tensor, nn

from atoll.errors import ConfigError, Gone
from atoll.filters import NormClip
from atoll.registry import OwnName


def halved(s: int) -> float:
    return 0.5**s


START = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3)
LR, MOMENTUM = 0.5, 0.5
RATES = {"algorithm.outer_optimizer": {"name": "sgd", "lr": LR, "momentum": MOMENTUM, "nesterov": True}}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """An asynchronous run of one fp64 weight and three sites, to be started."""
    world = World(tmp_path, {"weight": START}, "abc", codec="none", **RATES, **{"async.enabled": True})
    yield world
    world.close()


def gradient(seed: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


G = [gradient(number) for number in range(4)]


def nesterov(gradients: list[Tensor]) -> dict[str, Tensor]:
    theta, m = START.clone(), torch.zeros_like(START)
    for g in gradients:
        m = MOMENTUM * m + g
        theta = theta - LR * (g + MOMENTUM * m)
    return {"weight": theta}


def advance(world: World, site: str, *seeds: int) -> None:
    """The site submits a gradient for each seed, and pulls what comes of it."""
    for seed in seeds:
        world.submit(site, -gradient(seed))
        world.pull(site)


def one_by_one(world: World) -> None:
    """All pull version 0; b, c, and a come in, then b, which is at version 1: 0, 1, 2 and 2 versions behind."""
    world.pull()
    for number, site in enumerate("bca"):
        world.submit(site, -G[number])
        world.wait(number + 1)
        if site == "b":
            world.pull("b")
    world.submit("b", -G[3])
    world.wait(4)


@pytest.mark.covers("L3", "L5", "D10")
@pytest.mark.parametrize(
    ("weight", "scales"),
    [
        ("constant", (1.0, 1.0, 1.0, 1.0)),
        ("inverse_sqrt", (1.0, 1 / math.sqrt(2), 1 / math.sqrt(3), 1 / math.sqrt(3))),
        (f"{__name__}:halved", (1.0, 0.5, 0.25, 0.25)),
    ],
    ids=["constant", "inverse_sqrt", "own"],
)
def test_an_async_run_applies_updates_one_by_one(world: World, weight: str, scales: tuple[float, ...]) -> None:
    """An asynchronous run applies each update as it comes, scaled down by how many versions it is behind."""
    world.start(**{"async.staleness_weight": weight})
    one_by_one(world)
    assert world.staleness == [("b", 0), ("c", 1), ("a", 2), ("b", 2)]
    require_close(world.model, nesterov([scale * g for scale, g in zip(scales, G, strict=True)]))
    status = world.status
    assert (status.policy, status.outer) == ("async", "sgd(lr=0.5, momentum=0.5, nesterov=True)")
    assert status.staleness == {"0": 1, "1": 1, "2": 2}


@pytest.mark.covers("L3", "L6")
def test_delayed_nesterov_matches_its_formula(world: World) -> None:
    """An asynchronous run with `async.momentum_every = 2` gives the values of delayed Nesterov momentum."""
    world.start(**{"async.momentum_every": 2})
    one_by_one(world)
    theta, m = START.clone(), torch.zeros_like(START)
    for first, second in ((G[0], G[1]), (G[2], G[3])):
        theta = theta - LR * first / 2
        m = MOMENTUM * m + (first + second) / 2
        theta = theta - LR * (MOMENTUM * m + second / 2)
    require_close(world.model, {"weight": theta})


def above_one(s: int) -> float:
    return 1.0 + s


def test_a_staleness_weight_above_one_is_refused() -> None:
    from atoll.reducers import staleness_weight

    weight = staleness_weight(OwnName(f"{__name__}:above_one"))
    with pytest.raises(ConfigError, match=r"returned 2\.0 for a staleness of 1"):
        weight(1)


@pytest.mark.covers("L5")
def test_an_update_too_far_behind_is_dropped(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """An update that is more versions behind than `async.max_staleness` does not count, and its site continues from the
    newest version.
    """
    world.start(**{"async.max_staleness": 1})
    world.pull()
    world.submit("b", -G[0])
    world.wait(1)
    world.submit("c", -G[1])
    world.wait(2)
    world.submit("a", -G[2])  # 2 behind: the site is told, and goes on from the head
    assert " is over: its base is more than async.max_staleness = 1 behind version 2." in caplog.text
    assert "has replaced it" not in caplog.text
    world.pull("a")
    world.submit("a", -G[3])
    world.wait(3)
    assert world.staleness == [("b", 0), ("c", 1), ("a", 0)]
    require_close(world.model, nesterov([G[0], G[1], G[3]]))


def test_an_async_buffer_of_two_takes_their_mean(world: World) -> None:
    """With `async.buffer_size = 2`, a version is made from the weighted mean of two updates."""
    world.start(**{"async.buffer_size": 2})
    world.pull()
    world.submit("c", -G[0], weight=3.0)
    assert world.status.fragments[0].version == 0
    world.submit("a", -G[1], weight=1.0)
    world.wait(1)
    assert world.status.history[0].workers == ["a", "c"]
    require_close(world.model, nesterov([0.75 * G[0] + 0.25 * G[1]]))


@pytest.mark.covers("L5")
def test_an_async_buffer_scales_updates_by_staleness(world: World) -> None:
    """If a version is made from two updates, each is scaled by its own staleness."""
    # The second step has the update of site `a`, which is 1 version behind, with weight 3/4. It has the new update of
    # site `b` with weight 1/4. The staleness halves the update of `a`: the gradient is 3/4 · 1/2 · g_a + 1/4 · g_b =
    # 0.375 g_a + 0.25 g_b.
    world.start(**{"async.buffer_size": 2, "async.staleness_weight": f"{__name__}:halved"})
    world.pull()
    world.submit("b", -G[0])
    world.submit("c", -G[1])
    world.wait(1)
    world.pull("b")
    world.submit("a", -G[2], weight=3.0)
    world.submit("b", -G[3], weight=1.0)
    world.wait(2)
    assert world.staleness == [("b", 0), ("c", 0), ("a", 1), ("b", 0)]
    require_close(world.model, nesterov([0.5 * G[0] + 0.5 * G[1], 0.375 * G[2] + 0.25 * G[3]]))


@pytest.mark.covers("L26")
def test_warns_of_an_update_six_versions_old(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """If an update is six versions behind, the log and the status warn, and recommend `diloco.dynamic_local_steps`."""
    world.start()
    world.pull("a", "b")
    advance(world, "b", *range(6))
    world.submit("a", -gradient(7))
    world.wait(7)
    assert "an update of a was 6 versions old" in caplog.text
    assert "diloco.dynamic_local_steps = true" in world.status.warnings[-1]


@pytest.mark.covers("L6")
def test_an_async_run_may_start_with_synchronous_rounds(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """With `async.sync_rounds_first = 1`, the first version is made from the updates of all sites, and each later one
    from a single update.
    """
    caplog.set_level("INFO", "atoll")
    world.start(**{"async.sync_rounds_first": 1, "async.momentum_every": 2})
    world.pull()
    for number, site in enumerate("abc"):
        assert world.status.fragments[0].version == 0
        world.submit(site, -gradient(number))
    world.wait(1)
    world.pull("a")
    world.submit("a", -G[3])
    world.wait(2)
    # the mean of the first round makes a whole step of Nesterov's, what follows half a step without momentum
    g = (G[0] + G[1] + G[2]) / 3
    require_close(world.model, {"weight": START - LR * (g + MOMENTUM * g) - LR * G[3] / 2})
    assert "1 synchronous rounds first" in world.status.policy
    assert caplog.text.count("round 1 was the last synchronous round") == 1


@pytest.mark.covers("L2", "L3", "L6")
def test_dynamic_local_steps_give_a_slow_site_fewer_steps(tmp_path: Path) -> None:
    """With `diloco.dynamic_local_steps`, a site whose steps take four times as long is soon asked for fewer steps."""
    # Measured rates vary on a busy machine, so the loops train until the slow site is asked for fewer steps.
    settings = {
        "algorithm.name": "diloco",
        "async.enabled": True,
        "diloco.dynamic_local_steps": True,
        "diloco.sync_every": 16,
        "rounds.sites": 2,
        "network.heartbeat_interval_s": 0.2,
    }
    asked: dict[str, list[int]] = {"fast": [], "slow": []}
    pacer, deadline_s = threading.Event(), time.monotonic() + 60

    def done() -> bool:
        return any(steps < 12 for steps in asked["slow"]) or time.monotonic() > deadline_s

    def train(site: str, pause_s: float) -> None:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with diloco(server, tmp_path, site, model, optimizer) as loop:
            while not done():
                rounds, before = loop.rounds, loop.step
                while loop.rounds == rounds and not done():
                    optimizer.zero_grad()
                    model.weight.sum().backward()
                    pacer.wait(pause_s)
                    optimizer.step()
                if loop.rounds > rounds:
                    asked[site].append(loop.step - before)

    with plain_server(tmp_path, nn.Linear(1, 1, bias=False), **settings) as server:
        together(partial(train, "fast", 0.01), partial(train, "slow", 0.04))
    assert asked["slow"][0] == 16  # no site had been measured
    assert 1 <= asked["slow"][-1] < 12, asked


ASYNC = {"async.enabled": True}
DELAYED = ASYNC | {"async.momentum_every": 3}
STREAMING = {"diloco.num_fragments": 2, "diloco.sync_every": 4, "diloco.fragment_update_alpha": 1.0}


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (ASYNC, "Training may diverge. Set async.momentum_every = 3 (delayed Nesterov)"),
        (DELAYED | {"rounds.total": 5, "async.sync_rounds_first": 5}, "all rounds are synchronous"),
        (
            {"aggregation.upload_codec.name": "topk"},
            "both together overshoot. Set momentum = 0 and lr = 1 in algorithm.outer_optimizer",
        ),
        (STREAMING, "never use the training of other workers"),
        (DELAYED | {"aggregation.download_codec.name": "int4"}, "Set disk.keep_versions = 3"),
        (DELAYED | {"aggregation.download_codec.name": "bf16"}, "so almost nothing is saved"),
    ],
    ids=["momentum", "never-async", "topk", "alpha-1", "keep", "too-many-differences"],
)
def test_warns_of_settings_that_contradict_each_other(
    tmp_path: Path, settings: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If settings work against each other, the server warns at its start and in the status."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with plain_server(tmp_path, model, algorithm="diloco", sites=3, **settings) as server:
        (told,) = server.status().warnings
    assert says in told
    assert told in caplog.text


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"aggregation.download_codec.density": 0.1, "async.enabled": False}, "but no name of a codec"),
        ({"aggregation.download_codec.name": "itn8"}, "download_codec.name = 'itn8' is not one of none, bf16"),
        ({"algorithm.name": "scaffold"}, "this algorithm's own tensors need synchronous rounds"),
        ({"rounds.best_metric": "loss"}, "rounds.best_metric is 'loss', but async.enabled is true"),
        ({"filters": [NormClip(1.0)]}, "by the argument filters, but async.enabled is true: .*Leave the argument fil"),
        ({"filters": {"a": [NormClip(1.0)]}}, "result_filters is given by the argument filters, but async.enabled is"),
        ({"workflow": print}, "workflow.function is given by the argument workflow, but async.enabled is true"),
        ({"rounds.min_sites": 2, "rounds.sites": 2}, "rounds.min_sites is 2, but async.buffer_size is 1"),
        ({"rounds.quorum": 1, "rounds.deadline_s": 3}, "quorum is 1, but async.enabled is true"),
        ({"algorithm.name": "fedavg", "diloco.dynamic_local_steps": True}, "steps is set, but in 'fedavg'"),
        ({"async.staleness_weight": "inverse"}, "weight = 'inverse' is not one of constant, inverse_sqrt"),
        (
            {"async.staleness_weight": "inverse_sqrt", "aggregation.reducer.name": "median"},
            "the reducer 'median' ignores weights",
        ),
    ],
)
def test_an_async_run_refuses_unsuitable_settings(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    """An asynchronous run refuses settings that are wrong, or that only synchronous runs can have."""
    with pytest.raises(ConfigError, match=says):
        plain_server(
            tmp_path, nn.Linear(1, 1), **({"algorithm.name": "diloco", "async.enabled": True} | settings)
        ).start()


@pytest.mark.covers("L5")
def test_keeps_a_version_until_it_is_pulled(world: World) -> None:
    """An asynchronous server keeps an old version until the site that was told to pull it has done so."""
    # Beyond that, only the two newest versions are kept. Site `a` pulls version 0 when version 4 is the newest.
    world.start()
    assert world.sites["a"].next_round() == 1
    world.pull("b")
    advance(world, "b", 0, 1, 2, 3)
    assert torch.equal(world.sites["a"].pull()["weight"], START)
    world.wait(4)


def test_drops_a_version_that_was_pulled(world: World) -> None:
    """An asynchronous server deletes an old version when each site that was told to pull it has done so."""
    # Site `a` has pulled version 1, and site `b` makes two more versions. The later update of `a` against version 1
    # still counts.
    world.start(**{"disk.keep_versions": 1, "network.heartbeat_interval_s": 0.1})
    world.pull("a", "b")
    world.submit("a", -G[0])
    world.wait(1)
    world.pull("a")
    server = world.server._require_served().run
    wait_until(lambda: server.roster["a"].beat.version == 1, "the heartbeat that says so")
    advance(world, "b", 1, 2)
    wait_until(lambda: [row.version for row in server.store.versions.kept()] == [3], "that 1 and 2 are dropped")
    world.submit("a", -G[3])  # and it counts, all the same
    world.wait(4)
    assert world.staleness[-1] == ("a", 2)


@pytest.mark.usefixtures("pulled_apart")
def test_a_slow_site_pulls_a_newer_version(world: World) -> None:
    """If the server cannot keep the old version that a site was told to pull, the site pulls a newer one."""
    # The server may pin only one version besides the newest.
    world.start(**{"disk.max_pinned_versions": 1, "disk.keep_versions": 1})
    assert world.sites["a"].next_round() == 1
    assert world.sites["c"].next_round() == 1
    world.pull("b")
    advance(world, "b", 0, 1, 2)
    world.sites["c"].next_round()  # of version 3, so that version 0 is no longer among the newest that are wanted
    advance(world, "b", 3)
    pulled = world.sites["a"].pull()["weight"]
    require_close({"weight": pulled}, nesterov(G))


@pytest.mark.usefixtures("pulled_apart")
@pytest.mark.covers("L3")
def test_a_site_pulling_after_the_end_gets_the_result(world: World) -> None:
    """A site that pulls an old version after the end of the run gets the result in its place."""
    # Site `a` was promised version 0. Before it pulls, an update of site `b` ends the run. A later update of `a` has no
    # effect and causes no error.
    world.start(rounds=1, **{"disk.keep_versions": 1})
    assert world.sites["a"].next_round() is not None
    world.pull("b")
    world.submit("b", -G[0])
    world.wait_until_durable(1)
    pulled = world.sites["a"].pull()["weight"]
    assert torch.equal(pulled, world.model["weight"])
    world.sites["a"].submit({"weight": pulled - G[1]})  # in vain, and no error
    assert world.sites["a"].next_round() is None
    assert world.staleness == [("b", 0)]


@pytest.mark.covers("L3")
def test_loading_the_newest_model_keeps_the_open_round(world: World) -> None:
    """A site may load the newest model while it trains from an older version. Its update still counts, 1 version
    behind.
    """
    world.start()
    world.pull("a", "b")
    world.submit("b", -G[0])
    world.wait(1)
    newest = world.sites["a"].worker.load_into({"weight": torch.zeros_like(START)})
    assert torch.equal(newest["weight"], world.model["weight"])
    world.submit("a", -G[1])
    world.wait(2)
    assert world.staleness == [("b", 0), ("a", 1)]


def test_a_version_is_durable_even_if_not_exported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version is marked as safe on disk even if its export failed because newer versions had displaced it."""
    from atoll.server.coordinator.exports import Exports

    def overtaken(*_: Any) -> None:
        raise Gone("Version 1 is no longer kept.")

    monkeypatch.setattr(Exports, "save", overtaken)
    world.start(**{"disk.export_every": 1})
    world.pull("a")
    world.submit("a", -G[0])
    world.wait_until_durable(1)


SIZE = 200
"""320 kB in fp64 are five parts of 64 KiB."""


PULL = r"GET .*/versions/\d+/[0-9a-f]{64} "


@pytest.fixture
def added(tmp_path: Path, pulled_apart: None) -> Iterator[World]:
    """An asynchronous run that adds updates up, to be started; its version takes five parts."""
    settings = {"diloco.sync_every": 1, "disk.keep_versions": 1, "network.part_bytes": 2**16, "network.connections": 1}
    settings |= PLAIN_DILOCO | {"async.enabled": True, "algorithm.outer_optimizer.nesterov": False}
    world = World(tmp_path, {"weight": torch.zeros(SIZE, SIZE, dtype=torch.float64)}, "ab", **settings)
    yield world
    world.close()


def break_the_next_pull(world: World, b: WireSite, line: Proxy) -> Fault:
    """Some of it has come when b has taken 1 from all weights in four versions, and the server has started again."""

    def forget() -> None:
        for _ in range(4):
            at = world.version
            b.train(-0.25).submit()
            world.wait(at + 1)
        world.restart()

    fault = Fault(PULL, "down", at=1000, action="reset", wait=forget)
    line.faults.append(fault)
    return fault


def require_at(state: Mapping[str, Tensor], value: float) -> None:
    """Every weight has this value."""
    require_close(state, {"weight": torch.full((SIZE, SIZE), value, dtype=torch.float64)})


@pytest.mark.covers("L3", "L10")
def test_a_broken_pull_continues_with_the_newest_version(added: World) -> None:
    """If a pull breaks off and its version is then deleted, the site pulls the newest version instead, and its update
    counts.
    """
    added.start(algorithm="fedavg")
    with Proxy(added.server.port) as line, ManualSite(line.url, site="a", folder=added.workers) as a:
        broken = break_the_next_pull(added, WireSite(added.url, "b"), line)
        assert a.next_round() is not None
        state = a.pull()
        assert broken.reached.is_set()
        require_at(state, -1.0)
        a.submit({"weight": state["weight"] - 1.0})
        added.wait(5)
    assert added.staleness[-1] == ("a", 0)
    require_at(added.model, -2.0)


@pytest.mark.covers("L3", "L10")
def test_a_diloco_loop_loses_no_step_when_a_pull_breaks(added: World) -> None:
    """If a DiLoCo loop's pull breaks and the server restarts, each local step still counts exactly once."""
    # Each step subtracts 1 from every weight.
    model = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()

    added.start()
    b = WireSite(added.url, "b")
    with Proxy(added.server.port) as line, diloco(line.url, added.folder, "a", model, optimizer) as loop:
        step()
        broken = break_the_next_pull(added, b, line)
        step()
        assert broken.reached.is_set()
        require_at(model.state_dict(), -3.0)
        step()
        assert (loop.rounds, loop.skipped) == (3, 0)
    added.wait(7)
    require_at(added.model, -4.0)
