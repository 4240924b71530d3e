"""`atoll init`: what it writes works as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll import Settings
from atoll.cli import init


@pytest.mark.parametrize(
    "algorithm", ["fedavg", *(pytest.param(each, marks=pytest.mark.long) for each in ("scaffold", "diloco"))]
)
def test_the_script_trains_alone_and_the_run_file_is_valid(atoll_command, tmp_path, algorithm: str) -> None:
    outcome = atoll_command("init", "mine", "--algorithm", algorithm)
    assert outcome.returncode == 0, outcome.stderr
    assert "atoll server run.toml" in outcome.stdout
    settings = Settings.read(tmp_path / "mine" / "run.toml", environ={})
    assert (settings.name, settings.algorithm, settings.model) == ("mine", algorithm, "model:build")
    trained = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path / "mine", env=dict(os.environ), capture_output=True, text=True
    )
    assert trained.returncode == 0, trained.stderr
    assert "loss" in trained.stdout
    assert "training alone" in trained.stderr


@pytest.mark.covers("X3")
def test_what_cannot_be_written_is_said(atoll_command, tmp_path) -> None:
    (tmp_path / "taken").write_text("a file")
    outcome = atoll_command("init", "taken/mine")
    assert outcome.returncode == 7
    assert outcome.stderr.startswith("atoll: taken/mine cannot be written: Not a directory. Name another folder")
    assert outcome.stderr.count("\n") == 1


@pytest.mark.parametrize("algorithm", ["fedavg", "diloco"])
def test_every_default_of_the_run_file_is_the_real_one(algorithm: str) -> None:
    """Uncommenting every line that shows a value changes nothing."""
    lines = init.run_file(algorithm, "x").splitlines()
    keys = {key for keys in (init.SECTIONS | init.LOW_COMMUNICATION | init.SIMULATED).values() for key in keys}
    assert any(line.startswith("# num_fragments = 1") for line in lines) == (algorithm == "diloco")
    uncommented = [
        line.removeprefix("# ") if line.startswith("# ") and line[2:].partition(" = ")[0] in keys else line
        for line in lines
        if not line.endswith(" =")
    ]
    import tomllib

    values = tomllib.loads("\n".join(uncommented))
    chosen = {"name": "x", "model": "model:build", "num_workers": 2, "algorithm": algorithm, "rounds": 10}
    chosen |= {"sync_every": 20} if algorithm == "diloco" else {"client": "train.py"}
    assert Settings.build(values) == Settings.build(chosen)


def test_a_name_that_is_no_algorithm_is_refused_with_the_nearest(atoll_command, tmp_path) -> None:
    outcome = atoll_command("init", "mine", "--algorithm", "fedproxy")
    assert outcome.returncode == 2
    assert "Atoll has no algorithm 'fedproxy'. Did you mean 'fedprox'?" in " ".join(outcome.stderr.split())
    assert not (tmp_path / "mine").exists()


def test_nothing_is_overwritten(atoll_command, tmp_path) -> None:
    (tmp_path / "train.py").write_text("mine")
    outcome = atoll_command("init")
    assert outcome.returncode == 2
    assert "train.py" in outcome.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"


def test_a_name_that_toml_would_misread_is_quoted() -> None:
    import tomllib

    name = 'a"b\\c'
    assert tomllib.loads(init.run_file("diloco", name))["name"] == name


def test_the_templates_are_in_the_package() -> None:
    from importlib.resources import files

    names = {Path(str(entry)).name for entry in (files("atoll.cli") / "templates").iterdir()}
    assert {"model.py", "train_fedavg.py", "train_diloco.py"} <= names
