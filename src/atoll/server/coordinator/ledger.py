"""The ledger: the only place where a run's state changes.

For each event, the round machine (pure functions in `atoll.rounds`) returns effects. Some effects are decisions. The
ledger writes the decisions to the journal in one transaction, and then carries out all effects. All calls run on one
event loop.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, MutableMapping, Sequence

from atoll.errors import DiskFull, StoreError, transient_reason
from atoll.protocol.status_messages import RoundSummary
from atoll.rounds import events, machine
from atoll.rounds.early_stopping import MetricProgress
from atoll.rounds.leases import Member
from atoll.rounds.state import FragmentSnapshot, Rules, Snapshot, State
from atoll.rounds.transitions import IssuedTicket
from atoll.server.coordinator.roster import Presence
from atoll.store.store import Store

LOG = logging.getLogger("atoll.server")

FACTS = (events.UpdateAccepted, events.RefusalRecorded, events.SatOut, events.VersionCommitted)
"""Events about rows that are already in the journal. If the disk is full, the ledger applies such an event later."""


class Ledger:
    """The state of one run. Events change it, through `apply`. An event has effects; some effects are decisions.

    Args:
        rules: rules of the run's rounds.
        record: function that writes decisions into the journal (the server's database), all of them or none.
        act: function that carries out one effect. It is called after the decisions are in the journal.
        clock: function that returns the time in seconds, as `time.monotonic` does.
        on_failure: callback with an error of the store after which the run cannot go on.

    Attributes:
        state: state of the rounds, leases and tickets. `restore` sets it first.
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
        """Set the state from the journal's content, and finish what a crash has interrupted."""
        self.state, effects = machine.restore(self.rules, snapshot, self._clock())
        self._carry_out(effects)

    def apply(self, event: events.Event) -> tuple[events.Effect, ...]:
        """Apply an event: find its effects, write the decisions among them to the journal, then carry out all effects.

        An event in `FACTS` reports something that is in the journal already. If the disk is full, such an event is kept
        and applied before the next event. Until that succeeds, events that are not in `FACTS` fail, except
        `WorkerSeen`: decisions from the old state would be wrong. For example, a ticket with an accepted update would
        be issued again.

        Returns:
            The effects of the event; empty if the event is kept for later.

        Raises:
            StoreError: the journal could not be written, and the state has not changed. An event in `FACTS` does not
                raise `DiskFull`.
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
            LOG.error("the run's state cannot be updated: %s Trying again.", error)
            self._untold.append(event)
            return ()

    def _step(self, event: events.Event) -> tuple[events.Effect, ...]:
        before = self.state
        self.state, effects = machine.step(before, event, self._clock())
        try:
            self._carry_out(effects)
        except StoreError as error:
            self.state = before
            if transient_reason(error) is None:
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
        store: store of the run.
        roster: site → what the server knows about its worker, such as the process and host to record for a lease.
        decided: the decisions.
        keep_weights: whether to record the weight of each site's first update when a round closes.
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
                case events.GenerationBegun(base, why):
                    run_log.begin_generation(base, why)
                case events.RoundClosed(fragment, base, numbers):
                    run_log.freeze(fragment, base, numbers, keep_weights=keep_weights)
                case events.RoundSatOut(fragment, base, in_a_row, next_ticket):
                    summary = RoundSummary.sat_out_by_all(fragment, effect.number, effect.sites, len(roster))
                    run_log.end_sat_out(fragment, base, in_a_row, next_ticket, summary.model_dump_json())
                case events.RunFinished():
                    run_log.finish()


def snapshot_of(store: Store, progress: MetricProgress) -> Snapshot:
    """Return the journal's content from which the ledger restores its state: current rounds, tickets and sites."""
    run_log, tickets, fragments = store.run_log, store.tickets, []
    for fragment, head in enumerate(store.versions.heads()):
        row = run_log.round(fragment, head)
        expected = row.expected if row is not None and row.state == "open" else None
        frozen = row.tickets if row is not None and row.state == "frozen" else ()
        sat_out = run_log.last_sat_out_round(fragment)
        done = head - len(run_log.lost_versions(fragment)) + sat_out.total
        # a lost version may come before a round that all sites sat out: no later round gets the number of that one
        done = max([done, *(each.round for each in run_log.summaries(2, fragment))])
        fragments.append(
            FragmentSnapshot(
                head,
                expected,
                frozen,
                started=run_log.has_begun(fragment),
                lost=head + sat_out.total - done,
                sat_out_rounds=sat_out.total,
                sat_out_in_a_row=sat_out.in_a_row if sat_out.base_version == head else 0,
                first_ticket=sat_out.first_ticket,
            )
        )
    return Snapshot(
        fragments=tuple(fragments),
        members=tuple(
            Member(row.site, row.lease, row.state == "alive", "" if row.state == "alive" else row.state)
            for row in run_log.members()
        ),
        tickets=tuple(
            IssuedTicket(
                row.ticket, row.site, row.fragment, row.base_version, row.state, row.reason or "", row.accepted_order
            )
            for row in tickets.to_go_on()
        ),
        next_ticket=tickets.next_number(),
        next_lease=run_log.next_lease(),
        finished=run_log.finished,
        progress=progress,
    )
