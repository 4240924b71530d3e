"""The journal: transactions, full disks, the lock of the directory, the audit log, effects of the round machine."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from harness.sim_journal import initial
from store_world import audited, begin, kill_during, new_run, reopen, run_round, submit, write_version

from atoll.errors import DiskFull, StateCorrupt, StateLocked, StoreError, SyncFailed
from atoll.rounds import events
from atoll.rounds.state import Rules
from atoll.server.coordinator.event_log import EventLog
from atoll.server.coordinator.ledger import Change, write_change
from atoll.server.coordinator.roster import Presence
from atoll.store.journal import Journal
from atoll.store.journal_tables import SCHEMA_VERSION
from atoll.store.store import Store
from atoll.store.verify_journal import everything


class Undone(Exception):
    pass


def counted(journal: Journal) -> dict[str, int]:
    return dict(journal.rows("SELECT name, value FROM counters"))


def fail_after(journal: Journal, *names: str, seen: list[str]) -> None:
    """A transaction that counts, and fails."""
    with journal.transaction():
        for name in names:
            journal.count(name)
        journal.after_commit(lambda: seen.append("committed"))
        journal.after_rollback(lambda: seen.append("undone"))
        raise Undone


def test_nested_transactions_are_committed_together(journal: Journal) -> None:
    """A transaction inside another one is committed with the outer one, and its callbacks run after this commit."""
    seen: list[str] = []
    with journal.transaction():
        for name in ("a", "b"):
            with journal.transaction():
                journal.count(name)
                journal.after_commit(lambda name=name: seen.append(name))
        assert seen == []
    assert (counted(journal), seen) == ({"a": 1, "b": 1}, ["a", "b"])


def test_a_failed_transaction_is_undone(journal: Journal) -> None:
    """If a transaction fails, it is undone together with the transactions inside it."""
    seen: list[str] = []
    with pytest.raises(Undone), journal.transaction():  # noqa: PT012
        with journal.transaction():
            journal.count("a")
            journal.after_commit(lambda: seen.append("never"))
            journal.after_rollback(lambda: seen.append("undone"))
        raise Undone
    assert (counted(journal), seen) == ({}, ["undone"])


def test_a_failed_inner_transaction_without_changes_is_ignored(journal: Journal) -> None:
    """If an inner transaction fails before it changes anything and its error is caught, the outer transaction is
    committed.
    """
    seen: list[str] = []
    with journal.transaction():
        journal.count("a")
        with pytest.raises(Undone):
            fail_after(journal, seen=seen)
    assert (counted(journal), seen) == ({"a": 1}, ["undone"])


def test_a_failed_inner_transaction_undoes_the_outer(journal: Journal) -> None:
    """If an inner transaction fails after a change, the outer transaction is undone, even if the error was caught."""
    seen: list[str] = []
    with pytest.raises(StoreError, match="so the whole transaction was undone"), journal.transaction():  # noqa: PT012
        journal.count("a")
        journal.after_rollback(lambda: seen.append("a undone"))
        for names in (["b"], []):  # the second has changed nothing
            with pytest.raises(Undone):
                fail_after(journal, *names, seen=seen)
        with journal.transaction():
            journal.count("c")
    assert (counted(journal), seen) == ({}, ["undone", "undone", "a undone"])
    with journal.transaction():
        journal.count("a")
    assert counted(journal) == {"a": 1}


def test_another_threads_transaction_waits(journal: Journal) -> None:
    """A transaction of another thread waits until the first one has ended. It is committed by itself."""
    begins, seen = threading.Event(), list[str]()

    def count_beside() -> None:
        begins.set()
        with journal.transaction():
            seen.append("beside")
            journal.count("beside")

    beside = threading.Thread(target=count_beside)
    with pytest.raises(Undone), journal.transaction():  # noqa: PT012
        beside.start()
        assert begins.wait(60.0)
        journal.count("a")
        seen.append("within")
        raise Undone
    beside.join()
    assert (seen, counted(journal)) == (["within", "beside"], {"beside": 1})


def test_a_failing_disk_is_reported(journal: Journal) -> None:
    """If the disk is full or fails inside an inner transaction, the journal raises the error for this case and commits
    nothing.
    """
    with pytest.raises(DiskFull), journal.transaction(), journal.transaction():
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(SyncFailed, match="the spool"), journal.transaction():  # noqa: PT012
        journal.sync_failed("the spool", OSError(errno.EIO, "Input/output error"))
        with journal.transaction():
            journal.count("a")
    assert counted(journal) == {}


def test_changes_after_an_ended_transaction_are_refused(journal: Journal) -> None:
    """If SQLite has ended a transaction by itself, later changes in this transaction are refused."""
    # SQLite does so if the disk is full. Without the refusal, a later change would be a transaction of its own and
    # would stay.
    with pytest.raises(Undone), journal.transaction():  # noqa: PT012
        journal._db.execute("ROLLBACK")
        with pytest.raises(StoreError, match="has rolled this transaction back"), journal.transaction():
            journal.count("a")
        raise Undone
    assert counted(journal) == {}


def test_another_programs_lock_is_reported(journal: Journal) -> None:
    """If another program has locked the journal, the error says to close that program."""
    # Without the lock, the journal works again.
    journal.row("PRAGMA busy_timeout = 0")
    other = sqlite3.connect(journal.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with (
        pytest.raises(StoreError, match=r"locked by another program.*Close the program that writes to it"),
        journal.transaction(),
    ):
        journal.count("a")
    other.close()
    with journal.transaction():
        journal.count("a")
    assert counted(journal) == {"a": 1}


def test_a_checkpoint_during_a_transaction_is_harmless(journal: Journal) -> None:
    """A checkpoint of the write-ahead log during a transaction loses no change. Afterwards, the whole log can be moved
    into the database.
    """
    for empty in (lambda: None, journal.checkpoint):
        with journal.transaction():
            journal.count("a")
            empty()
    assert counted(journal) == {"a": 2}
    (busy, in_log, moved) = journal.row("PRAGMA wal_checkpoint(PASSIVE)") or (1, 0, 0)
    assert (busy, in_log) == (0, moved)


def test_the_log_of_a_large_transaction_shrinks_again(journal: Journal) -> None:
    """After a transaction of 20 MB, a checkpoint and the next change, the write-ahead log takes 8 MiB."""
    log = journal.path.with_name(journal.path.name + "-wal")
    with journal.transaction():
        for number in range(200):
            journal.count(f"{number} " + "x" * 100_000)
    assert log.stat().st_size > 2e7
    journal.checkpoint()
    with journal.transaction():
        journal.count("a")
    assert log.stat().st_size == 8 * 2**20
    assert len(counted(journal)) == 201


@pytest.mark.covers("F25")
def test_a_checkpoint_without_descriptors_loses_nothing(journal: Journal) -> None:
    """If there is no free file descriptor, a checkpoint of the write-ahead log raises no error and loses nothing. A
    later checkpoint works.
    """
    with journal.transaction():
        journal.count("a")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        journal.checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    journal.checkpoint()
    assert counted(journal) == {"a": 1}


@pytest.mark.covers("F25")
def test_a_full_disk_loses_nothing(store: Store) -> None:
    """If the disk is full, the journal loses nothing, and it goes on when there is space."""
    # SQLite's own limit of pages stands for the disk: it causes the error of a full disk in the place where a full disk
    # does.
    submit(store, 1, "a", 0)
    pages = store.journal.value("PRAGMA page_count")
    store.journal.value(f"PRAGMA max_page_count = {pages}")
    big = "x" * 100_000
    with pytest.raises(DiskFull):
        store.run_log.put_member("c", 3, host=big)
    assert store.tickets.get(1).state == "accepted"
    store.journal.value("PRAGMA max_page_count = 1000000")
    store.run_log.put_member("c", 3, host=big)
    assert store.run_log.member("c").host == big


@pytest.mark.covers("F29")
def test_a_second_store_is_refused(store: Store) -> None:
    """A second server process on one state directory is refused, and the error names the process that uses it."""
    with pytest.raises(StateLocked, match=rf"process {os.getpid()} on .*another disk\.state_dir"):
        begin(store.directory)
    store.close()
    begin(store.directory)[0].close()


def test_every_start_raises_the_epoch(tmp_path: Path) -> None:
    """Every start raises the epoch of the journal by one, also after a kill."""
    kill_during(tmp_path, "accept.before=kill", "submit(new_run(directory), 1, 'a', 0)")
    for epoch in (2, 3):
        store, _ = begin(tmp_path)
        assert store.run_log.epoch == epoch
        store.close()


def test_the_run_is_created_once(store: Store) -> None:
    """If a journal already contains a run, creating a run in it is refused."""
    assert store.run_log.run is not None
    with pytest.raises(StoreError, match="already contains a run"):
        store.run_log.create_run(store.run_log.run)


@pytest.mark.covers("F41")
@pytest.mark.parametrize("damage", ["truncated", "newer", "no text"])
def test_an_unreadable_journal_is_refused(tmp_path: Path, damage: str) -> None:
    """A journal that is truncated, damaged in the definition of a table or of a newer version is refused."""
    store = new_run(tmp_path, 3)
    store.close()
    path = tmp_path / "journal.sqlite"
    data = path.read_bytes()
    if damage == "newer":
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA user_version = 99")
    elif damage == "no text":  # in the definition of a table, which SQLite's message quotes
        path.write_bytes(data.replace(b"ticket INTEGER NOT", b"ticket INTEGER\xa0NOT"))
    else:
        path.write_bytes(data[: len(data) // 2 + 100])
    with pytest.raises(StateCorrupt, match="version 99" if damage == "newer" else "damaged"):
        begin(tmp_path)


@pytest.mark.covers("F41", "X3")
@pytest.mark.parametrize(
    ("version", "table"), [(0, "notes"), (0, "versions"), (SCHEMA_VERSION, "notes"), (99, "notes")]
)
def test_another_programs_database_is_refused(tmp_path: Path, version: int, table: str) -> None:
    """If another program's database is in the place of the journal, it is refused with the name of a table, and stays
    unchanged.
    """
    path = tmp_path / "journal.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(f"CREATE TABLE {table} (text); PRAGMA user_version = {version};")
    before = path.read_bytes()
    with pytest.raises(StateCorrupt) as caught:
        Store(tmp_path)
    assert str(caught.value) == (
        f"{path} belongs to another program: it has the table '{table}'. Move it away, or set another disk.state_dir."
    )
    assert path.read_bytes() == before


@pytest.mark.covers("F41", "X3")
@pytest.mark.parametrize("size", [1, 2, 100, 24_000])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, size: int) -> None:
    """A file in the place of the journal that is not a database is refused and stays unchanged."""
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"x" * size)
    with pytest.raises(StateCorrupt) as caught:
        Store(tmp_path)
    assert str(caught.value).startswith(f"{path} is damaged: file is not a database. Restore the whole directory")
    assert path.read_bytes() == b"x" * size


@pytest.mark.covers("F41")
@pytest.mark.parametrize("how", ["emptied", "removed"])
def test_a_lost_journal_starts_no_new_run(store: Store, how: str) -> None:
    """If the journal is missing or empty, the server refuses to start a new run over the files of the old one."""
    run_round(store, 0)
    store.close()
    journal, files = store.journal.path, sorted(store.slots.folder.iterdir())
    journal.write_bytes(b"") if how == "emptied" else journal.unlink()
    for _ in range(2):  # the first refusal must not leave what the second start takes for a journal
        with pytest.raises(StateCorrupt, match="missing or empty"):
            begin(store.directory)
    assert files == sorted(store.slots.folder.iterdir())


@pytest.mark.covers("X3")
def test_a_folder_in_the_journals_place_is_refused(tmp_path: Path) -> None:
    """If a folder is in the place of the journal, the error says to move it away. The state directory does not stay
    locked.
    """
    (tmp_path / "journal.sqlite").mkdir()
    with pytest.raises(StoreError, match="move the folder away"):
        Store(tmp_path)
    (tmp_path / "journal.sqlite").rmdir()
    Store(tmp_path).close()  # the refusal has let go of the directory


def test_the_audit_log_lists_updates_and_versions(store: Store) -> None:
    """The audit log lists each accepted or refused update and each committed version in their order."""
    run_round(store, 0)
    store.tickets.issue(3, "a", 0, 1)
    store.tickets.refuse(3, "NaN in w")
    # committed 0; accepted 1 and 2; committed 1; refused 3
    assert [entry.what for entry in audited(store)] == ["committed", "accepted", "accepted", "committed", "refused"]
    assert everything(store.journal.rows, store.directory, None) == (5, audited(store)[-1].hash)


# -- effects of the round machine as rows


def test_effects_of_the_machine_survive_a_restart(tmp_path: Path) -> None:
    """After a restart, the journal has all effects that the round machine had decided."""
    # Site `b` left and came back late. The round that both sites began waits for `a` alone.
    store, _ = begin(tmp_path)
    write_version(store, 0)
    decided = [
        events.LeaseGranted("a", 1),
        events.LeaseGranted("b", 2),
        events.RoundOpened(0, 0, ("a", "b")),
        events.TicketIssued("a", 1, 0, 0, new=True),
        events.TicketIssued("b", 2, 0, 0, new=True),
        events.LeaseEnded("b", 2, "left", "Ctrl-C"),
        events.TicketsExpired((2,), "b left"),
        events.ExpectedChanged(0, 0, ("a",)),
        events.LeaseGranted("b", 3),
    ]
    state = initial(Rules(sites=2))
    write_change(store, {"b": Presence("b")}, EventLog(store), Change(state, state, decided))
    store, _ = reopen(store)
    round_ = store.run_log.round(0, 0)
    assert (round_.state, round_.expected) == ("open", ("a",))
    assert {member.site: (member.lease, member.state) for member in store.run_log.members()} == {
        "a": (1, "alive"),
        "b": (3, "alive"),
    }
    assert [(row.ticket, row.state) for row in (store.tickets.get(1), store.tickets.get(2))] == [
        (1, "open"),
        (2, "expired"),
    ]
