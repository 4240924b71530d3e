"""Asynchronous runs over real sockets and files: what is applied when, to what, and how far behind it was."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from async_world import LR, MOMENTUM, SITES, START, Clients, gradient, nesterov
from kit.servers import plain_server
from kit.sites import diloco, together
from torch import nn

from atoll.errors import ConfigError
from atoll.filters import NormClip


def halved(s: int) -> float:
    return 0.5**s


WORLD = Callable[..., Clients]
G = [gradient(number) for number in range(4)]


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
def test_updates_are_applied_one_by_one_to_whatever_is_the_head(
    world: WORLD, weight: str, scales: tuple[float, ...]
) -> None:
    """Their staleness may be a weight."""
    run = world(**{"async.staleness_weight": weight})
    run.one_by_one()
    assert run.behind() == [("b", 0), ("c", 1), ("a", 2), ("b", 2)]
    run.require_weight(nesterov([scale * g for scale, g in zip(scales, G, strict=True)]))
    status = run.server.status()
    assert (status.policy, status.outer) == ("async", "sgd(lr=0.5, momentum=0.5, nesterov=True)")
    assert status.staleness == {"0": 1, "1": 1, "2": 2}


@pytest.mark.covers("L3", "L6")
def test_delayed_nesterov(world: WORLD) -> None:
    run = world(**{"async.momentum_every": 2})
    run.one_by_one()
    theta, m = START.clone(), torch.zeros_like(START)
    for first, second in ((G[0], G[1]), (G[2], G[3])):
        theta = theta - LR * first / 2
        m = MOMENTUM * m + (first + second) / 2
        theta = theta - LR * (MOMENTUM * m + second / 2)
    run.require_weight(theta)


def above_one(s: int) -> float:
    return 1.0 + s


def test_a_weight_of_staleness_that_is_none_is_refused() -> None:
    from atoll.reducers import staleness_weight

    weight = staleness_weight(f"{__name__}:above_one")
    with pytest.raises(ConfigError, match=r"returned 2\.0 for a staleness of 1"):
        weight(1)


@pytest.mark.covers("L5")
def test_an_update_too_far_behind_does_not_count(world: WORLD, caplog: pytest.LogCaptureFixture) -> None:
    run = world(**{"async.max_staleness": 1})
    run.pull("a", "b", "c")
    run.submit("b", gradient(0))
    run.wait(1)
    run.submit("c", gradient(1))
    run.wait(2)
    run.submit("a", gradient(2))  # 2 behind: the site is told, and goes on from the head
    assert " is over: its base is more than async.max_staleness 1 versions behind version 2." in caplog.text
    assert "has replaced it" not in caplog.text
    run.pull("a")
    run.submit("a", gradient(3))
    run.wait(3)
    assert run.behind() == [("b", 0), ("c", 1), ("a", 0)]
    run.require_weight(nesterov([G[0], G[1], G[3]]))


def test_a_buffer_takes_the_mean_of_so_many(world: WORLD) -> None:
    run = world(**{"async.buffer_size": 2})
    run.pull("a", "b", "c")
    run.submit("c", gradient(0), weight=3.0)
    assert run.server.status().fragments[0].version == 0
    run.submit("a", gradient(1), weight=1.0)
    run.wait(1)
    assert run.server.status().history[0].workers == ["a", "c"]
    run.require_weight(nesterov([0.75 * G[0] + 0.25 * G[1]]))


@pytest.mark.covers("L5")
def test_a_buffer_of_old_and_new_updates_weighs_each_by_its_own_staleness(world: WORLD) -> None:
    """The second step has the update of a, 1 version behind, with weight 3/4, and b's, which is new, with 1/4.

    The staleness halves a's: the step's gradient is 3/4 · 1/2 · g_a + 1/4 · g_b = 0.375 g_a + 0.25 g_b.
    """
    run = world(**{"async.buffer_size": 2, "async.staleness_weight": f"{__name__}:halved"})
    run.pull("a", "b", "c")
    run.submit("b", G[0])
    run.submit("c", G[1])
    run.wait(1)
    run.pull("b")
    run.submit("a", G[2], weight=3.0)
    run.submit("b", G[3], weight=1.0)
    run.wait(2)
    assert run.behind() == [("b", 0), ("c", 0), ("a", 1), ("b", 0)]
    run.require_weight(nesterov([0.5 * G[0] + 0.5 * G[1], 0.375 * G[2] + 0.25 * G[3]]))


@pytest.mark.covers("L26")
def test_an_update_more_than_five_behind_is_told_of(world: WORLD, caplog: pytest.LogCaptureFixture) -> None:
    run = world()
    run.pull("a", "b")
    for number in range(6):
        run.submit("b", gradient(number))
        run.pull("b")
    run.submit("a", gradient(7))
    run.wait(7)
    assert "an update of a was 6 versions old" in caplog.text
    assert "diloco.dynamic_local_steps = true" in run.server.status().warnings[-1]


@pytest.mark.covers("L3")
@pytest.mark.parametrize("delayed", [0, 2])
def test_an_infinite_grace_has_the_bits_of_a_synchronous_run(tmp_path: Path, delayed: int) -> None:
    weights = []
    for enabled in (False, True):
        with ExitStack() as stack:
            settings = {"async.enabled": enabled, "async.momentum_every": delayed}
            settings |= {"async.grace_s": math.inf} if enabled else {}
            run = Clients(tmp_path / str(enabled), stack, **settings)
            for number in range(3):
                run.pull("a", "b", "c")
                for index, site in enumerate(("c", "a", "b")):
                    run.submit(site, gradient(3 * number + index), weight=1.0 + index)
                run.wait(number + 1)
            weights.append(run.weight())
    assert torch.equal(*weights)


@pytest.mark.covers("L6")
def test_synchronous_rounds_first(world: WORLD, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "atoll")
    run = world(**{"async.sync_rounds_first": 1, "async.momentum_every": 2})
    run.pull("a", "b", "c")
    for number, site in enumerate(SITES):
        assert run.server.status().fragments[0].version == 0
        run.submit(site, gradient(number))
    run.wait(1)
    run.pull("a")
    run.submit("a", gradient(3))
    run.wait(2)
    # the mean of the first round makes a whole step of Nesterov's, what follows half a step without momentum
    g = (G[0] + G[1] + G[2]) / 3
    run.require_weight(START - LR * (g + MOMENTUM * g) - LR * G[3] / 2)
    assert "1 synchronous rounds first" in run.server.status().policy
    assert caplog.text.count("round 1 was the last synchronous round") == 1


@pytest.mark.covers("L2", "L3", "L6")
def test_diloco_loops_with_a_slow_site_and_dylu(tmp_path: Path) -> None:
    """The slow site takes four times as long for a step: soon it is asked for fewer steps than the fast one.

    On a busy machine the measured rates vary, so the loops train until the slow site is asked for fewer.
    """
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
def test_settings_that_defeat_each_other_are_told_of_at_the_start_and_in_status(
    tmp_path: Path, settings: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
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
        ({"algorithm.name": "scaffold"}, "this algorithm's own tensors change only in rounds"),
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
def test_what_an_asynchronous_run_does_not_have_is_refused(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plain_server(
            tmp_path, nn.Linear(1, 1), **({"algorithm.name": "diloco", "async.enabled": True} | settings)
        ).start()
