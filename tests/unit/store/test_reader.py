"""Copies of a journal that a server changes meanwhile, and what a reader leaves when it fails."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kit.folders import open_paths
from store_world import new_run

from atoll.errors import StateCorrupt, StoreError, UsageError
from atoll.store import reader
from atoll.store.reader import open_state, recorded_failure, saved_status

BOTH = "SELECT epoch, (SELECT count(*) FROM workflows) FROM meta"
Server = Callable[..., None]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files, in which no test leaves one."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state directory of a server that has stopped; its epoch is 1."""
    new_run(tmp_path / "state", 2).close()
    return tmp_path / "state"


@pytest.fixture
def server(state: Path) -> Iterator[Server]:
    """Execute statements of a server. Its index of the log is in memory, so a reader has to copy."""
    with closing(sqlite3.connect(state / "journal.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("UPDATE counters SET value = value")
        db.execute("PRAGMA wal_checkpoint")

        def execute(*statements: str) -> None:
            for statement in statements:
                db.execute(statement).fetchall()

        yield execute


def after_each_copy(monkeypatch: pytest.MonkeyPatch, do: Callable[[str], object]) -> None:
    """Call `do` with the name of each file of a journal that a reader has copied."""
    copy = shutil.copyfileobj

    def copied(source, target, *size) -> None:
        copy(source, target, *size)
        do(Path(target.name).name)

    monkeypatch.setattr(reader.shutil, "copyfileobj", copied)


ALONE = "UPDATE meta SET epoch = epoch + 1"
ANOTHER = "INSERT INTO workflows VALUES ({}, 'w', 'now', 0)"
MOVE = "PRAGMA wal_checkpoint"


def test_copies_again_once_the_log_is_overwritten(state: Path, server: Server, monkeypatch) -> None:
    """The second change overwrites the log. The first one, in the database since, is not in a copy made before."""
    number = iter(range(3))

    def change(name: str) -> None:
        if name == "journal.sqlite" and next(number) == 0:
            server(ALONE, MOVE, ANOTHER.format(1))

    after_each_copy(monkeypatch, change)
    with open_state(state) as found:
        assert found.rows(BOTH) == [(2, 1)]
    assert next(number) == 2


def test_reads_what_a_checkpoint_moves_from_the_log(state: Path, server: Server, monkeypatch) -> None:
    """The log has it, too, until it is overwritten: one copy does."""
    copies: list[str] = []
    server(ALONE)
    after_each_copy(monkeypatch, lambda name: (copies.append(name), server(MOVE)))
    with open_state(state) as found:
        assert found.rows(BOTH) == [(2, 0)]
    assert copies == ["journal.sqlite", "journal.sqlite-wal"]


def test_reads_a_commit_that_comes_between_the_copies(state: Path, server: Server, monkeypatch) -> None:
    server(ALONE)
    after_each_copy(monkeypatch, lambda name: server(ANOTHER.format(1)) if name == "journal.sqlite" else None)
    with open_state(state) as found:
        assert found.rows(BOTH) == [(2, 1)]


def test_drops_an_old_log(state: Path, monkeypatch) -> None:
    """Drops the copy of a log that is gone. A server that ends during the first copy removes its log."""
    db = sqlite3.connect(state / "journal.sqlite", isolation_level=None)
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    db.execute(ALONE)

    def end(name: str) -> None:
        if name == "journal.sqlite-wal":
            db.execute(ALONE)
            db.close()

    after_each_copy(monkeypatch, end)
    with open_state(state) as found:
        assert found.rows(BOTH) == [(3, 0)]
    assert not (state / "journal.sqlite-wal").exists()


def test_gives_up_where_each_copy_is_overtaken(state: Path, server: Server, monkeypatch) -> None:
    number = iter(range(100))
    after_each_copy(monkeypatch, lambda _: server(ANOTHER.format(next(number)), MOVE))
    with pytest.raises(StoreError, match=r"has changed .* each of the 10 times that it was copied"), open_state(state):
        pass


def test_names_a_full_disk_of_temporary_files(state: Path, monkeypatch) -> None:
    def fill(_: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    after_each_copy(monkeypatch, fill)
    with (
        pytest.raises(
            StoreError, match=r"copied into the folder of temporary files \(No space left on device\)\. Free"
        ),
        open_state(state),
    ):
        pass


def test_closes_everything_when_its_block_raises(state: Path) -> None:
    names, files = sorted(state.iterdir()), sorted(open_paths())
    with pytest.raises(ZeroDivisionError), open_state(state):
        raise ZeroDivisionError
    with pytest.raises(StateCorrupt, match="no such table: absent"), open_state(state) as found:
        found.rows("SELECT * FROM absent")
    assert sorted(open_paths()) == files
    assert sorted(state.iterdir()) == names


def test_removes_what_a_killed_reader_has_left(state: Path, temporary: Path) -> None:
    left = temporary / f"{reader.TEMPORARY}{2**22 + 1}-abc"  # no process has this id
    left.mkdir()
    (left / "journal.sqlite").touch()
    with open_state(state):
        assert not left.exists()


def test_a_folder_without_run_has_nothing(tmp_path: Path) -> None:
    """A directory without run has no status and no failure."""
    assert saved_status(tmp_path) is None
    assert recorded_failure(tmp_path) == ""
    with pytest.raises(UsageError, match="There is no run in"), open_state(tmp_path):
        pass
