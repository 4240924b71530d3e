"""Memory: what a round takes does not grow with the model, and the receive path builds no tensor."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.round_run import Bench, measure
from kit.client import Client
from kit.servers import plain_server
from torch import nn

BENCH = Path(__file__).resolve().parents[3] / "bench" / "largest_round.py"
_spec = importlib.util.spec_from_file_location("largest_round", BENCH)
assert _spec is not None
assert _spec.loader is not None
largest_round = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(largest_round)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.covers("D1", "P8")
@pytest.mark.parametrize("codec", ["none", "int8"], ids=["whole", "int8-both-ways"])
def test_a_model_ten_times_as_large_takes_no_more_memory_on_either_side(codec: str) -> None:
    how: dict[str, Any] = {
        "workers": 2,
        "rounds": 2,
        "tensors": 20,
        "codec": codec,
        "downlink_codec": codec,
    }
    small = measure(Bench(gb=0.012, **how), lambda _: None)
    large = measure(Bench(gb=0.12, **how), lambda _: None)
    assert small["exact"]
    assert large["exact"]
    # 108 MB more of model and 432 MB more of updates; the difference allowed is that of scratch reached later
    assert large["server_peak_anon_mb"] < small["server_peak_anon_mb"] + 60
    assert large["server_peak_anon_mb"] <= 200
    assert large["worker_peak_anon_mb"] < small["worker_peak_anon_mb"] + 20
    assert large["worker_peak_anon_mb"] <= 64


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.covers("P18", "D1", "D9")
def test_four_workers_with_three_times_the_model_take_no_more_memory_on_either_side() -> None:
    """At a size that a test can afford: 0.06 and 0.18 GB × 4 workers, in processes of their own, through files.

    What it shows is that anonymous memory does not follow: 0.12 GB more of model at each worker, and 1.4 GB more of
    updates and versions at the server. `python bench/largest_round.py` does it with 5 GB, or what fits.
    """
    how: dict[str, Any] = {"workers": 4, "rounds": 2, "tensors": 20}
    small, large = (measure(Bench(gb=gb, **how), lambda _: None) for gb in (0.06, 0.18))
    said = largest_round.compared(small, large)
    assert said["ok"], said
    assert large["bytes_down"] > 2.5 * small["bytes_down"] > 0  # it did move the model


GB = 10**9


@pytest.mark.covers("P18")
@pytest.mark.parametrize(
    ("disk", "memory", "fits"),
    [
        (100 * GB, 100 * GB, 5.0),  # 17 times 5 GB are 85 GB of files
        (57 * GB, 100 * GB, 3.0),  # 0.9·57/17 = 3.02
        (100 * GB, 16 * GB, 3.0),  # 0.75·16/4
        (1 * GB, 100 * GB, 0.0),
    ],
    ids=["all", "disk", "memory", "none"],
)
def test_the_largest_round_is_what_the_free_disk_and_memory_take(disk: int, memory: int, fits: float) -> None:
    assert largest_round.largest_gb(5.0, 4, disk, memory) == fits


@pytest.mark.slow
@pytest.mark.covers("P18", "D1", "D9")
def test_the_largest_round_says_how_much_memory_it_took(tmp_path: Path) -> None:
    argv = [sys.executable, str(BENCH), "--gb", "0.1", "--workers", "1", "--rounds", "2", "--dir", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ok"]
    assert said["gb"] == [0.01, 0.1]
    assert "0.1 GB × 1 worker" in done.stderr


@pytest.mark.covers("D2")
def test_receiving_a_part_builds_no_tensor_and_holds_a_few_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spy around the receive path: torch makes nothing meanwhile, and Python holds at most a few runs of bytes."""
    from atoll.transport import request_body

    made: list[str] = []
    peak_bytes: list[int] = []
    receive = request_body.receive_part
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
    monkeypatch.setattr("atoll.server.http.receive_parts.receive_part", spied)
    model = nn.Linear(4000, 2000, bias=False)  # 32 MB: two parts
    with plain_server(tmp_path, model, **{"rounds.total": 1, "network.connections": 1}) as server:
        with Client(server.url, site="a", folder=tmp_path / "w") as client:
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
    with plain_server(tmp_path, model, **{"rounds.total": 1}) as server:
        with Client(server.url, site="a", folder=tmp_path / "w") as client:
            assert client.next_round() == 1
            state = client.pull()
            assert torch.equal(state["layer.4999"], torch.full((3,), 4999.0))
            client.submit({name: tensor + 1.0 for name, tensor in state.items()})
            assert client.next_round() is None
            final = server.status()
    # one part: 5,000 segments of 64 bytes (12 and padding), and 32 bytes of BLAKE3
    assert final.bytes_up == 5000 * 64 + 32
