"""Asynchronous DiLoCo in a swarm: to its end, and with a server's bits where updates come in the same order."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import DiLoCoSites
from swarm_run import SITES, build, gradients_
from swarm_world import PLAIN, Result, serve_swarm
from torch import nn

H = 4
ORDER = "abcaacbba"
DILOCO: dict[str, Any] = PLAIN | {"algorithm.name": "diloco", "diloco.sync_every": H, "async.enabled": True}


def step_(model: nn.Module, optimizer: torch.optim.Optimizer, site: str, step: int) -> None:
    gradients_(model, site, step)
    optimizer.step()


class InTurn(DiLoCoSites):
    """Behind a first round together they send their updates one after the other, as `ORDER` says.

    A site whose turn it is sends its update behind its fourth step, and begins the next four with what has come of it.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        self._all_here = threading.Barrier(len(SITES))
        self._passed, self._turn, self._is_over = threading.Condition(), 0, False
        super().__init__(*given, **options, during=self._wait)

    def _work(self, site: str) -> None:
        super()._work(site)
        with self._passed:
            self._is_over = True
            self._passed.notify_all()

    def _wait(self, site: str, step: int) -> None:
        if step == H:
            self._all_here.wait()
        with self._passed:
            if step > H and step % H == 0:
                self._turn += 1
                self._passed.notify_all()
            if step > H and step % H == H - 1:
                self._passed.wait_for(lambda: self._is_over or ORDER[self._turn : self._turn + 1] == site)


def left_by(
    folder: Path, steps: int = 40, kind: type[DiLoCoSites] = DiLoCoSites, **settings: Any
) -> tuple[Result, DiLoCoSites]:
    folder.mkdir()
    with serve_swarm(folder, **DILOCO | settings) as server:
        sites = kind(server.url, folder, steps, SITES, build=build, step=step_, weights=SITES)
        sites.join()
        status = server.status()
    if settings.get("swarm.enabled", True):
        assert status.bytes_up == 0
    return Result(folder), sites


@pytest.mark.covers("P10", "D10")
@pytest.mark.parametrize(
    "settings",
    [{}, {"diloco.num_fragments": 2}, {"async.momentum_every": 2}],
    ids=["whole-model", "fragments", "delayed-nesterov"],
)
def test_asynchronous_runs_come_to_their_end(tmp_path: Path, settings: dict[str, Any]) -> None:
    result, sites = left_by(tmp_path / "swarm", steps=400, **{"rounds.total": 9}, **settings)
    counted = [state for _, _, state in result.tickets if state == "counted"]
    assert len(counted) == sum(len(summary["workers"]) for summary in result.history)
    assert len({summary["aggregator"] for summary in result.history}) > 1
    assert all(loop.finished for loop in sites.loops.values())


@pytest.mark.covers("P10", "D10")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async.staleness_weight": "inverse_sqrt", "aggregation.upload_codec.name": "int8"},
        {"async.momentum_every": 2},
    ],
    ids=["constant", "weighed-by-staleness", "delayed-nesterov"],
)
def test_an_asynchronous_run_with_updates_in_the_same_order_has_a_servers_bits(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    run: dict[str, Any] = {
        "kind": InTurn,
        "async.sync_rounds_first": 1,
        "rounds.total": 1 + len(ORDER),
    } | settings
    ours, _ = left_by(tmp_path / "swarm", **run)
    theirs, _ = left_by(tmp_path / "server", **run, **{"swarm.enabled": False})
    assert ours.versions == theirs.versions
    first, *one_by_one = ours.history
    assert first["workers"] == ["a", "b", "c"]
    assert [summary["workers"] for summary in one_by_one] == [[site] for site in ORDER]
    # a, b, c from version 1; a has missed b, c; a again; c: a, a; b: c, a, a, c; b again; a: c, b, b
    assert [summary["staleness"] for summary in one_by_one] == [[0], [1], [2], [2], [0], [2], [4], [0], [3]]
    assert [summary["staleness"] for summary in theirs.history] == [summary["staleness"] for summary in ours.history]
