"""The journal: the SQLite database (WAL mode) with the server's decisions. It has one connection and one lock.

The lock also guards values in memory that must agree with the journal, such as which tensor files are in use. Callbacks
(`after_commit`, `after_rollback`) keep these values up to date. If the process is killed at any instruction,
all changes of a transaction are in the file, or none of them.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import sqlite3
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from atoll.errors import DiskFull, StateCorrupt, StoreError, SyncFailed, transient_reason
from atoll.format_text import of_fragment
from atoll.posix import FULL, file_error, open_own
from atoll.runtime import failpoint
from atoll.store import journal_tables, migrations
from atoll.store.journal_tables import CHECKED, CHECKED_LATER, SCHEMA, SCHEMA_VERSION, Table

LOG = logging.getLogger("atoll.server")

Durability = Literal["process", "power"]
Row = TypeVar("Row")
Answer = TypeVar("Answer")
UNUSABLE = "Check the disk, and that this user may write the file and its folder; then start the run again."
_FSYNC = {sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC}
_CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
JOURNAL = "journal.sqlite"
"""Name of the journal's file in a state directory."""
BUSY_S = 5.0
"""Seconds that the journal waits for another program's lock on the file."""
LOG_PAGES = 16_000
"""SQLite checkpoints the write-ahead log at this size, in pages of 4 KiB, unless `checkpoint` was called before."""
LOG_BYTES = 8 * 2**20
"""Once copied, the file of the write-ahead log shrinks to this size: a large transaction takes its space only once."""
LOG_CHANGES = 1000
"""The write-ahead log is copied in the background after so many changed rows: it then has about 2,000 pages. What a
commit survives does not depend on it: a `synced` one writes the whole log to the disk."""

REMEMBERED = set(CHECKED) - {"events", "site_rounds", "configs", "identities", "workflow_facts"}
"""Tables of which the journal remembers what it has read, until they change. Answers from other tables may be long."""
MOST_ANSWERS = 200
"""Number of answers that are remembered at most, for each set of tables. A client can ask for any version."""
_TABLES = {*CHECKED, "audit", "counters", "exports_under_way"}

NEW_RUN = (
    "Restore the whole directory from a backup, or start a new run with another disk.state_dir and "
    "model.source = an exported file."
)


