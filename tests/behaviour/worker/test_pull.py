"""What is in the model and the base file after a pull, whatever happened on the way."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.proxy import Fault, Proxy
from kit import rewrite_note
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.errors import Gone


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    torch.manual_seed(0)
    with plain_server(tmp_path, nn.Linear(300, 100), part_bytes=2**16, **{"network.connections": 1}) as server:
        yield server


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return dict(nn.Linear(300, 100).state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


@pytest.mark.covers("F1", "P8")
def test_a_resumed_pull_fills_the_model_too(server: atoll.Server, tmp_path: Path) -> None:
    """Guards against a resumed pull that leaves the model what it had for the parts that were there."""
    with atoll.join(server.url, "a", folder=tmp_path / "w") as worker:
        worker.next_round().load_into(model())
    (base,) = tmp_path.rglob("base.safetensors")
    rewrite_note(base.with_suffix(".json"), complete=False)  # as a kill before the end leaves it
    with base.open("r+b") as file:
        file.seek(2**16)
        file.write(bytes(100))
    with atoll.join(server.url, "a", folder=tmp_path / "w") as worker:
        assert same(worker.next_round().load_into(model(seed=9)), model())
        assert 0 < worker.bytes_down <= 2**16


@pytest.mark.covers("P8")
def test_a_pull_that_breaks_off_goes_on_with_the_parts_that_are_missing(server: atoll.Server, tmp_path: Path) -> None:
    """Every part is a request: the second one is broken off, and no other is sent twice."""
    requests = "GET .*/versions/0/[0-9a-f]{64}"
    with Proxy(server.port) as proxy:
        fault = Fault(requests, "down", 60_000, "reset")  # parts of 49 kB, 64 KiB and 6 kB
        proxy.faults.append(fault)
        with atoll.join(proxy.url, "a", folder=tmp_path / "w") as worker:
            assert same(worker.next_round().load_into(model(seed=9)), model())
        assert fault.reached.is_set()
        assert proxy.count(requests) == 3 + 1


class HalfFrozen(nn.Module):
    """Three parts; the first and the half of the second are of a tensor that no round changes."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.full((2**14,), value), requires_grad=False)
        self.trained = nn.Parameter(torch.full((2**14,), value))


@pytest.mark.covers("F1", "P8")
@pytest.mark.parametrize("at", [1000, 60_000], ids=["first part", "second part"])
def test_a_part_that_is_as_it_was_comes_into_a_model_that_has_not_got_it(tmp_path: Path, at: int) -> None:
    """The base file has it of the version before, so a look at the file would leave it out behind a broken attempt."""
    settings = {"rounds": 2, "part_bytes": 2**16, "network.connections": 1}
    with plain_server(tmp_path, HalfFrozen(1.0), **settings) as server, Proxy(server.port) as proxy:
        fault = Fault("GET .*/versions/1/[0-9a-f]{64}", "down", at, "reset")
        proxy.faults.append(fault)
        with atoll.join(proxy.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                model = fl_round.load_into(HalfFrozen(-7.0))  # a new one in each round
                assert fault.reached.is_set() == (fl_round.number == 2)
                assert model.frozen.unique().tolist() == [1.0]
                assert model.trained.unique().tolist() == [float(fl_round.number)]
                with torch.no_grad():
                    model.trained += 1
                fl_round.submit(model)


@pytest.mark.covers("P8")
def test_a_pull_fills_large_small_and_turned_tensors_alike(tmp_path: Path) -> None:
    """Parts of 1 MiB; `large` (1.2 MB) is received where it is, the others are not."""
    torch.manual_seed(3)
    source = {"large": torch.randn(600, 500), "turned": torch.randn(400, 300).t(), "small": torch.randn(7)}
    with plain_server(tmp_path, source, part_bytes=2**20) as server:
        with atoll.join(server.url, "a", folder=tmp_path / "w") as worker:
            fl_round = worker.next_round()
            for _ in range(2):  # the second time from the base file, which has all of it, too
                assert same(fl_round.load_into({name: torch.zeros_like(each) for name, each in source.items()}), source)


def falling(folder: Path, size: int, rounds: int, outer_lr: float) -> atoll.Server:
    """DiLoCo with H = 2: all weights begin at 8, and each inner step of `fall` takes 1 from them."""
    settings = {
        "diloco.sync_every": 2,
        "aggregation.upload_codec.name": "none",
        "algorithm.outer_optimizer.lr": outer_lr,
        "algorithm.outer_optimizer.momentum": 0.0,
        "network.part_bytes": 2**16,
    }
    start = nn.Linear(size, size, bias=False)
    nn.init.constant_(start.weight, 8.0)
    return plain_server(folder, start, algorithm="diloco", sites=1, rounds=rounds, **settings)


def fall(model: nn.Linear, optimizer: torch.optim.Optimizer, poison: bool = False) -> None:
    optimizer.zero_grad()
    model.weight.sum().backward()
    if poison:
        assert model.weight.grad is not None
        model.weight.grad.fill_(float("nan"))
    optimizer.step()


@pytest.mark.covers("F31")
def test_diloco_goes_on_from_the_global_model_when_its_update_is_refused(tmp_path: Path) -> None:
    """NaN at the first synchronisation, then −1 twice."""
    with falling(tmp_path, 1, rounds=1, outer_lr=1.0) as server:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as diloco:
            for number in range(4):
                fall(model, optimizer, poison=number == 1)
                if number == 1:
                    assert model.weight.item() == 8.0
            assert diloco.finished
        assert model.weight.item() == 6.0
        assert server.status().refused == 1


@pytest.mark.parametrize(
    ("size", "rounds", "outer_lr", "arrived", "left"),
    [(1, 1, 0.5, 0, 7.0), (300, 2, 1.0, 1, 4.0)],  # 8 − 0.5·2, and 8 − 2 − 2: the second model has six parts
    ids=["of the result", "in the middle"],
)
def test_a_pull_that_ends_with_gone_is_begun_anew_and_no_step_is_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    rounds: int,
    outer_lr: float,
    arrived: int,
    left: float,
) -> None:
    from atoll.transport.part_transfer import HttpTransfer

    pull, broken = HttpTransfer.pull, [True]

    def once(self: HttpTransfer, path: str, digests: Any, parts: Any, sinks: Any, **more: Any) -> None:
        if broken:
            broken.clear()
            pull(self, path, digests, parts[:arrived], sinks, **more)
            raise Gone("revoked", "pull again")
        pull(self, path, digests, parts, sinks, **more)

    with falling(tmp_path, size, rounds, outer_lr) as server:
        model = nn.Linear(size, size, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as diloco:
            monkeypatch.setattr(HttpTransfer, "pull", once)
            while not diloco.finished:
                fall(model, optimizer)
            assert diloco.step == 2 * rounds
        assert model.weight.detach().unique().tolist() == [left]
