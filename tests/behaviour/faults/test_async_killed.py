"""The server of an asynchronous run is killed at every place that matters: every acknowledged update counts, once."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from fault_world import ServerProcess, build
from harness.processes import Nursery
from site_threads import together
from torch import Tensor

import atoll

VERSIONS = 10
SETTINGS = {
    "async.enabled": True,
    "rounds.total": VERSIONS,
    "rounds.sites": 3,
    "algorithm.outer_optimizer.lr": 1.0,
    "algorithm.outer_optimizer.momentum": 0.0,
    "async.staleness_weight": "constant",
}


def change(site: str, k: int, name: str, like: Tensor) -> Tensor:
    """What the k-th update of a site moves a parameter by."""
    generator = torch.Generator().manual_seed(1000 * k + 31 * ord(site) + len(name))
    return torch.randn(like.shape, generator=generator)


def train(url: str, folder: Path, site: str, trained: Counter[str]) -> Callable[[], None]:
    def run() -> None:
        model, k = build(), 0
        with atoll.join(url, site=site, folder=folder / "workers") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter.sub_(change(site, k, name, parameter))
                fl_round.submit(model, metrics={"k": k})
                trained[site] += 1
                k += 1

    return run


@pytest.mark.parametrize(
    "lives",
    [
        pytest.param(("accept.before=kill@3",), id="before-an-accept", marks=pytest.mark.covers("F8")),
        pytest.param(("accept.after=kill@4",), id="after-an-accept", marks=pytest.mark.covers("F9")),
        pytest.param(("pass.chunk=kill@9",), id="in-a-pass", marks=pytest.mark.covers("F10")),
        pytest.param(("head.before=kill@4",), id="before-the-head-moves", marks=pytest.mark.covers("F12")),
        pytest.param(("head.after=kill@5",), id="after-the-head-moves", marks=pytest.mark.covers("F12")),
        pytest.param(
            ("accept.after=kill@3", "recover.midway=kill", "head.after=kill@2", "accept.before=kill@2"),
            id="again-and-again",
            marks=pytest.mark.covers("F13"),
        ),
    ],
)
@pytest.mark.covers("L3", "L5")
def test_every_acknowledged_update_counts_once(nursery: Nursery, tmp_path: Path, lives: tuple[str, ...]) -> None:
    trained: Counter[str] = Counter()
    with ServerProcess(nursery, tmp_path, lives, **SETTINGS) as server:
        together(*(train(server.url, tmp_path, site, trained) for site in "abc"))
        assert server.kept.wait() == 0
        assert server.kept.deaths == len(lives)
    with contextlib.closing(sqlite3.connect(tmp_path / "state/journal.sqlite")) as journal:
        rows = journal.execute(
            "SELECT site, metrics, state, base_version, version FROM tickets "
            "WHERE state IN ('counted', 'accepted') ORDER BY ticket"
        ).fetchall()
    counted = [(site, int(json.loads(metrics)["k"])) for site, metrics, state, _, _ in rows if state == "counted"]
    taken = [(site, int(json.loads(metrics)["k"])) for site, metrics, *_ in rows]
    assert len(set(counted)) == len(counted) == VERSIONS
    for site in "abc":  # none is missing but the last, which came when the run was over
        mine = [k for other, k in taken if other == site]
        assert mine == list(range(len(mine)))
        assert trained[site] - len(mine) in (0, 1)
    assert max(version - 1 - base for _, _, state, base, version in rows if state == "counted") > 0
    result = safetensors.torch.load_file(tmp_path / "state/exports/model.safetensors")
    for name, start in build().named_parameters():
        expected = start.detach().double() - sum(change(site, k, name, start).double() for site, k in counted)
        assert torch.allclose(result[name].double(), expected, rtol=0, atol=1e-5), name
