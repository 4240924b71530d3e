"""A checksum in every row of the journal: a value that changes on disk is noticed at the next start.

SQLite has checksums over its write-ahead log, and none over its database. Temporary triggers of the server's own
connection write the checksum, so that no statement can forget it. What changes a value elsewhere, a disk or another
program, leaves a row that no longer agrees with it.

The journal's tables. What must never happen is a constraint here, so that no caller can make it happen.

`heads` decides which versions exist: one UPDATE of it is the commit. A version row above its head does not count.
`row_check` is the row's checksum, written by the journal itself (`checks.py`).
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


SCHEMA_VERSION = 5

SCHEMA = f"""
CREATE TABLE meta (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    epoch INTEGER NOT NULL,
    finished INTEGER NOT NULL,
    row_check INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO meta VALUES (1, 0, 0, {row_check(1, 0, 0)});

CREATE TABLE run (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    run_id TEXT NOT NULL,
    settings_json TEXT NOT NULL,
    schema_json TEXT NOT NULL,
    schema_digest TEXT NOT NULL,
    torch_build TEXT NOT NULL,
    cpu_capability TEXT NOT NULL,
    created_at TEXT NOT NULL,
    row_check INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE shapes (
    fragment INTEGER NOT NULL,
    kind TEXT NOT NULL,
    nbytes INTEGER NOT NULL,
    header_digest BLOB NOT NULL,
    row_check INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (fragment, kind)
) STRICT;

CREATE TABLE members (
    site TEXT NOT NULL PRIMARY KEY,
    lease INTEGER NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('alive', 'dead', 'left', 'failed')),
    joined_at TEXT NOT NULL,
    host TEXT NOT NULL,
    labels_json TEXT NOT NULL,
    detail TEXT NOT NULL,
    rounds_counted INTEGER NOT NULL,
    process TEXT NOT NULL,
    weight REAL NOT NULL DEFAULT 0,
    row_check INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE rounds (
    fragment INTEGER NOT NULL,
    base_version INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'frozen', 'committed')),
    expected_json TEXT NOT NULL,
    tickets_json TEXT NOT NULL,
    opened_at TEXT NOT NULL,
    population INTEGER NOT NULL DEFAULT 0,
    total_weight REAL NOT NULL DEFAULT 0,
    row_check INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (fragment, base_version)
) STRICT;
CREATE UNIQUE INDEX one_round ON rounds (fragment) WHERE state IN ('open', 'frozen');

CREATE TABLE tickets (
    ticket INTEGER PRIMARY KEY,
    site TEXT NOT NULL,
    fragment INTEGER NOT NULL,
    base_version INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'accepted', 'counted', 'refused', 'expired')),
    reason TEXT NOT NULL DEFAULT '',
    slot INTEGER CHECK (slot IS NULL OR state IN ('open', 'accepted')),
    digest TEXT,
    weight REAL NOT NULL DEFAULT 0,
    steps INTEGER NOT NULL DEFAULT 0,
    metrics_json TEXT NOT NULL DEFAULT '{{}}',
    norm REAL NOT NULL DEFAULT 0,
    version INTEGER,
    bytes INTEGER NOT NULL DEFAULT 0,
    accepted_order INTEGER NOT NULL DEFAULT 0,
    row_check INTEGER NOT NULL DEFAULT 0,
    CHECK (state != 'accepted' OR slot IS NOT NULL),
    CHECK (state NOT IN ('accepted', 'counted') OR (digest IS NOT NULL AND weight > 0)),
    CHECK ((state = 'counted') = (version IS NOT NULL))
) STRICT;
CREATE UNIQUE INDEX one_ticket ON tickets (site, fragment, base_version)
    WHERE state IN ('open', 'accepted', 'counted');
CREATE UNIQUE INDEX one_spool ON tickets (fragment, slot) WHERE slot IS NOT NULL;
CREATE INDEX live_tickets ON tickets (ticket) WHERE state IN ('open', 'accepted');
CREATE UNIQUE INDEX tickets_in_order ON tickets (accepted_order) WHERE accepted_order > 0;
CREATE INDEX tickets_of_site ON tickets (site, fragment, ticket);
CREATE INDEX tickets_of_round ON tickets (fragment, base_version);

CREATE TABLE parts (
    ticket INTEGER NOT NULL REFERENCES tickets,
    part INTEGER NOT NULL,
    digest BLOB NOT NULL,
    sumsq REAL NOT NULL,
    row_check INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (ticket, part)
) STRICT, WITHOUT ROWID;

CREATE TABLE versions (
    fragment INTEGER NOT NULL,
    version INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    state_slot INTEGER,
    digest TEXT NOT NULL,
    part_digests BLOB NOT NULL,
    state_digests BLOB NOT NULL,
    summary_json TEXT NOT NULL,
    created_at TEXT NOT NULL,
    row_check INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (fragment, version),
    UNIQUE (fragment, slot),
    UNIQUE (fragment, state_slot)
) STRICT;

CREATE TABLE deltas (
    fragment INTEGER NOT NULL,
    version INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    base_version INTEGER NOT NULL,
    base_digest TEXT NOT NULL,
    digest TEXT NOT NULL,
    part_digests BLOB NOT NULL,
    row_check INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (fragment, version),
    UNIQUE (fragment, slot)
) STRICT;

CREATE TABLE heads (
    fragment INTEGER PRIMARY KEY,
    version INTEGER,
    durable_version INTEGER,
    row_check INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE history (
    seq INTEGER PRIMARY KEY,
    fragment INTEGER NOT NULL,
    version INTEGER NOT NULL,
    digest TEXT NOT NULL,
    summary_json TEXT NOT NULL,
    created_at TEXT NOT NULL,
    lost INTEGER NOT NULL DEFAULT 0,
    row_check INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE counters (
    name TEXT NOT NULL PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT;

CREATE TABLE audit (
    seq INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    what TEXT NOT NULL,
    detail_json TEXT NOT NULL,
    prev_hash TEXT NOT NULL,
    hash TEXT NOT NULL
) STRICT;

CREATE TABLE exports_under_way (
    path TEXT NOT NULL PRIMARY KEY
) STRICT;
"""
