"""The journal's rows of what happens in a run, each as JSON under its number: those of sites, and those of the run."""

from __future__ import annotations

from atoll.errors import StateCorrupt
from atoll.store.journal import NEW_RUN, Journal, KeptValue, require_row
from atoll.store.round_summaries import Query

KEPT = 10_000
"""Number of events of sites that the journal keeps at least, and of events of the run. The summaries of rounds are kept
beside them, for all rounds."""
_SLACK = 500
"""The oldest events are deleted each time that so many were added."""


class EventRows:
    """Reads and writes the journal's rows of events.

    A site can cause any number of events: it joins again and again, or is refused. So the events of sites are counted
    apart: they never displace those of the run and its rounds.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._newest = KeptValue(journal, lambda: newest_event(journal.rows))

    @property
    def newest(self) -> int:
        """The number of the newest event; 0 if there is none."""
        return self._newest.get()

    def append(self, number: int, event_json: str, *, of_site: bool) -> None:
        """Add an event. Call it inside a transaction.

        Args:
            number: its number: one above that of the newest event.
            event_json: the event as JSON, without its number.
            of_site: whether it is an event of a site, and not of the run.
        """
        sql = "INSERT INTO events (number, of_site, event_json) VALUES (?, ?, ?)"
        self._journal.execute(sql, number, of_site, event_json)
        self._newest.set(number)
        if number % _SLACK == 0:
            for kind in (False, True):
                self._journal.execute(
                    "DELETE FROM events WHERE of_site = ?1 AND number <= "
                    "(SELECT number FROM events WHERE of_site = ?1 ORDER BY number DESC LIMIT 1 OFFSET ?2)",
                    kind,
                    KEPT,
                )


def newest_event(query: Query) -> int:
    """Return the number of the newest event; 0 if there is none."""
    ((number,),) = query("SELECT coalesce(max(number), 0) FROM events")
    return int(number)


def oldest_event(query: Query) -> int:
    """Return the number of the oldest event that is kept; 0 if there is none."""
    ((number,),) = query("SELECT coalesce(min(number), 0) FROM events")
    return int(number)


def events_after(query: Query, number: int, limit: int) -> list[tuple[int, str]]:
    """Return the events after `number`, at most `limit`, as pairs of number and JSON, in order.

    The events before a damaged one are returned without it.

    Args:
        query: reads the journal.
        number: number of an event; 0: from the oldest on.
        limit: maximum number of events.

    Raises:
        StateCorrupt: the first of them is damaged.
    """
    found = list[tuple[int, str]]()
    for each, of_site, text, check in query(
        "SELECT number, of_site, event_json, row_check FROM events WHERE number > ? ORDER BY number LIMIT ?",
        number,
        limit,
    ):
        try:
            rest = f"{NEW_RUN} Until then, ask for the events behind it with after={each}."
            require_row("events", ("number",), each, of_site, text, check=check, remedy=rest)
        except StateCorrupt:
            if found:
                break
            raise
        found.append((each, text))
    return found
