"""Pages of the events of a run, from the rows of its journal: for the server, and for a directory without one."""

from __future__ import annotations

import json
from typing import Any

from atoll.errors import Gone
from atoll.protocol.run_events import EventPage, EventQuery
from atoll.store.kept_events import events_after, newest_event, oldest_event
from atoll.store.round_summaries import Query, sites_of_round

PAGE_BYTES = 2**20 - 2**14
"""Maximum bytes of the events in an answer, so that the whole answer has at most 1 MiB."""
PAGE_EVENTS = 1000


def event_page(query: Query, asked: EventQuery) -> EventPage:
    """Return the events after `asked.after`, or the newest `asked.last`, as many as fit into `PAGE_BYTES`.

    If the summary of a single round does not fit, its sites are divided among several pages.

    Raises:
        Gone: there is no such event yet, or the ones that follow it are no longer kept.
    """
    oldest, newest = oldest_event(query), newest_event(query)
    after = max(newest - asked.last, oldest - 1, 0) if asked.last else asked.after
    if after > newest:
        raise Gone(
            f"There is no event {after}: the newest is {newest}.",
            "The server's state was probably restored from a backup. Ask again with after=0 for all events that it "
            f"keeps, or with after={newest} for new ones alone.",
        )
    if 0 < after < oldest - 1:
        raise Gone(f"Event {after + 1} is no longer kept: the oldest is {oldest}.", f"Ask with after={oldest - 1}.")
    found, room, within = list[dict[str, Any]](), PAGE_BYTES, 0
    for number, text in events_after(query, after, PAGE_EVENTS):
        event, known = {"number": number, **json.loads(text)}, 0 if found else asked.within
        sites = _sites(query, event)[known:]
        room -= len(text.encode()) + 64
        sent = _fitting(sites, room)
        if found and (room < 0 or sent < len(sites)):
            break
        if sites:
            event["summary"]["sites"] = [json.loads(site) for site in sites[:sent]]
            room -= sum(len(site.encode()) for site in sites)
        found.append(event)
        if sent < len(sites):
            within = known + sent
            break
    page = {"events": found, "oldest": oldest, "newest": newest, "within": within}
    return EventPage.model_validate_json(json.dumps(page))


def _sites(query: Query, event: dict[str, Any]) -> list[str]:
    if "summary" not in event:
        return []
    return sites_of_round(query, event["fragment"], event["summary"]["version"])


def _fitting(texts: list[str], room: int) -> int:
    """Return how many of the texts fit into `room` bytes; at least one."""
    for count, text in enumerate(texts):
        room -= len(text.encode()) + 2
        if room < 0:
            return max(count, 1)
    return len(texts)
