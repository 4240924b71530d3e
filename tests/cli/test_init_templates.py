"""`atoll init --template`: each project trains as it is, with the commands of its README, in real processes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from harness.processes import Nursery, Process, wait_until
from safetensors.torch import load_file

from atoll import Settings
from atoll.cli import init


def commands(folder: Path) -> list[str]:
    """What the README has people type: the indented lines."""
    return [line.strip() for line in (folder / "README.md").read_text().splitlines() if line.startswith("    ")]


def address_of(server: Process) -> str:
    def found() -> str:
        assert server.poll() is None, server.output()
        said = re.search(r"listening on (\S+)", server.output())
        return said.group(1) if said else ""

    return wait_until(found, "the server's address", 60)


def follow(nursery: Nursery, folder: Path, typed: list[str], flags: list[str]) -> Process:
    """Start what the README says, the worker's line twice; the server, when all have ended well."""
    serve, work = typed
    server = nursery.start(*serve.split(), "--port=0", *flags, cwd=folder)
    address = address_of(server)
    workers = []
    for site in ("a", "b"):
        argv = work.replace("http://127.0.0.1:8512", address).replace("--site a", f"--site {site}").split()
        argv[argv.index("python")] = sys.executable
        workers.append(nursery.start(*argv, cwd=folder, env={"OMP_NUM_THREADS": "1"}))
    assert [worker.wait(100) for worker in workers] == [0, 0], [worker.output() for worker in workers]
    assert server.wait(60) == 0, server.output()
    return server


