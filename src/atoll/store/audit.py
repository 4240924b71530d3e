"""The audit log: who submitted what, what was decided, which version came of it; chained by hashes.

An entry is written in the transaction of the decision it tells of. Whoever notes the last hash somewhere else (it is
what `verify` returns) can show later that nothing before it was changed.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from blake3 import blake3

from atoll.errors import StateCorrupt
from atoll.store.journal import Journal
from atoll.store.rows import AuditRow, now

START = "0" * 64


def append(journal: Journal, what: str, **detail: Any) -> None:
    """Add an entry, inside a transaction."""
    last = journal.last_audited()
    seq, previous = (last[0] + 1, last[1]) if last else (1, START)
    text = json.dumps(detail, sort_keys=True)
    at = now()
    journal.execute(
        "INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?)",
        seq,
        at,
        what,
        text,
        previous,
        digest := _hash(seq, at, what, text, previous),
    )
    journal.audited(seq, digest)


def entries(journal: Journal, limit: int) -> list[AuditRow]:
    """The last `limit` entries, oldest first."""
    found = journal.rows("SELECT * FROM audit ORDER BY seq DESC LIMIT ?", limit)
    return [AuditRow(*row) for row in reversed(found)]


class Rows(Protocol):
    """What a log is read from: the server's journal, or a reader of its own."""

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]: ...


def verify(journal: Rows) -> tuple[int, str]:
    """Number of entries and the last hash.

    Raises:
        StateCorrupt: an entry was changed, removed or added out of turn; the first such is named.
    """
    seq, previous = 0, START
    while page := journal.rows("SELECT * FROM audit WHERE seq > ? ORDER BY seq LIMIT 1000", seq):
        for values in page:
            row = AuditRow(*values)
            expected = _hash(seq + 1, row.at, row.what, row.detail_json, previous)
            if (row.seq, row.prev_hash, row.hash) != (seq + 1, previous, expected):
                raise StateCorrupt(
                    f"The audit log is broken at entry {seq + 1}: it was changed or removed.",
                    "Compare the directory with a backup.",
                )
            seq, previous = row.seq, row.hash
    return seq, previous


def hash_of(row: AuditRow) -> str:
    """What the hash of an entry has to be."""
    return _hash(row.seq, row.at, row.what, row.detail_json, row.prev_hash)


def _hash(seq: int, at: str, what: str, detail_json: str, previous: str) -> str:
    return blake3(json.dumps([seq, at, what, detail_json, previous]).encode()).hexdigest()
