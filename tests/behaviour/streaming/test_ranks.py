"""Two workers of two ranks each, real processes on Gloo: rank 0 talks, every rank has what a single one would have."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from harness.processes import free_port
from streaming_world import Trace, expected, require_close, serve
from torch import Tensor

SCRIPT = Path(__file__).with_name("rank_of_a_site.py")


def start(url: str, site: str, steps: int, out: Path) -> list[subprocess.Popen[str]]:
    """Both ranks of a site."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, SCRIPT, site, str(steps), out],
            env=os.environ
            | {"ATOLL_SERVER": url, "RANK": str(rank), "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]


def trace_of(path: Path) -> Trace:
    steps: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
    for key, value in safetensors.torch.load_file(path).items():
        step, _, name = key.partition("/")
        steps[int(step)][name] = value
    return [steps[step] for step in sorted(steps)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"fragments": 1, "tau": 0, "alpha": 0.0}, id="whole", marks=pytest.mark.long),
        pytest.param({"fragments": 2, "tau": 1, "alpha": 0.25}, id="streams"),
    ],
)
def test_ranks_together_are_one_worker(tmp_path: Path, how: dict[str, Any]) -> None:
    """Each rank has half of its site's data, so that the mean of the gradients is that of the site."""
    with serve(tmp_path, H=4, rounds=3, sites=2, K=how["fragments"], tau=how["tau"], alpha=how["alpha"]) as server:
        ranks = [each for site in "ab" for each in start(server.url, site, 40, tmp_path)]
        try:
            for each in ranks:
                output, _ = each.communicate(timeout=100)
                assert each.returncode == 0, output[-3000:]
        finally:
            for each in ranks:
                each.kill()
        server.run()
    right = expected(["a", "b"], sync_every=4, rounds=3, **how)
    for rank in (0, 1):
        require_close({site: trace_of(tmp_path / f"{site}-{rank}.safetensors") for site in "ab"}, right)
    assert [worker.site for worker in server.status().workers] == ["a", "b"]
