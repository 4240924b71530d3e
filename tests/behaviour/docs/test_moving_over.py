"""The pages for people who move over: the words that they look for are there, and the rebuilt examples run."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from pages import ROOT

WORDS = {
    "from-nvflare": "client, controller, task data, aggregator, decomposer, tensor downloader, persistor, executor, "
    "DXO, Shareable, FLModel, SimEnv, task_data_filters, tensor_download_chunk_size, LazyTensorDict",
    "from-flower": "SuperLink, SuperNode, ClientApp, ServerApp, strategy, run_config, mods, workers manager, "
    "ClientManager, Grid, ArrayRecord, fit, evaluate",
    "from-diloco": "HealthMonitor, FragmentManager, sync round, DiLoCoServer, DiLoCoWorker, DiLoCoClient, LocalSGD, "
    "Manager, Lighthouse, DiLoCoOptimizer, DHT, DyLU, dn_buffer_size",
}
"""Page → what people look for on it."""


@pytest.mark.covers("X7")
@pytest.mark.parametrize("page", WORDS)
def test_the_words_that_people_look_for_are_there(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert [word for word in WORDS[page].split(", ") if word not in text] == []


def run(folder: Path, *argv: str, **environment: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.covers("P11", "X7")
@pytest.mark.long
@pytest.mark.parametrize("env", ["local", "sim"])
def test_hello_pt_learns(env: str, tmp_path: Path) -> None:
    said = run(tmp_path, str(ROOT / "examples" / "hello_pt" / "job.py"), "--env", env, "--folder", "here")
    rounds = re.findall(r"round (\d) of 2, 2 updates: accuracy ([\d.]+), train_loss ([\d.]+)", said)
    assert [number for number, *_ in rounds] == ["1", "2"]
    assert float(rounds[1][2]) < float(rounds[0][2])
    assert list((tmp_path / "here").glob("*/exports/model.safetensors"))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.covers("X7")
def test_quickstart_pytorch_learns_on_partitions(tmp_path: Path) -> None:
    import shutil

    shutil.copytree(ROOT / "examples" / "quickstart_pytorch", tmp_path / "here")
    said = run(
        tmp_path / "here",
        *(
            "-m",
            "atoll.cli.main",
            "simulate",
            "run.toml",
            "--set",
            "rounds.sites=2",
            "--processes",
            "2",
            "--rounds",
            "3",
        ),
        *("--", "--partitions", "2"),
    )
    assert "round 3 of 3" in said
    assert (tmp_path / "here" / "atoll-simulation" / "exports" / "model.safetensors").exists()


@pytest.mark.parametrize("example", ["hello_pt/data.py", "quickstart_pytorch/task.py"])
def test_both_read_the_binary_version_of_cifar10(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pictures of class 7 and 3, written by hand: a label's byte, then [3, 32, 32]."""
    record = bytes([7]) + bytes([255]) * 1024 + bytes(2048)
    other = bytes([3]) + bytes(3072)
    (tmp_path / "data_batch_1.bin").write_bytes(record + other)
    (tmp_path / "test_batch.bin").write_bytes(other)
    monkeypatch.syspath_prepend(ROOT / "examples" / Path(example).parent)
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
