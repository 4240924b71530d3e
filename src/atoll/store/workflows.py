"""Which workflows of a run have ended, as rows of its journal: a finished one is not run again.

The table is made when the first one ends, so that journals of runs without workflows stay as they are.
"""

from __future__ import annotations

from atoll.store import audit
from atoll.store.journal import Journal
from atoll.store.rows import now

_TABLE = """
CREATE TABLE IF NOT EXISTS workflows (
    place INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    ended_at TEXT NOT NULL
) STRICT
"""


def finished(journal: Journal) -> dict[int, str]:
    """Place in the run's list → name, of those that have ended."""
    if journal.value("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'workflows'") is None:
        return {}
    return dict(journal.rows("SELECT place, name FROM workflows ORDER BY place"))


def finish(journal: Journal, place: int, name: str) -> None:
    """Record the end of one.

    Raises:
        DiskFull: nothing was recorded; may be tried again.
    """
    with journal.transaction():
        journal.execute(_TABLE)
        journal.execute("INSERT OR REPLACE INTO workflows VALUES (?, ?, ?)", place, name, now())
        audit.append(journal, "workflow", place=place, name=name)


def forget_from(journal: Journal, place: int) -> None:
    """Run this one again, and those behind it."""
    if finished(journal):
        with journal.transaction():
            journal.execute("DELETE FROM workflows WHERE place >= ?", place)
