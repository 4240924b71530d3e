"""What is in the model and the base file after a pull, whatever happened on the way."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.errors import Gone, ServerUnreachable, StoreError
from atoll.tensors.layout import Part
from atoll.tensors.module_tensors import named_tensors
from atoll.transport.part_transfer import HttpTransfer
from atoll.worker.exchange import base_and_outbox
from atoll.worker.exchange.base_and_outbox import BaseNote
from atoll.worker.exchange.participation import take_part


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    torch.manual_seed(0)
    with plain_server(tmp_path, nn.Linear(300, 100), part_bytes=2**16) as server:
        yield server


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return named_tensors(nn.Linear(300, 100))[0]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


@pytest.mark.covers("F1", "P8")
def test_a_resumed_pull_fills_the_model_too(server: atoll.Server, tmp_path: Path) -> None:
    """Guards against `pull` without `load_` where it was resumed: the model kept what it had for the parts that were
    there.
    """
    place = take_part(server.url, "a", folder=tmp_path / "w")
    ticket = place.exchange.ask().ticket
    assert ticket is not None
    place.exchange.pull(ticket.base, None)
    note = place.exchange.base.note
    assert note is not None
    place.exchange.base.begin(BaseNote(**{**note.__dict__, "complete": False}))  # as a kill before `finish` leaves it
    part = place.exchange.local.layouts.version.parts[1]
    place.exchange.base.write(part.start, memoryview(bytes(100)))
    tensors = model(seed=9)
    place.exchange.pull(ticket.base, tensors)
    assert same(tensors, model())
    place.leave()


@pytest.mark.covers("P8")
def test_a_pull_that_breaks_off_goes_on_with_the_parts_that_are_missing(
    server: atoll.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = take_part(server.url, "a", folder=tmp_path / "w")
    ticket = place.exchange.ask().ticket
    assert ticket is not None
    asked: list[list[int]] = []

    def pull(path: str, digests: Sequence[bytes], parts: Sequence[Part], *rest: Any, **more: Any) -> None:
        asked.append([part.index for part in parts])
        if len(asked) == 1:
            really(path, digests, parts[:1], *rest, **more)
            raise ServerUnreachable("The network is gone.")
        really(path, digests, parts, *rest, **more)

    really = place.exchange.transfer.pull
    monkeypatch.setattr(place.exchange.transfer, "pull", pull)
    tensors = model(seed=9)
    place.exchange.pull(ticket.base, tensors)
    assert asked == [[0, 1, 2], [1, 2]]
    assert same(tensors, model())
    place.leave()


class HalfFrozen(nn.Module):
    """Two parts, one of which no round changes."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.full((2**14,), value), requires_grad=False)
        self.trained = nn.Parameter(torch.full((2**14,), value))


@pytest.mark.covers("F1", "P8")
@pytest.mark.parametrize("arrived", [0, 1])
def test_a_part_that_is_as_it_was_comes_into_a_model_that_has_not_got_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrived: int
) -> None:
    """The base file has it of the version before, so a look at the file would leave it out behind a broken attempt."""
    really, cut = HttpTransfer.pull, [False]

    def pull(
        self: HttpTransfer, path: str, digests: Sequence[bytes], parts: Sequence[Part], *rest: Any, **more: Any
    ) -> None:
        if cut[0]:
            cut[0] = False
            really(self, path, digests, parts[:arrived], *rest, **more)
            raise ServerUnreachable("The network is gone.")
        really(self, path, digests, parts, *rest, **more)

    monkeypatch.setattr(HttpTransfer, "pull", pull)
    with plain_server(tmp_path, HalfFrozen(1.0), rounds=2, part_bytes=2**16) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                cut[0] = fl_round.number == 2
                model = fl_round.load_into(HalfFrozen(-7.0))  # a new one in each round
                assert not cut[0]
                assert model.frozen.unique().tolist() == [1.0]
                assert model.trained.unique().tolist() == [float(fl_round.number)]
                with torch.no_grad():
                    model.trained += 1
                fl_round.submit(model)


@pytest.mark.covers("F3")
def test_a_note_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `write_note` that writes into the note itself."""
    path = tmp_path / "base.json"
    note = BaseNote("run", 0, 1, "0" * 64, [], True)
    base_and_outbox.write_note(path, note)

    def half(self: Path, text: str, *_: object, **__: object) -> int:
        with open(self, "w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(StoreError, match="No space left"):
        base_and_outbox.write_note(path, BaseNote("run", 0, 2, "1" * 64, [], True))
    assert base_and_outbox.read_note(path, BaseNote) == note


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
    pull, broken = HttpTransfer.pull, [True]

    def once(self: HttpTransfer, path: str, digests: Any, parts: Sequence[Part], sinks: Any, **more: Any) -> None:
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


@pytest.mark.covers("P8")
def test_a_pull_fills_large_small_and_turned_tensors_alike(tmp_path: Path) -> None:
    """Parts of 1 MiB; `large` (1.2 MB) is received where it is, in runs of at least `ROOM_BYTES`, the others not."""
    torch.manual_seed(3)
    source = {"large": torch.randn(600, 500), "turned": torch.randn(400, 300).t(), "small": torch.randn(7)}
    with plain_server(tmp_path, source, part_bytes=2**20) as server:
        place = take_part(server.url, "a", folder=tmp_path / "w")
        ticket = place.exchange.ask().ticket
        assert ticket is not None
        for _ in range(2):  # the second time from the base file, which has all of it, too
            target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
            place.exchange.pull(ticket.base, target)
            assert same(target, source)
        place.leave()
