"""DiLoCo in a swarm: synchronous and streaming with a server's bits, asynchronous to its end."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from site_threads import DiLoCoSites
from swarm_run import SITES, build, gradients_
from swarm_world import Result, serve_swarm
from torch import nn

H = 4
ORDER = "abcaacbba"
DILOCO: dict[str, Any] = {
    "algorithm.name": "diloco",
    "algorithm.outer_optimizer.name": None,
    "algorithm.outer_optimizer.lr": None,
    "algorithm.outer_optimizer.momentum": None,
    "diloco.sync_every": H,
    "network.heartbeat_timeout_s": 60.0,
}


class Trained(DiLoCoSites):
    weights = SITES

    def build(self) -> nn.Module:
        return build()

    def inner(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def local_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, site: str, step: int) -> None:
        gradients_(model, site, step)
        optimizer.step()


class InTurn(Trained):
    """Behind a first round together they send their updates one after the other, as `ORDER` says.

    A site whose turn it is sends its update behind its fourth step, and begins the next four with what has come of it.
    """

    def __init__(self, url: str, folder: Path, sites: Collection[str], steps: int) -> None:
        self._all_here = threading.Barrier(len(sites))
        self._passed, self._turn, self._is_over = threading.Condition(), 0, False
        super().__init__(url, folder, sites, steps, self._wait)

    def _train(self, site: str) -> None:
        super()._train(site)
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


def left_by(folder: Path, steps: int = 40, kind: type[Trained] = Trained, **settings: Any) -> tuple[Result, Trained]:
    folder.mkdir()
    with serve_swarm(folder, **DILOCO | settings) as server:
        sites = kind(server.url, folder, SITES, steps)
        sites.join()
        status = server.status()
    if settings.get("swarm.enabled", True):
        assert status.bytes_up == 0
    return Result(folder), sites


RUNS = [
    pytest.param({}, id="whole-model"),
    pytest.param({"aggregation.upload_codec.name": "int8"}, id="int8"),
    pytest.param({"aggregation.upload_codec.name": "topk"}, id="topk-with-residuals"),
    pytest.param({"async.momentum_every": 2}, id="delayed-nesterov"),
    pytest.param({"disk.in_files": False}, id="in-memory"),
    pytest.param(
        {"diloco.num_fragments": 2, "diloco.fragment_sync_delay": 1, "diloco.fragment_update_alpha": 0.25},
        id="streaming",
    ),
]


@pytest.mark.covers("P10", "D10")
@pytest.mark.parametrize("settings", RUNS)
def test_the_same_bits_as_a_server_makes(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours, mine = left_by(tmp_path / "swarm", **settings)
    theirs, others = left_by(tmp_path / "server", **settings, **{"swarm.enabled": False})
    assert ours.versions == theirs.versions
    assert len(ours.versions) > 3
    for site in SITES:
        expected = others.models[site].state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in mine.models[site].state_dict().items())


@pytest.mark.covers("P10", "D10")
@pytest.mark.parametrize(
    "settings",
    [{}, {"diloco.num_fragments": 2}, {"async.momentum_every": 2}],
    ids=["whole-model", "fragments", "delayed-nesterov"],
)
def test_asynchronous_runs_come_to_their_end(tmp_path: Path, settings: dict[str, Any]) -> None:
    result, sites = left_by(tmp_path / "swarm", steps=400, **{"async.enabled": True, "rounds.total": 9}, **settings)
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
        "async.enabled": True,
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
