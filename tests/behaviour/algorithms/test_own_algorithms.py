"""Algorithms of one's own: one in a file, and one of a third party with an entry point, whichever way a site trains.

By hand, with η = 0.1, α = 0.5, two steps a round and the loss (w − 1)²/2, so that ∇ = w − 1:

    round 1, from 0        0.1       = 0 − 0.1·(−1)
                           0.185     = 0.1 − 0.1·(−0.9 + 0.5·0.1)                           λ ← −0.5·0.185 = −0.0925
    round 2, from 0.185    0.25725   = 0.185 − 0.1·(−0.815 + 0.0925)
                           0.3186625 = 0.25725 − 0.1·(−0.74275 + 0.0925 + 0.5·0.07225)
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit import ForkedSite
from kit.models import Weights
from kit.packages import install
from kit.servers import new_simulation
from kit.world import World
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll import functional
from atoll.algorithms import Algorithm
from atoll.errors import ConfigError, UsageError

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_algorithm"


RESULT = 0.3186625
SETTINGS: dict[str, Any] = {"algorithm.name": "feddyn_local", "algorithm.alpha": 0.5, "rounds.total": 2}
BY_PATH: dict[str, Any] = {"algorithm.name": None, "algorithm.path": f"{EXAMPLE}/feddyn_local.py:feddyn_local"}


def one() -> Weights:
    return Weights(w=torch.zeros(1))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def two_steps(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        ((model.w - 1) ** 2 / 2).sum().backward()
        optimizer.step()


def train(worker: Iterable[atoll.Round]) -> None:
    """Also in the processes of a simulation."""
    model = one()
    for fl_round in worker:
        fl_round.load_into(model)
        with fl_round.correct(model, optimizer := sgd(model)):
            two_steps(model, optimizer)
        fl_round.submit(model)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example."""
    packages, project = tmp_path / "packages", tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    code = (EXAMPLE / "feddyn_local.py").read_text()
    install(monkeypatch, packages, "feddyn_local", code, project["entry-points"])
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def new_world(folder: Path, **settings: Any) -> World:
    return World(folder, one(), "a", **SETTINGS | settings)


def by_the_loop(url: str, folder: Path) -> None:
    """Each round in a worker of its own: what the site keeps outlives it."""
    for _ in range(2):
        with atoll.join(url, site="a", folder=folder) as worker:
            train([next(iter(worker))])


def by_functions(url: str, folder: Path) -> None:
    local = one()
    functional.init(url, site="a", folder=folder)
    while functional.is_running():
        received = functional.receive(into=local)
        received.correct(local, optimizer := sgd(local))
        two_steps(local, optimizer)
        functional.send(local)


@pytest.mark.parametrize("train", [by_the_loop, by_functions])
def test_own_algorithm_works_in_loops_and_functions(tmp_path: Path, train: Callable[..., None]) -> None:
    """A user's own algorithm corrects local steps and keeps its site state from round to round.

    Both ways to train work: a loop over rounds, and the functions of `atoll.functional`.
    """
    with new_world(tmp_path) as world:
        train(world.url, tmp_path / "sites")
        assert world.server.wait(60)
    assert world.result["w"].item() == pytest.approx(RESULT, rel=1e-6)


def simulated(folder: Path, **settings: Any) -> float:
    """w of a simulation's result."""
    given = {"disk.state_dir": folder / "state"} | SETTINGS | settings
    return load_file(new_simulation(one(), script=f"{__file__}:train", sites=1, **given).run().model)["w"].item()


def test_own_algorithm_works_in_a_simulation(tmp_path: Path) -> None:
    """A user's own algorithm corrects local steps and keeps its site state in a simulation."""
    assert simulated(tmp_path) == pytest.approx(RESULT, rel=1e-6)


def test_training_without_a_server_is_not_corrected() -> None:
    """A script that trains without a server makes plain gradient steps inside `correct`."""
    # By hand: 0 + 0.1·1 = 0.1 and 0.1 + 0.1·0.9 = 0.19.
    with atoll.join() as worker:
        fl_round = next(iter(worker))
        local = fl_round.load_into(one())
        with fl_round.correct(local, optimizer := sgd(local)) as steps:
            two_steps(local, optimizer)
        fl_round.submit(local)
    assert (local.w.item(), steps.steps) == (pytest.approx(0.19), 2)


