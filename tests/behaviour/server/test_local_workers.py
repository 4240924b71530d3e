"""A server with its sites in threads of the same program, without a network between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.world import World, require_equal
from torch import Tensor

import atoll
from atoll.errors import ConfigError, StateLocked, UsageError
from atoll.testing.run import local_worker, together, wait_until

MODEL = {"w": torch.zeros(3)}
Change = Callable[[str, dict[str, Tensor]], dict[str, Tensor]]


def plus(change: float) -> Change:
    return lambda site, model: {name: value + change for name, value in model.items()}


def train(server: atoll.Server, site: str, change: Change, **submitted: Any) -> dict[str, Tensor]:
    """The whole part of a site; returns the run's result as it loads it."""
    with local_worker(server, site) as worker:
        for fl_round in worker:
            fl_round.submit(change(site, fl_round.state_dict()), **submitted)
        return worker.load_into(dict(MODEL) | {"w": torch.ones(3)})


def test_threads_of_a_server_train_as_sites(tmp_path: Path) -> None:
    """Threads of the server's process train as two sites."""
    # Each of two rounds adds the mean of 1 and 3, and each site then loads the result.
    world, loaded = World(tmp_path, MODEL, "ab", rounds=2), dict[str, dict[str, Tensor]]()

    def part(site: str, change: float) -> None:
        loaded[site] = train(world.server, site, plus(change))

    with world:
        together(lambda: part("a", 1.0), lambda: part("b", 3.0))
        world.server.run()
    assert world.counted == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    require_equal(world.result, {"w": torch.full((3,), 4.0)})
    for each in loaded.values():
        require_equal(each, world.result)


@pytest.mark.parametrize(
    "settings",
    [{"algorithm": "scaffold", "codec": "int8"}, {"async.enabled": True, "codec": "none"}],
    ids=["scaffold and int8", "async"],
)
def test_a_local_worker_equals_a_joined_worker(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A worker in the server's own process gives the same bits as one that joins over HTTP."""
    # The state that a site keeps between its rounds, as SCAFFOLD's controls, also continues.

    def build() -> torch.nn.Linear:
        torch.manual_seed(0)
        return torch.nn.Linear(300, 4)

    def steps(worker: Any) -> None:
        model = build()
        for fl_round in worker:
            fl_round.load_into(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with fl_round.correct(model, optimizer):
                for _ in range(2):
                    optimizer.zero_grad()
                    model(torch.ones(2, 300)).square().mean().backward()
                    optimizer.step()
            fl_round.submit(model)

    results = []
    for name in ("local", "joined"):
        with World(tmp_path / name, build(), "a", rounds=3, **settings) as world:
            with (
                local_worker(world.server, "a") if name == "local" else atoll.join(world.url, "a", folder=tmp_path)
            ) as worker:
                steps(worker)
            world.server.run()
        results.append(world.result)
    require_equal(*results)


def test_local_workers_can_sit_out_and_be_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A local worker can sit out a round and be refused like any other site."""
    # Site `a` sits out its second round, and the update of site `b` in round 1 is refused because of NaN.
    with World(tmp_path, MODEL, "ab", rounds=2, **{"rounds.min_sites": 1}) as world:

        def a() -> None:
            with local_worker(world.server, "a") as worker:
                for fl_round in worker:
                    fl_round.submit(fl_round.state_dict(), weight=float(fl_round.number == 1))

        def b() -> None:
            with local_worker(world.server, "b") as worker:
                for fl_round in worker:
                    value = torch.nan if fl_round.number == 1 else 1.0
                    fl_round.load_into(dict(MODEL))
                    fl_round.submit({"w": torch.full((3,), value)})

        together(a, b)
        world.server.run()
    assert world.counted == [("a", 1), ("b", 2)]
    assert "b: this update does not count: The update of b was refused: w contains NaN or Inf." in caplog.text


def test_a_local_worker_stays_alive_during_long_training(tmp_path: Path) -> None:
    """A worker in the server's process stays alive through long training, though its script calls nothing meanwhile."""
    # During three heartbeat timeouts, with its lease.
    beats = {"network.heartbeat_interval_s": 0.1, "network.heartbeat_timeout_s": 0.5}
    with World(tmp_path, MODEL, "ab", rounds=1, **beats) as world, local_worker(world.server, "a") as worker:
        begun_s = world.status.uptime_s
        wait_until(lambda: world.status.uptime_s > begun_s + 1.5, "three timeouts")
        assert [each.state for each in world.status.workers] == ["alive"]
        assert worker.next_round(0) is None  # the lease is as it was


def test_an_error_ends_a_local_worker(tmp_path: Path) -> None:
    """If the script of a local worker raises, the status shows the site as failed, with the error."""
    with World(tmp_path, MODEL, "ab", rounds=1) as world:
        with pytest.raises(ValueError, match="no data"), local_worker(world.server, "a"):
            raise ValueError("no data")
        (worker,) = world.status.workers
        assert (worker.state, worker.error) == ("failed", "ValueError: no data")


def test_a_stopped_server_ends_local_waits(tmp_path: Path) -> None:
    """When its server stops, a waiting local worker gets an error. A new server on the same folder
    continues the run.
    """
    with World(tmp_path, MODEL, "ab", rounds=1) as world:
        ends: list[str] = []

        def waits() -> None:
            with pytest.raises(UsageError) as ended, local_worker(world.server, "a") as worker:
                worker.next_round()
            ends.append(str(ended.value))

        thread = threading.Thread(target=waits)
        thread.start()
        wait_until(lambda: world.status.workers, "the site to join")
        world.restart()
        thread.join(30)
        assert ends == ["The server has stopped. Start it again, then its sites."]
        together(*(lambda site=site: train(world.server, site, plus(1.0)) for site in "ab"))
        world.server.run()
    require_equal(world.result, {"w": torch.ones(3)})


def test_a_site_cannot_have_two_local_workers(tmp_path: Path) -> None:
    """A second worker in the server's process under the same site name is refused."""
    with World(tmp_path, MODEL, "ab", rounds=1) as world, local_worker(world.server, "a"):
        with pytest.raises(StateLocked):
            local_worker(world.server, "a")


@pytest.mark.parametrize("settings", [{"algorithm": "diloco"}, {"algorithm": "diloco", "K": 2, "H": 2}])
def test_local_workers_refuse_diloco_runs(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A DiLoCo run, with or without several fragments, refuses a local worker, and no site joins."""
    model = {"w": torch.zeros(3), "v": torch.zeros(3)}
    with World(tmp_path, model, "a", rounds=1, **settings) as world:
        with pytest.raises(ConfigError, match="only synchronous and asynchronous rounds of whole models"):
            local_worker(world.server, "a")
        assert world.status.workers == []
