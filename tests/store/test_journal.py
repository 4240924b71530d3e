"""The journal: transactions, what a full disk does to them, the lock of the directory, the audit log."""

from __future__ import annotations

import os
import resource
import sqlite3
import threading
from pathlib import Path

import pytest
from store_world import accept, audited, begin, first, killed, play_round, send_part, submit, update_of

from atoll import runtime
from atoll.errors import DiskFull, StateCorrupt, StateLocked, StoreError
from atoll.store.audit_log import verify
from atoll.store.journal import Journal
from atoll.store.store import Store


class Undone(Exception):
    pass


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.sqlite", "process")


def count(journal: Journal) -> int:
    return int(journal.value("SELECT coalesce(sum(value), 0) FROM counters"))


def test_a_transaction_is_all_or_nothing(journal: Journal) -> None:
    with pytest.raises(Undone), journal.transaction():  # noqa: PT012
        journal.count("x")
        raise Undone
    assert count(journal) == 0


def test_an_inner_transaction_fails_alone(journal: Journal) -> None:
    said: list[str] = []
    with journal.transaction():
        journal.count("x")
        with pytest.raises(Undone), journal.transaction():  # noqa: PT012
            journal.count("x", 10)
            journal.after_commit(lambda: said.append("never"))
            journal.after_rollback(lambda: said.append("undone"))
            raise Undone
        journal.after_commit(lambda: said.append("done"))
        assert said == ["undone"]
    assert (count(journal), said) == (1, ["undone", "done"])


def test_what_follows_a_commit_does_not_follow_a_failure(journal: Journal) -> None:
    said: list[str] = []
    with pytest.raises(Undone), journal.transaction():  # noqa: PT012
        with journal.transaction():
            journal.after_commit(lambda: said.append("never"))
        raise Undone
    assert said == []


def test_threads_take_turns(journal: Journal) -> None:
    def work() -> None:
        for _ in range(50):
            with journal.transaction():
                before = count(journal)
                journal.count("x")
                assert count(journal) == before + 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(journal) == 200


def test_a_lock_of_another_program_is_told_with_its_remedy(journal: Journal) -> None:
    journal.row("PRAGMA busy_timeout = 0")
    other = sqlite3.connect(journal.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match=r"locked by another program.*Close what writes to it"):
        with journal.transaction():
            journal.count("x")
    other.close()
    with journal.transaction():
        journal.count("x")
    assert count(journal) == 1


def test_the_log_is_emptied_while_a_transaction_is_open(journal: Journal) -> None:
    with journal.transaction():
        journal.count("x")
    with journal.transaction():
        journal.count("x")
        journal.checkpoint()
    assert count(journal) == 2
    (busy, in_log, moved) = journal.row("PRAGMA wal_checkpoint(PASSIVE)") or (1, 0, 0)
    assert (busy, in_log) == (0, moved)


@pytest.mark.covers("F25")
def test_a_full_disk_loses_nothing_and_goes_on_when_there_is_space(tmp_path: Path) -> None:
    """SQLite's own page limit stands for the disk: the same error, from the same place."""
    store = first(tmp_path)
    submit(store, 1, "a", 0)
    pages = store.journal.value("PRAGMA page_count")
    store.journal.value(f"PRAGMA max_page_count = {pages}")
    big = "x" * 100_000
    with pytest.raises(DiskFull):
        store.run_log.put_member("c", 3, host=big)
    assert store.tickets.get(1).state == "accepted"
    store.journal.value("PRAGMA max_page_count = 1000000")
    assert store.run_log.put_member("c", 3, host=big).host == big
    store.close()


@pytest.mark.covers("F25")
def test_a_disk_that_is_full_at_the_commit_leaves_the_ticket_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = first(tmp_path)
    store.tickets.issue(1, "a", 0, 0)
    for part in (0, 1):
        send_part(store, 1, part, update_of("a", 0))
    monkeypatch.setattr(runtime, "_actions", runtime._parse("journal.commit=enospc"))
    monkeypatch.setattr(runtime, "_reached", {})
    with pytest.raises(DiskFull):
        accept(store, 1, update_of("a", 0))
    assert store.tickets.get(1).state == "open"
    assert accept(store, 1, update_of("a", 0)).state == "accepted"
    store.close()


