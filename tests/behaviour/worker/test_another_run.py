"""Another run begins at the address of the one that a site takes part in: the site's progress stays out of it."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import free_port, wait_until
from kit import DiLoCoSites, FederatedSites, Threads, local_step, post, serve
from torch import nn

import atoll
from atoll.errors import ServerLost


@pytest.mark.covers("L10")
@pytest.mark.parametrize("way", ["diloco", "streaming", "federated"])
def test_a_worker_does_not_go_on_in_another_run_at_the_same_address(tmp_path: Path, way: str) -> None:
    settings: dict[str, Any] = {"sites": 1, "rounds": 1000, "codec": "none"}
    settings |= {"network.port": free_port(), "network.heartbeat_interval_s": 0.1}
    if way in ("diloco", "streaming"):
        settings |= {"algorithm": "diloco", "H": 4, "K": 2 if way == "streaming" else 1}
    goes_on = threading.Event()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, site: str, number: int) -> None:
        if number == 20:
            assert goes_on.wait(60)
        local_step(model, optimizer, site, number)

    def during(site: str, number: int) -> None:
        assert number < 3 or goes_on.wait(60)

    with serve(tmp_path / "old", **settings) as old:
        url = old.url
        sites: Threads
        if way == "federated":
            sites = FederatedSites(url, tmp_path, ["a"], during=during)
        else:
            sites = DiLoCoSites(url, tmp_path, 10**6, ["a"], step=step, max_sync_retries=0)
        wait_until(lambda: old.status().fragments[0].version >= 2, "two rounds")
    with serve(tmp_path / "new", **settings) as new:
        goes_on.set()
        with pytest.raises(ServerLost) as raised:
            sites.join()
        assert new.status().run in str(raised.value)
        assert new.status().workers == []
        assert new.status().fragments[0].version == 0
    assert raised.value.exit_code == 5


def test_a_site_of_tasks_answers_none_of_another_run(tmp_path: Path) -> None:
    port = free_port()

    def waits(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=60)  # the second one never comes

    def serve_tasks(name: str) -> atoll.Server:
        return atoll.Server(
            workflow=waits, settings={"network.port": port, "disk.state_dir": tmp_path / name, "disk.min_free_bytes": 0}
        )

    with ExitStack() as stack:
        with serve_tasks("old") as old:
            worker = stack.enter_context(atoll.tasks(old.url, "a"))
            worker.task("show")(lambda payload: payload)
            site = Threads(worker.run)
            wait_until(lambda: old.status().workers != [], "the site")
        with serve_tasks("new") as new:
            with pytest.raises(ServerLost):
                site.join()
            assert new.status().workers == []


def test_a_server_refuses_a_join_that_means_another_run(tmp_path: Path) -> None:
    """The run may change between the worker's question, which run there is, and its joining."""
    with serve(tmp_path) as server:
        status, reply = post(server.url, "/v1/workers", {"protocol": 1, "site": "a", "run": "0" * 32})
        assert (status, reply["code"]) == (409, "server_lost")
        assert server.status().run in reply["message"]
        assert server.status().workers == []
