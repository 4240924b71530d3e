"""The pages for people who move over: every Atoll name in their tables exists, and the rebuilt examples run."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll import registry
from atoll.aggregation.user_aggregator import Update
from atoll.config import FIELDS, GROUPS, NOT_SETTINGS, Settings
from atoll.protocol.openapi import OPERATIONS
from atoll.recipes import Recipe, RunResult
from atoll.server.tasks.workflow_controller import Controller
from atoll.worker.training.federated_loop import Round, Worker

sys.path.insert(0, str(Path(__file__).parent))
from pages import ROOT, prose
from test_documents import ATOLL, below, require_command

PAGES = ["from-nvflare", "from-flower", "from-diloco"]

STAND_FOR: dict[str, Any] = {
    "atoll": atoll,
    "controller": Controller,
    "diloco": atoll.DiLoCo,
    "received": Round,
    "recipe": Recipe,
    "result": RunResult,
    "fl_round": Round,
    "server": atoll.Server,
    "update": Update,
    "worker": Worker,
}
"""First word of a name with dots → what it is of."""

FILES = {"run.toml", "model.safetensors", "metrics.jsonl"}
ARGUMENTS = {
    "filters": atoll.join,
    "max_sync_retries": atoll.DiLoCo,
    "metrics": Round.submit,
    "site": Controller.send,
    "weight": Round.submit,
}
"""Names that are arguments → of what."""


def exists(name: str) -> bool:
    """Whether a name of ours is a public one, a setting, a value of one, a command, a variable, a route or a file."""
    if name in FILES or name in FIELDS or name in GROUPS or name.startswith("algorithm.") or name in NOT_SETTINGS:
        return True
    if name in ARGUMENTS:
        return name in inspect.signature(ARGUMENTS[name]).parameters
    if found := re.fullmatch(r"([\w.]+) = (\S.*)", name):
        Settings.build({"rounds.sites": 2, found[1]: value_of(found[2])})
        return True
    if found := re.fullmatch(r"(GET|POST|PUT|DELETE) (/\S+)", name):
        return any((each.method, each.path) == found.groups() for each in OPERATIONS)
    if name.startswith("atoll "):
        require_command(name.removeprefix("atoll "), name)
        return True
    if name.startswith("--"):
        return any(name in each.opts for each in below(ATOLL)["worker"].params)
    if name in {each for kind in registry.TABLES for each in registry.TABLES[kind]}:
        return True
    if name.startswith("with "):
        name = re.sub(r"^with (.+?)\(.*$", r"\1", name)
    first, *rest = name.split(".")
    found_at: Any = STAND_FOR.get(first)
    return found_at is not None and bool(rest) and has(found_at, rest)


def value_of(text: str) -> Any:
    import tomllib

    return tomllib.loads(f"value = {text}")["value"]


def has(of: Any, names: list[str]) -> bool:
    for name in names:
        fields = getattr(of, "__dataclass_fields__", {})
        annotations = (
            {key for kind in inspect.getmro(of) for key in vars(kind).get("__annotations__", {})}
            if (inspect.isclass(of))
            else set()
        )
        if not hasattr(of, name) and name not in fields and name not in annotations:
            return False
        of = getattr(of, name, None)
    return True


def our_names(page: str) -> list[str]:
    """What stands in back quotes in the second column of the tables whose second column is Atoll's."""
    found: list[str] = []
    for table in re.findall(r"(?:^\|.*\n)+", prose(ROOT / "docs" / f"{page}.md"), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
        if head[1:2] == ["Atoll"]:
            found += [name for row in rows if len(row) > 1 for name in re.findall(r"`([^`]+)`", row[1])]
    return found


@pytest.mark.covers("X7")
@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_ours_in_the_tables_exists(page: str) -> None:
    names = our_names(page)
    assert len(names) > 50
    missing = [name for name in names if not exists(name)]
    assert missing == []


NO_NAMES = ["atoll.joyn", "round.submitt", "sync_evry", "POST /v1/worker", "result.modle", "reducer_of_mine", "--sight"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert not exists(name)


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
    module = registry.load_attribute(f"{ROOT / 'examples' / example}:np") and sys.modules[Path(example).stem]
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
