"""What must never be in the journal: each CHECK and each UNIQUE of its tables, with a row that it alone refuses."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from store_world import accept, first, play_round, send_part, update_of

TICKET = "INSERT INTO tickets (ticket, site, fragment, base_version, state, slot, digest, weight, version) VALUES "
ROUND = "INSERT INTO rounds (fragment, base_version, state, expected, tickets, opened_at) VALUES "
VERSION = (
    "INSERT INTO versions (fragment, version, slot, state_slot, digest, part_digests, state_digests, summary_json, "
    "created_at) VALUES "
)
MEMBER = (
    "INSERT INTO members (site, lease, state, joined_at, host, labels_json, detail, rounds_counted, process) VALUES "
)
DELTA = "INSERT INTO deltas (fragment, version, slot, base_version, base_digest, digest, part_digests) VALUES "

CHECKS: dict[str, str | list[str]] = {
    "meta: id = 1": "INSERT INTO meta (id, epoch, finished) VALUES (2, 0, 0)",
    "run: id = 1": "INSERT INTO run (id, run_id, settings_json, schema_json, schema_digest, torch_build, "
    "cpu_capability, created_at) VALUES (2, '', '{}', '{}', '', '', '', '')",
    "members: state IN ('alive', 'dead', 'left', 'failed')": MEMBER + "('c', 9, 'gone', '', '', '{}', '', 0, '')",
    "rounds: state IN ('open', 'frozen', 'committed')": ROUND + "(1, 0, 'closed', '[]', '[]', '')",
    "tickets: state IN ('open', 'accepted', 'counted', 'refused', 'expired')": TICKET
    + "(9, 'c', 0, 1, 'lost', NULL, NULL, 0, NULL)",
    "tickets: slot IS NULL OR state IN ('open', 'accepted')": [
        TICKET + "(9, 'c', 0, 1, 'expired', 7, NULL, 0, NULL)",
        TICKET + "(9, 'c', 0, 1, 'counted', 7, 'd', 1, 2)",
    ],
    "tickets: state != 'accepted' OR slot IS NOT NULL": TICKET + "(9, 'c', 0, 1, 'accepted', NULL, 'd', 1, NULL)",
    "tickets: state NOT IN ('accepted', 'counted') OR (digest IS NOT NULL AND weight > 0)": [
        TICKET + "(9, 'c', 0, 1, 'accepted', 7, 'd', 0, NULL)",
        TICKET + "(9, 'c', 0, 1, 'accepted', 7, NULL, 1, NULL)",
        TICKET + "(9, 'c', 0, 1, 'counted', NULL, NULL, 1, 2)",
        TICKET + "(9, 'c', 0, 1, 'counted', NULL, 'd', -1.0, 2)",
    ],
    "tickets: (state = 'counted') = (version IS NOT NULL)": [
        TICKET + "(9, 'c', 0, 1, 'counted', NULL, 'd', 1, NULL)",
        TICKET + "(9, 'c', 0, 1, 'open', NULL, NULL, 0, 2)",
    ],
}
"""Constraint → rows that break it and no other."""

UNIQUES: dict[str, str | list[str]] = {
    "members.site": MEMBER + "('a', 9, 'alive', '', '', '{}', '', 0, '')",
    "members.lease": MEMBER + "('c', 1, 'alive', '', '', '{}', '', 0, '')",
    "rounds.fragment, rounds.base_version": ROUND + "(0, 0, 'committed', '[]', '[]', '')",
    "rounds.fragment": [ROUND + f"(0, 2, '{state}', '[]', '[]', '')" for state in ("open", "frozen")],
    "tickets.ticket": TICKET + "(1, 'c', 0, 1, 'open', NULL, NULL, 0, NULL)",
    "tickets.site, tickets.fragment, tickets.base_version": [
        TICKET + "(9, 'a', 0, 1, 'open', NULL, NULL, 0, NULL)",  # beside the accepted one of site a
        TICKET + "(9, 'a', 0, 1, 'accepted', 7, 'd', 1.0, NULL)",
        TICKET + "(9, 'a', 0, 1, 'counted', NULL, 'd', 1.0, 2)",
    ],
    "tickets.fragment, tickets.slot": TICKET
    + "(9, 'c', 0, 1, 'open', (SELECT slot FROM tickets WHERE slot IS NOT NULL LIMIT 1), NULL, 0, NULL)",
    "tickets.accepted_order": "UPDATE tickets SET accepted_order = 1 WHERE ticket = 2",
    "parts.ticket, parts.part": "INSERT INTO parts (ticket, part, digest, sumsq) VALUES (3, 0, x'00', 1.0)",
    "versions.fragment, versions.version": VERSION + "(0, 1, 7, NULL, '', x'', x'', '', '')",
    "versions.fragment, versions.slot": VERSION
    + "(0, 7, (SELECT slot FROM versions LIMIT 1), NULL, '', x'', x'', '', '')",
    "versions.fragment, versions.state_slot": VERSION
    + "(0, 7, 7, (SELECT state_slot FROM versions WHERE state_slot IS NOT NULL LIMIT 1), '', x'', x'', '', '')",
    "deltas.fragment, deltas.version": DELTA + "(0, 1, 7, 0, '', '', x'')",
    "deltas.fragment, deltas.slot": DELTA + "(0, 7, 0, 0, '', '', x'')",
    "heads.fragment": "INSERT INTO heads (fragment) VALUES (0)",
    "history.seq": "INSERT INTO history (seq, fragment, version, digest, summary_json, created_at) "
    "VALUES (1, 0, 9, '', '', '')",
    "shapes.fragment, shapes.kind": "INSERT INTO shapes (fragment, kind, nbytes, header_digest) "
    "SELECT fragment, kind, 0, x'' FROM shapes LIMIT 1",
    "counters.name": "INSERT INTO counters VALUES ('bytes', 1)",
    "audit.seq": "INSERT INTO audit VALUES (1, '', '', '{}', '', '')",
    "exports_under_way.path": "INSERT INTO exports_under_way VALUES ('here'), ('here')",
    "workflows.place": "INSERT INTO workflows (place, name, ended_at) VALUES (0, 'a', ''), (0, 'b', '')",
    "meta.id": "INSERT INTO meta (id, epoch, finished) VALUES (1, 0, 0)",
    "run.id": "INSERT INTO run SELECT * FROM run",
}
"""Columns that are unique together → a row that repeats them and no others."""

ALLOWED = [
    ROUND + "(1, 0, 'open', '[]', '[]', '')",  # another fragment's
    ROUND + "(0, 7, 'committed', '[]', '[]', '')",  # beside the open one
    TICKET + "(9, 'a', 0, 1, 'refused', NULL, NULL, 0, NULL)",  # beside the one that may still count
    TICKET + "(9, 'a', 0, 1, 'expired', NULL, NULL, 0, NULL)",
    TICKET + "(9, 'a', 1, 1, 'open', NULL, NULL, 0, NULL)",
    TICKET + "(9, 'c', 0, 1, 'open', NULL, NULL, 0, NULL)",
    TICKET + "(9, 'c', 0, 1, 'accepted', 7, 'd', 0.5, NULL)",
    TICKET + "(9, 'c', 0, 1, 'counted', NULL, 'd', 0.5, 2)",
]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """Version 1 is the head, its round is open; ticket 3 of site a is accepted in it."""
    store = first(tmp_path)
    play_round(store, 0)
    store.run_log.open_round(0, 1, ["a", "b"])
    store.tickets.issue(3, "a", 0, 1)
    for part in (0, 1):
        send_part(store, 3, part, update_of("a", 1))
    accept(store, 3, update_of("a", 1))
    store.close()
    with closing(sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA foreign_keys = ON")
        db.execute(DELTA + "(0, 1, 0, 0, '', '', x'')")
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
def test_a_row_that_repeats_what_is_unique_is_refused(
    journal: sqlite3.Connection, columns: str, statement: str, round_state: str
) -> None:
    journal.execute("UPDATE rounds SET state = ? WHERE base_version = 1", (round_state,))
    with pytest.raises(sqlite3.IntegrityError) as caught:
        journal.execute(statement)
    assert str(caught.value) == f"UNIQUE constraint failed: {columns}"


def test_a_part_of_no_ticket_is_refused(journal: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        journal.execute("INSERT INTO parts (ticket, part, digest, sumsq) VALUES (99, 0, x'00', 1.0)")


@pytest.mark.parametrize("statement", ALLOWED)
def test_what_a_run_needs_is_allowed(journal: sqlite3.Connection, statement: str) -> None:
    assert journal.execute(statement).rowcount == 1


def test_every_constraint_of_the_journal_has_its_row(journal: sqlite3.Connection) -> None:
    """A new CHECK or UNIQUE needs a row above."""
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
