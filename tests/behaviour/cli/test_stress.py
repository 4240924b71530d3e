"""The stress program: where updates are kept, and who aggregates them, makes no difference to a bit."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.round_run import Bench

STRESS = Path(__file__).parents[3] / "bench" / "stress.py"


SWARM, BOTH = ("--placement", "swarm"), ("--placement", "both", "--no-disk-streaming")
RUNS = [
    pytest.param(SWARM, [("swarm", True)], id="disk"),
    pytest.param((*SWARM, "--compare"), [("swarm", True), ("swarm", False)], id="compare", marks=pytest.mark.long),
    pytest.param(BOTH, [("server", False), ("swarm", False)], id="both-in-memory", marks=pytest.mark.long),
]


@pytest.mark.slow
@pytest.mark.covers("D8", "D9", "D10", "P10")
@pytest.mark.parametrize(("chosen", "ways"), RUNS)
def test_every_way_comes_to_the_same_bits(
    tmp_path: Path, chosen: tuple[str, ...], ways: list[tuple[str, bool]]
) -> None:
    command = [sys.executable, str(STRESS), "--gb", "0.004", "--workers", "2", "--rounds", "2", "--tensors", "7"]
    command += [*chosen, "--json", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    assert [(run["settings"]["placement"], run["settings"]["download_to_disk"]) for run in runs] == ways
    assert all(run["exact"] for run in runs)  # bit for bit what a server's rounds give, too
    assert len({run["digest"] for run in runs}) == 1
    for run, (placement, _) in zip(runs, ways, strict=True):
        assert len(run["rounds_s"]) == 2
        assert set(run["workers_peak_anon_mb"]) == {"worker-000", "worker-001"}
        if placement == "swarm":  # of tensors only the initial model, once: 4 MB and its header
            assert run["server_bytes_up"] == 0
            assert 4_000_000 <= run["server_bytes_down"] < 4_010_000
            assert len(set(run["aggregators"])) == 2
        else:  # two updates a round, and three versions for each worker
            assert 16_000_000 <= run["server_bytes_up"] < 16_010_000
            assert 24_000_000 <= run["server_bytes_down"] < 24_040_000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.covers("D8")
@pytest.mark.parametrize("same", [True, False])
def test_bits_that_differ_end_it_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], same: bool
) -> None:
    """Each way is one of its own: on disk and in memory, at the server and at a worker."""
    program = runpy.run_path(str(STRESS))
    asked: list[tuple[str, bool]] = []

    def measured(bench: Bench, say: object) -> dict[str, Any]:
        asked.append((bench.placement, bench.download_to_disk))
        return {"digest": "0" if same else str(len(asked)), "exact": True}

    main = program["main"]
    monkeypatch.setitem(main.__globals__, "measure", measured)
    monkeypatch.setattr(sys, "argv", ["stress.py", "--placement", "both", "--compare", "--json"])
    if same:
        main()
    else:
        with pytest.raises(SystemExit, match="The result is not what it should be"):
            main()
    assert asked == [("server", True), ("server", False), ("swarm", True), ("swarm", False)]
    assert len(json.loads(capsys.readouterr().out)) == 4
