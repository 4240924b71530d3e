"""The examples, and the files on docs/custom-aggregators.md, run by the commands and run files that are printed."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path

import pytest
import torch
from harness.processes import Nursery
from kit.processes import command, run_commands
from kit.results import of_sites
from kit.sites import finish, manual_sites, train_round
from pages import ROOT, blocks
from safetensors.torch import load_file
from torch import Tensor

import atoll
from atoll.testing.run import history

EXAMPLES = ROOT / "examples"

# -- examples/custom_components: an aggregator and a workflow of one's own


@pytest.fixture
def components(tmp_path: Path) -> Path:
    """A copy of the example."""
    source, ignored = EXAMPLES / "custom_components", shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(source, tmp_path / "example", ignore=ignored))


def commands_of(folder: Path) -> list[list[str]]:
    """The words of the commands of the README: its indented lines."""
    return [line.split() for line in (folder / "README.md").read_text().splitlines() if line.startswith("    ")]


@pytest.mark.slow
@pytest.mark.covers("X1")
def test_the_own_aggregator_example_trains(nursery: Nursery, components: Path) -> None:
    serve, work, *_ = commands_of(components)
    run_commands(nursery, components, [*serve, "--rounds=3"], work)
    rows = history(components / "atoll-run")
    assert of_sites(rows) == [["a", "b"]] * 3
    assert rows[-1]["metrics"]["loss"] < rows[0]["metrics"]["loss"]


@pytest.mark.slow
@pytest.mark.covers("T14")
def test_the_own_workflow_example_trains(nursery: Nursery, components: Path) -> None:
    """The example of an own workflow trains a model in rounds that the workflow itself runs."""
    text = (components / "workflow.py").read_text()
    (components / "workflow.py").write_text(text.replace("ROUNDS = 5", "ROUNDS = 3"))
    *_, serve, work = commands_of(components)
    server = run_commands(nursery, components, serve, work)
    said = re.findall(r"workflow round (\d): accuracy a ([\d.]+), b ([\d.]+)", server.output())
    assert [number for number, *_ in said] == ["1", "2", "3"]
    assert float(said[-1][1]) > 0.5
    assert load_file(components / "workflow-model.safetensors")["head.weight"].shape == (10, 256)


# -- examples for people who move over


@pytest.mark.slow
@pytest.mark.covers("P11", "X7")
@pytest.mark.long
@pytest.mark.parametrize("env", ["local", "sim"])
def test_the_hello_pt_example_learns(nursery: Nursery, env: str, tmp_path: Path) -> None:
    job = str(EXAMPLES / "hello_pt" / "job.py")
    done = command(nursery, tmp_path, "--env", env, "--folder", "here", program=job, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    rounds = re.findall(r"round (\d) of 2, 2 updates: accuracy ([\d.]+), train_loss ([\d.]+)", done.stdout)
    assert [number for number, *_ in rounds] == ["1", "2"]
    assert float(rounds[1][2]) < float(rounds[0][2])
    assert list((tmp_path / "here").glob("*/exports/model.safetensors"))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.covers("X7")
def test_the_quickstart_example_simulates_partitions(nursery: Nursery, tmp_path: Path) -> None:
    """The PyTorch quickstart trains in a simulation of two sites with one partition of the data each."""
    folder = Path(shutil.copytree(EXAMPLES / "quickstart_pytorch", tmp_path / "here"))
    flags = ["--set", "rounds.sites=2", "--processes", "2", "--rounds", "3", "--", "--partitions", "2"]
    done = command(nursery, folder, "simulate", "run.toml", *flags, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "round 3 of 3" in done.stdout + done.stderr
    assert (folder / "atoll-simulation" / "exports" / "model.safetensors").exists()


@pytest.mark.parametrize("example", ["hello_pt/data.py", "quickstart_pytorch/task.py"])
def test_both_examples_read_the_binary_cifar10(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both examples read CIFAR-10 in its binary version."""
    # The test writes two pictures by hand, of classes 7 and 3: one byte for the label, then [3, 32, 32] bytes.
    record = bytes([7]) + bytes([255]) * 1024 + bytes(2048)
    other = bytes([3]) + bytes(3072)
    (tmp_path / "data_batch_1.bin").write_bytes(record + other)
    (tmp_path / "test_batch.bin").write_bytes(other)
    monkeypatch.syspath_prepend(EXAMPLES / Path(example).parent)
    module = importlib.import_module(Path(example).stem)
    if example.startswith("hello"):
        train, test = module.load("cifar10", str(tmp_path))
        pictures, labels = train.tensors
        assert test.tensors[1].tolist() == [3]
    else:
        monkeypatch.setenv("CIFAR10", str(tmp_path))
        pictures, labels = module.pictures()
    assert labels.tolist() == [7, 3]
    assert pictures.shape == (2, 3, 32, 32)
    assert pictures[0].mean(dim=(1, 2)).tolist() == [1.0, -1.0, -1.0]


