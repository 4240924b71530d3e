"""`skip()`: a site without data for a round says so, in every way in, and stays in the run."""

from __future__ import annotations

import logging
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit.models import Weights
from kit.servers import PLAIN_DILOCO, new_simulation, plain_server
from kit.sites import logged
from kit.world import World
from safetensors.torch import load_file

import atoll
from atoll.cli.status import latest, plain
from atoll.errors import UsageError
from atoll.testing.run import Threads

START = {"w": torch.zeros(2)}


def skip(world: World, site: str, number: int) -> None:
    """Skip round `number`, without a model."""
    world.ask(site, number=number)
    world.sites[site].round.skip()


def test_a_site_that_skips_is_not_missing(tmp_path: Path) -> None:
    """A site that calls `skip` in a round is not reported as missing, and the version is made from the other site's
    update.
    """
    # In round 1 a moves by 2 and b skips: the version is 2.
    with World(tmp_path, START, rounds=2) as world:
        skip(world, "b", 1)
        status = world.status
        assert "waits for a; b sat out" in status.fragments[0].reason
        assert any("b sat out" in line for line in plain(status, world.url))
        assert world.sites["b"].worker.bytes_up == world.sites["b"].worker.bytes_down == 0
        world.move("a", 1, 2.0)
        world.rounds(1.0, 2)
        assert world.finish()["w"].tolist() == [3.0, 3.0]
        first, _ = world.status.history
    assert (first.workers, first.sat_out, first.expected) == (["a"], ["b"], 2)
    assert "instead of" not in first.line()
    assert not any("without b" in line for line in world.log)


def test_a_round_is_either_skipped_or_submitted(tmp_path: Path) -> None:
    """After `skip` or `submit`, a second call in the same round says that the round is over for this site."""
    with World(tmp_path, START, "a", rounds=2) as world:
        skip(world, "a", 1)
        for again in (world.sites["a"].round.skip, partial(world.sites["a"].submit, START)):
            with pytest.raises(UsageError, match="Round 1 is over for this site"):
                again()
        world.move("a", 2, 1.0)
        with pytest.raises(UsageError, match="Round 2 is over for this site"):
            world.sites["a"].round.skip()
        world.finish()


