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


def test_a_log_with_another_salt_than_its_index_is_copied_at_once(state: Path, monkeypatch) -> None:
    """If log and index do not belong together, as after damage, a reader does not try the index, which takes 10 s."""
    with closing(sqlite3.connect(state / "journal.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("UPDATE meta SET epoch = epoch")
        copy = state.with_name("copy")
        shutil.copytree(state, copy)
    log = copy / "journal.sqlite-wal"
    log.write_bytes(b"x" * 24 + log.read_bytes()[24:])
    begun, options = reader._begun, list[str]()
    monkeypatch.setattr(reader, "_begun", lambda path, more="": (options.append(more), begun(path, more))[1])
    with open_state(copy) as found:
        assert [each.version for each in found.heads()] == [2]
    assert options == [""]


def test_a_reader_copies_an_overwritten_log_again(state: Path, server: Server, monkeypatch) -> None:
    """If the write-ahead log is overwritten while a reader copies the journal, the reader copies again."""
    # The second change overwrites the log. The first change is in the database by then, but not in the copy made
    # before.
    number = iter(range(3))

    def change(name: str) -> None:
        if name == "journal.sqlite" and next(number) == 0:
            server(ALONE, MOVE, ANOTHER.format(1))

    after_each_copy(monkeypatch, change)
    with open_state(state) as found:
        assert found.rows(BOTH) == [(2, 1)]
    assert next(number) == 2


def test_a_reader_needs_one_copy_despite_checkpoints(state: Path, server: Server, monkeypatch) -> None:
    """If a checkpoint moves a change from the log into the database during the copy, one copy is enough to read the
    change.

    The log still has the change until it is overwritten.
    """
    copies: list[str] = []
    server(ALONE)
    after_each_copy(monkeypatch, lambda name: (copies.append(name), server(MOVE)))
    with open_state(state) as found:
        assert found.rows(BOTH) == [(2, 0)]
    assert copies == ["journal.sqlite", "journal.sqlite-wal"]


def test_a_reader_sees_a_commit_between_copies(state: Path, server: Server, monkeypatch) -> None:
    """A reader sees a change that is committed after the copy of the database and before the copy of the log."""
    server(ALONE)
    after_each_copy(monkeypatch, lambda name: server(ANOTHER.format(1)) if name == "journal.sqlite" else None)
    with open_state(state) as found:
        assert found.rows(BOTH) == [(2, 1)]


def test_a_reader_drops_a_removed_logs_copy(state: Path, monkeypatch) -> None:
    """If a server ends during the first copy and removes its log, the reader drops its copy of the log."""
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


def test_a_reader_gives_up_after_ten_copies(state: Path, server: Server, monkeypatch) -> None:
    """If the journal changes during each of ten copies, the reader gives up with an error that says so."""
    number = iter(range(100))
    after_each_copy(monkeypatch, lambda _: server(ANOTHER.format(next(number)), MOVE))
    with pytest.raises(StoreError, match=r"has changed .* each of the 10 times that it was copied"), open_state(state):
        pass


def test_a_full_temporary_folder_is_reported(state: Path, monkeypatch) -> None:
    """If the folder of temporary files is full, the reader's error names this folder and says what to do."""

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


def test_a_reader_closes_everything_after_an_error(state: Path) -> None:
    """If code that reads a journal raises, the reader closes all its files and leaves none in the state directory."""
    names, files = sorted(state.iterdir()), sorted(open_paths())
    with pytest.raises(ZeroDivisionError), open_state(state):
        raise ZeroDivisionError
    with pytest.raises(StateCorrupt, match="no such table: absent"), open_state(state) as found:
        found.rows("SELECT * FROM absent")
    assert sorted(open_paths()) == files
    assert sorted(state.iterdir()) == names


def test_a_reader_removes_a_killed_readers_files(state: Path, temporary: Path) -> None:
    """A reader removes the temporary folder that a killed reader has left."""
    left = temporary / f"{reader.TEMPORARY}{2**22 + 1}-abc"  # no process has this id
    left.mkdir()
    (left / "journal.sqlite").touch()
    with open_state(state):
        assert not left.exists()


def test_a_folder_without_run_has_no_status(tmp_path: Path) -> None:
    """A folder without a run has no status and no failure. Opening its state is refused."""
    assert saved_status(tmp_path) is None
    assert recorded_failure(tmp_path) == ""
    with pytest.raises(UsageError, match="There is no run in"), open_state(tmp_path):
        pass
