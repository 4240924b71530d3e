"""A checksum in every row of the journal: a value that changes on disk is noticed at the next start.

SQLite has checksums over its write-ahead log, and none over its database. Temporary triggers of the server's own
connection write the checksum, so that no statement can forget it. What changes a value elsewhere, a disk or another
program, leaves a row that no longer agrees with it.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable

TABLES = ("meta", "run", "shapes", "members", "rounds", "tickets", "parts", "versions", "deltas", "heads", "history")
"""Those with a column `row_check`. The audit log has its own hashes, and counters are for people."""

UNCHECKED = {"row_check", "settings_json", "torch_build", "cpu_capability"}
"""Columns that no checksum covers: a start compares them with its own settings, torch and CPU."""


def row_check(*values: object) -> int:
    """CRC-32 of a row's values: any changed bit, and any changed run of up to 32 bits, changes it."""
    return zlib.crc32(repr(values).encode())


def keep(db: sqlite3.Connection) -> None:
    """From here on every row that this connection writes gets its checksum."""
    db.execute("PRAGMA temp_store = MEMORY")
    understand(db)
    for table in TABLES:
        keys, columns = _columns(db, table)
        same_row = " AND ".join(f"{key} = NEW.{key}" for key in keys)
        write = f"UPDATE {table} SET row_check = row_check({', '.join(columns)}) WHERE {same_row};"
        for when in ("INSERT", f"UPDATE OF {', '.join(columns)}"):
            name = f"check_{table}_{when.partition(' ')[0].lower()}"
            db.execute(f"CREATE TEMP TRIGGER {name} AFTER {when} ON main.{table} BEGIN {write} END")


def understand(db: sqlite3.Connection) -> None:
    """Let statements of this connection use the function `row_check`."""
    db.create_function("row_check", -1, row_check, deterministic=True)


def changed_row(db: sqlite3.Connection) -> str | None:
    """The first row that is not what was written, as `table (key = value)`; None where all are."""
    understand(db)
    for table in TABLES:
        keys, columns = _columns(db, table)
        found = db.execute(
            f"SELECT {', '.join(keys)} FROM {table} WHERE row_check != row_check({', '.join(columns)}) LIMIT 1"
        ).fetchone()
        if found:
            return f"{table} ({', '.join(f'{key} = {value!r}' for key, value in zip(keys, found, strict=True))})"
    return None


def changed_definition(db: sqlite3.Connection, schema: Iterable[str]) -> str | None:
    """The first table or index of the schema whose definition in the file is another one; None where none is."""
    with_schema = sqlite3.connect(":memory:")
    try:
        for script in schema:
            with_schema.executescript(script)
        wanted = _definitions(with_schema)
    finally:
        with_schema.close()
    found = _definitions(db)
    return next((name for name, text in wanted.items() if found.get(name) != text), None)


def _definitions(db: sqlite3.Connection) -> dict[str, str]:
    return dict(db.execute("SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


def _columns(db: sqlite3.Connection, table: str) -> tuple[list[str], list[str]]:
    """The columns of the primary key, and those that the checksum covers."""
    found = [(name, key) for _, name, _, _, _, key in db.execute(f"PRAGMA main.table_info({table})")]
    return [name for name, key in found if key], [name for name, _ in found if name not in UNCHECKED]
