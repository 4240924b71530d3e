"""A note beside base or outbox survives what the bytes may not: the file is read once before its note is believed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.errors import UsageError
from atoll.testing.run import failpoints

TILE = 4096
"""Elements of a tensor that no part divides."""


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(300, 100)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with plain_server(tmp_path, model(), sites=1, part_bytes=2**16) as server:
        yield server


def only(folder: Path, name: str) -> Path:
    (path,) = folder.rglob(name)
    return path


def remove(path: Path) -> None:
    path.unlink()


def shorten(path: Path) -> None:
    os.truncate(path, 1000)


def zero(path: Path) -> None:
    """What a power loss leaves of a preallocated file after its note was written."""
    path.write_bytes(bytes(path.stat().st_size))


def nothing(path: Path) -> None:
    """It is what its note says."""


def damage_one_part(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(70_000)
        file.write(b"\xff" * 100)


DAMAGES = [(nothing, []), (remove, [0, 1, 2]), (shorten, [0, 1, 2]), (zero, [0, 1, 2]), (damage_one_part, [1])]
"""What happens to a file of three parts, and which of them are pulled again."""


@pytest.mark.covers("F41", "F1")
@pytest.mark.parametrize(("damage", "parts"), DAMAGES)
def test_a_base_that_is_not_what_its_note_says_is_pulled_again(
    server: atoll.Server,
    tmp_path: Path,
    damage: Callable[[Path], None],
    parts: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "atoll")
    with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
        next(iter(worker)).load_into(model())
    base = only(tmp_path, "base.safetensors")
    content = base.read_bytes()
    damage(base)
    with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
        mine = nn.Linear(300, 100)
        fl_round = worker.next_round()
        fl_round.load_into(mine)
        fl_round.load_into(mine)
        header = 8 + int.from_bytes(content[:8], "little")
        sizes = [header + 3 * 4 * TILE, 4 * 4 * TILE]  # of at most 64 KiB, to the end of a tile
        sizes.append(len(content) - sum(sizes))
        assert worker.bytes_down == sum(sizes[part] for part in parts)
    assert base.read_bytes() == content
    assert torch.equal(mine.weight, model().weight)
    assert torch.equal(mine.bias, model().bias)
    told = [line for line in caplog.messages if "are downloaded again" in line]
    assert len(told) == (damage in (zero, damage_one_part))  # of one that is gone there is nothing to say


@pytest.mark.covers("F41")
def test_no_update_is_formed_against_a_damaged_base(server: atoll.Server, tmp_path: Path) -> None:
    """A training loop may have loaded the model in another way than `load_into`."""
    with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
        next(iter(worker)).load_into(model())
    damage_one_part(only(tmp_path, "base.safetensors"))
    with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
        round_ = next(iter(worker))
        with pytest.raises(UsageError, match="was not downloaded"):
            round_.submit(model())
        round_.load_into(model())
        round_.submit(model())


@pytest.mark.covers("F41", "F3")
@pytest.mark.parametrize("damage", [damage for damage, _ in DAMAGES[1:]])
def test_a_damaged_outbox_is_said_once_and_the_round_is_trained_again(
    server: atoll.Server, tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against an outbox with parts that the server refuses at every start of the worker, for ever."""
    with Proxy(server.port) as proxy, atoll.join(proxy.url, site="a", folder=tmp_path / "w") as worker:
        proxy.faults += [Fault("PUT .*", "up", BEFORE_HEADER, "reset") for _ in range(100)]  # no part arrives
        fl_round = worker.next_round()
        trained = fl_round.load_into(model())
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.sub_(1.0)  # an update of zeros would be whole in a file of zeros
        with failpoints("outbox.sealed=eio"), pytest.raises(OSError, match="failpoint"):
            fl_round.submit(trained)
    damage(only(tmp_path, "outbox.bin"))
    caplog.set_level(logging.WARNING, "atoll")
    with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
        round_ = next(iter(worker))
        assert round_.number == 1
        assert len([line for line in caplog.messages if "outbox.bin is damaged" in line]) == 1
        assert not list(tmp_path.rglob("outbox.json"))
        round_.submit(round_.load_into(model()))
