"""A site of two ranks, real processes on Gloo: rank 0 talks, and rank 1 has the same model and the same correction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning_world import SAMPLES, Tiny, fit_rounds, lines, serve, trainer_of

import atoll
import atoll.integrations.lightning

SCRIPT = Path(__file__).with_name("lightning_ranks.py")


def start(package: str, url: str, out: Path, lr: float = 0.1) -> subprocess.Popen[str]:
    environment = os.environ | {"ATOLL_SERVER": url, "ATOLL_SITE": "a", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, SCRIPT, package, out, str(lr)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def reference(rounds: int, eta: float = 0.1) -> tuple[list[float], float]:
    """SCAFFOLD, option II, of a (target 1, 2 steps: 6 samples a rank) and b (target −3, 3 steps); a's ends, and x."""
    sites = {"a": (1.0, 2), "b": (-3.0, 3)}
    own, x, c, of_a = {"a": 0.0, "b": 0.0}, 0.0, 0.0, []
    for _ in range(rounds):
        ends, deltas = {}, []
        for name, (target, steps) in sites.items():
            y = x
            for _ in range(steps):
                y -= eta * ((y - target) - own[name] + c)
            deltas.append(-c + (x - y) / (steps * eta))
            own[name] += deltas[-1]
            ends[name] = y
        of_a.append(ends["a"])
        x, c = (ends["a"] + ends["b"]) / 2, c + sum(deltas) / 2
    return of_a, x


@pytest.mark.slow
@pytest.mark.covers("S9")
@pytest.mark.parametrize("name", ["pytorch_lightning", pytest.param("lightning.pytorch", marks=pytest.mark.long)])
def test_two_ranks_are_one_site(tmp_path: Path, name: str) -> None:
    rounds = 3
    with serve(tmp_path, "scaffold", **{"rounds.total": rounds, "rounds.sites": 2, "rounds.min_sites": 2}) as server:
        ranks = start(name, server.url, tmp_path)
        try:
            trainer, module = trainer_of(), Tiny(target=-3.0)
            atoll.integrations.lightning.patch(trainer, server.url, "b", folder=tmp_path / "b")
            fit_rounds(trainer, module)
            output, _ = ranks.communicate(timeout=100)
        finally:
            ranks.kill()
        assert ranks.returncode == 0, output[-3000:]
        of_a, x = reference(rounds)
        told = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
        for rank in told:
            assert rank["locals"] == pytest.approx(of_a, rel=1e-5)
            assert rank["result"] == pytest.approx(x, rel=1e-5)
            assert rank["device"] == "cpu"
        assert [rank["joined"] for rank in told] == [True, False]
        assert [rank["files"] for rank in told] == [True, False]
        assert [line["workers"] for line in lines(server)] == [["a", "b"]] * rounds
        assert [line["weights"] for line in lines(server)] == [[SAMPLES, SAMPLES]] * rounds  # of both ranks together


@pytest.mark.slow
@pytest.mark.covers("S9")
@pytest.mark.long
@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_an_error_at_rank_0_ends_all_of_them(tmp_path: Path, name: str) -> None:
    """The update is refused at rank 0 alone: its learning rates sum up to 0. Rank 1 must not wait for it for ever."""
    with serve(tmp_path, "scaffold", **{"rounds.total": 1}) as server:
        ranks = start(name, server.url, tmp_path, lr=0.0)
        try:
            output, _ = ranks.communicate(timeout=100)
        finally:
            ranks.kill()
        assert ranks.returncode != 0
        assert "sum of the learning rates of this round's 2 steps is 0" in output
        assert server.status().fragments[0].version == 0
