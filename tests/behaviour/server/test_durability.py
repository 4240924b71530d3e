"""Versions that reach the disk late or never: sites send again what was lost; and a run with nothing on disk."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.process_figures import memory_files_bytes
from harness.processes import wait_until
from kit import ask_journal, flip_bit
from kit.manual_site import ManualSite
from kit.models import wide_model
from kit.servers import PLAIN_DILOCO, plain_server
from kit.wire import WireSite
from kit.world import World, require_close
from torch import nn

import atoll
from atoll.errors import ConfigError
from atoll.server.coordinator import background_writes
from atoll.store.journal import Journal
from atoll.store.versions import Versions


@pytest.mark.covers("F42")
def test_takes_no_update_against_another_base(tmp_path: Path) -> None:
    """If an update names the right ticket but the digest of another base version, the server answers 410, and the
    ticket stays open.
    """
    # This happens after the server was restored from an old backup.
    with plain_server(tmp_path, nn.Linear(2, 2)) as server:
        update = WireSite(server.url).train(1.0).push()
        status, told = update.complete(base_digest="0" * 64)
        assert (status, update.state()["outcome"]["state"]) == (410, "open"), told
        update.submit()


@pytest.mark.covers("F42")
def test_a_run_survives_power_loss_in_its_first_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run's first version is on disk before the first site trains, so a power loss leaves a run to go on with."""
    synced = list[str]()
    sync = Journal.sync

    def noted(journal: Journal, fd: int, what: str) -> None:
        sync(journal, fd, what)
        synced.append(Path(what).name)

    monkeypatch.setattr(Journal, "sync", noted)
    with plain_server(tmp_path, nn.Linear(2, 2)) as server:
        assert any(name.startswith("version-") for name in synced)
        assert server.status().durable_version == 0


@pytest.mark.covers("F26")
def test_keeps_few_versions_while_the_disk_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk is slow, the server keeps at most five versions and writes one at a time."""
    # These are the newest, the one before it, the durable one, the one that is being written, and the next one.
    waits, writes = threading.Event(), threading.Lock()
    on_their_way: set[str] = set()
    most_at_once = synced = 0
    sync = Journal.sync

    def slow(journal: Journal, fd: int, what: str) -> None:
        nonlocal most_at_once, synced
        if Path(what).name.startswith("version-"):
            with writes:
                on_their_way.add(what)
                synced += 1
                most_at_once = max(most_at_once, len(on_their_way))
            assert waits.wait(60)
            with writes:
                on_their_way.discard(what)
        sync(journal, fd, what)

    monkeypatch.setattr(Journal, "sync", slow)
    monkeypatch.setattr(background_writes, "DURABLE_S", 0.0)
    waits.set()
    versions = set()
    with plain_server(tmp_path, nn.Linear(4, 3), rounds=7) as server:
        with ManualSite(server.url, site="a", folder=tmp_path / "workers") as client:
            while (number := client.next_round()) is not None:
                if number == 2:
                    wait_until(lambda: server.status().durable_version == 1, "version 1 to be durable")
                    waits.clear()
                versions.add(len(list((tmp_path / "state" / "slots").glob("version-*"))))
                if number == 7:
                    assert server.status().durable_version == 1
                    waits.set()
                    wait_until(lambda: server.status().durable_version == 6, "the newest version to be durable")
                client.submit({name: tensor + 1.0 for name, tensor in client.pull().items()})
    assert most_at_once == 1
    assert max(versions) <= 5
    assert synced <= 5  # versions 0, 1, 2, 6 and 7; fewer where the first write begins late


@pytest.mark.covers("F26")
def test_quick_versions_become_durable_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions that follow each other quickly are fsynced once, after a pause; the last one at the end of the run."""
    monkeypatch.setattr(background_writes, "DURABLE_S", 600.0)
    synced = 0
    sync = Journal.sync

    def counted(journal: Journal, fd: int, what: str) -> None:
        nonlocal synced
        synced += Path(what).name.startswith("version-")
        sync(journal, fd, what)

    monkeypatch.setattr(Journal, "sync", counted)
    with plain_server(tmp_path, nn.Linear(4, 3), rounds=6) as server:
        with ManualSite(server.url, site="a", folder=tmp_path / "workers") as client:
            while (number := client.next_round()) is not None:
                if number == 2:
                    wait_until(lambda: server.status().durable_version == 1, "version 1 to be durable")
                if number == 6:
                    assert server.status().durable_version == 1
                client.submit({name: tensor + 1.0 for name, tensor in client.pull().items()})
        server.run()
        assert server.status().durable_version == 6
    assert synced == 3  # versions 0, 1 and 6


