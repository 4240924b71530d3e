"""The journal's rows of what happens in a run: the newest `KEPT` events, each as JSON under its number."""

from __future__ import annotations

from atoll.store.journal import Journal

KEPT = 10_000
"""Number of events that the journal keeps at least. The summaries of rounds are kept beside them, for all rounds."""
_SLACK = 500
"""The oldest events are deleted that many at a time."""


class EventRows:
    """Reads and writes the journal's rows of events."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def append(self, event_json: str) -> int:
        """Add an event, and return its number. Call it inside a transaction.

        Args:
            event_json: the event as JSON, without its number.
        """
        number = self.newest() + 1
        self._journal.execute("INSERT INTO events (number, event_json) VALUES (?, ?)", number, event_json)
        if number % _SLACK == 0:
            self._journal.execute("DELETE FROM events WHERE number <= ?", number - KEPT)
        return number

    def newest(self) -> int:
        """Return the number of the newest event; 0 if there is none."""
        return int(self._journal.value("SELECT coalesce(max(number), 0) FROM events"))

    def oldest(self) -> int:
        """Return the number of the oldest event that is kept; 0 if there is none."""
        return int(self._journal.value("SELECT coalesce(min(number), 0) FROM events"))

    def after(self, number: int, limit: int) -> list[tuple[int, str]]:
        """Return the events after `number`, at most `limit`, as pairs of number and JSON, in order."""
        found = self._journal.rows(
            "SELECT number, event_json FROM events WHERE number > ? ORDER BY number LIMIT ?", number, limit
        )
        return [(number, text) for number, text in found]
