"""A line of 200 ms and 1 % loss, where TCP gives little to each connection, however wide the line is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fault_world import serving
from harness.proxy import Pace, Proxy
from torch import nn

import atoll

PACE = Pace(delay_s=0.1, bytes_per_s=1.2 * 1460 / (0.2 * 0.01**0.5))
"""87,600 bytes/s: 71 such connections fill 50 Mbit/s."""
CONNECTIONS, TIMEOUT_S = 8, 3.0


@pytest.mark.covers("F21", "L9")
def test_parallel_parts_make_up_for_a_slow_connection_and_no_site_is_lost(tmp_path: Path) -> None:
    model = nn.Linear(1024, 640)  # 2.6 MB in 41 parts: 3.7 s each way over eight connections, 30 over one
    with (
        serving(
            tmp_path,
            model,
            **{
                "rounds.sites": 1,
                "rounds.total": 1,
                "network.connections": CONNECTIONS,
                "network.heartbeat_interval_s": 0.5,
                "network.heartbeat_timeout_s": TIMEOUT_S,
                "network.idle_timeout_s": 30.0,
            },
        ) as server,
        Proxy(server.port, PACE) as proxy,
    ):
        with atoll.join(proxy.url, site="far", folder=tmp_path / "workers") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                with torch.no_grad():
                    model.weight.add_(1.0)
                fl_round.submit(model, weight=1.0)
            moved = [dict(each) for each in proxy.moved_bytes]
        server.run()
        status = server.status()
    for way in ("up", "down"):
        total, most = sum(each[way] for each in moved), max(each[way] for each in moved)
        assert most / PACE.bytes_per_s > TIMEOUT_S  # so long, a silent worker would have been given up
        assert total / most >= 5
    assert status.deaths == 0
