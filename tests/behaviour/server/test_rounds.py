"""A server and workers, over real sockets and files: the whole way of an update, at any size and for many sites."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import largest_round
import pytest
import torch
from harness.crowd import Crowd
from kit.manual_site import ManualSite
from kit.requests import answer
from kit.servers import plain_server
from kit.sites import together
from kit.wire import WireSite
from kit.world import World
from round_run import Bench, measure
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.errors import ConfigError
from atoll.protocol import status_messages
from atoll.testing.run import wait_until


def tiny(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.covers("D1", "P8", "L15", "L22")
def test_fedavg_takes_the_weighted_mean(tmp_path: Path) -> None:
    """FedAvg gives the weighted mean of the sites' parameters, and the maximum of their integer counters."""
    # Every site ends with the result's bits. The mean of a metric uses only the sites that reported it, with the
    # weights of their updates.
    start = tiny()
    reports = {"a": {"loss": 1.0, "accuracy": 0.25}, "b": {"loss": 4.0}, "c": {"accuracy": 0.75, "auc": 0.5}}
    amounts, weights = {"a": 1.0, "b": 4.0, "c": 5.0}, {"a": 1.0, "b": 2.0, "c": 5.0}
    finals: dict[str, dict[str, torch.Tensor]] = {}

    def train(site: str) -> None:
        model = tiny(seed=99)
        with atoll.join(server.url, site=site, folder=tmp_path / "workers") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(amounts[site])
                model[1].num_batches_tracked += int(amounts[site])
                fl_round.submit(model, weight=weights[site], metrics=reports[site])
            finals[site] = worker.load_into(tiny(seed=7)).state_dict()

    with plain_server(tmp_path, start, sites=3, rounds=2) as server:
        together(*(partial(train, site) for site in weights))
        server.run()
    result = load_file(server.exports / "model.safetensors")
    tiny(seed=5).load_state_dict(result, strict=True)
    for final in finals.values():
        assert final.keys() == result.keys()
        assert all(torch.equal(final[name], tensor) for name, tensor in result.items())  # all end with the same bits
    for name, parameter in start.named_parameters():
        # a round moves by (1·1 + 2·4 + 5·5) / 8 = 4.25; in pseudo-gradient form, twice, in fp32
        theta = parameter.detach().clone()
        for _ in range(2):
            g = (theta - (theta + 1.0)) * (1 / 8)
            g.add_(theta - (theta + 4.0), alpha=2 / 8).add_(theta - (theta + 5.0), alpha=5 / 8)
            theta = theta - g
        assert torch.equal(result[name], theta), name
    # integer counters take the maximum: 0 → max(0 + 1, 0 + 4, 0 + 5) → 5 + 5
    assert result["1.num_batches_tracked"].item() == 10
    lines = [json.loads(line) for line in (server.exports / "metrics.jsonl").read_text().splitlines()]
    assert [(line["version"], [each["site"] for each in line["sites"]]) for line in lines] == [
        (1, ["a", "b", "c"]),
        (2, ["a", "b", "c"]),
    ]
    # loss: (1·1 + 2·4) / (1 + 2) = 3;  accuracy: (1·0.25 + 5·0.75) / (1 + 5) = 4/6;  auc: one site's
    assert lines[0]["metrics"] == {"loss": pytest.approx(3.0), "accuracy": pytest.approx(2 / 3), "auc": 0.5}
    assert lines[0]["counts"] == {"loss": 2, "accuracy": 2, "auc": 1}
    elements = sum(parameter.numel() for parameter in start.parameters())  # each has the same mean pseudo-gradient
    assert [line["grad_norm"] for line in lines] == [pytest.approx(4.25 * elements**0.5, rel=1e-5)] * 2
    first, _ = server.status().history
    assert [each.weight for each in first.sites] == [1.0, 2.0, 5.0]
    assert first.total_weight is None, "no reducer needs it, so that it is not kept"


def test_metrics_show_each_sites_own_figures(tmp_path: Path) -> None:
    """The metrics file and the status have each site's weight, metrics, times and bytes, also after a restart."""
    settings = {"sites": 2, "rounds": 2}

    def train(site: str) -> None:
        with atoll.join(server.url, site=site, folder=tmp_path / "workers") as worker:
            for fl_round in worker:
                model = fl_round.load_into(tiny())
                began_s = time.monotonic()
                while time.monotonic() - began_s < 0.05:
                    pass
                fl_round.submit(model, weight=weights[site], steps=3, metrics={"loss": weights[site]})

    weights = {"a": 1.0, "b": 3.0}
    with plain_server(tmp_path, tiny(), **settings) as server:
        together(*(partial(train, site) for site in weights))
        server.run()
    path, status = server.exports / "metrics.jsonl", server.status()
    told = [json.loads(line)["sites"] for line in path.read_text().splitlines()]
    facts = ("site", "weight", "steps", "metrics", "staleness")
    for sites in told:
        assert [[site[name] for name in facts] for site in sites] == [
            ["a", 1.0, 3, {"loss": 1.0}, 0],
            ["b", 3.0, 3, {"loss": 3.0}, 0],
        ]
        assert all(site["train_seconds"] >= 0.05 and site["wait_seconds"] > 0 for site in sites)
    assert len({site["nbytes"] for sites in told for site in sites}) == 1
    assert [worker.last and worker.last.model_dump() for worker in status.workers] == told[-1]
    path.unlink()
    with plain_server(tmp_path, tiny(), **settings) as server:
        assert [worker.last for worker in server.status().workers] == [worker.last for worker in status.workers]
    assert [json.loads(line)["sites"] for line in path.read_text().splitlines()] == told


