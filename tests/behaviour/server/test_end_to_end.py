"""A server and workers in one process, over real sockets and files: the whole way of an update."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from harness.processes import free_port
from kit.client import Client
from kit.servers import plain_server
from kit.sites import clients, together
from torch import nn

import atoll
from atoll.errors import AtollError, SchemaMismatch
from atoll.testing.run import status


def tiny(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def serve(folder: Path, model: nn.Module | None, **settings: Any) -> atoll.Server:
    return plain_server(folder, model, **settings).start()


def add(model: nn.Module, amount: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount)


finals: dict[str, dict[str, torch.Tensor]] = {}


def federated(server: atoll.Server, folder: Path, site: str, amount: float, weight: float) -> Callable[[], None]:
    def job() -> None:
        model = tiny(seed=99)
        with atoll.join(server.url, site=site, folder=folder / "workers") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                add(model, amount)
                model[1].num_batches_tracked += int(amount)
                fl_round.submit(model, weight=weight, metrics={"loss": amount})
            final = worker.load_into(tiny(seed=7))
        assert finals.setdefault(server.url, final.state_dict()).keys() == final.state_dict().keys()
        for name, tensor in final.state_dict().items():
            assert torch.equal(finals[server.url][name], tensor), name  # every site ends with the same bits

    return job


@pytest.mark.covers("D1", "P8", "L15", "L22")
def test_fedavg_takes_the_weighted_mean_and_the_result_loads_strictly(tmp_path: Path) -> None:
    start = tiny()
    server = serve(tmp_path, start, **{"rounds.sites": 2, "rounds.total": 2})
    together(federated(server, tmp_path, "a", 1.0, 1.0), federated(server, tmp_path, "b", 4.0, 2.0))
    assert server.wait(30)
    server.run()
    result = safetensors.torch.load_file(server.exports / "model.safetensors")
    model = tiny(seed=5)
    model.load_state_dict(result, strict=True)
    for name, parameter in start.named_parameters():
        # a round moves by (1·1 + 2·4) / 3 = 3; in pseudo-gradient form, twice, in fp32
        theta = parameter.detach().clone()
        for _ in range(2):
            u_a, u_b = theta - (theta + 1.0), theta - (theta + 4.0)
            g = u_a * (1 / 3)
            g.add_(u_b, alpha=2 / 3)
            theta = theta - g
        assert torch.equal(result[name], theta), name
    # integer counters take the maximum: 0 → max(0 + 1, 0 + 4) → max(4 + 1, 4 + 4)
    assert result["1.num_batches_tracked"].item() == 8
    lines = [json.loads(line) for line in (server.exports / "metrics.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == [1, 2]
    assert lines[0]["metrics"]["loss"] == pytest.approx(3.0)
    assert lines[0]["counts"] == {"loss": 2}
    elements = sum(parameter.numel() for parameter in start.parameters())  # each has the mean pseudo-gradient −3
    assert [line["grad_norm"] for line in lines] == [pytest.approx(3 * elements**0.5, rel=1e-5)] * 2
    assert lines[0]["workers"] == ["a", "b"]


@pytest.mark.covers("L2", "L4")
def test_diloco_synchronises_every_h_steps_around_any_loop(tmp_path: Path) -> None:
    """H = 2, SGD inner lr 1 on a gradient of constant 1 (or 3): a worker's round moves its weight by −2 (−6)."""
    settings = {
        "algorithm.name": "diloco",
        "rounds.sites": 2,
        "rounds.total": 3,
        "diloco.sync_every": 2,
        "aggregation.upload_codec.name": "none",
        "algorithm.outer_optimizer.lr": 0.5,
        "algorithm.outer_optimizer.momentum": 0.0,
    }
    server = serve(tmp_path, nn.Linear(1, 1, bias=False), **settings)
    ends: dict[str, float] = {}

    def job(site: str, slope: float) -> Callable[[], None]:
        def run() -> None:
            model = nn.Linear(1, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with atoll.DiLoCo(model, optimizer, server=server.url, site=site, folder=tmp_path / "workers") as diloco:
                for _ in range(6):
                    optimizer.zero_grad()
                    (slope * model.weight.sum()).backward()
                    optimizer.step()
                assert diloco.finished
                assert diloco.rounds == 3
            ends[site] = model.weight.item()

        return run

    begin = safetensors.torch.load_file(server.save_state(tmp_path / "begin.safetensors"))["weight"].item()
    together(job("a", 1.0), job("b", 3.0))
    assert server.wait(30)
    server.run()
    # the mean pseudo-gradient is (2 + 6) / 2 = 4; the outer step is 0.5 · 4 = 2; three rounds
    assert ends["a"] == ends["b"]
    assert ends["a"] == pytest.approx(begin - 6.0, abs=1e-5)


@pytest.mark.covers("L1", "L11")
@pytest.mark.parametrize("restarted", [False, True])
def test_the_outer_momentum_goes_on_from_round_to_round(tmp_path: Path, restarted: bool) -> None:
    """Nesterov, lr and μ ½, u = 2 twice: m = 2, θ1 = 8 − ½·(2 + ½·2) = 6.5; m = ½·2 + 2, θ2 = 6.5 − ½·(2 + ½·3)."""
    start = nn.Linear(1, 1, bias=False)
    nn.init.constant_(start.weight, 8.0)
    settings: dict[str, Any] = {
        "algorithm.name": "diloco",
        "aggregation.upload_codec.name": "none",
        "algorithm.outer_optimizer.lr": 0.5,
        "algorithm.outer_optimizer.momentum": 0.5,
        "network.port": free_port(),
        "rounds.total": 2,
    }
    server = serve(tmp_path, start, **settings)
    with Client(server.url, site="a", folder=tmp_path / "workers") as client:
        for theta in (8.0, 6.5):
            assert client.next_round() is not None
            weight = client.pull()["weight"]
            assert weight.item() == theta
            client.submit({"weight": weight - 2.0})
            if restarted:
                server.stop()
                server = serve(tmp_path, None, **settings)
        assert client.next_round() is None
    server.run()
    assert safetensors.torch.load_file(server.exports / "model.safetensors")["weight"].item() == 4.75


@pytest.mark.covers("F30", "X3")
def test_another_architecture_is_refused_with_both_digests_and_the_first_difference(tmp_path: Path) -> None:
    with plain_server(tmp_path, tiny()) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers") as worker:
            fl_round = next(iter(worker))
            sent = server.status().bytes_down
            with pytest.raises(SchemaMismatch, match=r"0\.weight F32\[5, 3\].*0\.weight F32\[4, 3\]"):
                fl_round.load_into(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))
            assert server.status().bytes_down == sent


