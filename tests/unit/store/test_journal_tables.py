"""Constraints of the journal's tables, and an audit log that was tampered with column by column."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from store_world import accept, new_run, send_part, submit, update_of
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.errors import StateCorrupt

# -- constraints


TICKET = "INSERT INTO tickets (ticket, site, fragment, base_version, state, slot, digest, version) VALUES "
REPORTS = "UPDATE tickets SET report = json_set(report, '$.{}', {}) WHERE ticket = 1"
ROUND = "INSERT INTO rounds (fragment, base_version, state, expected, tickets, opened_at) VALUES "
VERSION = (
    "INSERT INTO versions (fragment, version, slot, state_slot, digest, part_digests, state_digests, summary_json, "
    "created_at) VALUES "
)
IDENTITY = (
    "INSERT INTO identities (site, state, since, kind, credential, expires_at, previous, previous_until, invitation, "
    "invited_until, used, used_request, used_at, enrolments) VALUES "
)
IDENTITY_ROW = "('a', '{state}', '', '', '', 0.0, '', 0.0, '', 0.0, '', '', '', 0)"
MEMBER = (
    "INSERT INTO members (site, lease, state, joined_at, host, labels_json, detail, rounds_counted, process) VALUES "
)
DELTA = "INSERT INTO deltas (fragment, version, slot, base_version, base_digest, digest, part_digests) VALUES "
GENERATION = "INSERT INTO generations (number, version, reason, created_at) VALUES "

CHECKS: dict[str, str | list[str]] = {
    "meta: id = 1": "INSERT INTO meta (id, epoch, finished) VALUES (2, 0, 0)",
    "run: id = 1": "INSERT INTO run (id, run_id, settings_json, schema_json, schema_digest, torch_build, "
    "cpu_capability, created_at) VALUES (2, '', '{}', '{}', '', '', '', '')",
    "members: state IN ('alive', 'dead', 'left', 'failed')": MEMBER + "('c', 9, 'gone', '', '', '{}', '', 0, '')",
    "rounds: state IN ('open', 'frozen', 'committed')": ROUND + "(1, 0, 'closed', '[]', '[]', '')",
    "tickets: state IN ('open', 'accepted', 'counted', 'refused', 'sat out', 'expired')": TICKET
    + "(9, 'c', 0, 1, 'lost', NULL, NULL, NULL)",
    "tickets: slot IS NULL OR state IN ('open', 'accepted')": [
        TICKET + "(9, 'c', 0, 1, 'expired', 7, NULL, NULL)",
        TICKET + "(9, 'c', 0, 1, 'counted', 7, 'd', 2)",
    ],
    "tickets: state != 'accepted' OR slot IS NOT NULL": TICKET + "(9, 'c', 0, 1, 'accepted', NULL, 'd', NULL)",
    "tickets: state NOT IN ('accepted', 'counted') OR digest IS NOT NULL": [
        TICKET + "(9, 'c', 0, 1, 'accepted', 7, NULL, NULL)",
        TICKET + "(9, 'c', 0, 1, 'counted', NULL, NULL, 2)",
    ],
    "tickets: (state = 'counted') = (version IS NOT NULL)": [
        TICKET + "(9, 'c', 0, 1, 'counted', NULL, 'd', NULL)",
        TICKET + "(9, 'c', 0, 1, 'open', NULL, NULL, 2)",
    ],
    "workflow_facts: kind IN ('call', 'answer', 'end', 'dropped')": "INSERT INTO workflow_facts (place, number, "
    "of_call, kind) VALUES (0, 0, 0, 'other')",
    "identities: state IN ('invited', 'enrolled', 'revoked')": IDENTITY + IDENTITY_ROW.format(state="gone"),
}
"""Constraint → rows that break it and no other."""

UNIQUES: dict[str, str | list[str]] = {
    "identities.site": f"{IDENTITY}{IDENTITY_ROW}, {IDENTITY_ROW}".format(state="invited"),
    "members.site": MEMBER + "('a', 9, 'alive', '', '', '{}', '', 0, '')",
    "members.lease": MEMBER + "('c', 1, 'alive', '', '', '{}', '', 0, '')",
    "rounds.fragment, rounds.base_version": ROUND + "(0, 0, 'committed', '[]', '[]', '')",
    "rounds.fragment": [ROUND + f"(0, 2, '{state}', '[]', '[]', '')" for state in ("open", "frozen")],
    "sat_out_rounds.fragment, sat_out_rounds.total": "INSERT INTO sat_out_rounds (fragment, base_version, in_a_row, "
    "total, first_ticket) VALUES (0, 0, 1, 1, 2), (0, 1, 1, 1, 3)",
    "tickets.ticket": TICKET + "(1, 'c', 0, 1, 'open', NULL, NULL, NULL)",
    "tickets.site, tickets.fragment, tickets.base_version": [
        TICKET + "(9, 'a', 0, 1, 'open', NULL, NULL, NULL)",  # beside the accepted one of site a
        TICKET + "(9, 'a', 0, 1, 'accepted', 7, 'd', NULL)",
        TICKET + "(9, 'a', 0, 1, 'counted', NULL, 'd', 2)",
    ],
    "tickets.fragment, tickets.slot": TICKET
    + "(9, 'c', 0, 1, 'open', (SELECT slot FROM tickets WHERE slot IS NOT NULL LIMIT 1), NULL, NULL)",
    "tickets.accepted_order": "UPDATE tickets SET accepted_order = 1 WHERE ticket = 2",
    "parts.ticket, parts.part": "INSERT INTO parts (ticket, part, digest, sumsq) VALUES (3, 0, x'00', 1.0)",
    "versions.fragment, versions.version": VERSION + "(0, 1, 7, NULL, '', x'', x'', '', '')",
    "versions.fragment, versions.slot": VERSION
    + "(0, 7, (SELECT slot FROM versions LIMIT 1), NULL, '', x'', x'', '', '')",
    "versions.fragment, versions.state_slot": VERSION
    + "(0, 7, 7, (SELECT state_slot FROM versions WHERE state_slot IS NOT NULL LIMIT 1), '', x'', x'', '', '')",
    "site_rounds.fragment, site_rounds.version, site_rounds.site": "INSERT INTO site_rounds (fragment, version, site, "
    "summary_json) VALUES (0, 9, 'a', '{}'), (0, 9, 'a', '{}')",
    "generations.number": GENERATION + "(1, 2, '', '')",
    "deltas.fragment, deltas.version": DELTA + "(0, 1, 7, 0, '', '', x'')",
    "deltas.fragment, deltas.slot": DELTA + "(0, 7, 0, 0, '', '', x'')",
    "heads.fragment": "INSERT INTO heads (fragment) VALUES (0)",
    "history.seq": "INSERT INTO history (seq, fragment, version, digest, summary_json, created_at) "
    "VALUES (1, 0, 9, '', '', '')",
    "shapes.fragment, shapes.kind": "INSERT INTO shapes (fragment, kind, nbytes, header_digest) "
    "SELECT fragment, kind, 0, x'' FROM shapes LIMIT 1",
    "counters.name": "INSERT INTO counters VALUES ('bytes', 1)",
    "configs.site, configs.round": "INSERT INTO configs (site, round, config_json) VALUES ('a', 1, ''), ('a', 1, '')",
    "audit.seq": "INSERT INTO audit VALUES (1, '', '', '{}', '', '')",
    "events.number": "INSERT INTO events (number, of_site, event_json) VALUES (7, 0, '{}'), (7, 0, '{}')",
    "exports_under_way.path": "INSERT INTO exports_under_way VALUES ('here'), ('here')",
    "workflow_facts.place, workflow_facts.number": "INSERT INTO workflow_facts (place, number, of_call, kind) "
    "VALUES (0, 0, 0, 'call'), (0, 0, 0, 'end')",
    "workflows.place": "INSERT INTO workflows (place, name, ended_at) VALUES (0, 'a', ''), (0, 'b', '')",
    "meta.id": "INSERT INTO meta (id, epoch, finished) VALUES (1, 0, 0)",
    "run.id": "INSERT INTO run SELECT * FROM run",
}
"""Columns that are unique together → a row that repeats them and no others."""

ALLOWED = [
    ROUND + "(1, 0, 'open', '[]', '[]', '')",  # another fragment's
    ROUND + "(0, 7, 'committed', '[]', '[]', '')",  # beside the open one
    TICKET + "(9, 'a', 0, 1, 'refused', NULL, NULL, NULL)",  # beside the one that may still count
    TICKET + "(9, 'a', 0, 1, 'expired', NULL, NULL, NULL)",
    TICKET + "(9, 'a', 1, 1, 'open', NULL, NULL, NULL)",
    TICKET + "(9, 'c', 0, 1, 'open', NULL, NULL, NULL)",
    TICKET + "(9, 'c', 0, 1, 'accepted', 7, 'd', NULL)",
    TICKET + "(9, 'c', 0, 1, 'counted', NULL, 'd', 2)",
]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """Version 1 is the head, its round is open; ticket 3 of site a is accepted in it."""
    store = new_run(tmp_path, 1)
    store.run_log.open_round(0, 1, ["a", "b"])
    store.tickets.issue(3, "a", 0, 1)
    for part in (0, 1):
        send_part(store, 3, part, update_of("a", 1))
    accept(store, 3, update_of("a", 1))
    store.close()
    with closing(sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA foreign_keys = ON")
        db.execute(DELTA + "(0, 1, 0, 0, '', '', x'')")
        db.execute(GENERATION + "(1, 1, '', '')")
        yield db


def rows_of(table: dict[str, str | list[str]]) -> list[tuple[str, str]]:
    return [(key, row) for key, rows in table.items() for row in ([rows] if isinstance(rows, str) else rows)]


@pytest.mark.parametrize(("constraint", "statement"), rows_of(CHECKS))
def test_a_row_that_breaks_a_check_is_refused(journal: sqlite3.Connection, constraint: str, statement: str) -> None:
    text = constraint.partition(": ")[2]
    with pytest.raises(sqlite3.IntegrityError, match=re.escape(f"CHECK constraint failed: {text}")):
        journal.execute(statement)


@pytest.mark.parametrize(("columns", "statement"), rows_of(UNIQUES))
@pytest.mark.parametrize("round_state", ["open", "frozen"])
def test_repeated_unique_values_are_refused(
    journal: sqlite3.Connection, columns: str, statement: str, round_state: str
) -> None:
    """A row that repeats the values of unique columns is refused, with the names of these columns."""
    journal.execute("UPDATE rounds SET state = ? WHERE base_version = 1", (round_state,))
    with pytest.raises(sqlite3.IntegrityError) as caught:
        journal.execute(statement)
    assert str(caught.value) == f"UNIQUE constraint failed: {columns}"


def test_a_part_without_a_ticket_is_refused(journal: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        journal.execute("INSERT INTO parts (ticket, part, digest, sumsq) VALUES (99, 0, x'00', 1.0)")


@pytest.mark.parametrize("statement", ALLOWED)
def test_rows_that_a_run_needs_are_allowed(journal: sqlite3.Connection, statement: str) -> None:
    """The constraints of the tables allow the rows that a run needs, such as an expired ticket beside an accepted
    one.
    """
    assert journal.execute(statement).rowcount == 1


def test_every_constraint_of_the_journal_has_a_case(journal: sqlite3.Connection) -> None:
    """Each CHECK and UNIQUE in the tables is in CHECKS or UNIQUES of this file."""
    checks, uniques = set[str](), set[str]()
    for table, sql in journal.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL"):
        checks |= {f"{table}: {text}" for text in _checks(sql)}
        keys = [name for _, name, _, _, _, key in journal.execute(f"PRAGMA table_info({table})") if key]
        uniques.add(", ".join(f"{table}.{name}" for name in keys))
        for _, index, unique, *_ in journal.execute(f"PRAGMA index_list({table})"):
            if unique:
                names = [name for _, _, name in journal.execute(f"PRAGMA index_info({index})")]
                uniques.add(", ".join(f"{table}.{name}" for name in names))
    assert checks == set(CHECKS)
    assert uniques == set(UNIQUES)


def _checks(sql: str) -> list[str]:
    found = []
    for match in re.finditer(r"CHECK \(", sql):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(sql[end], 0)
            end += 1
        found.append(sql[match.end() : end - 1])
    return found


# -- the audit log


COLUMNS = ("seq", "at", "what", "detail_json", "prev_hash", "hash")
CHANGES: dict[str, Any] = {
    "at": "2001-01-01T00:00:00+00:00",
    "what": "refused",
    "detail_json": '{"ticket": 1}',
    "prev_hash": "1" * 64,
}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Seven entries: committed 0; accepted 1, 2; committed 1; accepted 3, 4; committed 2."""
    store = new_run(tmp_path, 2)
    store.close()
    assert said(tmp_path) == ""
    return tmp_path