def test_a_start_completes_the_metrics_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its start, the server adds the rounds that `metrics.jsonl` lacks, and repairs an incomplete or
    repeated line.
    """
    # The start compares only the last rounds of the file: here 3, in general 20. It compares the whole file only if
    # those rounds differ.
    monkeypatch.setattr(status_messages, "HISTORY", 3)
    with World(tmp_path, {"w": torch.zeros(2)}, "a", rounds=6) as world:
        world.rounds(1.0, 1, 2, 3, 4, 5)
        world.wait(5)
        path = world.server.exports / "metrics.jsonl"
        wait_until(lambda: len(path.read_bytes().splitlines()) == 5, "the metrics of five rounds")
        told, number = path.read_bytes(), path.stat().st_ino
        lines = told.splitlines(keepends=True)
        first_lost = b"{}\n" + b"".join(lines[1:])
        for left, is_same, after in (
            (b"".join(lines[:3]), True, told),  # killed before two appends
            (first_lost, True, first_lost),  # what stands before the last rounds is not read
            (told + lines[-1][:9], False, told),  # killed during an append
            (told + lines[-1], False, told),
            (b"", False, told),
        ):
            path.write_bytes(left)
            world.restart()
            assert (path.read_bytes(), path.stat().st_ino == number) == (after, is_same), left
            number = path.stat().st_ino
        world.rounds(1.0, 6)
        world.finish()
        assert path.read_bytes().splitlines(keepends=True)[:5] == lines


@pytest.mark.covers("L15", "F31")
def test_a_run_survives_huge_finite_numbers(tmp_path: Path) -> None:
    """If weights, metrics and updates are so large that their products or sums overflow, the model and the metrics'
    means are still finite.
    """
    model, rounds = {"w": torch.zeros(3, dtype=torch.float64)}, []
    largest = sys.float_info.max
    reports = {"a": {"perplexity": math.exp(705), "big": largest}, "b": {"big": largest}, "c": {"big": largest}}
    limits = {"aggregation.max_update_norm": 0.0}
    with plain_server(tmp_path, model, sites=3, rounds=1, **limits) as server:
        for site in [WireSite(server.url, name) for name in reports]:
            rounds.append(site.train(1e200, weight=50_000.0, metrics=reports[site.name]))
        for update in rounds:
            update.submit()
        assert server.wait(30)
        (told,) = server.status().history
        assert told.metrics == {"perplexity": math.exp(705), "big": largest}
        assert told.grad_norm is None, "it is not finite"
    result = load_file(server.exports / "model.safetensors")
    assert result["w"].tolist() == pytest.approx([1e200] * 3)


def test_refuses_weights_that_may_overflow(tmp_path: Path) -> None:
    """The server refuses an `aggregation.max_weight` so large that a sum of weights could overflow."""
    with pytest.raises(ConfigError, match="max_weight"):
        plain_server(tmp_path, tiny(), **{"aggregation.max_weight": 1.7e308})


WORKERS, ROUNDS = 200, 2


@pytest.mark.covers("L17")
async def test_two_hundred_workers_take_part_in_every_round(tmp_path: Path) -> None:
    """Two hundred workers wait for a version, download it and send updates at the same time. Each takes part in every
    round.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    connector = aiohttp.TCPConnector(limit=0)
    with plain_server(tmp_path, model, rounds=ROUNDS, sites=WORKERS) as server:
        async with asyncio.timeout(240), aiohttp.ClientSession(connector=connector) as session:
            crowd = await Crowd.at(server.url, session, train_s=0.0)
            await asyncio.gather(*(crowd.one(session, f"w-{number:03}") for number in range(WORKERS)))
        assert not crowd.errors
        assert [worker.rounds for worker in server.status().workers] == [ROUNDS] * WORKERS
        server.run()
    # every update is 1e-3 everywhere, so is their mean, and each of two rounds takes it off
    after = load_file(server.exports / "model.safetensors")
    for name, value in before.items():
        torch.testing.assert_close(after[name], value - 2e-3, rtol=0, atol=1e-6)