def test_a_site_may_skip_after_loading(tmp_path: Path) -> None:
    """A site may skip a round after `load_into` and `correct`. It sends nothing, and its optimizer is free again."""
    model = torch.nn.Linear(2, 1)
    with World(tmp_path, torch.nn.Linear(2, 1), "a", algorithm="scaffold", rounds=2) as world:
        world.ask("a", number=1)
        round_ = world.sites["a"].round
        round_.load_into(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        round_.correct(model, optimizer)
        round_.skip()
        optimizer.step()
        skip(world, "a", 2)
        world.finish()
        assert world.version == 0


def test_rounds_that_all_skip_begin_after_pauses(tmp_path: Path) -> None:
    """If all sites skip several rounds in a row, each further round begins after a pause, and the status says why."""
    # Five rounds; from the fourth on, each begins after a pause.
    with World(tmp_path, START, "a", rounds=5) as world:
        for number in (1, 2, 3):
            skip(world, "a", number)
        begin_s = time.monotonic()
        assert world.sites["a"].next_round(0) is None
        assert any("rounds begin after a pause" in text for text in world.status.warnings)
        skip(world, "a", 4)
        skip(world, "a", 5)
        assert time.monotonic() - begin_s > 0.3  # 0.1 s and 0.2 s
        world.finish()
        assert any("round 5: no version, because all sites sat out (a)" in line for line in latest(world.status))


def test_the_functional_interface_can_skip_a_round(tmp_path: Path) -> None:
    """`atoll.functional` can skip a round before or after `receive`, and refuses to without an open round."""
    with plain_server(tmp_path, START, sites=1, rounds=3) as server:
        atoll.functional.init(server.url, "a", folder=tmp_path / "w")
        with pytest.raises(UsageError, match="There is no open round to skip"):
            atoll.functional.skip()
        for number in (1, 2, 3):
            assert atoll.functional.is_running()
            if number == 1:
                atoll.functional.skip()
            else:
                atoll.functional.receive()
                if number == 2:
                    atoll.functional.skip(metrics={"loss": 2.0})
                else:
                    atoll.functional.send({"w": torch.full((2,), 3.0)})
        assert not atoll.functional.is_running()
        assert server.wait(60)
        assert load_file(server.exports / "model.safetensors")["w"].tolist() == [3.0, 3.0]
        assert [each.sat_out for each in server.status().history] == [["a"], ["a"], []]


def test_a_script_without_a_server_may_skip(caplog: pytest.LogCaptureFixture) -> None:
    """Without a server, a script may skip its only round: nothing is sent, and the loop ends."""
    caplog.set_level(logging.INFO)
    with atoll.join() as worker:
        assert [fl_round.skip() for fl_round in worker] == [None]
    assert any("sat out the round" in line for line in logged(caplog))


@pytest.mark.parametrize(
    "rules",
    [{"diloco.sync_every": 2}, {"diloco.sync_every": 2, "diloco.fragment_sync_delay": 1}],
    ids=["whole", "delayed"],
)
def test_a_diloco_site_without_data_follows_the_others(tmp_path: Path, rules: dict[str, Any]) -> None:
    """A DiLoCo site without data skips each round and gets the versions that the other site makes."""
    # a moves by 2 in each of three rounds.
    with plain_server(tmp_path, Weights(w=torch.zeros(2)), **(PLAIN_DILOCO | rules), sites=2, rounds=3) as server:
        met = list[float]()

        def work(site: str) -> None:
            model = Weights(w=torch.zeros(2))
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with atoll.DiLoCo(model, optimizer, server=server.url, site=site, folder=tmp_path / "w") as loop:
                for _ in range(20):
                    if loop.finished:
                        break
                    if site == "b":
                        loop.skip()
                        met.append(model.w[0].item())
                        continue
                    model.w.grad = torch.full((2,), -1.0)
                    optimizer.step()
                assert loop.finished
                assert loop.step == (0 if site == "b" else loop.step)
            with pytest.raises(UsageError, match="does not take part in a run now"):
                loop.skip()

        Threads(partial(work, "a"), partial(work, "b")).join()
        assert server.wait(60)
        assert all((each.workers, each.sat_out) == (["a"], ["b"]) for each in server.status().history)
        assert met == sorted(met)
        assert met[-1] == load_file(server.exports / "model.safetensors")["w"][0].item()


def test_skipping_drops_local_steps_not_yet_sent(tmp_path: Path) -> None:
    """If a DiLoCo site skips in the middle of a round, its local steps of this round are dropped."""
    # One step of H = 3, then `skip`: the only site has version 0 again, and its next update has three steps.
    rules = PLAIN_DILOCO | {"diloco.sync_every": 3}
    with plain_server(tmp_path, Weights(w=torch.zeros(2)), **rules, sites=1, rounds=2) as server:
        model = Weights(w=torch.zeros(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as loop:

            def step() -> None:
                model.w.grad = torch.full((2,), -1.0)
                optimizer.step()

            step()
            loop.skip()
            assert model.w.tolist() == [0.0, 0.0]
            for _ in range(3):
                step()
            assert loop.finished
            assert model.w.tolist() == [3.0, 3.0]
        assert [(each.version, each.sat_out) for each in server.status().history] == [(None, ["a"]), (1, [])]


SCRIPT = """
import torch
import atoll

with atoll.join() as worker:
    for fl_round in worker:
        if worker.site == "site-0001" or fl_round.number == 2:
            fl_round.skip()
            continue
        model = fl_round.state_dict()
        fl_round.submit({"w": model["w"] + 1.0})
"""


@pytest.mark.slow
def test_a_simulated_site_can_skip_rounds(tmp_path: Path) -> None:
    """A simulation makes a version in each round that at least one site does not skip."""
    # Of two sites one never trains, and the other one not in round 2: two versions in three rounds, each + 1.
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    settings = {
        "algorithm.name": "fedavg",
        "rounds.total": 3,
        "disk.state_dir": tmp_path / "s",
        "disk.min_free_bytes": 0,
    }
    result = new_simulation(START, script=str(script), sites=2, processes=1, **settings).run()
    assert (result.version, result.worker_rounds, result.failed) == (2, 2, {})
    assert load_file(result.model)["w"].tolist() == [2.0, 2.0]


@pytest.mark.slow
def test_skipping_over_the_network_matches_a_simulation(nursery: Nursery, tmp_path: Path) -> None:
    """The same script, run by `atoll worker` as two processes that skip rounds, gives the model of the simulation."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with plain_server(tmp_path, START, sites=2, rounds=3) as server:
        sites = [
            nursery.start(
                *("atoll", "worker", "--server", server.url, "--site", f"site-000{number}"),
                *("--dir", str(tmp_path / "w"), "--", sys.executable, str(script)),
                cwd=tmp_path,
            )
            for number in (0, 1)
        ]
        assert server.wait(120)
        assert [each.wait(60) for each in sites] == [0, 0]
        assert load_file(server.exports / "model.safetensors")["w"].tolist() == [2.0, 2.0]
        assert [each.sat_out for each in server.status().history] == [
            ["site-0001"],
            ["site-0000", "site-0001"],
            ["site-0001"],
        ]


def skip_round_2(worker: Any) -> None:
    for fl_round in worker:
        if fl_round.number == 2:
            fl_round.skip()
        else:
            fl_round.submit({"w": fl_round.state_dict()["w"] + 1}, weight=1.0)


@pytest.mark.slow
def test_all_simulated_sites_skip_with_a_config_function(tmp_path: Path) -> None:
    """If all simulated sites skip a round, the next round begins, even if a function configures each round."""
    result = new_simulation(
        START,
        script=skip_round_2,
        sites=3,
        processes=1,
        config=lambda number, site: {"number": number},
        **{"algorithm.name": "fedavg", "rounds.total": 3, "disk.state_dir": tmp_path / "s"},
    ).run()
    assert (result.version, result.worker_rounds, result.failed) == (2, 6, {})
