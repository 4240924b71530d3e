"""The journal's tables. What must never happen is a constraint here, so that no caller can make it happen.

`heads` decides which versions exist: one UPDATE of it is the commit. A version row above its head does not count.
`row_check` is the row's checksum, written by the journal itself (`checks.py`).
"""

from atoll.store.checks import row_check

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
