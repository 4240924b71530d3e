"""The network is lost just when a run is finished: training goes on, and later the worker has the run's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import local_step
from kit.models import wide_model
from kit.servers import new_server
from safetensors.torch import load_file
from torch import nn

import atoll

LAST_VERSION = "GET .*/versions/1[ /]"


def serve(folder: Path, **settings: Any) -> atoll.Server:
    options: dict[str, Any] = {
        "aggregation.upload_codec.name": "none",
        "diloco.sync_every": 4,
        "rounds.total": 1,
        "network.port": 0,
        "network.heartbeat_interval_s": 1.0,
    } | settings
    return new_server(wide_model(), **{"algorithm.name": "diloco", "disk.state_dir": folder / "state"}, **options)


def is_result(model: nn.Module, server: atoll.Server) -> bool:
    result = load_file(server.exports / "model.safetensors")
    return all(torch.equal(value, result[name]) for name, value in model.state_dict().items())


def train_on(loop: atoll.DiLoCo, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Site a's steps from this one on, until it knows that the run is finished."""
    while not loop.finished:
        assert steps < 40, "it never learns that the run is finished"
        local_step(model, optimizer, "a", steps)
        steps += 1


@pytest.mark.covers("L7", "L10")
def test_a_fragment_without_its_last_version_is_not_finished(tmp_path: Path) -> None:
    """Twice: where the result is fetched, and at the next turn, when the server says that all is over."""
    model = wide_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        serve(tmp_path, **{"rounds.sites": 1, "diloco.num_fragments": 2, "diloco.fragment_sync_delay": 1}) as server,
        Proxy(server.port) as proxy,
    ):
        with atoll.DiLoCo(
            model, optimizer, server=proxy.url, site="a", folder=tmp_path / "w", max_sync_retries=0
        ) as diloco:
            for step in range(3):  # fragment 0 is taken after 2 steps, merged after 3
                local_step(model, optimizer, "a", step)
            lost = [Fault(LAST_VERSION, "down", at=BEFORE_HEADER, action="reset") for _ in range(2)]
            proxy.faults.extend(lost)
            train_on(diloco, model, optimizer, 3)
            assert all(fault.reached.is_set() for fault in lost)
            assert diloco.skipped == 2
        server.run()
        assert is_result(model, server)


@pytest.mark.covers("L7")
@pytest.mark.parametrize("fragments", [1, 2])
def test_an_asynchronous_run_that_ends_without_us_does_not_end_our_loop_where_its_model_cannot_be_pulled(
    tmp_path: Path, fragments: int
) -> None:
    model, other = wide_model(), wide_model()
    mine, others = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    settings = {
        "rounds.sites": 2,
        "async.enabled": True,
        "diloco.num_fragments": fragments,
        "diloco.sync_every": 2 * fragments,
    }
    with serve(tmp_path, **settings) as server, Proxy(server.port) as proxy:
        a = atoll.DiLoCo(model, mine, server=proxy.url, site="a", folder=tmp_path / "a", max_sync_retries=0)
        b = atoll.DiLoCo(other, others, server=server.url, site="b", folder=tmp_path / "b")
        with a:
            local_step(model, mine, "a", 0)
            with b:
                for step in range(2 * fragments):
                    local_step(other, others, "b", step)
                assert b.finished
            lost = Fault(LAST_VERSION, "down", at=BEFORE_HEADER, action="reset")
            proxy.faults.append(lost)
            train_on(a, model, mine, 1)
            assert lost.reached.is_set()
        server.run()
        assert is_result(model, server)
