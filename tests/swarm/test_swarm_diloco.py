"""DiLoCo in a swarm: synchronous and streaming with a server's bits, asynchronous to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from site_threads import DiLoCoSites
from swarm_run import SITES, build, gradients_
from swarm_world import Result, serving
from torch import nn

DILOCO: dict[str, Any] = {
    "algorithm": "diloco",
    "outer_optimizer": None,
    "outer_lr": None,
    "outer_momentum": None,
    "sync_every": 4,
    "heartbeat_timeout_s": 60.0,
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


def left_by(folder: Path, steps: int = 40, **settings: Any) -> tuple[Result, Trained]:
    folder.mkdir()
    with serving(folder, **DILOCO | settings) as server:
        sites = Trained(server.url, folder, SITES, steps)
        sites.join()
        status = server.status()
    if settings.get("placement", "swarm") == "swarm":
        assert status.bytes_up == 0
    return Result(folder), sites


RUNS = [
    pytest.param({}, id="whole-model"),
    pytest.param({"codec": "int8"}, id="int8"),
    pytest.param({"codec": "topk"}, id="topk-with-residuals"),
    pytest.param({"dn_buffer_size": 2}, id="delayed-nesterov"),
    pytest.param({"download_to_disk": False}, id="in-memory"),
    pytest.param({"num_fragments": 2, "tau": 1, "alpha": 0.25}, id="streaming"),
]


@pytest.mark.covers("P10", "D10")
@pytest.mark.parametrize("settings", RUNS)
def test_the_same_bits_as_a_server_makes(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours, mine = left_by(tmp_path / "swarm", **settings)
    theirs, others = left_by(tmp_path / "server", **settings, placement="server")
    assert ours.versions == theirs.versions
    assert len(ours.versions) > 3
    for site in SITES:
        expected = others.models[site].state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in mine.models[site].state_dict().items())


@pytest.mark.covers("P10", "D10")
@pytest.mark.parametrize(
    "settings", [{}, {"num_fragments": 2}, {"dn_buffer_size": 2}], ids=["whole-model", "fragments", "delayed-nesterov"]
)
def test_asynchronous_runs_come_to_their_end(tmp_path: Path, settings: dict[str, Any]) -> None:
    result, sites = left_by(tmp_path / "swarm", steps=400, mode="async", rounds=9, **settings)
    counted = [state for _, _, state in result.tickets if state == "counted"]
    assert len(counted) == sum(len(summary["workers"]) for summary in result.history)
    assert len({summary["aggregator"] for summary in result.history}) > 1
    assert all(loop.finished for loop in sites.loops.values())
