"""What a run tells its sites for each round (`fl_round.config`): from a table, a schedule or a function."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit import ask_journal
from kit.models import Weights
from kit.servers import PLAIN_DILOCO, new_simulation, plain_server
from kit.world import World
from safetensors.torch import load_file

import atoll
from atoll.config import Settings
from atoll.errors import ConfigError, NotTold, RunFailed, ServerFailed
from atoll.server.coordinator import round_configs
from atoll.testing.run import local_worker
from atoll.worker.training import functional_loop

START = {"w": torch.zeros(2)}
TABLE = {"epochs": 2, "lr": {"1": 0.5, "3": 0.25}, "layers": ["head", "norm"], "augment": {"flip": True}}


def told(world: World, site: str, number: int) -> dict[str, Any]:
    """What a site is told for this round, which it then submits."""
    world.pull(site, number=number)
    config: dict[str, Any] = world.sites[site].round.config
    world.submit(site, 1.0)
    return config


def test_each_site_gets_the_rounds_configuration(tmp_path: Path) -> None:
    """Each site gets the values of `rounds.config` for its round; a table of numbers is a schedule by rounds."""
    # 0.5 in rounds 1 and 2, and 0.25 from round 3 on. Other tables are values.
    with World(tmp_path, START, rounds=4, **{"rounds.config": TABLE}) as world:
        for number, rate in enumerate((0.5, 0.5, 0.25, 0.25), 1):
            assert told(world, "a", number) == told(world, "b", number) == TABLE | {"lr": rate}
        world.finish()


def test_the_configuration_may_be_empty(tmp_path: Path) -> None:
    """Without `rounds.config`, or without a server, the configuration of a round is an empty dict."""
    with World(tmp_path, START, "a", rounds=1) as world:
        assert told(world, "a", 1) == {}
        world.finish()
    with atoll.join() as worker:
        for fl_round in worker:
            assert fl_round.config == {}
            fl_round.skip()


def missing(config: dict[str, Any], name: str = "lr") -> str:
    """What the error of a name that is not told says."""
    with pytest.raises(NotTold) as raised:
        config[name]
    assert isinstance(raised.value, KeyError)
    assert config.get(name, 0.1) == 0.1
    return str(raised.value)


def test_a_name_without_a_server_needs_a_default(tmp_path: Path) -> None:
    """The loop, the functions and DiLoCo say so, with the name and the remedy."""
    said = []
    with atoll.join() as worker:
        for fl_round in worker:
            said.append(missing(fl_round.config))
            fl_round.skip()
    atoll.functional.init()
    fl_round = atoll.functional.receive(into=Weights(w=torch.zeros(2)))
    assert fl_round is not None
    said.append(missing(fl_round.config))
    atoll.functional.skip()
    functional_loop.forget()
    model = Weights(w=torch.zeros(2))
    diloco = atoll.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=2)
    said.append(missing(diloco.config))
    with diloco:
        said.append(missing(diloco.config))
    assert {*said} == {
        "The configuration of the round has no 'lr': without a server, or before the first round, a script is told "
        "nothing. For a script that also runs alone, give a default: config.get('lr', …)."
    }


def train_by_a_missing_name(worker: Any) -> None:
    for fl_round in worker:
        assert fl_round.config["epochs"] == 2
        fl_round.config["rate"]


def test_a_name_that_a_run_does_not_set_is_named(tmp_path: Path) -> None:
    """At a site, in a simulation and in `atoll.run`, with the names that the run sets."""
    wanted = (
        "The configuration of the round has no 'rate'; it has 'epochs', 'lr', 'layers', 'augment'. Set it at the "
        "server, in rounds.config or by the configuration function, or give a default: config.get('rate', …)."
    )
    with World(tmp_path / "served", START, "a", rounds=1, **{"rounds.config": TABLE}) as world:
        world.pull("a")
        assert missing(world.sites["a"].round.config, "rate") == wanted
    settings = {"rounds.total": 1, "rounds.config": TABLE, "algorithm.name": "fedavg", "disk.min_free_bytes": 0}
    for name, run in {
        "threads": lambda given: atoll.run(START, train_by_a_missing_name, sites=["a"], settings=given),
        "processes": lambda given: atoll.Simulation(
            START, given, script=train_by_a_missing_name, sites=["a"], processes=1, arguments=()
        ).run(),
    }.items():
        with pytest.raises(RunFailed, match=r"has no 'rate'; it has 'epochs'"):
            run({**settings, "disk.state_dir": tmp_path / name})


def test_a_script_cannot_change_the_configuration(tmp_path: Path) -> None:
    """If a script changes the configuration dict that it got, it gets the run's values when it reads it again."""
    with World(tmp_path, START, "a", rounds=1, **{"rounds.config": TABLE}) as world:
        world.pull("a")
        world.sites["a"].round.config["layers"].append("all")
        assert world.sites["a"].round.config["layers"] == ["head", "norm"]
        world.submit("a", 1.0)
        world.finish()


