"""The stream of what happens in a run: numbered events, which subscribers get, and clients read page by page."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, get_args

from atoll.errors import Gone, StoreError, UsageError
from atoll.protocol import run_events
from atoll.protocol.status_messages import RoundSummary
from atoll.rounds import events
from atoll.rounds.state import State
from atoll.server.coordinator.long_polls import FairEvent
from atoll.store.journal_tables import utc_text
from atoll.store.round_summaries import sites_of_round
from atoll.store.store import Store

LOG = logging.getLogger("atoll.server")

PAGE_BYTES = 2**20 - 2**14
"""Maximum bytes of the events in an answer, so that the whole answer has at most 1 MiB."""
PAGE_EVENTS = 1000
KINDS: tuple[type[run_events.Happened], ...] = get_args(get_args(run_events.RunEvent)[0])
"""The classes of events that clients understand."""
OF_SITES: tuple[type[run_events.Happened], ...] = (
    *(kind for kind in KINDS if "site" in kind.model_fields),
    run_events.Warned,
)
"""The classes of events that a site causes; a warning may quote what a site reports. They are counted apart."""

OnEvent = Callable[[run_events.Happened], None]


class EventLog:
    """The events of a run. All calls run on the server's event loop.

    An event is written in the transaction of what it tells. Subscribers get it after the commit, in order. If one
    raises, the others and the run go on; the error is logged once for each subscriber.

    Attributes:
        problems: subscriber → the first error that it raised, as a warning for the status.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._rows = store, store.events
        self._told: list[run_events.Happened] = []  # written, but not yet passed to the subscribers
        self._subscribers: dict[str, tuple[OnEvent, Callable[[Exception], None] | None]] = {}
        self._news, self._has_ended, self._is_publishing = FairEvent(), False, False
        self.problems: dict[str, str] = {}

    def subscribe(self, name: str, on_event: OnEvent, on_error: Callable[[Exception], None] | None = None) -> None:
        """Call `on_event` for each event from now on.

        Args:
            name: name of the subscriber, for messages.
            on_event: it must not block.
            on_error: called with an error of `on_event`, if the run cannot go on after one.
        """
        self._subscribers[name] = on_event, on_error

    def write(self, happened: Iterable[run_events.Happened]) -> None:
        """Write events into the journal. Call it inside a transaction; after the commit, call `publish`."""
        count = len(self._told)
        self._store.journal.after_rollback(lambda: self._told.__delitem__(slice(count, None)))
        for each in happened:
            told = each.model_copy(update={"at": each.at or utc_text()})
            left_out: Any = {"number": True}
            if isinstance(told, run_events.RoundEnded):  # the journal has the sites in rows of their own
                left_out |= {"summary": {"sites"}}
            number = self._rows.append(told.model_dump_json(exclude=left_out), of_site=isinstance(told, OF_SITES))
            self._told.append(told.model_copy(update={"number": number}))

    def tell(self, happened: run_events.Happened) -> None:
        """Write an event that belongs to no change of the run's state, and publish it.

        If the journal cannot be written, the event has the number 0, and only subscribers get it: a failure of the disk
        is often why the run fails, and they hear of that.

        Raises:
            UsageError: it is an event of a class that clients do not know.
        """
        if type(happened) not in KINDS:
            raise UsageError(
                f"{type(happened).__name__} is not an event of a run.", "Use one of the classes in run_events.RunEvent."
            )
        try:
            with self._store.journal.transaction():
                self.write([happened])
        except StoreError as error:
            LOG.debug("the event %r is not in the journal: %s", happened.what, error)
            self._told.append(happened.model_copy(update={"at": happened.at or utc_text()}))
        self.publish()

    def publish(self) -> None:
        """Pass the events that were written to the subscribers, and wake the requests that wait for events.

        Inside a transaction, which may still be undone, this happens after its commit.
        """
        if not self._told:
            return
        if self._store.journal.in_transaction:
            self._store.journal.after_commit(self.publish)
            return
        if self._is_publishing:  # a subscriber has added an event: first, all subscribers get the present one
            asyncio.get_running_loop().call_soon(self.publish)
            return
        told, self._told, self._is_publishing = self._told, [], True
        try:
            for event in told:
                for name, (on_event, on_error) in list(self._subscribers.items()):
                    self._pass(event, name, on_event, on_error)
        finally:
            self._is_publishing = False
        self._news.set()

    def _pass(
        self, event: run_events.Happened, name: str, on_event: OnEvent, on_error: Callable[[Exception], None] | None
    ) -> None:
        try:
            on_event(event)
        except Exception as error:
            if on_error is not None:
                on_error(error)
            elif name not in self.problems:
                self.problems[name] = f"{name} failed at the event {event.number}: {error!r}"
                LOG.exception("%s failed at the event %d; the run goes on", name, event.number)

    def end(self) -> None:
        """Answer all requests that wait for events, because the server is about to end."""
        self._has_ended = True
        self._news.set()

    async def get_events(self, query: run_events.EventQuery) -> run_events.EventPage:
        """Return the events after `query.after`. If there is none, wait for the next one, up to `query.wait_s`.

        Raises:
            Gone: the server has no such event yet, or no longer has the ones that follow it.
        """
        until_s = time.monotonic() + query.wait_s
        while True:
            page = self.page(query)
            rest_s = until_s - time.monotonic()
            if page.events or rest_s <= 0 or self._has_ended:
                return page
            await self._news.wait(rest_s)

    def page(self, query: run_events.EventQuery) -> run_events.EventPage:
        """Return the events after `query.after`, as many as fit into `PAGE_BYTES`.

        If the summary of a single round does not fit, its sites are divided among several pages.

        Raises:
            Gone: the server has no such event yet, or no longer has the ones that follow it.
        """
        oldest, newest = self._rows.oldest(), self._rows.newest()
        if query.after > newest:
            raise Gone(
                f"There is no event {query.after}: the newest is {newest}.",
                "The server's state was probably restored from a backup. Ask again with after=0 for all events that it "
                f"keeps, or with after={newest} for new ones alone.",
            )
        if 0 < query.after < oldest - 1:
            raise Gone(
                f"Event {query.after + 1} is no longer kept: the oldest is {oldest}.", f"Ask with after={oldest - 1}."
            )
        found, room, within = list[dict[str, Any]](), PAGE_BYTES, 0
        for number, text in self._rows.after(query.after, PAGE_EVENTS):
            event, known = {"number": number, **json.loads(text)}, 0 if found else query.within
            sites = self._sites(event)[known:]
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
        return run_events.EventPage.model_validate_json(json.dumps(page))

    def _sites(self, event: dict[str, Any]) -> list[str]:
        if "summary" not in event:
            return []
        return sites_of_round(self._store.journal.rows, event["fragment"], event["summary"]["version"])


