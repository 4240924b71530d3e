"""The last version reaches every worker, also where its first pull fails."""

from pathlib import Path

import pytest
import torch
from kit.servers import new_server
from torch import nn

import atoll
from atoll.errors import Gone
from atoll.transport.resumable_transfer import HttpTransfer


def test_the_result_is_pulled_even_if_its_first_pull_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = nn.Linear(1, 1, bias=False)
    nn.init.constant_(start.weight, 8.0)
    options = {
        "algorithm.name": "diloco",
        "rounds.sites": 1,
        "rounds.total": 1,
        "diloco.sync_every": 2,
        "aggregation.upload_codec.name": "none",
        "network.port": 0,
    }
    with new_server(
        start,
        **options,
        **{
            "algorithm.outer_optimizer.lr": 0.5,
            "algorithm.outer_optimizer.momentum": 0.0,
            "disk.state_dir": tmp_path / "s",
        },
    ) as server:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as diloco:
            pull, broken = HttpTransfer.pull, [True]

            def once(self, *args, **more):  # type: ignore[no-untyped-def]
                if broken:
                    broken.clear()
                    raise Gone("revoked", "pull again")
                return pull(self, *args, **more)

            monkeypatch.setattr(HttpTransfer, "pull", once)
            for _ in range(4):
                optimizer.zero_grad()
                model.weight.sum().backward()
                optimizer.step()
                if diloco.finished:
                    break
            assert diloco.finished
        assert model.weight.item() == 7.0