def said(state: Path) -> str:
    """What `atoll audit` says is wrong."""
    outcome = CliRunner().invoke(app, ["audit", str(state)], standalone_mode=False)
    if isinstance(outcome.exception, StateCorrupt):
        return outcome.exception.message
    assert outcome.exception is None
    return ""


def entry(state: Path, seq: int) -> dict[str, Any]:
    with closing(sqlite3.connect(state / "journal.sqlite")) as journal:
        row = journal.execute("SELECT * FROM audit WHERE seq = ?", (seq,)).fetchone()
    return dict(zip(COLUMNS, row, strict=True))


def change(state: Path, seq: int, **values: Any) -> None:
    with closing(sqlite3.connect(state / "journal.sqlite")) as journal, journal:
        for column, value in values.items():
            journal.execute(f"UPDATE audit SET {column} = ? WHERE seq = ?", (value, seq))


def right_hash(row: dict[str, Any]) -> str:
    """BLAKE3 over the entry and the hash before it."""
    return blake3(json.dumps([row[name] for name in COLUMNS[:-1]]).encode()).hexdigest()


def test_an_audit_hash_covers_all_other_columns(state: Path) -> None:
    """The hash of an entry in the audit log covers all other columns of the entry."""
    # One of them is the hash of the entry before.
    for seq in range(1, 8):
        row = entry(state, seq)
        assert row["hash"] == right_hash(row)
        assert row["prev_hash"] == (entry(state, seq - 1)["hash"] if seq > 1 else "0" * 64)


