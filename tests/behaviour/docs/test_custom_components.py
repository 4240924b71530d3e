"""examples/custom_components: an aggregator and a workflow of one's own run by the commands of its README."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from harness.processes import Nursery, Process, wait_until
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_components"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "example", ignore=shutil.ignore_patterns("__pycache__")))


def commands(folder: Path) -> list[str]:
    """Return the commands of the README: its indented lines."""
    return [line.strip() for line in (folder / "README.md").read_text().splitlines() if line.startswith("    ")]


def follow(nursery: Nursery, folder: Path, serve: str, work: str, *flags: str) -> Process:
    """Start a server, and the command of a worker for each of two sites; return the server when all have ended well."""
    server = nursery.start(*serve.split(), "--port=0", *flags, cwd=folder)
    address = wait_until(lambda: re.search(r"listening on (\S+)", server.output()), "the server's address", 60).group(1)
    workers = []
    for site in ("a", "b"):
        argv = work.replace("http://127.0.0.1:8512", address).replace("--site a", f"--site {site}").split()
        argv[argv.index("python")] = sys.executable
        workers.append(nursery.start(*argv, cwd=folder, env={"OMP_NUM_THREADS": "1"}))
    assert [worker.wait(100) for worker in workers] == [0, 0], [worker.output() for worker in workers]
    assert server.wait(60) == 0, server.output()
    return server


@pytest.mark.slow
@pytest.mark.covers("X1")
def test_an_own_aggregator_trains(nursery: Nursery, folder: Path) -> None:
    follow(nursery, folder, *commands(folder)[:2], "--rounds=3")
    rows = [json.loads(line) for line in (folder / "atoll-run/exports/metrics.jsonl").read_text().splitlines()]
    assert [row["workers"] for row in rows] == [["a", "b"]] * 3
    assert rows[-1]["metrics"]["loss"] < rows[0]["metrics"]["loss"]


@pytest.mark.slow
@pytest.mark.covers("T14")
def test_an_own_workflow_trains_in_place_of_rounds(nursery: Nursery, folder: Path) -> None:
    text = (folder / "workflow.py").read_text()
    (folder / "workflow.py").write_text(text.replace("ROUNDS = 5", "ROUNDS = 3"))
    server = follow(nursery, folder, *commands(folder)[2:])
    said = re.findall(r"workflow round (\d): accuracy a ([\d.]+), b ([\d.]+)", server.output())
    assert [number for number, *_ in said] == ["1", "2", "3"]
    assert float(said[-1][1]) > 0.5
    assert load_file(folder / "workflow-model.safetensors")["head.weight"].shape == (10, 256)
