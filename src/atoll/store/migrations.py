"""Migrations of the journal: each makes the tables of one version out of those of the version before.

A migration never changes once a release has it: it is a copy of what the tables were then, not of what they are now.
All steps to today's version are one transaction, so a journal is of its old version or of today's, whenever the process
is killed. Nothing leads back. So a copy of the old journal is written first.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from atoll.posix import file_error, open_own
from atoll.runtime import failpoint
from atoll.store import journal_tables

_ADMIN = (
    "ALTER TABLE meta RENAME TO meta_before",
    """CREATE TABLE meta (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    epoch INTEGER NOT NULL,
    finished INTEGER NOT NULL,
    failed TEXT NOT NULL DEFAULT '',
    paused INTEGER NOT NULL DEFAULT 0,
    stopping INTEGER NOT NULL DEFAULT 0,
    back_to INTEGER NOT NULL DEFAULT -1,
    row_check INTEGER NOT NULL DEFAULT 0
) STRICT""",
    "INSERT INTO meta SELECT id, epoch, finished, failed, 0, 0, -1, row_check(id, epoch, finished, failed, 0, 0, -1) "
    "FROM meta_before",
    "DROP TABLE meta_before",
    """CREATE TABLE configs (
    site TEXT NOT NULL,
    round INTEGER NOT NULL,
    config_json TEXT NOT NULL,
    row_check INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (site, round)
) STRICT""",
)

_IDENTITIES = (
    """CREATE TABLE identities (
    site TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('invited', 'enrolled', 'revoked')),
    since TEXT NOT NULL,
    kind TEXT NOT NULL DEFAULT '',
    credential TEXT NOT NULL DEFAULT '',
    expires_at REAL NOT NULL DEFAULT 0.0,
    previous TEXT NOT NULL DEFAULT '',
    previous_until REAL NOT NULL DEFAULT 0.0,
    invitation TEXT NOT NULL DEFAULT '',
    invited_until REAL NOT NULL DEFAULT 0.0,
    used TEXT NOT NULL DEFAULT '',
    used_request TEXT NOT NULL DEFAULT '',
    used_at TEXT NOT NULL DEFAULT '',
    enrolments INTEGER NOT NULL DEFAULT 0,
    row_check INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (site)
) STRICT""",
)

_FACTS = (
    """CREATE TABLE workflow_facts (
    place INTEGER NOT NULL,
    number INTEGER NOT NULL,
    of_call INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('call', 'answer', 'end', 'dropped')),
    turn INTEGER NOT NULL DEFAULT -1,
    asked_json TEXT NOT NULL DEFAULT '',
    value_json TEXT NOT NULL DEFAULT '',
    file TEXT NOT NULL DEFAULT '',
    nbytes INTEGER NOT NULL DEFAULT 0,
    row_check INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (place, number)
) STRICT""",
)

MIGRATIONS: dict[int, tuple[str, ...]] = {12: _ADMIN, 13: _IDENTITIES, 14: _FACTS}
"""Version of the journal → the statements that lead to it from the version before."""
OLDEST = min(MIGRATIONS) - 1
"""The oldest version from which migrations lead to today's."""


def back_up(db: sqlite3.Connection, path: Path, version: int, sync: Callable[[int, str], None]) -> Path:
    """Write a copy of a journal beside it, whole or not at all, and return its path. An earlier copy is replaced.

    Args:
        db: connection to the journal.
        path: path of the journal.
        version: version of the journal, for the name of the copy.
        sync: writes a file to disk; it gets the descriptor and the name.

    Raises:
        sqlite3.Error, StoreError: the copy cannot be written.
    """
    backup = path.with_name(f"{path.stem}.version-{version}{path.suffix}")
    partial = backup.with_name(f"{backup.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        fd = open_own(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL)  # for its owner alone
        try:
            with closing(sqlite3.connect(partial)) as copy:
                db.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE")  # one file, which a user can move
            failpoint("journal.backup")
            sync(fd, str(partial))
            partial.replace(backup)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        raise file_error(error, partial) from error
    return backup


def checked_in(db: sqlite3.Connection) -> set[str]:
    """Return the tables of a journal, of any version, that have a checksum for each row."""
    return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE sql LIKE '%row_check%'")}


def migrate(db: sqlite3.Connection, version: int) -> None:
    """Make today's tables out of those of an older version. Call it in a transaction, with foreign keys off."""
    journal_tables.register_row_check(db)
    for number in range(version + 1, journal_tables.SCHEMA_VERSION + 1):
        for statement in MIGRATIONS[number]:
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {number}")


def migrated_copy(db: sqlite3.Connection, version: int) -> sqlite3.Connection:
    """Return a copy of a journal, of today's version, in a temporary file that ends with its connection."""
    copy = sqlite3.connect("", isolation_level=None)
    try:
        db.backup(copy)
        copy.execute("BEGIN")
        migrate(copy, version)
    except BaseException:
        copy.close()
        raise
    return copy