@pytest.mark.covers("F26")
def test_a_stop_does_not_wait_for_a_pause_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is stopped in the pause between two fsyncs makes its newest version durable first."""
    monkeypatch.setattr(background_writes, "DURABLE_S", 600.0)
    with plain_server(tmp_path, nn.Linear(4, 3), rounds=6) as server:
        with ManualSite(server.url, site="a", folder=tmp_path / "workers") as client:
            while (number := client.next_round()) is not None and number < 4:
                if number == 2:
                    wait_until(lambda: server.status().durable_version == 1, "version 1 to be durable")
                client.submit({name: tensor + 1.0 for name, tensor in client.pull().items()})
            assert server.status().durable_version == 1
        server.stop()
    assert ask_journal(tmp_path, "SELECT version, durable_version FROM heads") == [(3, 3)]


@contextmanager
def slow_disk(newest: int) -> Iterator[None]:
    """While it lasts, no version above `newest` becomes durable."""
    write_durable = Versions.write_durable

    def write(self: Versions, fragment: int = 0) -> int | None:
        behind = self.head(fragment).version > newest
        return self.durable(fragment) if behind else write_durable(self, fragment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Versions, "write_durable", write)
        yield


def lose_power(world: World) -> None:
    """End the server, lose its version 2, and start it again."""
    world.stop()
    ((slot,),) = ask_journal(world.folder, "SELECT slot FROM versions ORDER BY version DESC LIMIT 1")
    (path,) = (world.folder / "state" / "slots").glob(f"version-*-{slot}.safetensors")
    flip_bit(path, -1)  # as a page that never reached the disk would be
    world.start()
    assert world.version == 1


@pytest.mark.covers("F41")
@pytest.mark.parametrize("disturbed", [False, True])
def test_a_diloco_loop_resubmits_lost_updates(tmp_path: Path, disturbed: bool) -> None:
    """If the server loses a version that was not yet durable, the DiLoCo loop sends its update again and trains on
    undisturbed.
    """
    # H = 2 and steps of −1 give 8 → 6 → 4 → 2. The power fails in the middle of round 3, when version 2 is not durable.
    # Guards against an outbox that is cleared at the next pull, or rewritten for the ticket of a lost version.
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen: list[float] = []
    with slow_disk(newest=1), World(tmp_path, model, "a", rounds=3, H=2, **PLAIN_DILOCO) as world:
        with atoll.DiLoCo(model, optimizer, server=world.url, site="a", folder=world.workers) as diloco:
            for step in range(1, 7):
                optimizer.zero_grad()
                model.weight.sum().backward()
                optimizer.step()
                seen.append(model.weight.item())
                if step == 2:
                    world.wait_until_durable(1)
                if step == 5 and disturbed:
                    lose_power(world)
            assert (diloco.finished, diloco.rounds, diloco.skipped) == (True, 3, 0)
        world.server.run()
    assert seen == [7.0, 6.0, 5.0, 4.0, 3.0, 2.0]


@pytest.mark.covers("F41")
def test_a_site_resubmits_a_lost_versions_update(tmp_path: Path) -> None:
    """If the server loses a version in a power failure, the site sends its update for it again, and does not train it
    twice.
    """
    # The server never uses the number of a version again, so round 2 now makes version 3. The number of a round is used
    # again. Guards against an outbox that is rewritten for the ticket of the lost version.
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    trained: list[tuple[float, float]] = []
    with slow_disk(newest=1), World(tmp_path, model, "a", rounds=3) as world:
        with atoll.join(world.url, site="a", folder=world.workers) as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                before = model.weight.item()
                with torch.no_grad():
                    model.weight.add_(1.0 if trained else 16.0)
                trained.append((before, model.weight.item()))
                if len(trained) == 2:
                    world.wait_until_durable(1)
                if len(trained) == 3:
                    lose_power(world)
                fl_round.submit(model)
            assert worker.load_into(model).weight.item() == 18.0
        world.server.run()
    assert [(row.round, row.version) for row in world.status.history] == [(1, 1), (2, 3), (3, 4)]
    assert trained == [(0.0, 16.0), (16.0, 17.0), (17.0, 18.0), (17.0, 18.0)]  # round 2 only once
    with world:  # the server still knows that three rounds are done, not four
        assert (world.status.finished, world.status.version) == (True, 4)
        assert [(each.version, each.staleness) for each in world.status.workers] == [(3, 1)]
    assert not world.start(rounds=4).status.finished
    world.stop()


@pytest.mark.covers("L3", "F41")
def test_a_lost_version_loses_no_asynchronous_update(tmp_path: Path) -> None:
    """In an asynchronous run, the server loses version 2, which has the update of site `b`."""
    # The final model still has all three updates. Site `b` has gone on from version 2, and sends its update again. Site
    # `a` is at version 1.
    settings = PLAIN_DILOCO | {"algorithm.name": "fedavg", "async.enabled": True}
    with slow_disk(newest=1), World(tmp_path, {"w": torch.zeros(6)}, "abc", **settings) as world:
        world.pull("a", "b")
        world.submit("a", 0.125)
        world.wait_until_durable(1)
        world.pull("a")
        world.submit("b", 0.25)
        world.pull("b")
        lose_power(world)
        world.pull("b")  # sends again first
        world.pull("a")  # its ticket was of a version that may have been lost, too
        world.submit("a", 0.5)
        wait_until(lambda: len(world.status.history) == 3, "three updates")
        require_close(world.model, {"w": torch.full((6,), 0.125 + 0.25 + 0.5)})


IN_MEMORY: dict[str, Any] = {"disk.in_files": False}


@pytest.mark.covers("D12")
@pytest.mark.parametrize("settings", [{}, IN_MEMORY], ids=["files", "memory"])
def test_a_run_in_memory_writes_no_tensor_files(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A run with `disk.in_files = false` writes no tensor to the disk, and frees its memory at the end."""
    model = wide_model()
    nbytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    gc.collect()  # frees what a server of an earlier test kept in memory
    with World(tmp_path, model, rounds=3, codec="bf16", **settings) as world:
        in_memory = memory_files_bytes(os.getpid())
        assert in_memory >= nbytes if settings else in_memory == 0
        world.begin(build=wide_model).join()
        world.server.run()
    slots = [path for path in (tmp_path / "state" / "slots").iterdir() if path.stat().st_size]
    assert (slots == []) == bool(settings)
    assert memory_files_bytes(os.getpid()) == 0


@pytest.mark.covers("D12")
def test_a_run_in_memory_ends_with_its_server(tmp_path: Path) -> None:
    """A run that was kept in memory cannot continue after a stop: a start in its folder is refused."""
    # A run in memory with `disk.durability = "power"` is refused, because data in memory does not survive a power loss.

    def start(**settings: Any) -> atoll.Server:
        return plain_server(tmp_path, nn.Linear(1, 1), **settings).start()

    start(**IN_MEMORY).stop()
    with pytest.raises(ConfigError, match=r"a stopped run cannot continue\. Start a new run in another disk.state_dir"):
        start(**IN_MEMORY)
    with pytest.raises(ConfigError, match=r"disk\.in_files = False, but this start sets True"):
        start()
    with pytest.raises(ConfigError, match="data in memory does not survive a power loss"):
        start(**IN_MEMORY, **{"disk.durability": "power"})
