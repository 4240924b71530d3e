"""What is in the model and in the files of a site after a pull and at the next start, whatever happened on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import rewrite_note, tensors_digest
from kit.digests import same
from kit.world import World
from torch import Tensor, nn

from atoll.cli import export
from atoll.errors import Gone, PartCorrupt, UsageError
from atoll.filters import Filter
from atoll.store.versions import Versions
from atoll.testing.run import failpoints
from atoll.transport.part_transfer import HttpTransfer


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Its versions have three parts."""
    with World(tmp_path, model(), "a", part_bytes=2**16, **{"network.connections": 1}) as world:
        yield world


def model(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(300, 100)


def pulled_once(world: World) -> Path:
    """A site pulls a version, and ends; its base."""
    with world.worker() as worker:
        worker.next_round().load_into(model())
    (base,) = world.workers.rglob("base.safetensors")
    return base


@pytest.mark.covers("F1", "P8")
def test_a_resumed_pull_fills_the_whole_model(world: World, tmp_path: Path) -> None:
    """A resumed pull loads the whole model, including the parts that were downloaded before the interruption. Only the
    damaged part is downloaded again.
    """
    base = pulled_once(world)
    rewrite_note(base.with_suffix(".json"), complete=False)  # as a kill before the end leaves it
    with base.open("r+b") as file:
        file.seek(2**16)
        file.write(bytes(100))
    with world.worker() as worker:
        assert same(worker.next_round().load_into(model(seed=9)), model())
        assert 0 < worker.bytes_down <= 2**16


class HalfFrozen(nn.Module):
    """Three parts; the first and the half of the second are of a tensor that no round changes."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.full((2**14,), value), requires_grad=False)
        self.trained = nn.Parameter(torch.full((2**14,), value))


@pytest.mark.covers("F1", "P8")
@pytest.mark.parametrize("at", [1000, 60_000], ids=["first part", "second part"])
@pytest.mark.usefixtures("pulled_apart")
def test_unchanged_parts_reach_a_new_model(tmp_path: Path, at: int) -> None:
    """A pull into a new model also loads the tensors that have not changed since the last version, even if the download
    breaks off once.
    """
    # The base file has the unchanged part from the version before. Guards against a second attempt that finds this part
    # in the file and does not load it.
    settings = {"rounds": 2, "part_bytes": 2**16, "network.connections": 1}
    with World(tmp_path, HalfFrozen(1.0), "a", **settings) as world, Proxy(world.server.port) as proxy:
        fault = Fault("GET .*/versions/1/[0-9a-f]{64}", "down", at, "reset")
        proxy.faults.append(fault)
        with world.worker(server=proxy.url) as worker:
            for fl_round in worker:
                model = fl_round.load_into(HalfFrozen(-7.0))  # a new one in each round
                assert fault.reached.is_set() == (fl_round.number == 2)
                assert model.frozen.unique().tolist() == [1.0]
                assert model.trained.unique().tolist() == [float(fl_round.number)]
                with torch.no_grad():
                    model.trained += 1
                fl_round.submit(model)


@pytest.mark.covers("P8")
def test_a_pull_fills_every_kind_of_tensor(tmp_path: Path) -> None:
    """A pull loads large, small and transposed tensors. The second pull takes all of them from the base file."""
    # Parts have 1 MiB. `large` (1.2 MB) is received directly into its memory, the other tensors are not.
    torch.manual_seed(3)
    source = {"large": torch.randn(600, 500), "turned": torch.randn(400, 300).t(), "small": torch.randn(7)}
    with World(tmp_path, source, "a", part_bytes=2**20) as world:
        world.ask()
        for _ in range(2):  # the second time from the base file, which has all of it, too
            pulled = world.sites["a"].pull({name: torch.zeros_like(each) for name, each in source.items()})
            assert tensors_digest(pulled) == tensors_digest(source)


@pytest.mark.parametrize(
    ("size", "rounds", "outer_lr", "arrived", "left"),
    [(1, 1, 0.5, 0, 7.0), (300, 2, 1.0, 1, 4.0)],  # 8 − 0.5·2, and 8 − 2 − 2: the second model has six parts
    ids=["of the result", "in the middle"],
)
def test_a_pull_starts_again_after_a_gone_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, rounds: int, outer_lr: float, arrived: int, left: float
) -> None:
    """If a pull fails with `Gone`, the DiLoCo loop pulls again and loses no local step."""
    # With H = 2, all weights start at 8, and each inner step subtracts 1. One round with an outer rate of 0.5 leaves 8
    # − 0.5·2 = 7. Two rounds with a rate of 1 leave 8 − 2 − 2 = 4.
    pull, broken = HttpTransfer.pull, [True]

    def once(self: HttpTransfer, path: str, digests: Any, parts: Any, sinks: Any, **more: Any) -> None:
        if broken:
            broken.clear()
            pull(self, path, digests, parts[:arrived], sinks, **more)
            raise Gone("revoked", "pull again")
        pull(self, path, digests, parts, sinks, **more)

    start, model = (nn.Linear(size, size, bias=False) for _ in range(2))
    nn.init.constant_(start.weight, 8.0)
    outer = {"algorithm.outer_optimizer.lr": outer_lr, "algorithm.outer_optimizer.momentum": 0.0}
    run = {"algorithm": "diloco", "rounds": rounds, "H": 2, "codec": "none", "part_bytes": 2**16}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with World(tmp_path, start, "a", **run, **outer) as world, world.diloco(model, optimizer) as loop:
        monkeypatch.setattr(HttpTransfer, "pull", once)
        while not loop.finished:
            model.weight.grad = torch.ones(size, size)
            optimizer.step()
        assert loop.step == 2 * rounds
    assert model.weight.detach().unique().tolist() == [left]


# -- a note beside base or outbox survives what the bytes may not: the file is read once before its note is believed

TILE = 4096
"""Elements of a tensor that no part divides."""


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


DAMAGES = [(nothing, []), (Path.unlink, [0, 1, 2]), (shorten, [0, 1, 2]), (zero, [0, 1, 2]), (damage_one_part, [1])]
"""What happens to a file of three parts, and which of them are pulled again."""


@pytest.mark.covers("F41", "F1")
@pytest.mark.parametrize(("damage", "parts"), DAMAGES)
def test_a_damaged_base_is_pulled_again(
    world: World, tmp_path: Path, damage: Callable[[Path], None], parts: list[int], warned: Callable[[], list[str]]
) -> None:
    """If a site's base file is missing, too short, all zeros or damaged in one part, the next pull downloads the wrong
    parts again.
    """
    # An intact base file is not downloaded. Damage in a file of the right length causes one warning.
    base = pulled_once(world)
    content = base.read_bytes()
    damage(base)
    with world.worker() as worker:
        fl_round, mine = worker.next_round(), model(seed=9)
        for _ in range(2):
            fl_round.load_into(mine)
        header = 8 + int.from_bytes(content[:8], "little")
        sizes = [header + 3 * 4 * TILE, 4 * 4 * TILE]  # of at most 64 KiB, to the end of a tile
        sizes.append(len(content) - sum(sizes))
        assert worker.bytes_down == sum(sizes[part] for part in parts)
    assert base.read_bytes() == content
    assert same(mine, model())
    # of one that is gone there is nothing to say
    assert len([line for line in warned() if "downloading them again" in line]) == (damage in (zero, damage_one_part))


@pytest.mark.covers("F41", "P6")
@pytest.mark.parametrize("changed", [{}, {"complete": False}, {"digest": "0" * 64}], ids=["bytes", "part", "other"])
def test_submit_requires_an_intact_base_file(world: World, tmp_path: Path, changed: dict[str, object]) -> None:
    """If the site's base file is damaged, incomplete or of another version, `submit` is refused until `load_into` has
    downloaded the version.
    """
    # A training loop may have loaded the model in another way than with `load_into`.
    base = pulled_once(world)
    if changed:
        rewrite_note(base.with_suffix(".json"), **changed)
    else:
        damage_one_part(base)
    with world.worker() as worker:
        fl_round = worker.next_round()
        with pytest.raises(UsageError, match="was not downloaded"):
            fl_round.submit(model())
        fl_round.submit(fl_round.load_into(model()))


@pytest.mark.covers("F41", "F3")
@pytest.mark.parametrize("damage", [damage for damage, _ in DAMAGES[1:]])
def test_a_site_retrains_after_its_outbox_is_damaged(
    world: World, tmp_path: Path, damage: Callable[[Path], None], warned: Callable[[], list[str]]
) -> None:
    """If a site's outbox file is damaged or missing, the restarted site warns once, discards the outbox, and trains the
    round again.
    """
    # Guards against an outbox with parts that the server refuses at every start of the worker.
    with Proxy(world.server.port) as proxy, world.worker(server=proxy.url) as worker:
        proxy.faults += [Fault("PUT .*", "up", BEFORE_HEADER, "reset") for _ in range(100)]  # no part arrives
        fl_round = worker.next_round()
        trained = fl_round.load_into(model())
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.sub_(1.0)  # an update of zeros would be whole in a file of zeros
        with failpoints("outbox.sealed=eio"), pytest.raises(OSError, match="failpoint"):
            fl_round.submit(trained)
    (outbox,) = tmp_path.rglob("outbox.bin")
    damage(outbox)
    with world.worker() as worker:
        fl_round = worker.next_round()
        assert fl_round.number == 1
        assert len([line for line in warned() if "outbox.bin is damaged" in line]) == 1
        assert not list(tmp_path.rglob("outbox.json"))
        fl_round.submit(fl_round.load_into(model()))


class Fails(Filter):
    """Breaks off while the second update is formed."""

    def __init__(self) -> None:
        self.updates = 0

    def begin(self, update: Any) -> None:
        self.updates += 1

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        if self.updates > 1:
            raise KeyboardInterrupt
        return values


@pytest.mark.covers("F3")
def test_a_new_update_first_invalidates_the_old_one(world: World, tmp_path: Path) -> None:
    """Before a site writes an update over the previous one, it removes the note that describes the previous one."""
    # Guards against a process that is killed half-way and leaves half of a new update beside an old note.
    with world.worker(filters=[Fails()]) as worker:
        fl_round = worker.next_round()
        fl_round.submit(fl_round.load_into(model()))
        assert list(tmp_path.rglob("outbox.json"))
        fl_round = worker.next_round()
        trained = fl_round.load_into(model())
        with pytest.raises(KeyboardInterrupt):
            fl_round.submit(trained)
        assert not list(tmp_path.rglob("outbox.json"))


@pytest.mark.covers("P8", "F41")
def test_a_version_must_match_its_digest(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the parts that a server sends do not make up the announced version, `load_into` and the export refuse the
    version.
    """
    # No file is exported. The manifest names the announced version, but lists the parts of another version, which
    # arrive intact.
    (slot,) = (tmp_path / "state" / "slots").glob("version-*.safetensors")
    content = bytearray(slot.read_bytes())
    content[-1] ^= 1
    with slot.open("r+b") as file:
        file.write(content)
    header = 8 + int.from_bytes(content[:8], "little")
    last, get = blake3(content[header + 7 * 4 * TILE :]).digest(), Versions.get
    monkeypatch.setattr(
        Versions, "get", lambda *key: replace(row := get(*key), part_digests=(*row.part_digests[:-1], last))
    )
    refused = pytest.raises(PartCorrupt, match="version 0 is not the expected one")
    with world.worker() as worker, refused:
        worker.next_round().load_into(model(seed=9))
    with pytest.raises(PartCorrupt, match="version 0 is not the expected one"):
        export.from_server(world.url, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.covers("F42")
def test_a_server_that_went_back_is_reported(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the server's version is older than the version that a site has trained from, the site's log says that the
    server went back.
    """
    # The server is at version 0, and the site has trained from version 5 of the same run.
    rewrite_note(pulled_once(world).with_suffix(".json"), version=5, digest="0" * 64)
    with world.worker() as worker:
        worker.next_round().load_into(model())
    assert "the server went back from version 5 to 0" in caplog.text