def test_a_function_configures_each_site(tmp_path: Path) -> None:
    """A function may configure each round for each site. Its values take precedence over the table, and it is called
    once for a round and a site.
    """
    asked: list[tuple[int, str]] = []

    def config(number: int, site: str) -> dict[str, Any]:
        asked.append((number, site))
        return {"lr": 1.0 / number, "name": site}

    with World(tmp_path, START, rounds=2, config=config, **{"rounds.config": TABLE}) as world:
        for number in (1, 2):
            for site in "ab":
                assert told(world, site, number) == TABLE | {"lr": 1.0 / number, "name": site}
        world.finish()
    assert sorted(asked) == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_a_restart_keeps_an_open_rounds_configuration(tmp_path: Path) -> None:
    """After a restart, a site gets the same configuration for its open round, without another call of the function."""
    # The function counts its calls, so it would say something else; the journal has what it said to a for round 1.
    calls: list[str] = []

    def config(_: int, site: str) -> dict[str, Any]:
        calls.append(site)
        return {"call": len(calls)}

    with World(tmp_path, START, "a", rounds=3, config=config) as world:
        world.ask("a", number=1)
        assert world.sites["a"].round.config == {"call": 1}
        world.restart()
        world.sites["a"].close()
        heard = [told(world, "a", number) for number in (1, 2, 3)]
        world.finish()
    assert heard == [{"call": 1}, {"call": 2}, {"call": 3}]  # outside: a run that goes on would not end
    assert [tuple(row) for row in ask_journal(tmp_path, "SELECT site, round FROM configs")] == [("a", 2), ("a", 3)]


def test_a_restart_may_change_the_configuration(tmp_path: Path) -> None:
    """A changed table `rounds.config` takes effect at the next start, for the rounds that follow."""
    with World(tmp_path, START, "a", rounds=2, **{"rounds.config": {"lr": 0.5}}) as world:
        assert told(world, "a", 1) == {"lr": 0.5}
        world.restart(**{"rounds.config": {"lr": 0.25}})
        assert told(world, "a", 2) == {"lr": 0.25}
        world.finish()


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"lr": float("nan")}, "lr is nan, which is not a finite number"),
        ({"lr": {"1": 0.1, "5": float("inf")}}, r"lr\.5 is inf, which is not a finite number"),
        ({"lr": {"5": 0.1}}, "lr has no value for round 1: its first key is 5"),
        ({"when": Path("x")}, "when is of type PosixPath, but JSON has only numbers"),
        ({"text": "x" * 20_000}, r"it has 20012 bytes as JSON, but at most 16384 are sent"),
        ({"big": 2**70}, "big is a whole number beyond"),
        ({"deep": [[[[[[[[[1]]]]]]]]]}, r"deep(\[0\])* is nested too deeply"),
        ({"a\nb": 1}, r"it has the key 'a\\nb', but keys are printable texts"),
    ],
)
def test_a_wrong_configuration_is_refused_at_once(table: dict[str, Any], why: str) -> None:
    """A wrong table `rounds.config` is refused before the server starts, with the setting and the value."""
    with pytest.raises(ConfigError, match=rf"rounds\.config: {why}"):
        Settings.build({"rounds.config": table})


