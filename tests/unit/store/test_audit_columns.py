"""The audit log, tampered with by one that knows how its hashes are made: each column of an entry is covered."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from store_world import first, play_round, submit
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.errors import StateCorrupt

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
    store = first(tmp_path)
    play_round(store, 0)
    play_round(store, 1)
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


def test_a_hash_is_over_all_other_columns(state: Path) -> None:
    for seq in range(1, 8):
        row = entry(state, seq)
        assert row["hash"] == right_hash(row)
        assert row["prev_hash"] == (entry(state, seq - 1)["hash"] if seq > 1 else "0" * 64)


@pytest.mark.parametrize("column", [*CHANGES, "hash"])
@pytest.mark.parametrize("seq", [1, 3, 7])
def test_a_changed_column_is_found(state: Path, column: str, seq: int) -> None:
    change(state, seq, **{column: CHANGES.get(column, "2" * 64)})
    assert re.search(rf"entry {seq}\b", said(state))


@pytest.mark.parametrize("column", CHANGES)
@pytest.mark.parametrize("seq", [1, 3, 6])
def test_a_changed_column_is_found_where_its_hash_was_made_anew(state: Path, column: str, seq: int) -> None:
    """The next entry has the hash that was there before; where that is changed too, its own hash covers it."""
    change(state, seq, **{column: CHANGES[column]})
    change(state, seq, hash=right_hash(entry(state, seq)))
    assert re.search(rf"entry {seq}\b", said(state))
    change(state, seq + 1, prev_hash=entry(state, seq)["hash"])
    assert re.search(rf"entry {seq + 1}\b", said(state))


@pytest.mark.parametrize("column", ["at", "what", "detail_json"])
@pytest.mark.parametrize("seq", [1, 3, 7])
def test_a_changed_column_is_found_where_every_later_hash_was_made_anew(state: Path, column: str, seq: int) -> None:
    """`audit.head` has the last hash as it was."""
    change(state, seq, **{column: CHANGES[column]})
    for later in range(seq, 8):
        if later > 1:
            change(state, later, prev_hash=entry(state, later - 1)["hash"])
        change(state, later, hash=right_hash(entry(state, later)))
    assert "audit.head" in said(state)


@pytest.mark.parametrize("seq", [1, 4, 7])
def test_a_removed_entry_is_found(state: Path, seq: int) -> None:
    with closing(sqlite3.connect(state / "journal.sqlite")) as journal, journal:
        journal.execute("DELETE FROM audit WHERE seq = ?", (seq,))
    assert said(state)


@pytest.mark.parametrize(
    ("tampering", "word"),
    [
        ("UPDATE tickets SET site = 'z' WHERE ticket = 1", "tickets"),
        ("UPDATE tickets SET weight = 9.0 WHERE ticket = 1", "tickets"),
        ("UPDATE tickets SET state = 'expired', version = NULL WHERE ticket = 1", "tickets"),
        ("UPDATE history SET digest = 'd' WHERE version = 1", "history"),
        ("UPDATE heads SET version = 1", "heads"),
    ],
)
def test_a_changed_row_of_the_past_is_found(state: Path, tampering: str, word: str) -> None:
    """A start does not use these rows any more; `atoll audit` compares all."""
    with closing(sqlite3.connect(state / "journal.sqlite")) as journal, journal:
        journal.execute(tampering)
    assert word in said(state)


@pytest.mark.parametrize(
    ("tampering", "words"),
    [
        ("UPDATE tickets SET site = 'z' WHERE ticket = 1", "ticket 1 has the site 'z'"),
        ("UPDATE tickets SET weight = 9.0 WHERE ticket = 1", "ticket 1 has the weight 9.0"),
        ("UPDATE tickets SET steps = 9 WHERE ticket = 1", "ticket 1 has the steps 9"),
        ("UPDATE tickets SET norm = 9.0 WHERE ticket = 1", "ticket 1 has the norm 9.0"),
        ("UPDATE tickets SET digest = 'd' WHERE ticket = 3", "ticket 3 has the digest 'd'"),
        ("UPDATE tickets SET base_version = 7 WHERE ticket = 3", "ticket 3 has the base_version 7"),
        ("UPDATE tickets SET version = 7 WHERE ticket = 3", "ticket 3 has the version 7"),
        ("UPDATE tickets SET state = 'expired', version = NULL WHERE ticket = 1", "ticket 1 has the state 'expired'"),
        ("DELETE FROM tickets WHERE ticket = 1", "ticket 1 is missing"),
        ("UPDATE tickets SET ticket = 99 WHERE ticket = 1", "ticket 1 is missing"),
        ("UPDATE history SET digest = 'd' WHERE version = 1", "version 1 of fragment 0 has the digest 'd'"),
        ("DELETE FROM history WHERE version = 1", "version 1 of fragment 0"),
        ("UPDATE versions SET digest = 'd' WHERE version = 2", "version 2 of fragment 0 has the digest 'd'"),
        ("UPDATE heads SET version = 1", "version 2 is above the head"),
        ("UPDATE heads SET version = 3", "fragment 0 has the head 3"),
        ("UPDATE meta SET finished = 1", "the run is finished"),
        (
            "INSERT INTO tickets (ticket, site, fragment, base_version, state, digest, weight, version) "
            "VALUES (9, 'c', 0, 1, 'counted', 'd', 1.0, 2)",
            "has no entry for the accepted ticket 9",
        ),
        (
            "INSERT INTO history (fragment, version, digest, summary_json, created_at) VALUES (0, 0, '', '', '')",
            "version 2 of fragment 0",
        ),
    ],
)
def test_a_changed_row_is_found_where_its_checksum_was_made_anew(state: Path, tampering: str, words: str) -> None:
    """By one that lets the journal's own connection write it: the audit log has it otherwise."""
    from atoll.store.journal_tables import keep

    with closing(sqlite3.connect(state / "journal.sqlite", isolation_level=None)) as journal:
        keep(journal)
        journal.execute(tampering)
    assert words in said(state)


def test_what_the_log_tells_of_refused_expired_and_reopened_tickets_agrees_with_them(tmp_path: Path) -> None:
    store = first(tmp_path)
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
