"""Two hundred workers on one server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
import torch
from harness.crowd import Crowd
from kit.servers import plain_server
from safetensors.torch import load_file
from torch import nn

WORKERS, ROUNDS = 200, 2


@pytest.mark.covers("L17")
def test_two_hundred_workers_take_part_in_every_round_without_an_error(tmp_path: Path) -> None:
    """All of them wait for the version at once, pull at once, and send at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    server = plain_server(tmp_path, model, **{"rounds.total": ROUNDS, "rounds.sites": WORKERS}).start()

    async def all_of_them() -> Crowd:
        connector = aiohttp.TCPConnector(limit=0)
        async with asyncio.timeout(240), aiohttp.ClientSession(connector=connector) as session:
            crowd = await Crowd.at(server.url, session, train_s=0.0)
            await asyncio.gather(*(crowd.one(session, f"w-{number:03}") for number in range(WORKERS)))
        return crowd

    try:
        crowd = asyncio.run(all_of_them())
        assert not crowd.errors
        assert all(worker.rounds == ROUNDS for worker in server.status().workers)
        assert len(server.status().workers) == WORKERS
        server.run()
    finally:
        server.stop()
    # every update is 1e-3 everywhere, so is their mean, and each of two rounds takes it off
    after = load_file(server.exports / "model.safetensors")
    for name, value in before.items():
        torch.testing.assert_close(after[name], value - 2e-3, rtol=0, atol=1e-6)