def rounds_of(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "atoll-run" / "exports" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


WHAT = {
    "fedavg": ("fedavg", "loss"),
    "scaffold": ("scaffold", "loss"),
    "diloco": ("diloco", "loss"),
    "lightning": ("fedavg", "loss"),
    "transformers": ("fedavg", "loss"),
    "swarm": ("fedavg", "loss"),
    "custom": ("fedavg", "loss"),
}
"""Template → the algorithm of its run, and a metric that falls."""


PLAIN = {"README.md", "data.py", "model.py", "train.py", "run.toml"}


def test_every_template_is_tried_here() -> None:
    assert WHAT.keys() == init.TEMPLATES.keys()


@pytest.mark.covers("X1")
@pytest.mark.parametrize("template", WHAT)
def test_a_template_has_its_files_and_its_own_words(template: str, atoll_command, tmp_path: Path) -> None:
    assert atoll_command("init", "--template", template, "mine").returncode == 0
    more = {"aggregator.py", "answer.py", "flow.toml", "workflow.py"} if template == "custom" else set()
    assert {path.name for path in (tmp_path / "mine").iterdir()} == PLAIN | more
    assert WHAT[template][0] in (tmp_path / "mine" / "run.toml").read_text()
    other = "fedavg" if template != "fedavg" else "diloco"
    atoll_command("init", "--template", other, "other")
    assert (tmp_path / "mine" / "README.md").read_text() != (tmp_path / "other" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.covers("X1")
@pytest.mark.parametrize(
    "template",
    [pytest.param(each, marks=pytest.mark.long) if each not in ("swarm", "custom") else each for each in WHAT],
)
def test_a_template_runs_by_the_two_commands_of_its_readme(
    template: str, nursery: Nursery, atoll_command, tmp_path: Path
) -> None:
    outcome = atoll_command("init", "--template", template, "mine")
    assert outcome.returncode == 0, outcome.stderr
    assert "atoll server run.toml" in outcome.stdout
    folder = tmp_path / "mine"
    algorithm, metric = WHAT[template]
    settings = Settings.read(folder / "run.toml", environ={})
    assert (settings.name, settings.algorithm, settings.num_workers) == ("mine", algorithm, 2)
    server = follow(nursery, folder, commands(folder)[:2], ["--rounds=3"])
    rows = rounds_of(folder)
    assert [row["workers"] for row in rows] == [["a", "b"]] * 3
    measured = [row["metrics"][metric] for row in rows]  # type: ignore[index]
    assert measured[-1] < measured[0], server.output()
    at = ".atoll/a" if template == "swarm" else "atoll-run/exports"
    assert load_file(folder / at / "model.safetensors")


@pytest.mark.slow
@pytest.mark.covers("X1", "V1")
@pytest.mark.parametrize(
    "template",
    [
        pytest.param(each, marks=pytest.mark.long) if each != "scaffold" else each
        for each in WHAT
        if each != "diloco"  # which counts steps of its own, and is refused
    ],
)
def test_a_template_is_simulated_as_it_is_to_the_same_bits_on_any_number_of_processes(
    template: str, atoll_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its script draws random numbers that nobody seeds."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else one process would have all of them
    outcome = atoll_command("init", "--template", template, "mine")
    assert "atoll simulate run.toml --workers 20" in outcome.stdout
    results = []
    for processes in ("1", "2"):
        where = str(tmp_path / processes)
        flags = ["--workers", "5", "--per-round", "3", "--rounds", "2", "--processes", processes, "--state-dir", where]
        done = atoll_command("simulate", str(tmp_path / "mine" / "run.toml"), *flags)
        assert done.returncode == 0, done.stderr
        assert "6 worker-rounds" in done.stderr + done.stdout
        results.append((tmp_path / processes / "exports" / "model.safetensors").read_bytes())
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.covers("X1", "T14")
def test_the_workflow_of_the_template_custom_runs_by_its_commands(
    nursery: Nursery, atoll_command, tmp_path: Path
) -> None:
    atoll_command("init", "--template", "custom", "mine")
    folder = tmp_path / "mine"
    text = (folder / "workflow.py").read_text()
    (folder / "workflow.py").write_text(text.replace("ROUNDS = 5", "ROUNDS = 3"))
    server = follow(nursery, folder, commands(folder)[2:], [])
    said = re.findall(r"workflow round (\d): accuracy a ([\d.]+), b ([\d.]+)", server.output())
    assert [number for number, *_ in said] == ["1", "2", "3"]
    assert float(said[-1][1]) > 0.5
    assert load_file(folder / "workflow-model.safetensors")["head.weight"].shape == (10, 256)


@pytest.mark.slow
@pytest.mark.parametrize(
    "template", ["fedavg", *(pytest.param(each, marks=pytest.mark.long) for each in ("diloco", "lightning"))]
)
def test_a_template_s_script_trains_alone(template: str, nursery: Nursery, atoll_command, tmp_path: Path) -> None:
    atoll_command("init", "--template", template, "mine")
    alone = nursery.start(str(tmp_path / "mine" / "train.py"), cwd=tmp_path / "mine")
    assert alone.wait(90) == 0, alone.output()
    assert "training alone" in alone.output()


def test_a_template_or_algorithm_that_is_not_there_is_refused(atoll_command, tmp_path: Path) -> None:
    for given, said in [
        (["--template", "swam"], "Atoll has no template 'swam'; it has fedavg, scaffold, diloco, lightning,"),
        (["--template", "scafold"], "Did you mean 'scaffold'?"),
        (["--template", "fedavg", "--algorithm", "scaffold"], "The template 'fedavg' is not of algorithm 'scaffold'."),
    ]:
        outcome = atoll_command("init", "mine", *given)
        assert outcome.returncode == 2
        assert said in " ".join(outcome.stderr.split())
    assert not (tmp_path / "mine").exists()


def test_a_script_that_serves_several_algorithms_may_be_given_another(atoll_command, tmp_path: Path) -> None:
    assert atoll_command("init", "mine", "--template", "lightning", "--algorithm", "scaffold").returncode == 0
    assert Settings.read(tmp_path / "mine" / "run.toml", environ={}).algorithm == "scaffold"


def test_nothing_of_a_template_is_written_over_what_is_there(atoll_command, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    outcome = atoll_command("init", "--template", "fedavg")
    assert outcome.returncode == 2
    assert "has README.md already" in outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