@pytest.mark.parametrize("column", [*CHANGES, "hash"])
@pytest.mark.parametrize("seq", [1, 3, 7])
def test_a_changed_column_is_found(state: Path, column: str, seq: int) -> None:
    """If a column of an entry in the audit log was changed, `atoll audit` names the entry."""
    change(state, seq, **{column: CHANGES.get(column, "2" * 64)})
    assert re.search(rf"entry {seq}\b", said(state))


@pytest.mark.parametrize("column", CHANGES)
@pytest.mark.parametrize("seq", [1, 3, 6])
def test_a_changed_column_with_its_hash_is_found(state: Path, column: str, seq: int) -> None:
    """If a column of an entry and the entry's hash were changed, `atoll audit` still finds the change."""
    # The next entry has the hash from before. If that is changed too, the next entry's own hash no longer fits.
    change(state, seq, **{column: CHANGES[column]})
    change(state, seq, hash=right_hash(entry(state, seq)))
    assert re.search(rf"entry {seq}\b", said(state))
    change(state, seq + 1, prev_hash=entry(state, seq)["hash"])
    assert re.search(rf"entry {seq + 1}\b", said(state))


@pytest.mark.parametrize("column", ["at", "what", "detail_json"])
@pytest.mark.parametrize("seq", [1, 3, 7])
def test_changed_columns_with_all_hashes_are_found(state: Path, column: str, seq: int) -> None:
    """If a column of an entry and all later hashes were changed, `atoll audit` finds the change: the file `audit.head`
    has the last hash from before.
    """
    change(state, seq, **{column: CHANGES[column]})
    for later in range(seq, 8):
        if later > 1:
            change(state, later, prev_hash=entry(state, later - 1)["hash"])
        change(state, later, hash=right_hash(entry(state, later)))
    assert "audit.head" in said(state)