@pytest.mark.covers("L24", "L14")
def test_a_zero_pseudo_gradient_causes_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a DiLoCo round leaves the parameters unchanged, here with a learning rate of 0, the log warns that the
    pseudo-gradient is zero.
    """
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {"algorithm.name": "diloco", "rounds.total": 1, "diloco.sync_every": 1}
    with plain_server(tmp_path, nn.Linear(2, 2), **settings) as server:
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as diloco:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        figures = diloco.sync_metrics
        assert (figures["rounds"], figures["bytes_up"] > 0, figures["bytes_down"] > 0) == (1, True, True)
        (worker,) = server.status().workers
        assert worker.bytes_down == figures["bytes_down"]
    assert "the update is all zero after 1 step" in caplog.text


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.covers("P18", "D1", "D9", "P8")
@pytest.mark.parametrize(("workers", "codec"), [(4, "none"), (2, "int8")], ids=["whole", "int8-both-ways"])
def test_a_larger_model_takes_no_more_memory(workers: int, codec: str) -> None:
    """With a model three times as large, neither the server nor the workers take more memory, since versions and
    updates are in files.
    """
    # 0.18 GB against 0.06 GB of anonymous memory. `python bench/largest_round.py` shows this with 5 GB, or with as much
    # as fits.
    how: dict[str, Any] = {"workers": workers, "rounds": 2, "tensors": 20, "codec": codec, "downlink_codec": codec}
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
def test_the_largest_round_fits_disk_and_memory(disk: int, memory: int, fits: float) -> None:
    """The bench program `largest_round` chooses the largest model, up to 5 GB, that fits the free disk space and
    memory.
    """
    # Free space for files limits it to 0.9 · disk / 17, and free memory to 0.75 · memory / 4.
    assert largest_round.largest_gb(5.0, 4, disk, memory) == fits


@pytest.mark.slow
@pytest.mark.covers("P18", "D1", "D9")
def test_the_largest_round_program_reports_success(tmp_path: Path) -> None:
    """The bench program `largest_round` compares rounds of two model sizes, prints the sizes and the result, and ends
    with code 0.
    """
    words = ("--gb=0.1", "--workers=1", "--rounds=2", f"--dir={tmp_path}")
    argv = [sys.executable, str(Path(largest_round.__file__)), *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ok"]
    assert said["gb"] == [0.01, 0.1]
    assert "0.1 GB × 1 worker" in done.stderr


@pytest.mark.covers("D2")
def test_receiving_a_part_builds_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the server receives a part, it creates no torch tensor and holds less than half of the part's bytes in
    Python objects.
    """
    from atoll.transport import request_body

    made, peak_bytes = list[str](), list[int]()
    receive, receiving = request_body.receive_part, threading.local()

    async def spied(*arguments: Any, **options: Any) -> bytes:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        receiving.on = True
        try:
            return await receive(*arguments, **options)
        finally:
            receiving.on = False
            peak_bytes.append(tracemalloc.get_traced_memory()[1] - before)

    def noted(name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if getattr(receiving, "on", False):
            made.append(name)
        return function(*arguments, **options)

    for name in ("frombuffer", "from_numpy", "empty", "zeros", "tensor"):
        monkeypatch.setattr(torch, name, partial(noted, name, getattr(torch, name)))
    monkeypatch.setattr("atoll.server.http.byte_routes.receive_part", spied)
    model = nn.Linear(4000, 4000, bias=False)  # 64 MB: four parts
    with plain_server(tmp_path, model, **{"network.connections": 1}) as server:
        update = WireSite(server.url).train()
        tracemalloc.start()
        try:
            for part in range(len(update.parts)):
                assert answer(update.begin(part, update.body(part)))[0] == 204
        finally:
            tracemalloc.stop()
    assert len(peak_bytes) == 4
    assert made == []
    assert max(peak_bytes) < 8 * 2**20  # of parts of 16 MiB


def test_many_tensors_travel_as_one_stream(tmp_path: Path) -> None:
    """A model of 5,000 small tensors is uploaded in one part: the number of requests does not depend on the number of
    tensors.
    """
    model = {f"layer.{index}": torch.full((3,), float(index)) for index in range(5000)}
    with plain_server(tmp_path, model, rounds=1) as server:
        with ManualSite(server.url, site="a", folder=tmp_path / "w") as client:
            assert client.next_round() == 1
            state = client.pull()
            assert torch.equal(state["layer.4999"], torch.full((3,), 4999.0))
            client.submit({name: tensor + 1.0 for name, tensor in state.items()})
            assert client.next_round() is None
            final = server.status()
    # one part: 5,000 segments of 64 bytes (12 and padding), 32 bytes of BLAKE3, and the message with the digest
    assert 64 < final.bytes_up - (5000 * 64 + 32) < 512
