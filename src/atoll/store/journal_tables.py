"""The journal's tables, their checksums, and one dataclass per table for its rows.

Constraints of the tables exclude impossible states. The table `heads` has the number of each fragment's newest version
(its head). One UPDATE of `heads` commits a version; rows of `versions` with a higher number are ignored.

SQLite has checksums for its write-ahead log, but not for its database file. So each row has a checksum in the column
`row_check`. Triggers of the server's connection write this column, so no statement can forget it. If a disk or another
program changes a value, the row no longer matches its checksum.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from blake3 import blake3

from atoll.posix import require_regular
from atoll.protocol.messages import Report

CHECKED = (
    *("meta", "run", "shapes", "members", "rounds", "tickets", "parts"),
    *("versions", "deltas", "heads", "history", "site_rounds", "workflows", "generations", "sat_out_rounds", "events"),
    *("configs", "identities", "workflow_facts"),
)
"""Tables with a column `row_check`. The audit log has hashes instead. Counters are only displayed."""

CHECKED_LATER = "site_rounds"
"""Rows of this table are checked when they are read, not by each start: a long run has millions of them."""

ROW_CHECK = "row_check INTEGER NOT NULL DEFAULT 0"
"""SQL definition of the checksum column."""

UNCHECKED = {"row_check", "settings_json", "torch_build", "cpu_capability"}
"""Columns that the checksum does not cover: the checksum's own column, and the columns that a starting server compares
with its settings, torch build and CPU."""


def row_check(*values: object) -> int:
    """Return the CRC-32 of a row's values. It detects every change of one bit, and every burst of up to 32 bits."""
    return zlib.crc32(repr(values).encode())


def files_of(journal: Path) -> tuple[Path, ...]:
    """Return the paths of all files that SQLite keeps for a journal."""
    return tuple(journal.with_name(f"{journal.name}{end}") for end in ("", "-wal", "-shm", "-journal"))


def require_regular_files(journal: Path) -> None:
    """Check that SQLite may open a journal: the files that it keeps for it are regular files.

    Raises:
        OSError: one of them is something else.
    """
    for path in filter(os.path.lexists, files_of(journal)):
        require_regular(path, own=True)


def write_checksums(db: sqlite3.Connection) -> None:
    """Create triggers that write the checksum of every row that this connection inserts or updates."""
    db.execute("PRAGMA temp_store = MEMORY")
    register_row_check(db)
    for table in CHECKED:
        keys, columns = _columns(db, table)
        same_row = " AND ".join(f"{key} = NEW.{key}" for key in keys)
        write = f"UPDATE {table} SET row_check = row_check({', '.join(columns)}) WHERE {same_row};"
        for when in ("INSERT", f"UPDATE OF {', '.join(columns)}"):
            name = f"check_{table}_{when.partition(' ')[0].lower()}"
            db.execute(f"CREATE TEMP TRIGGER {name} AFTER {when} ON main.{table} BEGIN {write} END")


def register_row_check(db: sqlite3.Connection) -> None:
    """Make the Python function `row_check` callable in SQL statements of a connection."""
    db.create_function("row_check", -1, row_check, deterministic=True)


def changed_rows(db: sqlite3.Connection, tables: Iterable[str]) -> Iterator[str]:
    """Yield the rows of these tables that do not match their checksums, by `named_row`."""
    register_row_check(db)
    for table in tables:
        keys, columns = _columns(db, table)
        wrong = f"SELECT {', '.join(keys)} FROM {table} WHERE row_check != row_check({', '.join(columns)})"
        for found in db.execute(wrong):
            yield named_row(table, dict(zip(keys, found, strict=True)))


def named_row(table: str, keys: Mapping[str, object]) -> str:
    """Return the name of a row in messages: `table (key = value)`."""
    return f"{table} ({', '.join(f'{key} = {value!r}' for key, value in keys.items())})"