def test_a_run_that_is_finished_has_its_metrics_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round's line waits for those before it; the result is there meanwhile, and the server may be stopped."""
    from atoll.server.coordinator.background_writes import Exports

    append, save, saved = Exports.append_metrics, Exports.save, threading.Event()

    def late(self: Exports, summary: Any, at: str) -> None:
        saved.wait(10)  # so the line of round 2 has not begun when the result is there
        append(self, summary, at)

    def save_and_tell(self: Exports, *heads: Any) -> Path:
        path = save(self, *heads)
        threading.Timer(0.2, saved.set).start()
        return path

    monkeypatch.setattr(Exports, "append_metrics", late)
    monkeypatch.setattr(Exports, "save", save_and_tell)
    server = serve(tmp_path, tiny(), **{"rounds.sites": 1, "rounds.total": 2})
    federated(server, tmp_path, "a", 1.0, 1.0)()
    server.run()
    lines = (server.exports / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]


@pytest.mark.covers("L13")
def test_status_names_the_sites_that_the_round_waits_for(tmp_path: Path) -> None:
    with plain_server(tmp_path, tiny(), **{"rounds.sites": 2}) as server:
        (first,) = clients(server, tmp_path, ["first"]).values()
        assert first.next_round(wait_s=0.0) is None
        waiting = status(server.url)
        assert "waits for 2 sites to join, 1 has" in waiting.fragments[0].reason
        assert waiting.policy == "barrier"
        (second,) = clients(server, tmp_path, ["second"]).values()
        assert (first.next_round(), second.next_round()) == (1, 1)
        first.submit(first.pull())
        assert [missing.site for missing in server.status().fragments[0].waiting_for] == ["second"]
        first.close()
        second.close()


def forget_to_submit(url: str, folder: Path) -> None:
    with atoll.join(url, site="a", folder=folder) as worker:
        for _ in worker:
            pass


@pytest.mark.covers("P6")
def test_a_round_that_was_not_submitted_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with plain_server(tmp_path, tiny()) as server:
        with pytest.raises(AtollError, match=r"Call fl_round\.submit"):
            forget_to_submit(server.url, tmp_path / "workers")
        assert server.status().workers[0].state == "failed"
        assert "submit" in server.status().workers[0].error


def test_the_same_scripts_run_without_a_server() -> None:
    model = tiny()
    with atoll.join() as worker:
        for fl_round in worker:
            fl_round.submit(fl_round.load_into(model), weight=5, metrics={"loss": 0.1})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.DiLoCo(model, optimizer) as diloco:
        optimizer.step()
    assert diloco.rounds == 0