@pytest.mark.parametrize("seq", [1, 4, 7])
@pytest.mark.parametrize("tampering", ["DELETE FROM audit", "UPDATE audit SET seq = 9"], ids=["removed", "moved"])
def test_a_removed_or_moved_entry_is_found(state: Path, tampering: str, seq: int) -> None:
    """If an entry of the audit log was removed or moved, `atoll audit` reports it."""
    with closing(sqlite3.connect(state / "journal.sqlite")) as journal, journal:
        journal.execute(f"{tampering} WHERE seq = ?", (seq,))
    assert said(state)


@pytest.mark.parametrize(
    ("tampering", "word"),
    [
        ("UPDATE tickets SET site = 'z' WHERE ticket = 1", "tickets"),
        (REPORTS.format("weight", 9.0), "tickets"),
        ("UPDATE tickets SET state = 'expired', version = NULL WHERE ticket = 1", "tickets"),
        ("UPDATE history SET digest = 'd' WHERE version = 1", "history"),
        ("UPDATE heads SET version = 1", "heads"),
    ],
)
def test_a_changed_row_of_the_past_is_found(state: Path, tampering: str, word: str) -> None:
    """If a row was changed that no start uses any more, `atoll audit` names its table."""
    with closing(sqlite3.connect(state / "journal.sqlite")) as journal, journal:
        journal.execute(tampering)
    assert word in said(state)


