"""What is on disk, and what is held, when the store says that something is durable."""

import os
from pathlib import Path

import pytest
from store_world import begin, content, first, flip, play_round, submit, write_version

from atoll.store.file_slots import READER, VERSION
from atoll.store.journal import Journal
from atoll.store.store import Store


@pytest.mark.covers("F26")
def test_a_version_is_held_while_it_is_brought_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `write_durable` without its READER hold. Two commits happen during the fsync;
    keep_versions = 1: without
    the hold, the row of version 1 is dropped and its slot rewritten, and version 1 is then called durable."""
    store = first(tmp_path, **{"disk.keep_versions": 1})
    play_round(store, 0)
    sync, rounds = Journal.sync, iter((1, 2))

    def slow(self: Journal, fd: int, what: str) -> None:
        for base in rounds:
            play_round(store, base)
        sync(self, fd, what)

    monkeypatch.setattr(Journal, "sync", slow)
    assert store.versions.write_durable() == 1
    row = store.versions.get(0, 1)  # still there to fall back to
    slot = store.slots.pool(VERSION, 0)[row.slot]
    assert slot.path.read_bytes() == content(1)
    assert READER not in slot.holds
    store.close()


@pytest.mark.covers("F26")
def test_the_epoch_of_a_start_survives_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `Store.open` with a transaction that is not synced, or without the fsync of the folder."""
    order: list[str] = []
    transaction, sync = Journal.transaction, Journal.sync

    def told(self: Journal, *, synced: bool = False):  # type: ignore[no-untyped-def]
        order.append(f"synced={synced}")
        return transaction(self, synced=synced)

    monkeypatch.setattr(Journal, "transaction", told)
    monkeypatch.setattr(Journal, "sync", lambda self, fd, what: (order.append(what), sync(self, fd, what))[1])
    Store.open(tmp_path / "s").close()
    assert order[:2] == ["synced=True", str(tmp_path / "s")]


@pytest.mark.covers("F27")
def test_a_finished_run_that_fell_back_is_no_longer_finished(tmp_path: Path) -> None:
    """Guards against `_fall_back` without `finished = 0`."""
    store = first(tmp_path)
    play_round(store, 0)
    play_round(store, 1)
    store.run_log.finish()
    path = store.slots.pool(VERSION, 0)[store.versions.head().slot].path
    store.journal.close()
    os.close(store._lock_fd)
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"?")
    store, recovered = begin(tmp_path)
    assert recovered.heads[0].version == 1
    assert recovered.finished is False
    store.close()


@pytest.mark.covers("F26")
def test_durable_is_said_after_fsync_of_every_file_of_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a `sync` that does not reach the disk: the system is asked for each file, and for the folder."""
    store = first(tmp_path)
    play_round(store, 0)
    asked: list[str] = []
    fsync = os.fsync

    def told(fd: int) -> None:
        asked.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name.partition("-")[0])
        fsync(fd)

    monkeypatch.setattr(os, "fsync", told)
    assert store.versions.write_durable() == 1
    assert asked == ["version", "state", "slots"]
    store.close()


def lose(store: Store, *versions: int) -> Store:
    """Close the store, damage these versions as a power loss would, and start again."""
    paths = [store.slots.pool(VERSION, 0)[store.versions.get(0, version).slot].path for version in versions]
    store.close()
    for path in paths:
        flip(path, 20)
    return begin(store.directory)[0]


@pytest.mark.covers("F41")
def test_a_fall_back_lowers_the_durable_version(tmp_path: Path) -> None:
    """Guards against `_fall_back` that leaves it at the version that was lost: the one that the run went on from would
    not be kept until another is durable, and a power loss would leave nothing."""
    store = first(tmp_path)
    for base in (0, 1):
        play_round(store, base)
    assert store.versions.write_durable() == 2
    store = lose(store, 2)
    assert store.versions.durable() == 1
    for base, version in ((1, 3), (3, 4)):
        store.run_log.open_round(0, base, ("a",))
        submit(store, 10 * version, "a", base)
        store.run_log.freeze(0, base, (10 * version,))
        write_version(store, version, (10 * version,))
    assert [row.version for row in store.versions.kept()] == [1, 3, 4]
    store = lose(store, 3, 4)
    assert store.versions.head().version == 1
    store.close()


@pytest.mark.covers("F41")
@pytest.mark.parametrize("durable", [False, True])
def test_the_durable_version_of_a_finished_run_goes_only_when_the_last_one_is_durable(
    tmp_path: Path, durable: bool
) -> None:
    """Guards against `close` that drops it while the last version may still be lost with the power."""
    store = first(tmp_path)
    play_round(store, 0)
    store.versions.write_durable()
    for base in (1, 2):
        play_round(store, base)
    if durable:
        store.versions.write_durable()
    store.run_log.finish()
    store.close()
    store = begin(tmp_path)[0]
    assert [row.version for row in store.versions.kept()] == ([3] if durable else [1, 2, 3])
    if not durable:
        store = lose(store, 2, 3)
        assert (store.versions.head().version, store.run_log.finished) == (1, False)
    store.close()
