"""The round machine: a pure function from state, event and time to a new state and effects.

    state, _ = restore(Rules(sites=3), Snapshot((FragmentSnapshot(head=0),)), now_s)
    state, effects = step(state, events.WorkerJoined("clinic-a"), now_s)

The server and the simulator both run this code. After every relevant event, `settle` updates each open round: it
derives the expected sites from the live sites and the tickets, and asks the closing policy. A restarted server calls
`settle` on the state from the journal, so the same rules repair a crash between two writes to the journal.

`now_s` is a time in seconds on a monotonic clock. With a wall clock, setting the clock could declare workers dead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from atoll.rounds import events, leases
from atoll.rounds.early_stopping import Measured
from atoll.rounds.events import RunFinished
from atoll.rounds.opening import drop_ended, end_open, expire, open_next, pending_tickets, settle
from atoll.rounds.state import (
    Draft,
    FragmentSnapshot,
    Result,
    Round,
    Rules,
    Snapshot,
    State,
    ticket_by_id,
)
from atoll.rounds.transitions import ROUND, TICKET, IllegalTransition, Ticket, advance
from atoll.rounds.waiting import why

NEXT_ROUND = "counts from the next round on"
NOT_DRAWN = "was not drawn for this round; each round draws anew"


def step(state: State, event: events.Event, now_s: float) -> Result:
    """Return the state after an event, and the effects: the actions that the caller must take.

    Args:
        state: state before the event; it is not changed.
        event: the event.
        now_s: time of the event, in seconds of a monotonic clock.

    Raises:
        IllegalTransition: the event is not possible in this state; the caller has a bug.
    """
    draft = Draft(state, now_s)
    refused = leases.refusal(state.members, event.site, event.lease) if isinstance(event, events.Leased) else None
    if refused:
        return state, (refused,)
    match event:
        case events.WorkerSeen(site):
            draft.see(site)
        case events.WorkerJoined(site):
            _join(draft, site)
        case events.WorkerLeft(site, _, error):
            _end(draft, [site], "fails" if error else "leaves", error)
        case events.WorkerEnds(site):
            _submits_no_more(draft, site)
        case events.TicketRequested(site, _, fragment):
            _request(draft, site, fragment)
        case events.UpdateAccepted() | events.UpdateRefused():
            _update(draft, event)
        case events.VersionCommitted(fragment, version, value):
            _commit(draft, fragment, version, value)
        case events.AggregatorLost(fragment, reason):
            _collect_again(draft, fragment, reason)
        case events.TrainingBegins():
            draft.change(rules=replace(state.rules, held=False))
            settle(draft)
        case events.TimePassed():
            _end_silent(draft)
        case _:
            assert_never(event)
    return draft.result()


def _join(draft: Draft, site: str) -> None:
    lease = draft.state.next_lease
    members = leases.changed(draft.state.members, site, "joins", lease)
    draft.change(members=members, next_lease=lease + 1, ending=draft.state.ending - {site})
    draft.see(site)
    draft.effects.append(events.LeaseGranted(site, lease))
    settle(draft)


def _end(draft: Draft, sites: Iterable[str], event: str, detail: str) -> None:
    """End the leases of all `sites` because of `event`, then update the rounds once."""
    for site in sites:
        members = leases.changed(draft.state.members, site, event)
        seen_s = {other: last_s for other, last_s in draft.state.seen_s.items() if other != site}
        draft.change(members=members, seen_s=seen_s, ending=draft.state.ending - {site})
        draft.effects.append(events.LeaseEnded(site, members[site].lease, members[site].why, detail))
        draft.wake.update(range(len(draft.state.rounds)))
    settle(draft)


def _end_silent(draft: Draft) -> None:
    timeout_s = draft.state.rules.heartbeat_timeout_s
    silent = leases.silent(draft.state.seen_s, timeout_s, draft.now_s)
    _end(draft, silent, "falls silent", f"silent for {timeout_s:g} s")


def _submits_no_more(draft: Draft, site: str) -> None:
    """Record that the site submits no more updates: no round waits for it, but its accepted updates stay."""
    draft.see(site)
    draft.change(ending=draft.state.ending | {site})
    for fragment in range(len(draft.state.rounds)):
        end_open(draft, fragment, "its site ends", events.ENDS, site=site)
        draft.wake.add(fragment)
    settle(draft)


def _request(draft: Draft, site: str, fragment: int) -> None:
    draft.see(site)
    round_ = draft.round(fragment)
    if site in draft.state.ending and round_.phase != "finished":
        draft.effects.append(events.TicketWithheld(site, fragment, events.ENDS))
        return
    if round_.phase in ("open", "closing") and draft.state.is_async(fragment):
        _request_async(draft, site, fragment)
        return
    ticket = round_.tickets.get(site)
    cannot_close = len(round_.expected) < draft.state.rules.floor
    reason = ""
    if round_.phase == "finished":
        reason = events.FINISHED
    elif round_.phase != "open":
        reason = why(draft.state, fragment, draft.now_s)
    elif ticket and ticket.state == "accepted":
        reason = f"its update is accepted; the round {why(draft.state, fragment, draft.now_s)}"
    elif ticket and ticket.state == "refused" and not cannot_close:
        reason = f"its update was refused ({ticket.reason}); it {NEXT_ROUND}"
    elif ticket is None and site not in round_.expected:
        reason = NEXT_ROUND if draft.state.rules.sampling.fraction == 1 else NOT_DRAWN
    if reason:
        draft.effects.append(events.TicketWithheld(site, fragment, reason))
    elif ticket and ticket.state == "open":
        draft.effects.append(events.TicketIssued(site, ticket.id, fragment, ticket.base_version, new=False))
    else:  # the site's first ticket; or a retry after a refusal, if the round cannot close without the site
        _issue(draft, site, fragment)


def _request_async(draft: Draft, site: str, fragment: int) -> None:
    """Issue a ticket for the newest version in an asynchronous round. It replaces an open ticket for an earlier one."""
    round_ = draft.round(fragment)
    ticket = round_.tickets.get(site)
    if ticket and ticket.state == "accepted":
        draft.effects.append(
            events.TicketWithheld(
                site, fragment, f"its update is accepted; the round {why(draft.state, fragment, draft.now_s)}"
            )
        )
    elif ticket and ticket.state == "open" and ticket.base_version == round_.head:
        draft.effects.append(events.TicketIssued(site, ticket.id, fragment, ticket.base_version, new=False))
    else:
        reason = f"a newer ticket of {site} has replaced it"
        end_open(draft, fragment, "replaced by a newer one", reason, site=site)
        _issue(draft, site, fragment)


def _issue(draft: Draft, site: str, fragment: int) -> None:
    number, head = draft.state.next_ticket, draft.round(fragment).head
    draft.put(Ticket(number, site, fragment, head, "open"))
    draft.change(next_ticket=number + 1)
    draft.effects.append(events.TicketIssued(site, number, fragment, head, new=True))
    if site not in draft.round(fragment).expected:  # a ticket of an expected site changes no round
        settle(draft)


def _update(draft: Draft, event: events.UpdateAccepted | events.UpdateRefused) -> None:
    ticket = ticket_by_id(draft.state, event.ticket)
    what = "update accepted" if isinstance(event, events.UpdateAccepted) else "update refused"
    if ticket is None:
        raise IllegalTransition(f"Ticket {event.ticket} is in no current round: {what!r} is not possible.")
    state = advance(f"Ticket {event.ticket}", TICKET, ticket.state, what)
    if state == ticket.state:
        return
    if isinstance(event, events.UpdateAccepted):
        draft.put(replace(ticket, state=state, reason="", order=event.order))
    else:
        draft.put(replace(ticket, state=state, reason=event.reason, order=0))
    drop_ended(draft, ticket.fragment)
    round_ = draft.round(ticket.fragment)
    if state == "accepted" and round_.phase == "open" and round_.first_s is None:
        draft.change_round(ticket.fragment, first_s=draft.now_s)
    if ticket.site in draft.state.seen_s:
        draft.see(ticket.site)
    settle(draft)


def _commit(draft: Draft, fragment: int, version: int, value: float | None) -> None:
    round_ = draft.round(fragment)
    if version <= round_.head:
        raise IllegalTransition(f"Fragment {fragment} is at version {round_.head}: version {version} cannot follow.")
    rounds = draft.state.rules.rounds
    for ticket in round_.tickets.values():
        if ticket.id in round_.frozen:
            advance(f"Ticket {ticket.id}", TICKET, ticket.state, "version committed")
    if value is not None:
        measured = Measured(round_.head, round_.number, value)
        draft.change(progress=draft.state.rules.tracking.follow(draft.state.progress, measured))
        if draft.state.progress.best == measured:
            draft.effects.append(events.BestFound(measured))
    draft.change_round(fragment, head=version, lost=round_.lost + version - round_.head - 1)
    if (rounds and draft.round(fragment).done >= rounds) or draft.state.rules.tracking.stops(draft.state.progress):
        phase = advance(f"Fragment {fragment}", ROUND, round_.phase, "last version committed")
        end_open(draft, fragment, "run finished", "the run is finished")
        # Keep acknowledged updates: the run may be started again with more rounds.
        waiting = {site: ticket for site, ticket in pending_tickets(round_).items() if ticket.state == "accepted"}
        draft.change_round(fragment, phase=phase, expected={}, tickets=waiting, frozen=(), first_s=None)
        draft.wake.add(fragment)
        if draft.state.finished:
            draft.effects.append(events.RunFinished())
    else:
        open_next(draft, fragment, "version committed")
        settle(draft)


def _collect_again(draft: Draft, fragment: int, reason: str) -> None:
    """Reopen a swarm's round after the loss of its aggregator and the collected updates.

    The tickets with accepted updates are open again, so that their sites submit the updates again.
    """
    round_ = draft.round(fragment)
    if round_.phase not in ("open", "closing"):
        return
    phase = advance(f"Fragment {fragment}", ROUND, round_.phase, "aggregator lost")
    lost = [ticket for ticket in round_.tickets.values() if ticket.state == "accepted"]
    if not lost and phase == round_.phase:
        return
    for ticket in lost:
        state = advance(f"Ticket {ticket.id}", TICKET, ticket.state, "aggregator lost")
        draft.put(replace(ticket, state=state, order=0))
    alive = draft.state.active_s.keys()
    expected = {ticket.site: draft.now_s for ticket in lost if ticket.site in alive} | dict(round_.expected)
    draft.change_round(fragment, phase=phase, expected=expected, frozen=(), until_s=None, first_s=None)
    draft.effects.append(
        events.RoundReopened(fragment, round_.head, tuple(sorted(ticket.id for ticket in lost)), reason)
    )
    # Sites that have left are not expected any more.
    draft.effects.append(events.ExpectedChanged(fragment, round_.head, tuple(sorted(expected))))
    draft.wake.add(fragment)
    settle(draft)


# -- the state after a start


def restore(rules: Rules, journal: Snapshot, now_s: float) -> Result:
    """Return the state that the journal describes, and the effects that a crash has left undone.

    Heartbeat timeouts and deadlines restart at `now_s`. A round that was being reduced stays `closing`: the caller
    reduces it again and reports `VersionCommitted`. If the server crashes again, another call returns the same state,
    whether or not the effects of this call were written to the journal.

    Args:
        rules: rules of the rounds.
        journal: the decisions in the journal.
        now_s: current time in seconds.
    """
    tickets: list[dict[str, Ticket]] = [{} for _ in journal.fragments]
    for ticket in sorted(journal.tickets, key=lambda ticket: ticket.id):
        at = journal.fragments[ticket.fragment]
        if ticket.is_live if rules.policy.is_async(at.done + 1) else ticket.base_version == at.head:
            tickets[ticket.fragment][ticket.site] = ticket
    stopped = rules.tracking.stops(journal.progress)
    rounds = tuple(
        Round("finished", fragment.head, tickets=mine, lost=fragment.lost)
        if stopped
        else _restored(rules, fragment, mine, now_s)
        for fragment, mine in zip(journal.fragments, tickets, strict=True)
    )
    members = {member.site: member for member in journal.members}
    state = State(
        rules=rules,
        members=members,
        seen_s={member.site: now_s for member in members.values() if member.alive},
        rounds=rounds,
        next_ticket=max([journal.next_ticket, *(ticket.id + 1 for ticket in journal.tickets)]),
        next_lease=max([journal.next_lease, *(member.lease + 1 for member in journal.members)]),
        progress=journal.progress,
    )
    draft = Draft(state, now_s)
    for fragment, round_ in enumerate(rounds):
        if round_.phase == "closing" and not round_.frozen:  # crash after the commit, before the next round opened
            open_next(draft, fragment, "version committed")
        elif round_.phase == "closing":
            expire(draft, fragment)
        elif round_.phase == "finished":
            end_open(draft, fragment, "run finished", "the run is finished")
    settle(draft)
    if draft.state.finished and not journal.finished:
        draft.effects.append(RunFinished())
    return draft.result()


def _restored(rules: Rules, journal: FragmentSnapshot, tickets: dict[str, Ticket], now_s: float) -> Round:
    head, lost = journal.head, journal.lost
    if rules.rounds and journal.done >= rules.rounds:
        return Round("finished", head, tickets=tickets, lost=lost)
    if journal.frozen:
        return Round("closing", head, now_s, tickets=tickets, frozen=journal.frozen, lost=lost)
    if journal.expected is not None:
        expected = dict.fromkeys(journal.expected, now_s)
        first_s = now_s if any(ticket.state == "accepted" for ticket in tickets.values()) else None
        return Round("open", head, now_s, expected, tickets, lost=lost, first_s=first_s)
    return Round("closing" if journal.started else "gathering", head, tickets=tickets, lost=lost)
