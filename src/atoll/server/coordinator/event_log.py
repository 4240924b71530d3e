"""The stream of what happens in a run: numbered events, which subscribers get, and clients read page by page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, get_args

from atoll.errors import StoreError, UsageError
from atoll.protocol import run_events
from atoll.protocol.status_messages import RoundSummary
from atoll.rounds import events
from atoll.rounds.state import State
from atoll.server.coordinator.long_polls import FairEvent
from atoll.store.event_pages import event_page
from atoll.store.journal_tables import utc_text
from atoll.store.store import Store

LOG = logging.getLogger("atoll.server")

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

    Args:
        store: store of the run.
        after: number of the last event that subscribers got before the run began again; None: the server starts now.

    Attributes:
        passed: number of the last event that subscribers have got.
        problems: subscriber → the first error that it raised, as a warning for the status.
    """

    def __init__(self, store: Store, after: int | None = None) -> None:
        self._store, self._rows = store, store.events
        self.passed = self._rows.newest if after is None else after
        query = run_events.EventQuery(after=self.passed)
        # written, but not yet passed to the subscribers: at first what recovery has written, such as `WentBack`
        self._told: list[run_events.Happened] = [*event_page(store.journal.rows, query).events]
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
        for number, each in enumerate(happened, self._rows.newest + 1):
            told = each.model_copy(update={"at": each.at or utc_text(), "number": number})
            left_out: Any = {"number": True}
            if isinstance(told, run_events.RoundEnded):  # the journal has the sites in rows of their own
                left_out |= {"summary": {"sites"}}
            self._rows.append(number, told.model_dump_json(exclude=left_out), of_site=isinstance(told, OF_SITES))
            self._told.append(told)

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
                self.passed = max(self.passed, event.number)
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
        page = self.page(query)
        if page.events or not query.wait_s:
            return page
        await self.wait_beyond(page.newest, query.wait_s)
        return self.page(query)

    async def wait_beyond(self, number: int, wait_s: float) -> int:
        """Wait for an event after `number`, up to `wait_s` seconds or the end. Return the newest event's number."""
        until_s = time.monotonic() + wait_s
        while True:
            newest, rest_s = self._rows.newest, until_s - time.monotonic()
            if newest > number or rest_s <= 0 or self._has_ended:
                return newest
            await self._news.wait(rest_s)

    def page(self, query: run_events.EventQuery) -> run_events.EventPage:
        """Return the events after `query.after`, as many as fit into an answer.

        Raises:
            Gone: the server has no such event yet, or no longer has the ones that follow it.
        """
        return event_page(self._store.journal.rows, query)

    @property
    def has_ended(self) -> bool:
        """Whether no more events come, because the server is about to end."""
        return self._has_ended


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
