"""`atoll new`: what it writes works as it is, alone, with a server and in simulation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, wait_until
from safetensors.torch import load_file

from atoll import Settings


@pytest.mark.parametrize(
    "algorithm", ["fedavg", *(pytest.param(each, marks=pytest.mark.long) for each in ("scaffold", "diloco"))]
)
def test_trains_alone_with_a_valid_run_file(atoll_command, tmp_path: Path, algorithm: str) -> None:
    outcome = atoll_command("new", "mine", "--algorithm", algorithm)
    assert outcome.returncode == 0, outcome.stderr
    assert "atoll server run.toml" in outcome.stdout
    settings = Settings.read(tmp_path / "mine" / "run.toml", environ={})
    assert (settings.run.name, settings.algorithm.target, settings.model.source) == ("mine", algorithm, "train:build")
    trained = subprocess.run([sys.executable, "train.py"], cwd=tmp_path / "mine", capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr
    assert "loss" in trained.stdout
    assert "training alone" in trained.stderr


@pytest.mark.slow
@pytest.mark.covers("X1")
@pytest.mark.parametrize("algorithm", ["diloco", pytest.param("fedavg", marks=pytest.mark.long)])
def test_runs_by_the_commands_that_it_prints(nursery: Nursery, atoll_command, tmp_path: Path, algorithm: str) -> None:
    printed = atoll_command("new", "mine", "--algorithm", algorithm).stdout
    folder = tmp_path / "mine"
    serve, *work = (line.split("#")[0].split() for line in printed.splitlines() if re.match("  atoll (ser|wor)", line))
    server = nursery.start(*serve, "--port=0", "--rounds=3", cwd=folder)
    address = wait_until(lambda: re.search(r"listening on (\S+)", server.output()), "the server's address", 60).group(1)
    workers = []
    for command in work:
        command[command.index("--server") + 1], command[command.index("python")] = address, sys.executable
        workers.append(nursery.start(*command, cwd=folder, env={"OMP_NUM_THREADS": "1"}))
    assert [worker.wait(100) for worker in workers] == [0, 0], [worker.output() for worker in workers]
    assert server.wait(60) == 0, server.output()
    rows = [json.loads(line) for line in (folder / "atoll-run/exports/metrics.jsonl").read_text().splitlines()]
    assert [row["workers"] for row in rows] == [["a", "b"]] * 3
    assert rows[-1]["metrics"]["loss"] < rows[0]["metrics"]["loss"]
    assert load_file(folder / "atoll-run" / "exports" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.covers("X1", "V1")
def test_is_simulated_to_the_same_bits_on_any_number_of_processes(
    atoll_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its script draws random numbers without a seed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else one process would have all of them
    outcome = atoll_command("new", "--algorithm", "scaffold", "mine")
    assert "atoll simulate run.toml --set rounds.sites=20" in outcome.stdout
    results = []
    for processes in ("1", "2"):
        where = str(tmp_path / processes)
        sites = ["--set", "rounds.sites=5", "--set", "rounds.sample_fraction=0.6"]
        flags = [*sites, "--rounds", "2", "--processes", processes, "--dir", where]
        done = atoll_command("simulate", str(tmp_path / "mine" / "run.toml"), *flags)
        assert done.returncode == 0, done.stderr
        assert "6 worker-rounds" in done.stderr + done.stdout
        results.append((tmp_path / processes / "exports" / "model.safetensors").read_bytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("algorithm", ["fedavg", "diloco"])
def test_writes_the_real_defaults_as_comments(atoll_command, tmp_path: Path, algorithm: str) -> None:
    """Uncommenting every line that shows a value changes nothing."""
    atoll_command("new", "x", "--algorithm", algorithm)
    text = (tmp_path / "x" / "run.toml").read_text()
    assert ("# num_fragments = 1" in text) == (algorithm == "diloco")
    setting = re.compile(r"^# (\w+ =.*)$", re.MULTILINE)
    values = tomllib.loads(setting.sub(r"\1", text))
    chosen: dict[str, Any] = {
        "run.name": "x",
        "model.source": "train:build",
        "rounds.sites": 2,
        "algorithm.name": algorithm,
        "rounds.total": 10,
    }
    chosen |= {"diloco.sync_every": 20} if algorithm == "diloco" else {"run.script": "train.py"}
    assert Settings.build(values) == Settings.build(chosen)


def test_overwrites_nothing(atoll_command, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    outcome = atoll_command("new")
    assert outcome.returncode == 2
    assert "train.py" in outcome.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"


@pytest.mark.covers("X3")
def test_names_a_folder_that_cannot_be_written_in_one_line(atoll_command, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    outcome = atoll_command("new", "taken/mine")
    assert outcome.returncode == 7
    assert outcome.stderr.startswith("atoll: taken/mine cannot be written: Not a directory. Give another folder")
    assert outcome.stderr.count("\n") == 1


def test_quotes_a_name_that_toml_would_misread(atoll_command, tmp_path: Path) -> None:
    name = 'a"b\\c'
    atoll_command("new", name)
    assert tomllib.loads((tmp_path / name / "run.toml").read_text())["run"]["name"] == name
