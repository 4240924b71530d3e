"""SimEnv: the bits of real processes, in simulated sites."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recipe_world import BY_HAND, CORRECTED, DILOCO, module, project, recipe, train

from atoll.errors import AtollError, RunFailed, UsageError
from atoll.recipes import (
    DiLoCoRecipe,
    FedAvgRecipe,
    FedOptRecipe,
    FedProxRecipe,
    LocalEnv,
    Recipe,
    ScaffoldRecipe,
    SimEnv,
)

pytestmark = pytest.mark.slow
CORRECTING = (FedProxRecipe, ScaffoldRecipe)


@pytest.mark.long
@pytest.mark.covers("P11")
@pytest.mark.parametrize("kind", [FedAvgRecipe, FedOptRecipe, *CORRECTING], ids=lambda kind: kind.__name__)
def test_simulated_and_real_clients_have_the_same_bits(
    kind: type[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    project(tmp_path, monkeypatch, train(CORRECTED if kind in CORRECTING else BY_HAND))
    made = recipe(kind, model=module(), train_args=["--epochs", "3"])
    simulated = made.execute(SimEnv(sites=3, processes=2, folder="simulated"))
    said = capfd.readouterr().out
    assert "round 2 of 2, 3 updates: loss" in said
    assert simulated.model == Path("simulated/atoll-simulation/exports/model.safetensors")
    assert simulated.state_dir == Path("simulated/atoll-simulation")
    assert simulated.finished
    assert [row.workers for row in simulated.history] == [["site-1", "site-2", "site-3"]] * 2
    real = made.execute(LocalEnv(sites=3, folder="real", quiet=True))
    assert real.model is not None
    assert real.model.read_bytes() == simulated.model.read_bytes()
    assert real.metrics == simulated.metrics


@pytest.mark.long
@pytest.mark.covers("P11")
def test_the_written_file_is_simulated_by_the_command_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(tmp_path, monkeypatch)
    made = recipe(model=module())
    simulated = made.execute(SimEnv(sites=2, processes=2, folder="simulated", quiet=True))
    made.write("there/run.toml")
    command = [sys.executable, "-m", "atoll.cli.main", "simulate", "there/run.toml", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # its workers have other names, and so other data: what is equal is the run, not the numbers
    assert Path("there/atoll-simulation/exports/model.safetensors").exists()
    assert [row.round for row in simulated.history] == [1, 2]
    assert made.execute(SimEnv(sites=2, folder="simulated", quiet=True)).history == simulated.history


@pytest.mark.covers("P11")
def test_all_that_is_asked_for_reaches_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, monkeypatch)
    given: list[dict[str, Any]] = []

    class Asked:
        def __init__(self, **options: Any) -> None:
            given.append(options)

        def run(self) -> None:
            raise RunFailed("That is all.")

    monkeypatch.setattr("atoll.simulate.simulation.Simulation", Asked)
    env = SimEnv(sites=3, processes=2, engine="ray", address="head:6379", quiet=True)
    with pytest.raises(RunFailed, match="That is all"):
        recipe(train_args="--epochs 3", num_rounds=4).execute(env)
    (asked,) = given
    assert (asked["arguments"], asked["sites"]) == (["--epochs", "3"], ["site-1", "site-2", "site-3"])
    assert (asked["processes"], asked["engine"], asked["address"]) == (2, "ray", "head:6379")
    assert (asked["settings"].rounds.total, Path(asked["settings"].run.script).resolve()) == (4, tmp_path / "train.py")


@pytest.mark.covers("P11")
def test_what_has_no_meaning_in_a_simulation_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, monkeypatch, DILOCO)
    made = recipe(DiLoCoRecipe, sync_every=4).add_server_config({"diloco.num_fragments": 2})
    with pytest.raises(AtollError, match=r"diloco\.num_fragments is 2, but a simulation supports only"):
        made.execute(SimEnv(sites=2))
    with pytest.raises(AtollError, match=r"atoll\.DiLoCo cannot run in a simulation"):  # it would train alone
        recipe(DiLoCoRecipe, sync_every=4).execute(SimEnv(sites=2, processes=1))
    with pytest.raises(AtollError, match="engine is 'rey'"):
        recipe().execute(SimEnv(sites=2, engine="rey"))
    with pytest.raises(UsageError, match="sites is 1, but min_sites of small is 2"):
        recipe().execute(SimEnv(sites=1))
