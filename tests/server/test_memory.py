"""Memory: what a round takes does not grow with the model, and the receive path builds no tensor."""

from __future__ import annotations

import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.cli.bench_run import Bench, measure
from atoll.transport import host


@pytest.mark.slow
@pytest.mark.covers("D1", "P8")
@pytest.mark.parametrize("codec", ["none", "int8"], ids=["whole", "int8-both-ways"])
def test_a_model_ten_times_as_large_takes_no_more_memory_on_either_side(codec: str) -> None:
    how: dict[str, Any] = {"workers": 2, "rounds": 2, "tensors": 20, "codec": codec, "downlink_codec": codec}
    small = measure(Bench(gb=0.02, **how), lambda _: None)
    large = measure(Bench(gb=0.2, **how), lambda _: None)
    assert small["exact"]
    assert large["exact"]
    # 180 MB more of model and 720 MB more of updates; the difference allowed is that of scratch reached later
    assert large["server_peak_anon_mb"] < small["server_peak_anon_mb"] + 60
    assert large["server_peak_anon_mb"] <= 200
    assert large["worker_peak_anon_mb"] < small["worker_peak_anon_mb"] + 20
    assert large["worker_peak_anon_mb"] <= 64


@pytest.mark.covers("D2")
def test_receiving_a_part_builds_no_tensor_and_holds_a_few_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spy around the receive path: torch makes nothing meanwhile, and Python holds at most a few runs of bytes."""
    made: list[str] = []
    peak_bytes: list[int] = []
    receive = host.Incoming.part
    receiving = threading.local()

    async def spied(*arguments: Any, **options: Any) -> bytes:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        receiving.on = True
        try:
            return await receive(*arguments, **options)
        finally:
            receiving.on = False
            peak_bytes.append(tracemalloc.get_traced_memory()[1] - before)

    def forbid(name: str) -> None:
        original = getattr(torch, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if getattr(receiving, "on", False):
                made.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(torch, name, call)

    for name in ("frombuffer", "from_numpy", "empty", "zeros", "tensor"):
        forbid(name)
    monkeypatch.setattr(host.Incoming, "part", spied)
    model = nn.Linear(4000, 2000, bias=False)  # 32 MB: two parts
    options: dict[str, Any] = {"algorithm": "fedavg", "rounds": 1, "connections": 1}
    with atoll.Server(model, port=0, state_dir=tmp_path / "state", **options) as server:
        with atoll.Client(server.url, site="a", folder=tmp_path / "w") as client:
            assert client.next_round() == 1
            state = client.pull()
            tracemalloc.start()
            try:
                client.submit(state)
            finally:
                tracemalloc.stop()
            assert client.next_round() is None
    assert len(peak_bytes) == 2
    assert made == []
    assert max(peak_bytes) < 8 * 2**20  # of parts of 16 MiB


def test_five_thousand_tensors_travel_as_one_stream_each_way(tmp_path: Path) -> None:
    """5,000 tensors of 12 bytes: requests are counted in parts, not in tensors."""
    model = {f"layer.{index}": torch.full((3,), float(index)) for index in range(5000)}
    with atoll.Server(model, port=0, state_dir=tmp_path / "state", algorithm="fedavg", rounds=1) as server:
        with atoll.Client(server.url, site="a", folder=tmp_path / "w") as client:
            assert client.next_round() == 1
            state = client.pull()
            assert torch.equal(state["layer.4999"], torch.full((3,), 4999.0))
            client.submit({name: tensor + 1.0 for name, tensor in state.items()})
            assert client.next_round() is None
            final = client.status()
    # one part: 5,000 segments of 64 bytes (12 and padding), and 32 bytes of BLAKE3
    assert final.bytes_up == 5000 * 64 + 32
