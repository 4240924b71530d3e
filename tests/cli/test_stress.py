"""The stress program: where updates are kept makes no difference to a bit, in a swarm either."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STRESS = Path(__file__).parents[2] / "bench" / "stress.py"


@pytest.mark.slow
@pytest.mark.covers("D8", "D9", "D10", "P10")
@pytest.mark.parametrize("ways", [[True], pytest.param([True, False], marks=pytest.mark.long)], ids=["disk", "compare"])
def test_a_swarm_on_disk_and_in_memory(tmp_path: Path, ways: list[bool]) -> None:
    command = [sys.executable, str(STRESS), "--gb", "0.004", "--workers", "2", "--rounds", "2", "--tensors", "7"]
    more = ["--placement", "swarm", *(["--compare"] * (len(ways) > 1)), "--json", "--dir", str(tmp_path)]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    assert [run["settings"]["download_to_disk"] for run in runs] == ways
    assert all(run["exact"] for run in runs)  # bit for bit what a server's rounds give, too
    assert len({run["digest"] for run in runs}) == 1
    for run in runs:
        assert len(run["rounds_s"]) == 2
        assert set(run["workers_peak_anon_mb"]) == {"worker-000", "worker-001"}
        assert run["server_bytes_up"] == 0  # of tensors only the initial model, once: 4 MB and its header
        assert 4_000_000 <= run["server_bytes_down"] < 4_010_000
        assert len(set(run["aggregators"])) == 2
    assert list(tmp_path.iterdir()) == []
