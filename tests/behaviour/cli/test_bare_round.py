"""The yardstick beside `python bench/round.py` still runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
def test_the_bare_path_moves_a_small_model(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "bench/bare_round.py"), "--gb", "0.02", "--workers", "2", "--rounds", "2"]
    done = subprocess.run([*argv, "--dir", str(tmp_path)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["rounds_s"]) == 2
