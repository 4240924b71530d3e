"""A pull that ends with 410 in the middle: nobody trains on half of a version.

H = 2, inner SGD lr 1 on a gradient of 1, outer SGD lr 1, 6 parts. After round one (θ1 = θ0 − 2) the pull of version 1
ends with 410 after its first part; it is pulled again. θ2 must be θ0 − 4 everywhere.
"""

from pathlib import Path

import pytest
import torch
from kit.servers import new_server
from torch import nn

import atoll
from atoll.errors import Gone
from atoll.transport.resumable_transfer import HttpTransfer


def test_a_pull_that_ends_with_gone_leaves_local_progress_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    start = nn.Linear(300, 300, bias=False)
    nn.init.constant_(start.weight, 8.0)
    options = {
        "algorithm.name": "diloco",
        "rounds.sites": 1,
        "rounds.total": 2,
        "diloco.sync_every": 2,
        "aggregation.upload_codec.name": "none",
        "network.port": 0,
    }
    with new_server(
        start,
        **options,
        **{
            "algorithm.outer_optimizer.lr": 1.0,
            "algorithm.outer_optimizer.momentum": 0.0,
            "disk.state_dir": tmp_path / "s",
            "network.part_bytes": 2**16,
            "disk.min_free_bytes": 0,
        },
    ) as server:
        model = nn.Linear(300, 300, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as diloco:
            pull, broken = HttpTransfer.pull, [True]

            def once(self, path, digests, parts, sinks, **more):  # type: ignore[no-untyped-def]
                if broken:
                    broken.clear()
                    pull(self, path, digests, parts[:1], sinks, **more)
                    raise Gone("revoked", "pull again")
                return pull(self, path, digests, parts, sinks, **more)

            for number in range(6):
                if number == 1:
                    monkeypatch.setattr(HttpTransfer, "pull", once)
                optimizer.zero_grad()
                model.weight.sum().backward()
                optimizer.step()
                if diloco.finished:
                    break
        assert model.weight.detach().unique().tolist() == [4.0]