@pytest.mark.parametrize(
    ("tampering", "words"),
    [
        ("UPDATE tickets SET site = 'z' WHERE ticket = 1", "ticket 1 has the site 'z'"),
        (
            'UPDATE tickets SET report = json_set(report, "$.weight", 9.0) WHERE ticket = 1',
            "ticket 1 has the weight 9.0",
        ),
        ('UPDATE tickets SET report = json_set(report, "$.steps", 9) WHERE ticket = 1', "ticket 1 has the steps 9"),
        ("UPDATE tickets SET norm = 9.0 WHERE ticket = 1", "ticket 1 has the norm 9.0"),
        ("UPDATE tickets SET digest = 'd' WHERE ticket = 3", "ticket 3 has the digest 'd'"),
        ("UPDATE tickets SET base_version = 7 WHERE ticket = 3", "ticket 3 has the base_version 7"),
        ("UPDATE tickets SET version = 7 WHERE ticket = 3", "ticket 3 has the version 7"),
        ("UPDATE tickets SET state = 'expired', version = NULL WHERE ticket = 1", "ticket 1 has the state 'expired'"),
        ("DELETE FROM tickets WHERE ticket = 1", "ticket 1 is missing"),
        ("UPDATE tickets SET ticket = 99 WHERE ticket = 1", "ticket 1 is missing"),
        ("UPDATE history SET digest = 'd' WHERE version = 1", "version 1 has the digest 'd'"),
        ("DELETE FROM history WHERE version = 1", "version 1"),
        ("UPDATE versions SET digest = 'd' WHERE version = 2", "version 2 has the digest 'd'"),
        ("UPDATE heads SET version = 1", "version 2 is above the head"),
        ("UPDATE heads SET version = 3", "the head is version 3, but entry"),
        ("UPDATE meta SET finished = 1", "the run is finished"),
        (
            "INSERT INTO tickets (ticket, site, fragment, base_version, state, digest, version) "
            "VALUES (9, 'c', 0, 1, 'counted', 'd', 2)",
            "has no entry for the accepted ticket 9",
        ),
        (
            "INSERT INTO history (fragment, version, digest, summary_json, created_at) VALUES (0, 0, '', '', '')",
            "version 2",
        ),
    ],
)
def test_a_changed_row_with_its_checksum_is_found(state: Path, tampering: str, words: str) -> None:
    """If a row and its checksum were changed, `atoll audit` finds the change, because the audit log has the right
    values.
    """
    # A program that writes the row through the journal's own connection also renews the checksum.
    from atoll.store.journal_tables import write_checksums

    with closing(sqlite3.connect(state / "journal.sqlite", isolation_level=None)) as journal:
        write_checksums(journal)
        journal.execute(tampering)
    assert words in said(state)


def test_the_audit_log_agrees_with_the_tickets(tmp_path: Path) -> None:
    """For refused, expired and reopened tickets, the audit log agrees with the tickets, and `atoll audit` reports
    nothing.
    """
    store = new_run(tmp_path)
    store.run_log.open_round(0, 0, ["a", "b"])
    submit(store, 1, "a", 0)
    store.tickets.issue(2, "b", 0, 0)
    store.tickets.refuse(2, "NaN in w")
    store.tickets.issue(3, "b", 0, 0)
    store.tickets.expire([3], "too late")
    submit(store, 4, "b", 0)
    store.tickets.reopen(0, 0, [1, 4], "its aggregator is lost")
    store.close()
    assert said(tmp_path) == ""
