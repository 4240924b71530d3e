"""Another run begins at the address of the one that a site takes part in: the site's progress stays out of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from kit import DiLoCoSites, FederatedSites, Threads, local_step, serve
from torch import nn

from atoll.errors import ServerLost
from atoll.testing.processes import free_port, wait_until


@pytest.mark.covers("L10")
@pytest.mark.parametrize("way", ["diloco", "streaming", "federated"])
def test_a_worker_does_not_go_on_in_another_run_at_the_same_address(tmp_path: Path, way: str) -> None:
    settings = {"num_workers": 1, "port": free_port(), "rounds": 1000, "heartbeat_interval_s": 0.1, "codec": "none"}
    if way in ("diloco", "streaming"):
        settings |= {"algorithm": "diloco", "sync_every": 4, "num_fragments": 2 if way == "streaming" else 1}
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