def test_a_run_file_may_configure_rounds(tmp_path: Path) -> None:
    """A run file may have tables, schedules and a function for `rounds.config`; an option or a variable changes single
    values.
    """
    (tmp_path / "told.py").write_text("def config(round, site):\n    return {'site': site}\n")
    file = tmp_path / "run.toml"
    file.write_text(
        '[rounds]\nconfig_function = "told.py:config"\n[rounds.config]\nlr = {1 = 0.1, 10 = 0.01}\nepochs = 1\n'
    )
    read = Settings.read(file, {"rounds.config.epochs": 3}, {"ATOLL_ROUNDS__CONFIG__DEPTH": "4"}).rounds
    assert read.config == {"lr": {"1": 0.1, "10": 0.01}, "epochs": 3, "depth": 4}
    assert read.config_function == f"{tmp_path / 'told.py'}:config"
    assert round_configs.config_function(Settings.read(file, environ={}))(1, "a") == {"site": "a"}  # type: ignore[misc]
    file.write_text("[rounds.config]\nday = 2026-01-01\n")
    with pytest.raises(ConfigError, match=r"rounds\.config: day is of type date"):
        Settings.read(file, environ={})


def no_arguments() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (no_arguments, "cannot be called with a round and a site"),
        (3, "config is 3"),
    ],
    ids=["arguments", "no function"],
)
def test_a_configuration_function_is_tested_before_the_start(tmp_path: Path, function: Any, why: str) -> None:
    """A configuration function that cannot be called with a round and a site is refused before the server starts."""
    with pytest.raises(ConfigError, match=why):
        plain_server(tmp_path, START, config=function)


def no_text(number: int, site: str) -> Any:
    return "lr=0.1" if number == 2 else {}


def raises(number: int, site: str) -> Any:
    return {"lr": {}["x"]} if number == 2 else {}


def not_finite(number: int, site: str) -> Any:
    return {"lr": float("inf") if number == 2 else 0.1}


def a_tensor(number: int, site: str) -> Any:
    return {"lr": torch.tensor(0.1) if number == 2 else 0.1}


HANGING = threading.Event()
"""Ends the function that hangs, at the end of its test."""


def hangs(number: int, site: str) -> Any:
    if number == 2:
        HANGING.wait(60)
    return {}


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (no_text, "sites cannot get what it returned: it is of type str, not a dict"),
        (raises, r"KeyError\('x'\)"),
        (not_finite, "sites cannot get what it returned: lr is inf, which is not a finite number"),
        (a_tensor, "sites cannot get what it returned: lr is of type Tensor"),
        (hangs, "it did not return within 0.5 s"),
    ],
)
def test_a_failing_configuration_function_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Any, why: str
) -> None:
    """If the configuration function fails, the run fails and names the round and the site. With a corrected function,
    it continues with that round.
    """
    HANGING.clear()
    monkeypatch.setattr(round_configs, "TIMEOUT_S", 0.5)
    with World(tmp_path, START, "a", rounds=2, config=function) as world:
        told(world, "a", 1)
        with pytest.raises(ServerFailed):
            world.sites["a"].next_round()
        text = f"failed in round 2 for site a: {why}"
        with pytest.raises(RunFailed, match=text):
            world.server.wait(60)
        assert "Correct the function" in world.text
        with pytest.raises(RunFailed):
            world.server.run()
        assert "failed in round 2 for site a" in world.status.failed
        HANGING.set()
        world.sites.pop("a").close()
        world.stop()
        world.start(config=lambda number, site: {"number": number})
        assert told(world, "a", 2) == {"number": 2}
        world.finish()


