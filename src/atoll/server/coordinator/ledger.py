"""The ledger: the only place where a run's state changes.

For each event, the round machine (pure functions) returns effects. The ledger writes the decisions among them to the
journal in one transaction, and only then carries the effects out. All calls run on one event loop.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, MutableMapping, Sequence

from atoll.errors import DiskFull, StoreError, passing
from atoll.rounds import events, machine
from atoll.rounds.early_stopping import Progress
from atoll.rounds.leases import Member
from atoll.rounds.state import FragmentSnapshot, Rules, Snapshot, State
from atoll.rounds.transitions import Ticket
from atoll.server.coordinator.roster import Presence
from atoll.store.store import Store

LOG = logging.getLogger("atoll.server")

FACTS = (events.UpdateAccepted, events.UpdateRefused, events.VersionCommitted)
"""Events about rows that are already in the journal. If one cannot be applied now, the ledger applies it later."""


class Ledger:
    """The state of one run, and its changes by events.

    Args:
        rules: rules of the run's rounds.
        record: writes decisions into the journal, all of them or none.
        act: called with each effect once the decisions are in the journal.
        clock: returns monotonic time in seconds.
        on_failure: called with an error of the store after which the run cannot go on.

    Attributes:
        state: state of the round machine, set by `restore`. Only this class assigns it.
    """

    state: State

    def __init__(
        self,
        rules: Rules,
        record: Callable[[Sequence[events.Decision]], None],
        act: Callable[[events.Effect], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[StoreError], None] = lambda error: None,
    ) -> None:
        self.rules = rules
        self._record, self._act, self._clock, self._on_failure = record, act, clock, on_failure
        self._untold: list[events.Event] = []

    def restore(self, snapshot: Snapshot) -> None:
        """Set the state from the journal's snapshot, and carry out effects that a crash has interrupted."""
        self.state, effects = machine.restore(self.rules, snapshot, self._clock())
        self._carry_out(effects)

    def apply(self, event: events.Event) -> tuple[events.Effect, ...]:
        """Apply an event: decide, write the decisions to the journal, then carry out the effects.

        If the disk is full, an event in `FACTS` waits, because its row is in the journal already. Until the waiting
        events are applied, only `WorkerSeen` is decided. Without them, the round machine would issue an accepted ticket
        again.

        Returns:
            The effects of the event; empty if the event waits.

        Raises:
            DiskFull: the journal could not be written; the state has not changed.
        """
        try:
            if not isinstance(event, events.WorkerSeen):
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

    def _step(self, event: events.Event) -> tuple[events.Effect, ...]:
        before = self.state
        self.state, effects = machine.step(before, event, self._clock())
        try:
            self._carry_out(effects)
        except StoreError as error:
            self.state = before
            if passing(error) is None:
                self._on_failure(error)
            raise
        return effects

    def _carry_out(self, effects: tuple[events.Effect, ...]) -> None:
        decided = [effect for effect in effects if isinstance(effect, events.Decision)]
        given_again = [each for each in decided if isinstance(each, events.TicketIssued) and not each.new]
        if new := [effect for effect in decided if effect not in given_again]:
            self._record(new)
        for effect in effects:
            self._act(effect)


def record_in(
    store: Store,
    roster: MutableMapping[str, Presence],
    decided: Sequence[events.Decision],
    *,
    keep_weights: bool = False,
) -> None:
    """Write decisions into the store's journal, in one transaction.

    Args:
        roster: presences of the sites, with the process and host for the row of a lease.
        keep_weights: whether to record each site's first weight (`RunLog.freeze`).
    """
    run_log, tickets = store.run_log, store.tickets
    with store.journal.transaction():
        for effect in decided:
            match effect:
                case events.LeaseGranted(site, lease):
                    presence = roster.setdefault(site, Presence(site))
                    labels = json.dumps(presence.labels)
                    run_log.put_member(site, lease, process=presence.holder, host=presence.host, labels_json=labels)
                case events.LeaseEnded(site, lease, why, detail):
                    run_log.end_member(site, lease, why, detail)
                case events.RoundOpened(fragment, base, expected) | events.ExpectedChanged(fragment, base, expected):
                    run_log.open_round(fragment, base, expected)
                case events.TicketIssued(site, ticket, fragment, base):
                    tickets.issue(ticket, site, fragment, base)
                case events.TicketsExpired(numbers, reason):
                    tickets.expire(numbers, reason)
                case events.RoundReopened(fragment, base, numbers, reason):
                    tickets.reopen(fragment, base, numbers, reason)
                case events.RoundClosed(fragment, base, numbers):
                    run_log.freeze(fragment, base, numbers, keep_weights=keep_weights)
                case events.RunFinished():
                    run_log.finish()


def snapshot_of(store: Store, progress: Progress) -> Snapshot:
    """Return the journal's state as the snapshot that the round machine starts from, without ended rounds."""
    run_log, tickets, fragments = store.run_log, store.tickets, []
    for fragment, head in enumerate(store.versions.heads()):
        row = run_log.round(fragment, head)
        expected = row.expected if row is not None and row.state == "open" else None
        frozen = row.tickets if row is not None and row.state == "frozen" else ()
        lost = len(run_log.lost_versions(fragment))
        fragments.append(FragmentSnapshot(head, expected, frozen, started=run_log.has_begun(fragment), lost=lost))
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