# -- docs/custom-aggregators.md

SITES = {"a": 1.0, "b": 1.25, "c": 1.375, "d": 50.0, "e": -50.0}
"""Site → what it adds to every element in each round."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's files."""
    for block in blocks(ROOT / "docs" / "custom-aggregators.md"):
        _, name = block.info.split()
        (tmp_path / name).write_text(block.text, encoding="utf-8")
    return tmp_path


def run_rounds(run_file: Path, rounds: int, adds: dict[str, float], **flags: object) -> dict[str, Tensor]:
    """The result of rounds in which each site adds its number."""
    given = {"network.port": 0, "disk.min_free_bytes": 0} | flags
    settings = atoll.Settings.read(run_file, given, environ={})
    with atoll.Server({"w": torch.zeros(2, 2), "v": torch.zeros(3)}, settings=settings) as server:
        sites = manual_sites(server, run_file.parent, adds)
        for number in range(1, rounds + 1):
            train_round(sites, number, lambda site, base: {name: value + adds[site] for name, value in base.items()})
        result = finish(server, sites)
        server.run()
        return result


@pytest.mark.covers("D7", "X1")
def test_the_krum_example_takes_the_middle_update(folder: Path) -> None:
    """The Krum aggregator on the page picks the update in the middle of the three honest ones."""
    # with f = 1 of 5 the two nearest count, in units of the number of elements:
    # a: .25² + .375²,  b: .125² + .25²,  c: .125² + .375²; b is the smallest, and d and e are far from all others
    result = run_rounds(folder / "run.toml", 1, SITES)
    assert torch.equal(result["w"], torch.full((2, 2), 1.25))
    assert torch.equal(result["v"], torch.full((3,), 1.25))


@pytest.mark.covers("D13", "X1")
def test_the_running_mean_example_gives_the_mean(folder: Path) -> None:
    aggregator = {"path": f"{folder / 'running_mean.py'}:RunningMean"}
    result = run_rounds(folder / "run.toml", 1, SITES, **{"aggregation.aggregator": aggregator})
    assert torch.allclose(result["w"], torch.full((2, 2), sum(SITES.values()) / 5), atol=1e-5)


@pytest.mark.covers("D14", "X1")
def test_the_next_run_starts_from_the_last_stored_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the page's `store.toml`, a run stores each version, and the next run starts from the last one."""
    monkeypatch.chdir(folder)
    run_rounds(folder / "store.toml", 2, {"a": 1.0})
    saved = {path.name: load_file(path)["v"][0].item() for path in (folder / "shelf").iterdir()}
    assert saved == {f"round-{n:04d}.safetensors": float(n) for n in (0, 1, 2)}
    given = {"network.port": 0, "disk.state_dir": folder / "next"}
    with atoll.Server(settings=atoll.Settings.read(folder / "store.toml", given, environ={})) as server:
        begin = load_file(server.save_state(folder / "begin.safetensors"))
    assert begin["v"][0].item() == 2.0