def changed_definition(db: sqlite3.Connection) -> str | None:
    """Return the first table or index that differs from its definition in `SCHEMA`, as text; None if none differs."""
    found = _definitions(db)
    return next((name for name, text in _wanted_definitions().items() if found.get(name) != text), None)


@functools.cache
def _wanted_definitions() -> dict[str, str]:
    with contextlib.closing(sqlite3.connect(":memory:")) as with_schema:
        with_schema.executescript(SCHEMA)
        return _definitions(with_schema)


def _definitions(db: sqlite3.Connection) -> dict[str, str]:
    return dict(db.execute("SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


def _columns(db: sqlite3.Connection, table: str) -> tuple[list[str], list[str]]:
    """Return two lists of a table's columns: those of the primary key, and those that the row's checksum covers."""
    found = [(name, key) for _, name, _, _, _, key in db.execute(f"PRAGMA main.table_info({table})")]
    return [name for name, key in found if key], [name for name, _ in found if name not in UNCHECKED]


# -- Rows as dataclasses. Times are ISO 8601 in UTC. Digests are BLAKE3: bytes for parts, hex for files.


MemberState = Literal["alive", "dead", "left", "failed"]
RoundState = Literal["open", "frozen", "committed"]
TicketState = Literal["open", "accepted", "counted", "refused", "sat out", "expired"]


@dataclass(frozen=True, slots=True)
class RunRow:
    """The run in a state directory: id, settings and model schema. The row is written when the run begins."""

    run_id: str
    settings_json: str
    schema_json: str
    schema_digest: str
    torch_build: str
    cpu_capability: str
    created_at: str


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A site and its newest lease, the right of one worker process to act for the site.

    Attributes:
        process: text with the id of the process that has the lease, and the hash of the lease's secret.
        weight: weight of the site's first aggregated update, stored when its round closes; 0 before that, or if no
            reducer needs the total weight.
    """

    site: str
    lease: int
    state: MemberState
    joined_at: str
    host: str
    labels_json: str
    detail: str
    rounds_counted: int
    process: str
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundRow:
    """A round of one fragment: sites train from `base_version`, and their updates make the next version.

    State `frozen`: the round is closed, but its new version is not committed yet.

    Attributes:
        expected: sites that the round waits for while it is open.
        tickets: tickets of the updates to aggregate, in this order; empty while the round is open.
        population: number of sites that had joined the run, at any time before the round was closed.
        total_weight: estimated total weight of these sites when the round was closed; 0 if no reducer needs it.
    """

    fragment: int
    base_version: int
    state: RoundState
    expected: tuple[str, ...]
    tickets: tuple[int, ...]
    opened_at: str
    population: int = 0
    total_weight: float = 0.0


@dataclass(frozen=True, slots=True)
class SatOutRow:
    """A round of one fragment that ended without a version, because all sites sat out.

    Attributes:
        base_version: the version that the round started from.
        in_a_row: number of such rounds, this one included, that started from `base_version`.
        total: number of all such rounds of the fragment so far, this one included.
        first_ticket: tickets with a lower number and this base version belong to rounds that have ended.
        summary_json: summary of the round; empty in the row that a saved state begins with, if there was no such round.
    """

    fragment: int
    base_version: int
    in_a_row: int
    total: int
    first_ticket: int
    summary_json: str = ""
    created_at: str = ""


@dataclass(frozen=True, slots=True)
class TicketRow:
    """A ticket (a site's permission to submit one update) and, after acceptance, values of the update.

    Attributes:
        slot: number of the file (slot) with the update's bytes; None if there is no file.
        digest: digest of the accepted update, hex; None before acceptance.
        report: what the site reports of its update.
        version: version into which the update was aggregated; None before that.
        bytes: size of the accepted update in bytes.
        accepted_order: position of the update among all accepted updates of the run, from 1; 0 before acceptance.
    """

    ticket: int
    site: str
    fragment: int
    base_version: int
    state: TicketState
    reason: str = ""
    slot: int | None = None
    digest: str | None = None
    report: Report = field(default_factory=Report)
    norm: float = 0.0
    version: int | None = None
    bytes: int = 0
    accepted_order: int = 0

    @property
    def is_live(self) -> bool:
        """Whether the ticket is open or accepted: its update may still arrive, or waits to be aggregated."""
        return self.state in ("open", "accepted")

    @property
    def is_in(self) -> bool:
        """Whether the server has accepted the update (state `accepted`), or has already aggregated it (`counted`)."""
        return self.state in ("accepted", "counted")


@dataclass(frozen=True, slots=True)
class PartRow:
    """A part of an update that is on disk and passed its check. `sumsq` is the sum of squares of its decoded values."""

    ticket: int
    part: int
    digest: bytes
    sumsq: float


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A committed version that the server still has as a file.

    Attributes:
        slot: number of the file (slot) with the version.
        state_slot: number of the file (slot) with the outer optimizer's state after this version; None if the outer
            optimizer has no state, or if the state is no longer kept.
        digest: digest of the version, hex.
        part_digests: one digest per region of the version's file (`FileShape.regions`).
        state_digests: one digest per region of the state's file; empty if the outer optimizer has no state.
    """

    fragment: int
    version: int
    slot: int
    state_slot: int | None
    digest: str
    part_digests: tuple[bytes, ...]
    state_digests: tuple[bytes, ...]
    summary_json: str
    created_at: str

    @property
    def has_state(self) -> bool:
        """Whether all state of the outer optimizer after this version is still kept."""
        return not self.state_digests or self.state_slot is not None


@dataclass(frozen=True, slots=True)
class DeltaRow:
    """A delta: the encoded difference between a version and an older one, the base.

    A worker that has the base downloads only the delta.

    Attributes:
        version: the newer version: base plus delta.
        slot: number of the file (slot) with the delta.
        base_version, base_digest: number and digest of the base.
        digest: digest of the delta, hex.
        part_digests: one digest per region of the delta's file (`FileShape.regions`).
    """

    fragment: int
    version: int
    slot: int
    base_version: int
    base_digest: str
    digest: str
    part_digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """Digest of a version and summary of its round. The journal keeps this row after the version's file is removed."""

    fragment: int
    version: int
    digest: str
    summary_json: str
    created_at: str


@dataclass(frozen=True, slots=True)
class SiteRoundRow:
    """One site's update in the round that led to a version. The journal keeps this row as long as the version's digest.

    Attributes:
        summary_json: JSON of a `SiteRound`.
    """

    fragment: int
    version: int
    site: str
    summary_json: str


@dataclass(frozen=True, slots=True)
class GenerationRow:
    """A generation of the algorithm's state: from `version` on, this state has begun at zero again everywhere.

    The state consists of the tensors that the algorithm adds to the versions, and of those that it keeps at sites. A
    run begins in generation 0, which has no row.

    Attributes:
        version: the version from which the state begins. Its own tensors of the algorithm count as zero.
        reason: why the state began again, and what that costs; a sentence for the log and the status.
    """

    number: int
    version: int
    reason: str
    created_at: str

    def begins_at(self, version: int) -> bool:
        """Return whether the algorithm's tensors of this version count as zero, whatever values they have."""
        return self.number > 0 and self.version == version


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """What the user's function has told a site for a round, as JSON. The journal keeps this for the newest rounds."""

    site: str
    round: int
    config_json: str


@dataclass(frozen=True, slots=True)
class IdentityRow:
    """What the server knows of a site's credential and of its newest invitation. Times are Unix times, in seconds.

    Attributes:
        state: invited: it has had no credential yet. A site that is enrolled or revoked may also have an invitation.
        kind: kind of the credential; empty before the first one.
        credential: serial number of the certificate, or hash of the token; empty if the site has none.
        expires_at: time at which the credential expires.
        previous: the credential before the last renewal; empty if there is none.
        previous_until: time until which `previous` is accepted, too.
        invitation: hash of the secret of the open invitation; empty if there is none.
        invited_until: time until which the open invitation can be used.
        used: hash of the secret of the last invitation that was used.
        used_request: hash of the signing request for which it was used; empty if a token was asked for.
        used_at: when it was used, ISO 8601.
        since: since when the site is in this state, ISO 8601.
        enrolments: number of invitations that were used.
    """

    site: str
    state: Literal["invited", "enrolled", "revoked"]
    since: str
    kind: str = ""
    credential: str = ""
    expires_at: float = 0.0
    previous: str = ""
    previous_until: float = 0.0
    invitation: str = ""
    invited_until: float = 0.0
    used: str = ""
    used_request: str = ""
    used_at: str = ""
    enrolments: int = 0


@dataclass(frozen=True, slots=True)
class FactRow:
    """What a workflow's function has asked its controller, or has got. The journal keeps this until the workflow ends.

    Attributes:
        place: position of the workflow in the run's list.
        number: position of the fact among those of the workflow, from 0.
        of_call: number of the call that the fact belongs to; of a call itself its own.
        kind: `call`: the function has asked. `answer`: a site has answered the call's task. `end`: the task is over.
            `dropped`: the facts did not fit, and are no longer kept.
        turn: position of the call among those of the function's own thread; −1 for calls of other threads.
        asked_json: what was asked, as JSON; empty for other kinds.
        value_json: what came of it, as JSON.
        file: name of the file with an answer's payload; empty if there is none.
        nbytes: size of that file.
    """

    place: int
    number: int
    of_call: int
    kind: Literal["call", "answer", "end", "dropped"]
    turn: int = -1
    asked_json: str = ""
    value_json: str = ""
    file: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One entry of the audit log. `hash` is the BLAKE3 of the other fields, `prev_hash` the previous entry's hash."""

    seq: int
    at: str
    what: str
    detail_json: str
    prev_hash: str
    hash: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of the run: versions; counted, refused and expired updates; dead workers; bytes of accepted updates."""

    versions: int
    counted: int
    refused: int
    expired: int
    deaths: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Controls:
    """What the admin has asked of the run.

    Attributes:
        paused: whether no round begins.
        stopping: whether the present rounds are the last ones.
        back_to: version from which the next start of the server lets the run go on; None: the newest.
    """

    paused: bool
    stopping: bool
    back_to: int | None


def controls(query: Callable[..., list[tuple[Any, ...]]]) -> Controls:
    """Return what the admin has asked of the run, by a function that reads the journal."""
    ((paused, stopping, back_to),) = query("SELECT paused, stopping, back_to FROM meta")
    return Controls(bool(paused), bool(stopping), None if back_to < 0 else back_to)


def utc_text() -> str:
    """Return the current time in UTC, as ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# -- Tables ↔ rows.

Row = TypeVar("Row")
_TYPES = {str: "TEXT", int: "INTEGER", float: "REAL", bytes: "BLOB"}


class Column(NamedTuple):
    """The column for one field of a row's dataclass.

    Attributes:
        sql: SQL definition of the column.
        load: function that converts a column's value to the field's value; None if they are always equal.
        save: function that converts a field's value to the column's value; None if they are always equal.
    """

    sql: str
    load: Callable[[Any], Any] | None = None
    save: Callable[[Any], Any] | None = None

    @classmethod
    def of(cls, name: str, kind: Any, default: object) -> Column:
        """Return the column for a dataclass field. Collections are stored as JSON, tuples of digests as one blob.

        Args:
            name: name of the field.
            kind: type annotation of the field.
            default: default of the field; it becomes the column's default if it is a string or a number.
        """
        default_clause = f" DEFAULT {default!r}" if type(default) in (str, int, float) else ""
        if kind == tuple[bytes, ...]:
            return cls(f"{name} BLOB NOT NULL", _split_digests, b"".join)
        if get_origin(kind) is tuple:
            return cls(f"{name} TEXT NOT NULL", lambda text: tuple(json.loads(text)), json.dumps)
        if kind is Report:
            sql = f"{name} TEXT NOT NULL DEFAULT '{{}}'"
            return cls(sql, Report.model_validate_json, lambda value: value.model_dump_json())
        if get_origin(kind) is Literal:
            return cls(f"{name} TEXT NOT NULL CHECK ({name} IN {get_args(kind)})")
        if kind in _TYPES:
            return cls(f"{name} {_TYPES[kind]} NOT NULL{default_clause}")
        return cls(f"{name} {_TYPES[get_args(kind)[0]]}")  # an optional type allows NULL


class Table(Generic[Row]):
    """A table with one column for each field of a dataclass, under the field's name.

    Args:
        name: name of the table.
        row: dataclass of the rows.
        more: SQL of further columns, then of constraints.
        checked: whether to add the checksum column `row_check`.
        ending: SQL after the closing parenthesis of `CREATE TABLE`.
    """

    def __init__(self, name: str, row: type[Row], *more: str, checked: bool = True, ending: str = "STRICT") -> None:
        self._row, kinds = row, get_type_hints(row)
        self._columns = {each.name: Column.of(each.name, kinds[each.name], each.default) for each in fields(row)}  # type: ignore[arg-type]
        self._loads = [column.load for column in self._columns.values()]
        check = [ROW_CHECK] if checked else []
        parts = [*(column.sql for column in self._columns.values()), *check, *more]
        body = ",\n    ".join(parts)
        self.sql = f"CREATE TABLE {name} (\n    {body}\n) {ending};\n"
        names = ", ".join(self._columns)
        self.select = f"SELECT {names} FROM {name}"
        self.insert = f"INSERT INTO {name} ({names}) VALUES ({', '.join('?' for _ in self._columns)})"

    def read(self, values: tuple[Any, ...]) -> Row:
        """Convert one row of a query that begins with `self.select` to the table's dataclass."""
        return self._row(*[load(value) if load else value for load, value in zip(self._loads, values, strict=True)])

    def read_first(self, cursor: sqlite3.Cursor) -> Row | None:
        """Return the first row of a query that begins with `self.select`; None if there is none."""
        values = cursor.fetchone()
        return None if values is None else self.read(values)

    def read_all(self, cursor: sqlite3.Cursor) -> list[Row]:
        """Return the rows of a query that begins with `self.select`."""
        return [self.read(values) for values in cursor]

    def write(self, row: Row) -> list[Any]:
        """Convert a dataclass value to the SQL values for the statement `self.insert`."""
        values = ((column, getattr(row, name)) for name, column in self._columns.items())
        return [column.save(value) if column.save else value for column, value in values]


def _split_digests(joined: bytes) -> tuple[bytes, ...]:
    return tuple(joined[start : start + blake3.digest_size] for start in range(0, len(joined), blake3.digest_size))


RUNS = Table("run", RunRow, "id INTEGER PRIMARY KEY CHECK (id = 1)")
MEMBERS = Table("members", MemberRow, "PRIMARY KEY (site)", "UNIQUE (lease)")
ROUNDS = Table("rounds", RoundRow, "PRIMARY KEY (fragment, base_version)")
SAT_OUT = Table("sat_out_rounds", SatOutRow, "PRIMARY KEY (fragment, total)")
TICKETS = Table(
    "tickets",
    TicketRow,
    "PRIMARY KEY (ticket)",
    "CHECK (slot IS NULL OR state IN ('open', 'accepted'))",
    "CHECK (state != 'accepted' OR slot IS NOT NULL)",
    "CHECK (state NOT IN ('accepted', 'counted') OR digest IS NOT NULL)",
    "CHECK ((state = 'counted') = (version IS NOT NULL))",
)
PARTS = Table(
    "parts",
    PartRow,
    "PRIMARY KEY (ticket, part)",
    "FOREIGN KEY (ticket) REFERENCES tickets",
    ending="STRICT, WITHOUT ROWID",
)
VERSIONS = Table(
    "versions",
    VersionRow,
    "PRIMARY KEY (fragment, version)",
    "UNIQUE (fragment, slot)",
    "UNIQUE (fragment, state_slot)",
)
DELTAS = Table("deltas", DeltaRow, "PRIMARY KEY (fragment, version)", "UNIQUE (fragment, slot)")
HISTORY = Table("history", HistoryRow, "seq INTEGER PRIMARY KEY", "lost INTEGER NOT NULL DEFAULT 0")
SITE_ROUNDS = Table(
    "site_rounds", SiteRoundRow, "PRIMARY KEY (fragment, version, site)", ending="STRICT, WITHOUT ROWID"
)
GENERATIONS = Table("generations", GenerationRow, "PRIMARY KEY (number)")
CONFIGS = Table("configs", ConfigRow, "PRIMARY KEY (site, round)")
IDENTITIES = Table("identities", IdentityRow, "PRIMARY KEY (site)")
FACTS = Table("workflow_facts", FactRow, "PRIMARY KEY (place, number)")
AUDIT = Table("audit", AuditRow, "PRIMARY KEY (seq)", checked=False)


TABLES = (
    *(RUNS, MEMBERS, ROUNDS, SAT_OUT, TICKETS, PARTS, VERSIONS, DELTAS),
    *(HISTORY, SITE_ROUNDS, GENERATIONS, CONFIGS, IDENTITIES, FACTS, AUDIT),
)
SCHEMA_VERSION = 14

SCHEMA = f"""
CREATE TABLE meta (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    epoch INTEGER NOT NULL,
    finished INTEGER NOT NULL,
    failed TEXT NOT NULL DEFAULT '',
    paused INTEGER NOT NULL DEFAULT 0,
    stopping INTEGER NOT NULL DEFAULT 0,
    back_to INTEGER NOT NULL DEFAULT -1,
    {ROW_CHECK}
) STRICT;
INSERT INTO meta VALUES (1, 0, 0, '', 0, 0, -1, {row_check(1, 0, 0, "", 0, 0, -1)});

CREATE TABLE shapes (
    fragment INTEGER NOT NULL,
    kind TEXT NOT NULL,
    nbytes INTEGER NOT NULL,
    header_digest BLOB NOT NULL,
    {ROW_CHECK},
    PRIMARY KEY (fragment, kind)
) STRICT;

CREATE TABLE heads (
    fragment INTEGER PRIMARY KEY,
    version INTEGER,
    durable_version INTEGER,
    {ROW_CHECK}
) STRICT;

CREATE TABLE workflows (
    place INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    ended_at TEXT NOT NULL,
    {ROW_CHECK}
) STRICT;

CREATE TABLE events (
    number INTEGER PRIMARY KEY,
    of_site INTEGER NOT NULL,
    event_json TEXT NOT NULL,
    {ROW_CHECK}
) STRICT;

CREATE TABLE counters (name TEXT NOT NULL PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE exports_under_way (path TEXT NOT NULL PRIMARY KEY) STRICT;

{"".join(table.sql for table in TABLES)}
CREATE UNIQUE INDEX one_round ON rounds (fragment) WHERE state IN ('open', 'frozen');
CREATE UNIQUE INDEX one_ticket ON tickets (site, fragment, base_version)
    WHERE state IN ('open', 'accepted', 'counted');
CREATE UNIQUE INDEX one_spool ON tickets (fragment, slot) WHERE slot IS NOT NULL;
CREATE INDEX versions_in_order ON history (fragment, version) WHERE NOT lost;
CREATE INDEX live_tickets ON tickets (ticket) WHERE state IN ('open', 'accepted');
CREATE UNIQUE INDEX tickets_in_order ON tickets (accepted_order) WHERE accepted_order > 0;
CREATE INDEX tickets_of_site ON tickets (site, fragment, ticket);
CREATE INDEX tickets_of_round ON tickets (fragment, base_version);
"""
