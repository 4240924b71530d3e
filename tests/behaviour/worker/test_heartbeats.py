"""Status is as fresh as what a worker does: a change of state is told soon, the last figures on leaving."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from harness.processes import wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import diloco, take_steps
from kit.models import build_model
from kit.servers import plain_server
from torch import nn

import atoll

SILENT = {"network.heartbeat_interval_s": 600.0, "network.heartbeat_timeout_s": 0}
"""A heartbeat that waits for its interval comes far behind the end of a test."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with plain_server(tmp_path, nn.Linear(8, 4), **SILENT) as server:
        yield server


@pytest.mark.covers("L9", "F22")
@pytest.mark.parametrize("action", ["reset", "close"])
def test_a_heartbeat_that_stays_unanswered_is_followed_soon_by_another(
    server: atoll.Server, tmp_path: Path, action: Literal["reset", "close"]
) -> None:
    """Not after the interval, which is ten minutes here: the server may take the worker for dead before."""
    with Proxy(int(server.url.rpartition(":")[2])) as proxy:
        faults = [Fault("POST .*heartbeat", "down", BEFORE_HEADER, action) for _ in range(2)]
        proxy.faults += faults
        worker = atoll.join(proxy.url, "a", folder=tmp_path / "w")
        wait_until(lambda: proxy.count("POST .*heartbeat") >= 3, "a third heartbeat")
        assert all(fault.reached.is_set() for fault in faults)
        worker.leave()


def told(server: atoll.Server) -> tuple[str, str, int]:
    """State, what it does, and its step."""
    (worker,) = server.status().workers
    return worker.state, worker.doing, worker.step


@pytest.mark.covers("L13")
def test_a_change_of_state_is_told_without_waiting_for_the_interval(server: atoll.Server, tmp_path: Path) -> None:
    model = nn.Linear(8, 4)
    with atoll.join(server.url, "a", folder=tmp_path / "w") as worker:
        fl_round = worker.next_round()
        fl_round.load_into(model)
        wait_until(lambda: told(server)[1] == "training", "training")
        fl_round.submit(model)
        wait_until(lambda: told(server)[1] == "submitting to round 1", "the update")


@pytest.mark.covers("L13")
@pytest.mark.parametrize("fails", [False, True])
def test_the_last_figures_are_told_on_leaving(tmp_path: Path, fails: bool) -> None:
    """Steps are no change of state, so they wait for the next heartbeat: in ten minutes."""
    with plain_server(tmp_path, build_model(), algorithm="diloco", H=100, **SILENT) as server:
        loop = diloco(server, tmp_path).start()
        wait_until(lambda: told(server)[1] == "training", "a heartbeat")
        take_steps(loop, 41)
        assert told(server)[2] == 0
        error = ValueError("no data") if fails else None
        loop.__exit__(type(error) if error else None, error, None)
        assert told(server) == (("failed", "failed", 41) if fails else ("left", "left", 41))
