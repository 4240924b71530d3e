"""What is on disk, and what is held, when the store says that something is durable."""

from pathlib import Path

import pytest
from store_world import begin, content, first, play_round

from atoll.store.slots import READER, VERSION
from atoll.store.store import Store


@pytest.mark.covers("F26")
def test_a_version_is_held_while_it_is_brought_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `write_durable` without its READER hold. Two commits happen during the fsync;
    keep_versions = 1: without
    the hold, the row of version 1 is dropped and its slot rewritten, and version 1 is then called durable."""
    store = first(tmp_path, keep_versions=1)
    play_round(store, 0)
    sync, rounds = Store.sync, iter((1, 2))

    def slow(self: Store, fd: int, what: str) -> None:
        for base in rounds:
            play_round(self, base)
        sync(self, fd, what)

    monkeypatch.setattr(Store, "sync", slow)
    assert store.write_durable() == 1
    row = store.version(0, 1)  # still there to fall back to
    slot = store.pool(VERSION, 0)[row.slot]
    assert slot.path.read_bytes() == content(1)
    assert READER not in slot.holds
    store.close()


@pytest.mark.covers("F26")
def test_the_epoch_of_a_start_survives_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `Store.open` with a transaction that is not synced, or without the fsync of the folder."""
    from atoll.store.journal import Journal

    order: list[str] = []
    transaction, sync = Journal.transaction, Store.sync

    def told(self: Journal, *, synced: bool = False):  # type: ignore[no-untyped-def]
        order.append(f"synced={synced}")
        return transaction(self, synced=synced)

    monkeypatch.setattr(Journal, "transaction", told)
    monkeypatch.setattr(Store, "sync", lambda self, fd, what: (order.append(what), sync(self, fd, what))[1])
    Store.open(tmp_path / "s").close()
    assert order[:2] == ["synced=True", str(tmp_path / "s")]


@pytest.mark.covers("F27")
def test_a_finished_run_that_fell_back_is_no_longer_finished(tmp_path: Path) -> None:
    """Guards against `_fall_back` without `finished = 0`."""
    store = first(tmp_path)
    play_round(store, 0)
    play_round(store, 1)
    store.finish()
    path = store.pool(VERSION, 0)[store.head().slot].path
    store.journal.close()
    store._directory_lock.release()
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"?")
    store, recovered = begin(tmp_path)
    assert recovered.heads[0].version == 1
    assert recovered.finished is False
    store.close()
