"""Disks that lose what was not synced: the server's journal in memory, and images of folders.

The journal of a state directory is a database in memory. What a killed server leaves is the database without the open
transaction, and its files as they are. What a power loss leaves is the database as of the last synced commit, and of
each file what it had when it was last synced, or what it has now: the system may have written it by itself.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

ONCE = ("PRAGMA foreign_keys", "PRAGMA journal_mode", "PRAGMA temp_store", "PRAGMA wal_")
"""Statements that set up a connection: carried out again, they would make SQLite compile all others anew."""


def no_checksums(_: sqlite3.Connection) -> None:
    """Do in place of `write_checksums`: in a history no byte of a journal's file is damaged."""


def no_damage(*_: Any) -> None:
    """Do in place of `require_unchanged`."""


def no_checksum(*_: Any) -> int:
    """Do in place of `row_check`."""
    return 0


class Database:
    """A database in memory, and its one connection, which keeps its compiled statements.

    Each server process opens it again, and each history empties it. Compiling its statements for each process would
    take a third of a history's time.

    Attributes:
        synced: its content after the last commit that survives a power loss; empty: as it is now.
        is_careful: whether commits are rarely synced, so that `synced` has to be kept.
        done: the statements `ONCE` that its connection has carried out, and the functions that it has.
        first_rows: table → its rows in a new journal.
    """

    def __init__(self) -> None:
        self.synced, self.is_careful = b"", False
        self.first_rows: dict[str, list[tuple[Any, ...]]] = {}
        self._connect()

    def _connect(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=1000)
        self.done = set[str]()

    def go_back(self) -> None:
        """Lose what was not synced. SQLite cannot do so under a connection that has compiled statements."""
        self.connection.close()
        self._connect()
        self.connection.deserialize(self.synced)

    def note_synced(self) -> None:
        if self.is_careful:
            self.synced = self.connection.serialize()

    def note_first(self) -> None:
        """Remember the rows that a new journal has."""
        tables = self.connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY rowid DESC")
        for (table,) in tables.fetchall():
            self.first_rows[table] = self.connection.execute(f"SELECT * FROM {table}").fetchall()

    def close(self) -> None:
        """End the process that has it open: its transaction is undone."""
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def empty(self) -> None:
        """Leave the rows that a new journal has."""
        self.connection.execute("BEGIN")
        for table, rows in self.first_rows.items():
            self.connection.execute(f"DELETE FROM {table}")
            for row in rows:
                self.connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' for _ in row)})", row)
        self.connection.execute("COMMIT")


class Opened:
    """What a server process has as its connection."""

    def __init__(self, database: Database) -> None:
        self._database: Database | None = database
        self._is_full = True
        self.executemany = database.connection.executemany

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._database is None:
            raise sqlite3.ProgrammingError("Cannot operate on a closed database.")
        return self._database.connection

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    @property
    def total_changes(self) -> int:
        return self._connection.total_changes

    def execute(self, sql: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        connection, database = self._connection, self._database
        assert database is not None
        if sql.startswith("SELECT integrity_check"):
            return connection.execute("SELECT 'ok'")
        if sql[0] in "CP":  # COMMIT, PRAGMA
            if sql.startswith("PRAGMA synchronous = "):
                self._is_full = sql.endswith("FULL")
            if sql in database.done:
                return connection.cursor()
            if sql.startswith(ONCE):
                database.done.add(sql)
        cursor = connection.execute(sql, values)
        if sql == "COMMIT" and self._is_full:
            database.note_synced()
        return cursor

    def executescript(self, sql: str) -> None:
        self._connection.executescript(sql)
        assert self._database is not None
        self._database.note_first()

    def create_function(self, name: str, *arguments: Any, **more: Any) -> None:
        assert self._database is not None
        if name not in self._database.done:
            self._database.done.add(name)
            self._connection.create_function(name, *arguments, **more)

    def close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()


_FREE: list[Database] = []
"""Databases of histories that have ended, empty."""


class Disks:
    """The databases of all state directories, by path, and the contents that files had when they were synced.

    Attributes:
        power: whether each commit is synced (`disk.durability = "power"`).
        loses: whether a power loss is to come, so that what was synced has to be kept.
    """

    def __init__(self, *, power: bool, loses: bool = True) -> None:
        self.power, self.loses = power, loses
        self._databases: dict[str, Database] = {}
        self._synced: dict[str, bytes] = {}

    def connect(self, path: str | Path, *args: Any, **options: Any) -> Opened:
        """Open the database of a path, as `sqlite3.connect` does."""
        database = self._databases.get(str(path))
        if database is None:
            database = self._databases[str(path)] = _FREE.pop() if _FREE else Database()
            database.synced, database.is_careful = b"", self.loses and not self.power
        return Opened(database)

    def end(self) -> None:
        """Keep the databases for later histories."""
        for database in self._databases.values():
            database.close()
            database.empty()
        _FREE.extend(self._databases.values())
        self._databases.clear()

    def checkpoint(self, path: Path) -> None:
        """What SQLite's checkpoint does here: all that was committed survives a power loss."""
        self._databases[str(path)].note_synced()

    def fsync(self, fd: int) -> None:
        """Remember what a file has."""
        if not self.loses:
            return
        path = os.readlink(f"/proc/self/fd/{fd}")
        if os.path.isfile(path):
            self._synced[path] = Path(path).read_bytes()

    def copy_killed(self, before: Path, after: Path) -> Callable[[], None]:
        """Copy what a process leaves that is killed now. Call the result when its open transaction was undone."""
        _copy(before, after)
        for path in list(self._synced):
            if path.startswith(f"{before}/"):
                self._synced[f"{after}{path.removeprefix(str(before))}"] = self._synced.pop(path)
        return lambda: self._copy_database(before, after, power_loss=False)

    def copy_power_loss(self, before: Path, after: Path, chance: random.Random) -> Callable[[], None]:
        """Copy what a loss of power leaves now, as `copy_killed` does."""
        _copy(before, after)
        for path in sorted((after / "slots").iterdir()):
            was = str(before / "slots" / path.name)
            if chance.random() < 0.5:
                nbytes = path.stat().st_size
                path.write_bytes(self._synced.get(was, b"")[:nbytes].ljust(nbytes, b"\0"))
            self._synced[str(path)] = path.read_bytes()
        return lambda: self._copy_database(before, after, power_loss=True)

    def _copy_database(self, before: Path, after: Path, *, power_loss: bool) -> None:
        for path, database in list(self._databases.items()):
            if Path(path).parent == before:
                database.close()
                del self._databases[path]
                self._databases[str(after / Path(path).name)] = database
                if power_loss and database.synced:
                    database.go_back()


def _copy(before: Path, after: Path) -> None:
    """Copy a folder of small files."""
    after.mkdir(mode=0o700)
    with os.scandir(before) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _copy(Path(entry.path), after / entry.name)
            elif entry.is_file(follow_symlinks=False):
                shutil.copyfile(entry.path, after / entry.name)
                os.chmod(after / entry.name, 0o600)


copy = _copy


def lose_power_at_site(folder: Path, chance: random.Random) -> None:
    """A site's folder after a loss of power: its notes are there, but bytes of some other files are not."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".bin", ".safetensors") and chance.random() < 0.4:
            path.write_bytes(bytes(path.stat().st_size))