def test_a_site_without_the_algorithm_does_not_join(tmp_path: Path, nursery: Nursery) -> None:
    """A site on which the run's algorithm is not installed does not join. The error says what to install."""
    with new_world(tmp_path) as world:
        without = os.environ["PYTHONPATH"].partition(os.pathsep)[2]
        process = ForkedSite(nursery, tmp_path, world.url, "a", "import atoll; atoll.join()").start(PYTHONPATH=without)
        assert process.wait(60) != 0
        said = process.output()
        assert "algorithm 'feddyn_local' corrects local training, but it is not installed at this site" in said
        assert "Install feddyn-local 1.0 at this site." in said
        assert world.status.workers == []


def test_a_site_loads_no_code_from_the_servers_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site never loads the algorithm from the file path in the server's settings."""
    # A site with the installed package uses the package's code. A site without the package is refused.
    with new_world(tmp_path, **BY_PATH) as world:
        with world.worker() as worker:
            assert type(worker._backend.participation.exchange.local.rule).__module__ == "feddyn_local"
            monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
            with pytest.raises(ConfigError, match=r"Install feddyn-local 1\.0 at this site"):
                world.worker("b")


@pytest.mark.covers("X8")
def test_a_script_may_register_the_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an installed package, a site's script may register the run's algorithm itself."""
    # The server loads the algorithm from a file. A site that has not registered the algorithm is refused.
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    monkeypatch.setattr("atoll.registry._registered", {})
    with new_world(tmp_path, **BY_PATH) as world:
        with pytest.raises(ConfigError, match=r"call atoll.register\('algorithms', 'feddyn_local', …\) in the script"):
            world.worker()
        atoll.register("algorithms", "feddyn_local", import_module("feddyn_local").feddyn_local)
        by_the_loop(world.url, tmp_path / "sites")
        assert world.server.wait(60)
    assert world.result["w"].item() == pytest.approx(RESULT, rel=1e-6)


def test_a_simulation_loads_the_algorithm_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an installed package, the processes of a simulation load the algorithm from the path in the settings."""
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].partition(os.pathsep)[2])
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path / "packages")])
    assert simulated(tmp_path, **BY_PATH) == pytest.approx(RESULT, rel=1e-6)


def test_the_documentation_shows_the_short_example() -> None:
    """The documentation page shows the example of an own algorithm, which has at most 60 lines."""
    code = (EXAMPLE / "feddyn_local.py").read_text()
    page = (EXAMPLE.parents[1] / "docs" / "algorithms" / "own.md").read_text()
    assert f"```python\n{code}```" in page
    assert len(code.splitlines()) <= 60


# -- one that keeps controls: the site's loop gives each update its control difference

drift = Algorithm(
    name="drift",
    citation="",
    outer="sgd",
    outer_options={"lr": 1.0, "momentum": 0.0},
    reduce={"params": "mean", "buffers": "mean", "control": "share"},
)
OWN: dict[str, Any] = {"algorithm.name": None, "algorithm.path": f"{__name__}:drift", "rounds": 2}


@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "within fl_round.correct"])
def test_refuses_an_update_without_its_control_difference(tmp_path: Path, corrected: bool) -> None:
    """A site's `submit` refuses an update without the control difference that the algorithm needs.

    The site can then submit the update together with a control difference.
    """
    seen = []
    with World(tmp_path, one(), "a", **OWN) as world:
        with world.worker() as worker:
            for fl_round in worker:
                model = fl_round.load_into(one())
                seen.append(fl_round.global_state("control")["w"].tolist())
                if corrected:
                    fl_round.correct(model, sgd(model))
                nn.init.ones_(model.w)
                with pytest.raises(UsageError, match="groups="):
                    fl_round.submit(model)
                fl_round.submit(model, groups={"control": {"w": torch.tensor([-2.0])}}, steps=1)
        world.server.run()
        assert [summary.workers for summary in world.status.history] == [["a"], ["a"]]
    assert seen == [[0.0], [-2.0]]


def test_diloco_refuses_algorithms_that_send_extra_tensors(tmp_path: Path) -> None:
    """A DiLoCo loop refuses to start if the run's algorithm needs tensors besides the model in each update."""
    with World(tmp_path, one(), "a", **OWN) as world:
        words = "needs 'control' in each update, besides the model; atoll.DiLoCo does not support this"
        with pytest.raises(UsageError, match=words):
            world.diloco(one(), sync_every=1).start()


def test_diloco_refuses_an_algorithm_that_corrects_steps(tmp_path: Path) -> None:
    """A DiLoCo loop refuses to start if the run's algorithm corrects local steps, as FedProx does."""
    with World(tmp_path, one(), "a", algorithm="fedprox", **{"algorithm.mu": 0.1}) as world:
        with pytest.raises(UsageError, match=r"'fedprox'.* corrects local steps; atoll.DiLoCo does not"):
            world.diloco(one()).start()
