"""Workflows as users start them: the example, and one that a run file names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "scatter_and_gather.py"


def environment() -> dict[str, str]:
    mine = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
    return mine | {"OMP_NUM_THREADS": "1"}


def losses(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"^round \d: loss ([0-9.]+)$", text, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.covers("T14")
def test_the_example_trains_across_two_sites(tmp_path: Path) -> None:
    """The targets are a linear function of the inputs, so the loss goes towards 0: each round takes most of it."""
    done = subprocess.run(
        [sys.executable, EXAMPLE],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    values = losses(done.stdout)
    assert len(values) == 5
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.1 * values[0]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.covers("T14")
def test_a_run_file_names_the_workflow_and_workers_are_processes_of_their_own(tmp_path: Path) -> None:
    """The path in the run file is relative to it, not to the folder where the command is started."""
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(EXAMPLE, folder / "flow.py")
    (folder / "run.toml").write_text('workflow.function = "flow.py:main"\nnetwork.port = 0\n')
    server = subprocess.Popen(
        [sys.executable, "-m", "atoll.cli.main", "server", "run/run.toml"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    workers: list[subprocess.Popen[str]] = []
    said = ""
    try:
        assert server.stdout is not None
        for line in server.stdout:
            said += line
            found = re.search(r"listening on (\S+)", line)
            if found:
                for name in ("clinic-a", "clinic-b"):
                    told = environment() | {"ATOLL_SERVER": found[1], "ATOLL_SITE": name}
                    workers.append(
                        subprocess.Popen([sys.executable, str(EXAMPLE)], env=told, stderr=subprocess.PIPE, text=True)
                    )
        assert server.wait(60) == 0, said
        told_by = [worker.communicate(timeout=30)[1] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], told_by
    finally:
        for process in (server, *workers):
            if process.poll() is None:
                process.kill()
                process.wait()
    assert len(losses(said)) == 5, said
    assert "start workers with a script that uses atoll.tasks" in said
    assert re.search(r"finished after .*; 2 workers, 0 deaths$", said, re.MULTILINE), said
    for name, lines in zip(("clinic-a", "clinic-b"), told_by, strict=True):
        assert f"{name}: takes part in" in lines
        assert f"{name}: the workflow has ended" in lines