def test_a_diloco_loop_reads_the_rounds_configuration(tmp_path: Path) -> None:
    """A DiLoCo loop reads the configuration of the present round before each of its first steps."""
    # H = 1: the rate of each of three rounds is the schedule's, from the first step on.
    rules = PLAIN_DILOCO | {"diloco.sync_every": 1, "rounds.config": {"lr": {"1": 1.0, "2": 2.0, "3": 4.0}}}
    with plain_server(tmp_path, Weights(w=torch.zeros(2)), **rules, sites=1, rounds=3) as server:
        model = Weights(w=torch.zeros(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as loop:
            while not loop.finished:
                optimizer.param_groups[0]["lr"] = loop.config["lr"]
                model.w.grad = torch.full((2,), -1.0)
                optimizer.step()
        assert model.w.tolist() == [7.0, 7.0]


def test_a_loop_is_configured_before_its_round_opens(tmp_path: Path) -> None:
    """A DiLoCo loop that trains before round 1 opens already has the configuration of round 1."""
    # Round 1 waits for two sites.
    rules = PLAIN_DILOCO | {"diloco.sync_every": 2, "rounds.config": {"lr": 0.5}}
    rules["rounds.changes"] = [{"from_round": 2, "diloco.sync_every": 3}]

    def config(number: int, site: str) -> dict[str, Any]:
        return {"name": f"{site} in {number}"}

    with plain_server(tmp_path, Weights(w=torch.zeros(2)), **rules, sites=2, rounds=1, config=config) as server:
        model = Weights(w=torch.zeros(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as loop:
            assert loop.config == {"lr": 0.5, "name": "a in 1"}
            assert loop.sync_every == 2
            model.w.grad = torch.ones(2)
            optimizer.step()
            assert loop.config == {"lr": 0.5, "name": "a in 1"}


def test_asynchronous_rounds_have_a_configuration(tmp_path: Path) -> None:
    rules = {"async.enabled": True, "rounds.config": {"lr": {"1": 1.0, "2": 2.0}}}
    with World(tmp_path, START, "a", rounds=2, config=lambda number, site: {"site": site}, **rules) as world:
        assert [told(world, "a", number)["lr"] for number in (1, 2)] == [1.0, 2.0]
        world.finish()


def test_a_local_worker_gets_the_configuration(tmp_path: Path) -> None:
    with World(tmp_path, START, "a", rounds=1, config=lambda number, site: {"site": site}) as world:
        with local_worker(world.server, "a") as worker:
            for fl_round in worker:
                assert fl_round.config == {"site": "a"}
                fl_round.submit(fl_round.state_dict())
        assert world.server.wait(60)


SCRIPT = """
import atoll

with atoll.join() as worker:
    for fl_round in worker:
        model, config = fl_round.state_dict(), fl_round.config
        fl_round.submit({"w": model["w"] + config["step"] + config["own"]})
"""
OWN = "def config(round, site):\n    return {'own': 0.5 if site == 'site-0001' else 0.0}\n"
SETTINGS = {"algorithm.name": "fedavg", "rounds.total": 2, "disk.min_free_bytes": 0}
STEPS = {"rounds.config": {"step": {"1": 1.0, "2": 3.0}}}
EXPECTED = [4.5, 4.5]
"""1 and 3, and the mean of 0 and 0.5 twice."""


@pytest.mark.slow
def test_simulated_sites_get_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "own.py").write_text(OWN)
    result = new_simulation(
        START,
        script=str(tmp_path / "train.py"),
        sites=2,
        processes=1,
        **SETTINGS,
        **STEPS,
        **{"disk.state_dir": tmp_path / "s", "rounds.config_function": f"{tmp_path / 'own.py'}:config"},
    ).run()
    assert result.failed == {}
    assert load_file(result.model)["w"].tolist() == EXPECTED


@pytest.mark.slow
def test_a_failing_configuration_function_fails_a_simulation(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    simulation = new_simulation(
        START,
        script=str(tmp_path / "train.py"),
        sites=2,
        processes=1,
        config=raises,
        **SETTINGS,
        **{"disk.state_dir": tmp_path / "s", "rounds.config": {"step": 1.0, "own": 0.0}},
    )
    with pytest.raises(RunFailed, match="failed in round 2 for site site-000"):
        simulation.run()


@pytest.mark.slow
def test_processes_get_the_configuration_over_the_network(nursery: Nursery, tmp_path: Path) -> None:
    """A run of `atoll server` and `atoll worker` gives the same model as the simulation with this configuration."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "own.py").write_text(OWN)
    with plain_server(tmp_path, START, sites=2, rounds=2, config=f"{tmp_path / 'own.py'}:config", **STEPS) as server:
        sites = [
            nursery.start(
                *("atoll", "worker", "--server", server.url, "--site", f"site-000{number}"),
                *("--dir", str(tmp_path / "w"), "--", sys.executable, str(tmp_path / "train.py")),
                cwd=tmp_path,
            )
            for number in (0, 1)
        ]
        assert server.wait(120)
        assert [each.wait(60) for each in sites] == [0, 0]
        assert load_file(server.exports / "model.safetensors")["w"].tolist() == EXPECTED
