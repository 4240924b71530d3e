"""Asynchronous runs over real sockets and files: what is applied when, to what, and how far behind it was."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from async_world import LR, MOMENTUM, SITES, START, Clients, gradient, nesterov
from kit.servers import plain_server
from kit.sites import together
from torch import nn

import atoll
from atoll.errors import ConfigError


@pytest.mark.covers("L3", "L5", "D10")
def test_updates_are_applied_one_by_one_to_whatever_is_the_head(world: Callable[..., Clients]) -> None:
    run = world()
    run.one_by_one()
    assert run.behind() == [("b", 0), ("c", 1), ("a", 2), ("b", 2)]
    assert torch.allclose(run.weight(), nesterov([gradient(n) for n in range(4)]), rtol=0, atol=1e-12)
    status = run.server.status()
    assert (status.policy, status.outer) == ("async", "sgd(lr=0.5, momentum=0.5, nesterov=True)")
    assert status.staleness == {"0": 1, "1": 1, "2": 2}


@pytest.mark.covers("L3", "L6")
def test_delayed_nesterov(world: Callable[..., Clients]) -> None:
    run = world(**{"async.momentum_every": 2})
    run.one_by_one()
    theta, m, g = START.clone(), torch.zeros_like(START), [gradient(n) for n in range(4)]
    for first, second in ((g[0], g[1]), (g[2], g[3])):
        theta = theta - LR * first / 2
        m = MOMENTUM * m + (first + second) / 2
        theta = theta - LR * (MOMENTUM * m + second / 2)
    assert torch.allclose(run.weight(), theta, rtol=0, atol=1e-12)


@pytest.mark.covers("L5")
def test_staleness_may_be_a_weight(world: Callable[..., Clients]) -> None:
    run = world(**{"async.staleness_weight": "inverse_sqrt"})
    run.one_by_one()
    scales = (1.0, 1 / math.sqrt(2), 1 / math.sqrt(3), 1 / math.sqrt(3))
    expected = nesterov([scale * gradient(n) for n, scale in enumerate(scales)])
    assert torch.allclose(run.weight(), expected, rtol=0, atol=1e-12)


def by_the_user(s: int) -> float:
    return 0.5**s


@pytest.mark.covers("L5")
def test_a_user_s_own_weight_of_staleness(world: Callable[..., Clients]) -> None:
    run = world(**{"async.staleness_weight": f"{__name__}:by_the_user"})
    run.one_by_one()
    expected = nesterov([scale * gradient(n) for n, scale in enumerate((1.0, 0.5, 0.25, 0.25))])
    assert torch.allclose(run.weight(), expected, rtol=0, atol=1e-12)


def above_one(s: int) -> float:
    return 1.0 + s


def test_a_weight_of_staleness_that_is_none_is_refused() -> None:
    from atoll.reducers import staleness_weight

    weight = staleness_weight(f"{__name__}:above_one")
    with pytest.raises(ConfigError, match=r"returned 2\.0 for a staleness of 1"):
        weight(1)


@pytest.mark.covers("L5")
def test_an_update_too_far_behind_does_not_count(world: Callable[..., Clients], caplog: Any) -> None:
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
    assert torch.allclose(run.weight(), nesterov([gradient(0), gradient(1), gradient(3)]), rtol=0, atol=1e-12)


def test_a_buffer_takes_the_mean_of_so_many(world: Callable[..., Clients]) -> None:
    run = world(**{"async.buffer_size": 2})
    run.pull("a", "b", "c")
    run.submit("c", gradient(0), weight=3.0)
    assert run.server.status().fragments[0].version == 0
    run.submit("a", gradient(1), weight=1.0)
    run.wait(1)
    assert run.server.status().history[0].workers == ["a", "c"]
    expected = nesterov([0.75 * gradient(0) + 0.25 * gradient(1)])
    assert torch.allclose(run.weight(), expected, rtol=0, atol=1e-12)


@pytest.mark.covers("L26")
def test_an_update_more_than_five_behind_is_told_of(world: Callable[..., Clients], caplog: Any) -> None:
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
    for name, mode in (
        ("sync", {"async.enabled": False}),
        ("async", {"async.enabled": True, "async.grace_s": math.inf}),
    ):
        with ExitStack() as stack:
            run = Clients(tmp_path / name, stack, **{"async.momentum_every": delayed}, **mode)
            for number in range(3):
                run.pull("a", "b", "c")
                for index, site in enumerate(("c", "a", "b")):
                    run.submit(site, gradient(3 * number + index), weight=1.0 + index)
                run.wait(number + 1)
            weights.append(run.weight())
    assert torch.equal(*weights)


@pytest.mark.covers("L6")
def test_synchronous_rounds_first(world: Callable[..., Clients], caplog: Any) -> None:
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
    g = sum(gradient(n) for n in range(3)) / 3
    theta = START - LR * (g + MOMENTUM * g) - LR * gradient(3) / 2
    assert torch.allclose(run.weight(), theta, rtol=0, atol=1e-12)
    assert "1 synchronous rounds first" in run.server.status().policy
    assert caplog.text.count("round 1 was the last synchronous round") == 1


@pytest.mark.covers("L2", "L3", "L6")
def test_diloco_loops_with_a_slow_site_and_dylu(tmp_path: Path) -> None:
    """The slow site makes a step whenever the fast one has made four: it is asked for about a quarter of the steps."""
    model = nn.Linear(1, 1, bias=False)
    settings = {
        "algorithm.name": "diloco",
        "async.enabled": True,
        "diloco.dynamic_local_steps": True,
        "diloco.sync_every": 16,
        "rounds.sites": 2,
        "aggregation.upload_codec.name": "none",
        "network.heartbeat_interval_s": 0.2,
    }
    server = plain_server(tmp_path, model, **settings).start()
    asked: dict[str, list[int]] = {"fast": [], "slow": []}

    def job(site: str, pause_s: float) -> Callable[[], None]:
        def run() -> None:
            mine = nn.Linear(1, 1, bias=False)
            optimizer = torch.optim.SGD(mine.parameters(), lr=1e-3)
            with atoll.DiLoCo(mine, optimizer, server=server.url, site=site, folder=tmp_path / "w") as diloco:
                while len(asked["slow"]) < 4:
                    rounds = diloco.rounds
                    before = diloco.step
                    while diloco.rounds == rounds and len(asked["slow"]) < 4:
                        optimizer.zero_grad()
                        mine.weight.sum().backward()
                        pacer.wait(pause_s)
                        optimizer.step()
                    asked[site].append(diloco.step - before)

        return run

    pacer = threading.Event()
    together(job("fast", 0.01), job("slow", 0.04))
    server.stop()
    assert asked["slow"][0] == 16  # no site had been measured
    assert all(1 <= steps < 12 for steps in asked["slow"][2:]), asked


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"async.enabled": True}, "Training may diverge. Set async.momentum_every = 3 (delayed Nesterov)"),
        (
            {"async.enabled": True, "async.momentum_every": 3, "rounds.total": 5, "async.sync_rounds_first": 5},
            "all rounds are synchronous",
        ),
        (
            {"aggregation.upload_codec.name": "topk"},
            "both together overshoot. Set momentum = 0 and lr = 1 in algorithm.outer_optimizer",
        ),
        (
            {"diloco.num_fragments": 2, "diloco.sync_every": 4, "diloco.fragment_update_alpha": 1.0},
            "never use the training of other workers",
        ),
        (
            {"async.enabled": True, "async.momentum_every": 3, "aggregation.download_codec.name": "int4"},
            "Set disk.keep_versions = 3",
        ),
        (
            {"async.enabled": True, "async.momentum_every": 3, "aggregation.download_codec.name": "bf16"},
            "so almost nothing is saved",
        ),
    ],
    ids=["momentum", "never-async", "topk", "alpha-1", "keep", "too-many-differences"],
)
def test_settings_that_defeat_each_other_are_told_of_at_the_start_and_in_status(
    tmp_path: Path, settings: dict[str, Any], says: str, caplog: Any
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with plain_server(tmp_path, model, **{"algorithm.name": "diloco", "rounds.sites": 3}, **settings) as server:
        (told,) = server.status().warnings
    assert says in told
    assert told in caplog.text


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"aggregation.download_codec.density": 0.1, "async.enabled": False},
            "but no name of a codec",
        ),
        (
            {"aggregation.download_codec.name": "itn8"},
            "aggregation.download_codec = 'itn8' is not one of none, bf16",
        ),
        ({"algorithm.name": "scaffold"}, "this algorithm's own tensors change only in rounds"),
        ({"rounds.best_metric": "loss"}, "rounds.best_metric is 'loss', but async.enabled is true"),
        ({"rounds.min_sites": 2, "rounds.sites": 2}, "rounds.min_sites is 2, but async.buffer_size is 1"),
        ({"rounds.quorum": 1, "rounds.deadline_s": 3}, "quorum is 1, but async.enabled is true"),
        (
            {"algorithm.name": "fedavg", "diloco.dynamic_local_steps": True},
            "diloco.dynamic_local_steps is set, but in 'fedavg'",
        ),
        (
            {"async.staleness_weight": "inverse"},
            "async.staleness_weight = 'inverse' is not one of constant, inverse_sqrt",
        ),
        (
            {"async.staleness_weight": "inverse_sqrt", "aggregation.reducer.name": "median"},
            "the reducer 'median' ignores weights",
        ),
    ],
)
def test_what_an_asynchronous_run_does_not_have_is_refused(tmp_path: Path, settings: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plain_server(
            tmp_path, nn.Linear(1, 1), **({"algorithm.name": "diloco", "async.enabled": True} | settings)
        ).start()
