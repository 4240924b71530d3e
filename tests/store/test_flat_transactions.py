"""Transactions whose parts cannot fail alone: all of them, or none."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from atoll.errors import DiskFull, StoreError, SyncFailed
from atoll.store.journal import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.sqlite", "process")


def count(journal: Journal, name: str) -> int:
    return int(journal.value("SELECT value FROM counters WHERE name = ?", name) or 0)


def test_they_are_one(journal: Journal) -> None:
    told: list[str] = []
    with journal.transaction(flat=True):
        for name in ("a", "b"):
            with journal.transaction():
                journal.count(name)
                journal.after_commit(lambda name=name: told.append(name))  # type: ignore[misc]
        assert told == []
    assert (count(journal, "a"), count(journal, "b"), told) == (1, 1, ["a", "b"])


def fail_after(journal: Journal, *counted: str, told: list[str]) -> None:
    """A transaction that counts, and fails."""
    with journal.transaction():
        for name in counted:
            journal.count(name)
        journal.after_commit(lambda: told.append("committed"))
        journal.after_rollback(lambda: told.append("undone"))
        raise ZeroDivisionError


def test_one_that_fails_before_it_changes_anything_is_forgotten(journal: Journal) -> None:
    told: list[str] = []
    with journal.transaction(flat=True):
        with journal.transaction():
            journal.count("a")
        with pytest.raises(ZeroDivisionError):
            fail_after(journal, told=told)
    assert count(journal, "a") == 1
    assert told == ["undone"]


def test_one_that_fails_later_undoes_all_even_where_its_error_is_caught(journal: Journal) -> None:
    told: list[str] = []

    def count_both() -> None:
        with journal.transaction(flat=True):
            with journal.transaction():
                journal.count("a")
                journal.after_rollback(lambda: told.append("a undone"))
            with pytest.raises(ZeroDivisionError):
                fail_after(journal, "b", told=told)

    with pytest.raises(StoreError, match="undone with it"):
        count_both()
    assert (count(journal, "a"), count(journal, "b")) == (0, 0)
    assert told == ["undone", "a undone"]
    with journal.transaction():  # an ordinary one has savepoints again
        with pytest.raises(ZeroDivisionError):
            fail_after(journal, "b", told=told)
        journal.count("a")
    assert (count(journal, "a"), count(journal, "b")) == (1, 0)


def test_those_of_another_thread_are_no_part_of_it(journal: Journal) -> None:
    """They wait for its end, and are their own: it is undone, they are not."""
    begins, told = threading.Event(), list[str]()

    def count_beside() -> None:
        begins.set()
        with journal.transaction():
            told.append("beside")
            journal.count("beside")

    beside = threading.Thread(target=count_beside)

    def fail() -> None:
        with journal.transaction(flat=True):
            beside.start()
            assert begins.wait(60.0)
            with journal.transaction():
                journal.count("a")
            told.append("within")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    beside.join()
    assert told == ["within", "beside"]
    assert (count(journal, "a"), count(journal, "beside")) == (0, 1)


def test_after_a_failed_fsync_none_of_its_parts_goes_on(journal: Journal) -> None:
    def go_on() -> None:
        with journal.transaction(flat=True):
            journal.sync_failed("the spool", OSError(errno.EIO, "Input/output error"))
            with journal.transaction():
                journal.count("a")

    with pytest.raises(SyncFailed, match="the spool"):
        go_on()


def test_an_error_of_the_disk_inside_is_told_as_one(journal: Journal) -> None:
    def fill() -> None:
        with journal.transaction(flat=True), journal.transaction():
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskFull):
        fill()
    with journal.transaction(flat=True):
        journal.count("a")
    assert count(journal, "a") == 1


def test_one_that_is_torn_stays_so_whatever_follows(journal: Journal) -> None:
    told: list[str] = []

    def count_three() -> None:
        with journal.transaction(flat=True):
            with pytest.raises(ZeroDivisionError):
                fail_after(journal, "a", told=told)
            with pytest.raises(ZeroDivisionError):
                fail_after(journal, told=told)  # has changed nothing
            with journal.transaction():
                journal.count("b")

    with pytest.raises(StoreError, match="undone with it"):
        count_three()
    assert (count(journal, "a"), count(journal, "b")) == (0, 0)


def test_nothing_is_changed_after_sqlite_has_ended_it(journal: Journal) -> None:
    """As it does where the disk is full: what came then would be a transaction of its own, and outlive it."""

    def go_on() -> None:
        with journal.transaction(flat=True):
            journal._db.execute("ROLLBACK")
            with pytest.raises(StoreError, match="has ended the transaction"), journal.transaction():
                journal.count("a")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        go_on()
    assert count(journal, "a") == 0
