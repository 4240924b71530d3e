"""examples/lightning_sites.py, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "lightning_sites.py"


@pytest.mark.slow
@pytest.mark.covers("S15", "S13")
@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["scaffold", "diloco"])
def test_the_example_names_its_run_after_the_algorithm(tmp_path: Path, algorithm: str) -> None:
    """Two sites, two rounds, batch normalisation."""
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--set", f"algorithm.name={algorithm}", "--rounds", "2"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()
    assert said[0].startswith(f"run lightning-{algorithm} at http://127.0.0.1:")
    rounds = [line for line in said if line.startswith(f"lightning-{algorithm} round ")]
    assert len(rounds) == 2
    if algorithm == "scaffold":
        assert all("accuracy" in line and "global_accuracy" in line for line in rounds)