@pytest.mark.covers("F29")
def test_a_second_store_is_refused_and_the_holder_named(tmp_path: Path) -> None:
    store = first(tmp_path)
    with pytest.raises(StateLocked, match=rf"process {os.getpid()} on .*another state_dir"):
        begin(tmp_path)
    store.close()
    second, _ = begin(tmp_path)
    second.close()


def test_the_lock_ends_with_a_killed_process(tmp_path: Path) -> None:
    killed(tmp_path, "accept.before=kill", "submit(first(directory), 1, 'a', 0)")
    store, _ = begin(tmp_path)
    store.close()


def test_every_start_raises_the_epoch(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        store, _ = begin(tmp_path)
        epochs.append(store.run_log.epoch)
        store.close()
    assert epochs == [1, 2, 3]


def test_the_run_is_created_once(tmp_path: Path) -> None:
    store, _ = begin(tmp_path)
    assert store.run_log.run is not None
    with pytest.raises(StoreError, match="already holds a run"):
        store.run_log.create_run(store.run_log.run)
    store.close()


@pytest.mark.covers("F41")
@pytest.mark.parametrize("damage", ["garbage", "truncated"])
def test_a_damaged_journal_is_refused(tmp_path: Path, damage: str) -> None:
    store = first(tmp_path)
    for base in range(3):
        play_round(store, base)
    store.close()
    path = tmp_path / "journal.sqlite"
    data = path.read_bytes()
    path.write_bytes(b"x" * len(data) if damage == "garbage" else data[: len(data) // 2 + 100])
    with pytest.raises(StateCorrupt, match="damaged"):
        begin(tmp_path)


def test_a_journal_of_a_newer_atoll_is_refused(tmp_path: Path) -> None:
    first(tmp_path).close()
    db = sqlite3.connect(tmp_path / "journal.sqlite")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StateCorrupt, match="version 99"):
        begin(tmp_path)


def test_the_audit_log_lists_each_update_with_its_site_and_outcome(tmp_path: Path) -> None:
    store = first(tmp_path)
    play_round(store, 0)
    store.tickets.issue(3, "a", 0, 1)
    store.tickets.refuse(3, "NaN in w")
    # committed 0; accepted 1 and 2; committed 1; refused 3
    assert [entry.what for entry in audited(store)] == [
        "committed",
        "accepted",
        "accepted",
        "committed",
        "refused",
    ]
    count_, last = verify(store.journal)
    assert (count_, last) == (5, audited(store)[-1].hash)
    store.close()


@pytest.mark.parametrize(
    ("tampering", "entry"),
    [
        ("UPDATE audit SET detail_json = replace(detail_json, '\"a\"', '\"z\"') WHERE seq = 2", 2),
        ("DELETE FROM audit WHERE seq = 3", 3),
        ("UPDATE audit SET seq = 9 WHERE seq = 4", 4),
    ],
)
def test_tampering_with_the_audit_log_is_found(tmp_path: Path, tampering: str, entry: int) -> None:
    store = first(tmp_path)
    play_round(store, 0)
    with store.journal.transaction():
        store.journal.execute(tampering)
    with pytest.raises(StateCorrupt, match=f"entry {entry}"):
        verify(store.journal)
    store.close()


@pytest.mark.covers("F41")
@pytest.mark.parametrize("how", ["emptied", "removed"])
def test_a_lost_journal_does_not_begin_a_new_run_over_the_files_of_the_old_one(tmp_path: Path, how: str) -> None:
    store = first(tmp_path)
    play_round(store, 0)
    store.close()
    journal, files = tmp_path / "journal.sqlite", sorted((tmp_path / "slots").iterdir())
    journal.write_bytes(b"") if how == "emptied" else journal.unlink()
    for _ in range(2):  # the first refusal must not leave what the second start takes for a journal
        with pytest.raises(StateCorrupt, match="missing or empty"):
            begin(tmp_path)
    assert files == sorted((tmp_path / "slots").iterdir())


@pytest.mark.covers("X3")
def test_a_journal_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").mkdir()
    with pytest.raises(StoreError, match="unable to open database file"):
        Store.open(tmp_path)
    (tmp_path / "journal.sqlite").rmdir()
    Store.open(tmp_path).close()  # the refusal has let go of the directory


@pytest.mark.covers("F25")
def test_a_log_that_cannot_be_put_away_for_want_of_descriptors_waits(journal: Journal) -> None:
    with journal.transaction():
        journal.count("x")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        journal.checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    journal.checkpoint()
    assert count(journal) == 1