def _fitting(texts: list[str], room: int) -> int:
    """Return how many of the texts fit into `room` bytes; at least one."""
    for count, text in enumerate(texts):
        room -= len(text.encode()) + 2
        if room < 0:
            return max(count, 1)
    return len(texts)


def sat_out_by_all(effect: events.RoundSatOut, population: int) -> RoundSummary:
    """Return the summary of a round that all sites sat out, in a run of `population` sites."""
    return RoundSummary.sat_out_by_all(effect.fragment, effect.number, effect.sites, population)


def happened_by(effect: events.Effect, before: State, after: State, population: int) -> run_events.Happened | None:
    """Return what an effect of the round machine means for people and programs; None for effects that mean nothing.

    Args:
        effect: the effect.
        before: state of the run before the event.
        after: state after it.
        population: number of sites that have joined so far.
    """
    match effect:
        case events.LeaseGranted(site):
            return run_events.SiteJoined(site=site, again=site in before.members)
        case events.LeaseEnded(site, _, "dead", detail):
            return run_events.SiteSilent(site=site, reason=detail)
        case events.LeaseEnded(site, _, why, detail):
            return run_events.SiteLeft(site=site, reason=(detail or why) if why == "failed" else "")
        case events.RoundOpened(fragment, version, expected):
            number = after.rounds[fragment].number
            return run_events.RoundOpened(fragment=fragment, round=number, version=version, expected=list(expected))
        case events.TicketIssued(site, ticket, fragment, version, new=True):
            number = after.rounds[fragment].number
            return run_events.TicketIssued(fragment=fragment, round=number, site=site, ticket=ticket, version=version)
        case events.RoundClosed(fragment, _, tickets):
            issued = {each.id: each.site for each in after.rounds[fragment].tickets.values()}
            sites = [issued[ticket] for ticket in tickets]
            return run_events.RoundClosed(fragment=fragment, round=after.rounds[fragment].number, sites=sites)
        case events.RoundReopened(fragment, _, _, reason):
            return run_events.RoundReopened(fragment=fragment, round=after.rounds[fragment].number, reason=reason)
        case events.RoundSatOut(fragment, number=number):
            return run_events.RoundEnded(fragment=fragment, round=number, summary=sat_out_by_all(effect, population))
        case events.ControlsChanged(paused, stopping):
            kind = run_events.RunStopping if stopping else run_events.RunPaused if paused else run_events.RunResumed
            return kind()
        case events.RunFinished():
            return run_events.RunFinished(reason=after.why_ended)
    return None