class Journal:
    """The journal of one state directory. Thread-safe: during one thread's transaction all other threads wait.

    Attributes:
        undone: number of rollbacks so far. A value that was read from the journal and cached is valid only as long as
            this number is unchanged.
        committed: callback after every commit; it runs after the callbacks of `after_commit`.
    """

    def __init__(self, path: Path, durability: Durability, *, begin: bool = True) -> None:
        """Open the journal at `path`, or create one if the file is missing or empty. Migrate one of an older version.

        Args:
            path: path of the SQLite file.
            durability: what a commit survives. `process`: a kill of the server. `power`: also a power loss.
            begin: whether a new journal may be created. Pass False if files of an earlier run exist.

        Raises:
            StateCorrupt: the file is not a journal, is damaged, or is of a version that this Atoll does not read. Or it
                is missing or empty, and `begin` is False.
            StoreError: the file cannot be opened.
        """
        self.path, self.durability = path, durability
        self.lock = threading.RLock()
        self._level: str = "FULL" if durability == "power" else "NORMAL"
        self._depth = 0
        self._torn = False
        self._on_commit: list[Callable[[], None]] = []  # callbacks of `after_commit`
        self._on_rollback: list[Callable[[], None]] = []
        self._broken: SyncFailed | None = None
        self._translated = _Translated(self)
        self._checkpointing = threading.Lock()
        self._checkpoints: sqlite3.Connection | None = None  # copies the write-ahead log beside this thread's changes
        self._copied_changes = 0  # number of changed rows when it last did
        self._changes = Counter[str]()  # table → number of statements so far that may have changed it
        # tables of a query → the sum of their changes, and (query, its values, how it was fetched) → the answer
        self._answers: dict[frozenset[str], tuple[int, dict[tuple[Any, ...], Any]]] = {}
        self.undone = 0
        self.committed: Callable[[], None] = lambda: None
        self._open_files()
        if path.stat().st_size == 1:  # SQLite treats it as empty, and would overwrite it
            raise StateCorrupt(f"{path} is damaged: file is not a database.", NEW_RUN)
        with self._translated:
            self._db = sqlite3.connect(path, BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            with self._translated:
                self._prepare(begin)
        except UnicodeDecodeError as error:  # SQLite's message quotes the damaged bytes
            self._db.close()
            raise StateCorrupt(f"{path} is damaged: {error}.", NEW_RUN) from error
        except BaseException:
            self._db.close()
            raise
        self._file = path.stat()
        self.closed = False

    def _open_files(self) -> None:
        """Make the file if it is missing, for its owner alone: SQLite gives its other files the same mode.

        Raises:
            StoreError: one of SQLite's files is a link, or another thing that is not a file of its own.
        """
        for path in journal_tables.files_of(self.path):
            try:
                if path == self.path or os.path.lexists(path):
                    os.close(open_own(path, os.O_RDWR | os.O_CREAT))
            except OSError as error:
                raise file_error(error, path) from error

    def _prepare(self, begin: bool) -> None:
        version = require_journal(self._db, self.path)
        if version == 0 and not begin:
            raise StateCorrupt(f"{self.path} is missing or empty, but files of its run exist.", NEW_RUN)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {self._level}")
        if 0 < version < SCHEMA_VERSION:
            self._migrate(version)
        self._db.execute("PRAGMA foreign_keys = ON")
        self._db.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        self._db.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        if version == 0:
            self._db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        # without a table's name, it would also read all rows that are checked later
        for (answer,) in self._db.execute(
            "SELECT integrity_check FROM sqlite_schema, pragma_integrity_check(name) "
            "WHERE type = 'table' AND name != ?",
            (CHECKED_LATER,),
        ):
            if answer != "ok":
                raise StateCorrupt(f"{self.path} is damaged: {answer}.", NEW_RUN)
        require_unchanged(self._db, self.path, set(CHECKED) - {CHECKED_LATER})
        journal_tables.write_checksums(self._db)

    def _migrate(self, version: int) -> None:
        """Make a journal of today's version out of an older one: wholly or, after a kill or an error, not at all."""
        damaged = next(journal_tables.changed_rows(self._db, migrations.checked_in(self._db) - {CHECKED_LATER}), None)
        if damaged is not None:
            raise _changed(self.path, damaged)
        backup = migrations.back_up(self._db, self.path, version, self.sync)
        self.sync_folder(self.path.parent)
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            migrations.migrate(self._db, version)
            require_unchanged(self._db, self.path, set(CHECKED) - {CHECKED_LATER})
            failpoint("journal.migrate")
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._db.execute(f"PRAGMA synchronous = {self._level}")
        LOG.warning(  # commands that change the run, such as `atoll pause`, print warnings, too
            "%s was of journal version %d, and is of version %d now. As it was, it is kept as %s. An older Atoll "
            "cannot go on from here: for that, restore the whole directory from a backup",
            *(self.path, version, SCHEMA_VERSION, backup),
        )

    @contextmanager
    def transaction(self, *, synced: bool = False) -> Iterator[None]:
        """Group all changes inside a `with` block into one transaction. A nested block joins the outer transaction.

        If a nested block raises before it has changed a row, and the error is caught, the outer transaction goes on. If
        a nested block raises after it has changed a row, the outer transaction cannot be committed any more.

        Args:
            synced: make the commit survive a power loss, even with durability `process`. Only for the outermost block.

        Raises:
            DiskFull: nothing was changed; try again.
            SyncFailed: fsync failed, and the newest changes may be lost. Every later transaction raises this error.
        """
        with self.lock, self._translated:
            if self._broken:
                raise self._broken
            outermost, marks = self._depth == 0, (len(self._on_commit), len(self._on_rollback))
            if not outermost and not self._db.in_transaction:
                raise StoreError("SQLite has rolled this transaction back.", "Repeat all changes in a new transaction.")
            changes = self._db.total_changes
            self._depth += 1
            try:
                if outermost:
                    self._begin(synced)
                yield
                if outermost:
                    self._commit()
            except BaseException:
                self._torn = self._torn or self._db.total_changes != changes
                if outermost:
                    self.undone += 1
                    self._answers.clear()
                    if self._db.in_transaction:  # SQLite ends it by itself if the disk is full
                        self._db.execute("ROLLBACK")
                self._forget(*marks)
                raise
            finally:
                self._depth -= 1
                if synced:
                    self._db.execute(f"PRAGMA synchronous = {self._level}")
            if outermost:
                done, self._on_commit, self._on_rollback = self._on_commit, [], []
                for action in done:
                    action()
                self.committed()

    def _begin(self, synced: bool) -> None:
        self._torn = False
        if synced:
            self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        if self._torn:
            raise StoreError("An earlier change in the same transaction failed, so the whole transaction was undone.")
        failpoint("journal.commit")
        self._db.execute("COMMIT")

    def _forget(self, commits: int, rollbacks: int) -> None:
        """Drop a failed block's `after_commit` callbacks, and run its `after_rollback` callbacks in reverse order.

        Args:
            commits: number of `after_commit` callbacks that were registered before the block.
            rollbacks: number of `after_rollback` callbacks that were registered before the block.
        """
        actions = reversed(self._on_rollback[rollbacks:])
        del self._on_commit[commits:], self._on_rollback[rollbacks:]
        for action in actions:
            action()

    def after_commit(self, action: Callable[[], None]) -> None:
        """Call `action` under the lock after the outermost transaction is committed. `action` must not raise."""
        assert self._depth
        self._on_commit.append(action)

    def after_rollback(self, action: Callable[[], None]) -> None:
        """Call `action` if the current `transaction` block, or a block around it, fails. `action` must not raise."""
        assert self._depth
        self._on_rollback.append(action)

    def insert(self, table: Table[Row], row: Row, otherwise: str = "") -> int:
        """Insert a row and return the number of changed rows. Call it inside a transaction.

        Args:
            table: table of the row.
            row: the row to insert.
            otherwise: an SQL clause `ON CONFLICT …` for a row that exists already.
        """
        return self.execute(f"{table.insert} {otherwise}", *table.write(row))

    def execute(self, sql: str, *values: Any) -> int:
        """Execute one statement that changes rows, and return the number of changed rows. Call it in a transaction."""
        self._begin_change(sql)
        with self._translated:
            return self._db.execute(sql, values).rowcount

    def execute_many(self, sql: str, values: Iterable[Sequence[Any]]) -> None:
        """Execute a statement once for each tuple of values. Call it inside a transaction."""
        self._begin_change(sql)
        with self._translated:
            self._db.executemany(sql, values)

    def _begin_change(self, sql: str) -> None:
        assert self._depth, "a change outside of a transaction"
        for table in _tables_in(sql):
            self._changes[table] += 1

    def select(self, table: Table[Row], where: str = "", *values: Any) -> list[Row]:
        """Return the rows of a table that match `where`, as dataclass objects.

        Args:
            table: the table.
            where: an SQL clause `WHERE … ORDER BY …`, with a `?` for each of `values`; empty for all rows.
            values: values for the clause.
        """
        return list(self._ask(f"{table.select} {where}", values, table.read_all))

    def first(self, table: Table[Row], where: str = "", *values: Any) -> Row | None:
        """Return the first row that `select` would return; None if there is no row."""
        return self._ask(f"{table.select} {where}", values, table.read_first)

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return every row of a query. Do not change the list."""
        return self._ask(sql, values, sqlite3.Cursor.fetchall)

    def row(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        """Return the first row of a query; None if there is no row."""
        found: tuple[Any, ...] | None = self._ask(sql, values, sqlite3.Cursor.fetchone)
        return found

    def _ask(self, sql: str, values: tuple[Any, ...], fetch: Callable[[sqlite3.Cursor], Answer]) -> Answer:
        """Return the answer to a query. If all its tables are remembered, ask SQLite only once until one changes.

        Only this process writes the journal, through this connection. Outside of a transaction, each question to SQLite
        locks and unlocks the file.
        """
        with self.lock, self._translated:
            if not (tables := _tables_in(sql)) or not tables <= REMEMBERED:
                return fetch(self._db.execute(sql, values))
            changes, key = sum(self._changes[table] for table in tables), (sql, values, fetch)
            as_of, known = self._answers.get(tables, (-1, {}))
            if as_of != changes or len(known) >= MOST_ANSWERS:
                known = {}
                self._answers[tables] = changes, known
            if key not in known:
                known[key] = fetch(self._db.execute(sql, values))
            answer: Answer = known[key]
            return answer

    def value(self, sql: str, *values: Any) -> Any:
        """Return the first column of a query's first row; None if there is no row."""
        row = self.row(sql, *values)
        return row[0] if row else None

    def of(self, fragment: int) -> str:
        """Return " of fragment 2", for messages; empty if the run has one fragment."""
        return of_fragment(fragment if self.value("SELECT count(*) FROM heads") > 1 else None)

    def count(self, name: str, by: int = 1) -> None:
        """Add `by` to the counter `name`, one of the run's totals. Call it inside a transaction."""
        self.execute(
            "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
            name,
            by,
        )

    def sync(self, fd: int, what: str) -> None:
        """Fsync a file or a folder.

        Args:
            fd: descriptor of the file or folder.
            what: name of the file or folder for the error message.

        Raises:
            SyncFailed: fsync failed. Every later transaction fails, too.
        """
        try:
            failpoint("fsync")
            os.fsync(fd)
        except OSError as error:
            raise self.sync_failed(what, error) from error

    def sync_folder(self, folder: Path) -> None:
        """Fsync a folder, so that its file names survive a power loss.

        Raises:
            SyncFailed: fsync failed. Every later transaction fails, too.
        """
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(fd, str(folder))
        finally:
            os.close(fd)

    def sync_failed(self, what: str, error: OSError) -> SyncFailed:
        """Make every later transaction fail, and return the error to raise.

        After a failed fsync the kernel may have dropped data that was not written yet. So a later fsync that succeeds
        does not prove that the data are on disk.

        Args:
            what: name of the file or folder for the error message.
            error: the error of fsync.
        """
        self._broken = SyncFailed(
            f"fsync of {what} failed: {error.strerror}; what was written last may be lost.",
            "Check the disk, then start the run again: it falls back to the newest data that it can verify.",
        )
        return self._broken

    def checkpoint(self, least_changes: int = 0) -> None:
        """Copy SQLite's write-ahead log into the database file, without blocking other threads.

        If SQLite cannot open the file (too many open files), do nothing; the next call tries again.

        Args:
            least_changes: do nothing if fewer rows were changed since the last copy.

        Raises:
            StoreError: the file was removed or replaced, so the next start would not find later changes.
        """
        is_there = False
        with suppress(FileNotFoundError):
            is_there = os.path.samestat(self.path.lstat(), self._file)
        if not is_there:
            raise StoreError(f"{self.path} was removed or replaced while the server was running.", NEW_RUN)
        with self._checkpointing, self._translated:
            if self.closed or (changes := self._db.total_changes) - self._copied_changes < least_changes:
                return
            try:
                if self._checkpoints is None:  # kept, because opening a connection reads the whole schema
                    self._checkpoints = sqlite3.connect(self.path, check_same_thread=False)
                self._checkpoints.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # ends its locks
                self._copied_changes = changes
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CANTOPEN:
                    raise

    @property
    def in_transaction(self) -> bool:
        """Whether this thread is inside a transaction."""
        with self.lock:  # while another thread is inside one, this waits
            return self._depth > 0

    @property
    def usable(self) -> bool:
        """Whether the journal is open, and no fsync has failed."""
        return not self.closed and self._broken is None

    def close(self) -> None:
        """Close the connection to the file. Idempotent."""
        with self.lock:
            if not self.closed:
                self.closed = True
                self._answers.clear()
                with self._checkpointing:
                    if self._checkpoints is not None:
                        self._checkpoints.close()
                self._db.close()

    def readable(self, error: sqlite3.Error) -> StoreError:
        """Convert an error of SQLite to a `StoreError`, or a subclass, with a readable message and a remedy."""
        code = getattr(error, "sqlite_errorcode", 0)
        if code & 0xFF == sqlite3.SQLITE_FULL:
            return DiskFull(f"The disk of {self.path.parent} is full.", "Free disk space; nothing was lost.")
        if code in _FSYNC:
            return self.sync_failed(str(self.path), OSError(errno.EIO, str(error)))
        if code & 0xFF in _CORRUPT:
            return StateCorrupt(f"{self.path} is damaged: {error}.", NEW_RUN)
        if code & 0xFF in _BUSY:
            return StoreError(
                f"{self.path} was locked by another program for {BUSY_S:g} s.",
                "Close the program that writes to it, for example a sqlite3 shell or a backup, and start the "
                "server again: nothing is lost.",
            )
        return StoreError(f"{self.path}: {error}.", UNUSABLE)


class KeptValue(Generic[Answer]):
    """A value of the journal that is also kept in memory: it is read from the journal only after a rollback.

    A transaction that changes the value calls `set` or `forget`.

    Args:
        journal: the journal.
        read: reads the value from the journal.
    """

    _value: Answer

    def __init__(self, journal: Journal, read: Callable[[], Answer]) -> None:
        self._journal, self._read, self._as_of = journal, read, -1

    def get(self) -> Answer:
        """Return the value."""
        with self._journal.lock:
            if self._as_of != self._journal.undone:
                self.set(self._read())
            return self._value

    def set(self, value: Answer) -> None:
        """Replace the value. Call it in the transaction that changes the value in the journal."""
        self._value, self._as_of = value, self._journal.undone

    def forget(self) -> None:
        """Read the value from the journal the next time. Call it in the transaction that changes it."""
        self._as_of = -1


class _Translated:
    """A context manager that converts errors of SQLite to a `StoreError` or a subclass. Every SQL statement runs in it.

    It is a class, because a generator with `contextmanager` would be slower.

    Raises:
        DiskFull: the disk is full.
        SyncFailed: SQLite's fsync failed.
        StateCorrupt: the file is damaged.
        StoreError: any other error of SQLite.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal: Journal = weakref.proxy(journal)  # a cycle would keep the connection open until a collection

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, sqlite3.Error):
            raise self._journal.readable(error) from error
        if isinstance(error, OSError) and error.errno in FULL:
            folder = self._journal.path.parent
            raise DiskFull(f"The disk of {folder} is full.", "Free disk space; nothing was lost.") from error


def journal_failed(error: StoreError) -> bool:
    """Return whether an error makes the journal unusable until the server starts again.

    True for a failed fsync, and for an error of SQLite that would occur again at a retry. False for a full disk.
    """
    return isinstance(error, SyncFailed) or (isinstance(error.__cause__, sqlite3.Error) and not transient_reason(error))


def require_journal(db: sqlite3.Connection, path: Path) -> int:
    """Check that a database is a journal that this Atoll reads or migrates. Return its version; 0 if it has no tables.

    Args:
        db: connection to the database.
        path: path of the database, for the message.

    Raises:
        StateCorrupt: the database belongs to another program or to another version of Atoll.
    """
    ((version,),) = db.execute("PRAGMA user_version").fetchall()
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and (version == 0 or tables.isdisjoint(journal_tables.CHECKED)):
        raise StateCorrupt(
            f"{path} belongs to another program: it has the table {min(tables)!r}.",
            "Move it away, or set another disk.state_dir.",
        )
    if version and not migrations.OLDEST <= version <= SCHEMA_VERSION:
        raise StateCorrupt(
            f"{path} has journal version {version}, but this Atoll reads versions {migrations.OLDEST} to "
            f"{SCHEMA_VERSION}.",
            "A newer Atoll wrote it. Upgrade Atoll here; nothing was changed."
            if version > SCHEMA_VERSION
            else "Start its server once with an older Atoll that reads it, or use the version of Atoll that wrote it.",
        )
    return int(version)


def require_unchanged(db: sqlite3.Connection, path: Path, tables: Iterable[str] = CHECKED) -> None:
    """Check that every table of a journal is as Atoll defines it, and that rows match their checksums.

    Args:
        db: connection to the journal.
        path: path of the journal, for the message.
        tables: the tables of which the rows are checked.

    Raises:
        StateCorrupt: a table or a row is damaged or was changed.
    """
    changed = journal_tables.changed_definition(db) or next(journal_tables.changed_rows(db, tables), None)
    if changed is not None:
        raise _changed(path, changed)


def require_row(table: str, keys: Sequence[str], *values: object, check: int, remedy: str = NEW_RUN) -> None:
    """Check that a row matches its checksum.

    Args:
        table: the row's table.
        keys: columns of the primary key, which are the table's first columns.
        values: values of all columns, in their order.
        check: the row's checksum.
        remedy: what to do if it does not match.

    Raises:
        StateCorrupt: the row is damaged or was changed.
    """
    if journal_tables.row_check(*values) != check:
        raise _changed(JOURNAL, journal_tables.named_row(table, dict(zip(keys, values, strict=False))), remedy)


def _changed(path: Path | str, what: str, remedy: str = NEW_RUN) -> StateCorrupt:
    return StateCorrupt(f"{path} is damaged: the content of {what} does not match its checksum.", remedy)


@functools.lru_cache(1000)
def _tables_in(sql: str) -> frozenset[str]:
    """Return the journal's tables that an SQL statement names, and perhaps others: a column may have a table's name."""
    return frozenset(_TABLES.intersection(re.findall(r"\w+", sql)))


def placeholders(values: Iterable[object]) -> str:
    """Return one `?` per value, separated by commas, for an SQL clause `IN (…)`."""
    return ", ".join("?" for _ in values)
