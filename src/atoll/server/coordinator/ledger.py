"""The ledger: the only writer of a run's state.

Events go in. The pure machine decides, the decisions are journalled in one transaction, and only then acted on. All of
it happens on one event loop.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from atoll.errors import DiskFull, StoreError
from atoll.rounds import events as ev
from atoll.rounds import events as fx
from atoll.rounds import machine, state_rows
from atoll.rounds.early_stopping import Progress
from atoll.rounds.leases import Member
from atoll.rounds.state import ClosingRound, FragmentSnapshot, OpenRound, Rules, Snapshot, State, Ticket
from atoll.server.coordinator.roster import Presence
from atoll.store.store import Store

LOG = logging.getLogger("atoll.server")
E = TypeVar("E", bound=fx.Effect)

FACTS = (ev.UpdateAccepted, ev.UpdateRefused, ev.VersionCommitted)
"""Events that report a row which is in the journal: they must reach the machine, sooner or later."""


class Rows(Protocol):
    """Where decisions are recorded."""

    def transaction(self) -> AbstractContextManager[None]:
        """Make several writes one: all of them, or none."""

    def write(self, effect: fx.Effect) -> None:
        """Record one decision, inside a transaction."""


class Ledger:
    """The state of one run.

    Args:
        rules: of its rounds.
        clock: monotonic, in seconds.
        on_failure: called with an error of the store after which the run cannot go on.

    Attributes:
        state: what the machine knows, after `restore`. Only this class assigns it.
    """

    state: State

    def __init__(
        self,
        rules: Rules,
        rows: Rows,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[StoreError], None] = lambda error: None,
    ) -> None:
        self.rules = rules
        self._rows, self._clock, self._on_failure = rows, clock, on_failure
        self._acts: dict[type, list[Callable[[Any], None]]] = defaultdict(list)
        self._untold: list[ev.Event] = []

    def on(self, effect: type[E], act: Callable[[E], None]) -> None:
        """Call `act` with each effect of this kind, once it is in the journal."""
        self._acts[effect].append(act)

    def restore(self, snapshot: Snapshot) -> None:
        """Begin with what the journal has, and do what a crash has left undone."""
        self.state, effects = state_rows.restore(self.rules, snapshot, self._clock())
        self._carry_out(effects)

    def apply(self, event: ev.Event) -> tuple[fx.Effect, ...]:
        """Let the machine decide about an event, journal what it decided, then act on it.

        If the disk is full, a fact that is in the journal already waits, and the machine decides nothing before it
        knows it: it would issue an accepted ticket again. It only goes on to hear that workers live.

        Raises:
            DiskFull: the journal could not be written; nothing has changed.
        """
        try:
            if not isinstance(event, ev.WorkerSeen):
                while self._untold:
                    self._step(self._untold[0])
                    del self._untold[0]
            return self._step(event)
        except DiskFull as error:
            if not isinstance(event, FACTS):
                raise
            LOG.error("%s Trying again.", error)
            self._untold.append(event)
            return ()

    def _step(self, event: ev.Event) -> tuple[fx.Effect, ...]:
        before = self.state
        self.state, effects = machine.step(before, event, self._clock())
        try:
            self._carry_out(effects)
        except StoreError as error:
            self.state = before
            self._on_failure(error)
            raise
        return effects

    def _carry_out(self, effects: tuple[fx.Effect, ...]) -> None:
        decided = [effect for effect in effects if fx.for_journal(effect)]
        if decided:
            with self._rows.transaction():
                for effect in decided:
                    self._rows.write(effect)
        for effect in effects:
            for act in self._acts[type(effect)]:
                act(effect)


class StoreRows:
    """Records decisions in a store.

    Args:
        roster: has what a lease's row says of its process.
        keep_weights: whether a site keeps its first weight (`RunLog.freeze`).
    """

    def __init__(self, store: Store, roster: MutableMapping[str, Presence], *, keep_weights: bool = False) -> None:
        self._store, self._roster, self._keep_weights = store, roster, keep_weights

    def transaction(self) -> AbstractContextManager[None]:
        """Return a transaction of the journal."""
        return self._store.journal.transaction()

    def write(self, effect: fx.Effect) -> None:
        """Write the rows of a decision; a ticket that is given again has its row already."""
        run_log, tickets = self._store.run_log, self._store.tickets
        match effect:
            case fx.LeaseGranted(site, lease):
                presence = self._roster.setdefault(site, Presence(site))
                labels = json.dumps(presence.labels)
                run_log.put_member(site, lease, process=presence.holder, host=presence.host, labels_json=labels)
            case fx.LeaseEnded(site, lease, why, detail):
                run_log.end_member(site, lease, why, detail)
            case fx.RoundOpened(fragment, base, expected) | fx.ExpectedChanged(fragment, base, expected):
                run_log.open_round(fragment, base, expected)
            case fx.TicketIssued(site, ticket, fragment, base_version, new):
                if new:
                    tickets.issue(ticket, site, fragment, base_version)
            case fx.TicketsExpired(numbers, reason):
                tickets.expire(numbers, reason)
            case fx.RoundReopened(fragment, base_version, numbers, reason):
                tickets.reopen(fragment, base_version, numbers, reason)
            case fx.RoundClosed(fragment, base_version, numbers):
                run_log.freeze(fragment, base_version, numbers, keep_weights=self._keep_weights)
            case fx.RunFinished():
                run_log.finish()


def snapshot_of(store: Store, progress: Progress) -> Snapshot:
    """Return what the machine starts from; it passes over rows of rounds that have ended."""
    run_log, tickets, fragments = store.run_log, store.tickets, []
    for fragment, head in enumerate(store.versions.heads()):
        row = run_log.round(fragment, head)
        frozen = ClosingRound(head, row.tickets) if row is not None and row.state == "frozen" else None
        open_ = OpenRound(head, row.expected) if row is not None and row.state == "open" else None
        lost = len(run_log.lost_versions(fragment))
        fragments.append(FragmentSnapshot(head, open_, frozen, started=run_log.has_begun(fragment), lost=lost))
    return Snapshot(
        fragments=tuple(fragments),
        members=tuple(
            Member(row.site, row.lease, row.state == "alive", "" if row.state == "alive" else row.state)
            for row in run_log.members()
        ),
        tickets=tuple(
            Ticket(
                row.ticket, row.site, row.fragment, row.base_version, row.state, row.reason or "", row.accepted_order
            )
            for row in tickets.to_go_on()
        ),
        next_ticket=tickets.next_number(),
        next_lease=run_log.next_lease(),
        finished=run_log.finished,
        progress=progress,
    )
