"""The ledger: the only place where a run's state changes.

For each event, the round machine (pure functions in `atoll.rounds`) returns effects. Some effects are decisions. One
transaction writes the row of the event itself, the decisions, and what they mean for the followers of the run
(`EventLog`) to the journal. After the commit, the followers are told, and the ledger carries out all effects. If the
transaction fails, nothing has changed. All calls run on one event loop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass

from atoll.errors import StoreError, transient_reason
from atoll.protocol.run_events import Happened
from atoll.rounds import events, machine
from atoll.rounds.early_stopping import MetricProgress
from atoll.rounds.leases import Member
from atoll.rounds.state import FragmentSnapshot, Rules, Snapshot, State
from atoll.rounds.transitions import IssuedTicket
from atoll.server.coordinator.event_log import EventLog, happened_by, sat_out_by_all
from atoll.server.coordinator.roster import Presence
from atoll.store.run_log import RunLog
from atoll.store.store import Store


def nothing() -> None:
    """Do nothing: the default of a callback."""


@dataclass(frozen=True)
class Change:
    """A change of the run's state, to be written to the journal.

    Attributes:
        before, after: the state before and after it.
        decided: the decisions, in order.
        row: writes the rows of the event itself.
        happened: what the event means for people and programs; None: only its effects mean something.
    """

    before: State
    after: State
    decided: Sequence[events.Decision]
    row: Callable[[], object] = nothing
    happened: Happened | None = None


class Ledger:
    """The state of one run. Events change it, through `record`. An event has effects; some effects are decisions.

    Args:
        rules: rules of the run's rounds.
        write: function that writes a change into the journal (the server's database), all of it or nothing.
        clock: function that returns the time in seconds, as `time.monotonic` does.
        on_failure: callback with an error of the store after which the run cannot go on.
        publish: callback after each change that was written, before its effects are carried out.

    Attributes:
        state: state of the rounds, leases and tickets. `restore` sets it first.
    """

    state: State

    def __init__(
        self,
        rules: Rules,
        write: Callable[[Change], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[StoreError], None] = lambda error: None,
        publish: Callable[[], None] = nothing,
    ) -> None:
        self.rules = rules
        self._write, self._clock = write, clock
        self._on_failure, self._publish = on_failure, publish

    def restore(self, snapshot: Snapshot, act: Callable[[events.Effect], None]) -> None:
        """Set the state from the journal's content, and finish what a crash has interrupted.

        Args:
            snapshot: the journal's content.
            act: function that carries out one effect, now and later. It is called after the decisions are in the
                journal.
        """
        self._act = act
        state, effects = machine.restore(self.rules, snapshot, self._clock())
        self._follow(Change(state, state, _decided(effects)), effects)

    def record(
        self,
        event: events.Event,
        row: Callable[[], object] = nothing,
        happened: Happened | None = None,
    ) -> tuple[events.Effect, ...]:
        """Record an event: in one transaction its own row and the decisions that follow; then carry out all effects.

        Args:
            event: the event.
            row: writes the rows of the event itself; without it, the event has none.
            happened: what the event means, for the followers of the run; None: only its effects mean something.

        Returns:
            The effects of the event.

        Raises:
            StoreError: the journal could not be written, for example because the disk is full. Nothing has changed, so
                the same event may be recorded again.
        """
        after, effects = machine.step(self.state, event, self._clock())
        try:
            self._follow(Change(self.state, after, _decided(effects), row, happened), effects)
        except StoreError as error:
            if transient_reason(error) is None:
                self._on_failure(error)
            raise
        return effects

    def _follow(self, change: Change, effects: tuple[events.Effect, ...]) -> None:
        is_written = bool(change.decided) or change.row is not nothing
        if is_written:
            self._write(change)
        self.state = change.after
        if is_written:  # followers read the new state, and hear of a round's last update before the round is aggregated
            self._publish()
        for effect in effects:
            self._act(effect)


def _decided(effects: Iterable[events.Effect]) -> list[events.Decision]:
    """Return the decisions among effects, without a ticket that the journal already has."""
    decided = [effect for effect in effects if isinstance(effect, events.Decision)]
    return [each for each in decided if not isinstance(each, events.TicketIssued) or each.new]


def write_change(
    store: Store,
    roster: MutableMapping[str, Presence],
    log: EventLog,
    change: Change,
    *,
    keep_weights: bool = False,
) -> None:
    """Write a change of the run's state into the store's journal, in one transaction, with the events that it means.

    Args:
        store: store of the run.
        roster: site → what the server knows about its worker, such as the process and host to record for a lease.
        log: the run's events.
        change: the change.
        keep_weights: whether to record the weight of each site's first update when a round closes.
    """
    with store.journal.transaction():
        change.row()
        if change.happened is not None:
            log.write([change.happened])
        for effect in change.decided:
            _write_decision(store, roster, effect, keep_weights=keep_weights)
            happened = happened_by(effect, change.before, change.after, len(roster))
            if happened is not None:
                log.write([happened])


def _write_decision(
    store: Store, roster: MutableMapping[str, Presence], effect: events.Decision, *, keep_weights: bool
) -> None:
    run_log, tickets = store.run_log, store.tickets
    match effect:
        case events.LeaseGranted(site, lease):
            presence = roster.setdefault(site, Presence(site))
            labels = json.dumps(presence.labels)
            run_log.put_member(site, lease, process=presence.holder, host=presence.host, labels_json=labels)
        case events.LeaseEnded(site, lease, why, detail):
            run_log.end_member(site, lease, why, detail)
        case events.SitesForgotten(sites):
            run_log.forget_members(sites)
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
            summary = sat_out_by_all(effect, len(roster))
            run_log.end_sat_out(fragment, base, in_a_row, next_ticket, summary.model_dump_json())
        case events.ControlsChanged() | events.RoundStopped() | events.RunFinished():
            _write_control(run_log, effect)


def _write_control(run_log: RunLog, effect: events.ControlsChanged | events.RoundStopped | events.RunFinished) -> None:
    match effect:
        case events.ControlsChanged(paused, stopping):
            run_log.control(paused=paused, stopping=stopping)
        case events.RoundStopped(fragment, base):
            run_log.drop_open_round(fragment, base)
        case events.RunFinished():
            run_log.finish()


def snapshot_of(store: Store, progress: MetricProgress) -> Snapshot:
    """Return the journal's content from which the ledger restores its state: current rounds, tickets and sites."""
    run_log, tickets, fragments = store.run_log, store.tickets, []
    to_go_on = {row.ticket: row for row in tickets.to_go_on()}
    for fragment, head in enumerate(store.versions.heads()):
        row = run_log.round(fragment, head)
        expected = row.expected if row is not None and row.state == "open" else None
        frozen = row.tickets if row is not None and row.state == "frozen" else ()
        sat_out, sitting_out = run_log.last_sat_out_round(fragment), tickets.sitting_out(fragment)
        to_go_on |= {row.ticket: row for row in sitting_out}
        done = head - len(run_log.lost_versions(fragment)) + sat_out.total
        # a lost version may come before a round that all sites sat out: no later round gets the number of that one
        done = max([done, *(each.round for each in run_log.ended_rounds(2, fragment))])
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
                sitting_out=frozenset(row.ticket for row in sitting_out),
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
            for row in to_go_on.values()
        ),
        next_ticket=tickets.next_number(),
        next_lease=run_log.next_lease(),
        finished=run_log.finished,
        progress=progress,
        paused=run_log.controls.paused,
        stopping=run_log.controls.stopping,
        proven=frozenset(row.site for row in run_log.members() if row.rounds_counted),
    )
