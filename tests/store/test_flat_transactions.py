"""Transactions whose parts cannot fail alone: all of them, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import StoreError
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
