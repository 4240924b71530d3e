"""The round machine: a pure function from state, event and time to a new state and effects.

    state, _ = restore(Rules(sites=3), Snapshot((FragmentSnapshot(head=0),)), now_s)
    state, effects = step(state, events.WorkerJoined("clinic-a"), now_s)

The server and the simulator both run this code. After every relevant event, `_review_rounds` looks at each open round:
it derives the expected sites from the live sites and the tickets, and asks the closing policy. A restarted server calls
`_review_rounds` on the state from the journal, so the same rules repair the state after a crash between two writes to
the journal.

`now_s` is a time in seconds on a monotonic clock. With a wall clock, a change of the system time could make live
workers look dead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from atoll.rounds import events, leases
from atoll.rounds.closing_policy import Barrier, StayOpen
from atoll.rounds.early_stopping import Measurement
from atoll.rounds.state import (
    IN_VAIN_SHARE,
    PAUSED,
    CurrentRound,
    FragmentSnapshot,
    Rules,
    Snapshot,
    State,
    StateDraft,
    StepResult,
)
from atoll.rounds.transitions import ROUND, TICKET, IllegalTransition, IssuedTicket, advance

NEXT_ROUND = "counts from the next round on"
STATE_BEGINS = "the state of the run's algorithm begins at zero again, so this round is trained again"
NOT_DRAWN = "was not drawn for this round; each round draws again"
LATE = "it has never sent an update, and other sites join"
STOPPED = "the run was stopped by its admin before this round ended"


def step(state: State, event: events.Event, now_s: float) -> StepResult:
    """Return the state after an event, and the effects: the actions that the caller must take.

    Args:
        state: state before the event; it is not changed.
        event: the event.
        now_s: time of the event, in seconds of a monotonic clock.

    Raises:
        IllegalTransition: the event is not possible in this state; the caller has a bug.
    """
    draft = StateDraft(state, now_s)
    refused = leases.refusal(state.members, event.site, event.lease) if isinstance(event, events.Leased) else None
    if refused:
        return state, (refused,)
    match event:
        case events.WorkerSeen(site):
            draft.see(site)
        case events.WorkerJoined(site, invited):
            _join(draft, site, invited=invited)
        case events.WorkerLeft(site, _, error):
            _end(draft, [site], "fails" if error else "leaves", error)
        case events.WorkerEnds(site):
            _submits_no_more(draft, site)
        case events.TicketRequested(site, _, fragment):
            _request(draft, site, fragment)
        case events.UpdateAccepted() | events.RefusedUpdate() | events.SatOut():
            _update(draft, event)
        case events.VersionCommitted() | events.VersionEvaluated():
            _commit(draft, event)
        case events.AggregatorLost() | events.StateLost():
            _repeat(draft, event)
        case events.TrainingBegins() | events.RunPaused() | events.RunResumed() | events.RunStopped():
            _control(draft, event)
        case events.TimePassed():
            _end_silent(draft)
        case _:
            assert_never(event)
    return draft.result()


def _join(draft: StateDraft, site: str, *, invited: bool) -> None:
    is_new = site not in draft.state.members and not invited
    if is_new and len(draft.state.members) >= draft.state.rules.most_sites:
        _make_room(draft)
    lease = draft.state.next_lease
    members = leases.changed(draft.state.members, site, "joins", lease)
    draft.change(members=members, next_lease=lease + 1, ending=draft.state.ending - {site})
    draft.see(site)
    draft.effects.append(events.LeaseGranted(site, lease))
    for fragment, round_ in enumerate(draft.state.rounds):
        is_needed = round_.phase == "open" and draft.state.lacks_sites(fragment)
        if is_needed and site in round_.sat_out:  # the new process may have samples
            tickets = {other: ticket for other, ticket in round_.tickets.items() if other != site}
            draft.change_round(fragment, tickets=tickets)
    _review_rounds(draft)


def _make_room(draft: StateDraft) -> None:
    """Forget the sites that have never contributed and take part no more, and as many late ones as are too many."""
    _forget_gone(draft)
    members = draft.state.members
    late = sorted(site for site in draft.state.late if site in members and members[site].alive)
    too_many = late[: max(0, len(members) + 1 - draft.state.rules.most_sites)]
    for fragment in range(len(draft.state.rounds)):
        for site in too_many:
            _end_open(draft, fragment, "its site ends", LATE, site=site)
    _end(draft, too_many, "falls silent", LATE)
    _forget_gone(draft)


def _forget_gone(draft: StateDraft) -> None:
    state = draft.state
    kept = state.proven | {each.site for round_ in state.rounds for each in round_.tickets.values() if each.is_live}
    gone = tuple(sorted(each.site for each in state.members.values() if not each.alive and each.site not in kept))
    if gone:
        members = {site: member for site, member in state.members.items() if site not in gone}
        draft.change(members=members, late=state.late.difference(gone))
        draft.effects.append(events.SitesForgotten(gone))


def _end(draft: StateDraft, sites: Iterable[str], event: str, detail: str) -> None:
    """End the leases of `sites` because of `event`, then update all rounds."""
    for site in sites:
        members = leases.changed(draft.state.members, site, event)
        seen_s = {other: last_s for other, last_s in draft.state.seen_s.items() if other != site}
        draft.change(members=members, seen_s=seen_s, ending=draft.state.ending - {site})
        draft.effects.append(events.LeaseEnded(site, members[site].lease, members[site].why, detail))
        draft.wake = True
    _review_rounds(draft)


def _end_silent(draft: StateDraft) -> None:
    timeout_s = draft.state.rules.heartbeat_timeout_s
    silent = leases.silent(draft.state.seen_s, timeout_s, draft.now_s)
    _end(draft, silent, "falls silent", f"silent for {timeout_s:g} s")


def _submits_no_more(draft: StateDraft, site: str) -> None:
    """Record that the site submits no more updates: no round waits for it, but its accepted updates stay."""
    draft.see(site)
    draft.change(ending=draft.state.ending | {site})
    for fragment in range(len(draft.state.rounds)):
        _end_open(draft, fragment, "its site ends", events.ENDS, site=site)
        draft.wake = True
    _review_rounds(draft)


def _request(draft: StateDraft, site: str, fragment: int) -> None:
    draft.see(site)
    round_ = draft.round(fragment)
    if site in draft.state.ending and round_.phase != "finished":
        draft.effects.append(events.TicketWithheld(site, fragment, events.ENDS))
        return
    if round_.phase in ("open", "closing") and draft.state.is_async(fragment):
        _request_async(draft, site, fragment)
        return
    ticket = round_.tickets.get(site)
    reason = ""
    if round_.phase == "finished":
        reason = events.FINISHED
    elif round_.phase != "open":
        reason = draft.state.why(fragment, draft.now_s)
    elif ticket and ticket.state == "accepted":
        reason = f"its update is accepted; the round {draft.state.why(fragment, draft.now_s)}"
    elif ticket and ticket.state == "refused" and not draft.state.lacks_sites(fragment):
        reason = f"its update was refused ({ticket.reason}); it {NEXT_ROUND}"
    elif ticket and ticket.state == "sat out":
        reason = f"it sits out this round; the round {draft.state.why(fragment, draft.now_s)}"
    elif ticket is None and site not in round_.expected and site not in draft.state.late:
        reason = NEXT_ROUND if draft.state.rules.sampling.fraction == 1 else NOT_DRAWN
    elif draft.state.paused and not (ticket and ticket.state == "open"):
        reason = PAUSED
    if reason:
        draft.effects.append(events.TicketWithheld(site, fragment, reason))
    elif ticket and ticket.state == "open":
        draft.effects.append(events.TicketIssued(site, ticket.id, fragment, ticket.base_version, new=False))
    else:  # the site's first ticket; or a retry after a refusal, if the round cannot close without the site
        _issue(draft, site, fragment)


def _request_async(draft: StateDraft, site: str, fragment: int) -> None:
    """In an asynchronous round, issue a ticket for the newest version, in place of one for an earlier version.

    If the site's update is accepted and not yet in a version, or the site sits out this round, withhold the ticket.
    """
    round_ = draft.round(fragment)
    ticket = round_.tickets.get(site)
    if ticket and ticket.state in ("accepted", "sat out"):
        what = "its update is accepted" if ticket.state == "accepted" else "it sits out this round"
        reason = f"{what}; the round {draft.state.why(fragment, draft.now_s)}"
        draft.effects.append(events.TicketWithheld(site, fragment, reason))
    elif ticket and ticket.state == "open" and ticket.base_version == round_.head:
        draft.effects.append(events.TicketIssued(site, ticket.id, fragment, ticket.base_version, new=False))
    elif draft.state.paused:
        draft.effects.append(events.TicketWithheld(site, fragment, PAUSED))
    else:
        reason = f"a newer ticket of {site} has replaced it"
        _end_open(draft, fragment, "replaced by a newer one", reason, site=site)
        _issue(draft, site, fragment)


def _issue(draft: StateDraft, site: str, fragment: int) -> None:
    number, head = draft.state.next_ticket, draft.round(fragment).head
    draft.put(IssuedTicket(number, site, fragment, head, "open"))
    draft.change(next_ticket=number + 1)
    draft.effects.append(events.TicketIssued(site, number, fragment, head, new=True))
    if site not in draft.round(fragment).expected:  # a ticket of an expected site changes no round
        _review_rounds(draft)


_ENDS = {
    events.UpdateAccepted: "update accepted",
    events.RefusedUpdate: "update refused",
    events.SatOut: "site sits out",
}
"""Event about a ticket → its name in the table of transitions `TICKET`."""


def _update(draft: StateDraft, event: events.UpdateAccepted | events.RefusedUpdate | events.SatOut) -> None:
    ticket = draft.state.ticket_by_id(event.ticket)
    what = _ENDS[type(event)]
    if ticket is None:
        raise IllegalTransition(f"Ticket {event.ticket} is in no current round: {what!r} is not possible.")
    state = advance(f"Ticket {event.ticket}", TICKET, ticket.state, what)
    if state == ticket.state:
        return
    order = event.order if isinstance(event, events.UpdateAccepted) else 0
    reason = event.reason if isinstance(event, events.RefusedUpdate) else ""
    draft.put(replace(ticket, state=state, reason=reason, order=order))
    if state == "accepted" and ticket.site not in draft.state.proven:
        draft.change(proven=draft.state.proven | {ticket.site}, late=draft.state.late - {ticket.site})
    _drop_ended(draft, ticket.fragment)
    round_ = draft.round(ticket.fragment)
    if state == "accepted" and round_.phase == "open":
        first_s = draft.now_s if round_.first_s is None else round_.first_s
        draft.change_round(ticket.fragment, first_s=first_s, last_s=draft.now_s)
    if ticket.site in draft.state.seen_s:
        draft.see(ticket.site)
    _review_rounds(draft)


def _commit(draft: StateDraft, event: events.VersionCommitted | events.VersionEvaluated) -> None:
    version, value = event.version, event.value
    if isinstance(event, events.VersionEvaluated):
        _measure(draft, version, event.round, value)
        return
    fragment, round_ = event.fragment, draft.round(event.fragment)
    if version <= round_.head:
        raise IllegalTransition(f"Fragment {fragment} is at version {round_.head}: version {version} cannot follow.")
    for ticket in round_.tickets.values():
        if ticket.id in round_.frozen:
            advance(f"Ticket {ticket.id}", TICKET, ticket.state, "version committed")
    _measure(draft, round_.head, round_.number, value)
    draft.change_round(fragment, head=version, lost=round_.lost + version - round_.head - 1, sat_out_in_a_row=0)
    _go_on(draft, fragment, "version committed", "last version committed")


def _measure(draft: StateDraft, version: int, number: int, value: float | None) -> None:
    if value is not None:
        measured = Measurement(version, number, value)
        draft.change(progress=draft.state.rules.tracking.follow(draft.state.progress, measured))
        if draft.state.progress.best == measured:
            draft.effects.append(events.BestFound(measured))


def _go_on(draft: StateDraft, fragment: int, event: str, last_event: str) -> None:
    """After the end of a round, open the next one, unless the run is paused; after the last, finish the fragment.

    Args:
        draft: the new state, which this function changes.
        fragment: index of the fragment.
        event: the event that ended the round, from the table of transitions `ROUND`.
        last_event: the event if this was the last round.
    """
    round_, rounds, state = draft.round(fragment), draft.state.rules.rounds, draft.state
    if (rounds and round_.done >= rounds) or state.stopping or state.rules.tracking.stops(state.progress):
        _end_open(draft, fragment, "run finished", "the run is finished")
        # Keep acknowledged updates: the run may be started again with more rounds.
        waiting = {site: ticket for site, ticket in _pending_tickets(round_).items() if ticket.state == "accepted"}
        draft.change_round(fragment, tickets=waiting)
        _finish(draft, fragment, last_event)
    elif state.paused:
        _hold(draft, fragment, f"{event} while paused")
        draft.wake = True
    else:
        _open_next(draft, fragment, event)
        _review_rounds(draft)


def _finish(draft: StateDraft, fragment: int, event: str) -> None:
    """Finish a fragment by an event of the table of transitions `ROUND`."""
    phase = advance(f"Fragment {fragment}", ROUND, draft.round(fragment).phase, event)
    draft.change_round(fragment, phase=phase, expected={}, frozen=(), until_s=None, first_s=None)
    draft.wake = True
    if draft.state.finished:
        draft.effects.append(events.RunFinished())


def _hold(draft: StateDraft, fragment: int, event: str) -> None:
    """After a round's end, open no round, because the run is paused. Updates of an asynchronous run may still come."""
    round_ = draft.round(fragment)
    phase = advance(f"Fragment {fragment}", ROUND, round_.phase, event)
    tickets = _pending_tickets(round_) if draft.state.is_async(fragment) else {}
    draft.change_round(fragment, phase=phase, expected={}, tickets=tickets, frozen=(), until_s=None, first_s=None)


def _control(
    draft: StateDraft, event: events.TrainingBegins | events.RunPaused | events.RunResumed | events.RunStopped
) -> None:
    """Begin, pause, resume or stop the rounds. An event that comes after the end has no effect."""
    state = draft.state
    if isinstance(event, events.TrainingBegins):
        draft.change(rules=replace(state.rules, held=False))
        _review_rounds(draft)
        return
    if state.finished:
        return
    stopping = state.stopping or isinstance(event, events.RunStopped)
    paused = isinstance(event, events.RunPaused) and not stopping
    if (paused, stopping) != (state.paused, state.stopping):
        draft.change(paused=paused, stopping=stopping)
        draft.effects.append(events.ControlsChanged(paused, stopping))
        draft.wake = True
    for fragment in range(len(state.rounds)):
        phase = draft.round(fragment).phase
        if stopping and phase in ("gathering", "paused"):
            _end_open(draft, fragment, "run finished", STOPPED)
            _finish(draft, fragment, "stopped")
        elif isinstance(event, events.RunStopped) and phase == "open" and (event.now or _is_untouched(draft, fragment)):
            _stop_round(draft, fragment)
        elif phase == "paused" and not paused:
            _open_next(draft, fragment, "resumed")
    _review_rounds(draft)


def _is_untouched(draft: StateDraft, fragment: int) -> bool:
    """Return whether no site works for the present round: none has an accepted update, or is alive with a ticket."""
    members, tickets = draft.state.members, draft.round(fragment).tickets.values()
    return not any(each.is_live and (each.state == "accepted" or members[each.site].alive) for each in tickets)


def _stop_round(draft: StateDraft, fragment: int) -> None:
    """End an open round without a version. Its updates are not used, and its tickets end."""
    _collect_again(draft, fragment, STOPPED)
    if draft.round(fragment).phase == "open":  # else all sites had sat out
        _end_open(draft, fragment, "run finished", STOPPED)
        draft.effects.append(events.RoundStopped(fragment, draft.round(fragment).head))
        _finish(draft, fragment, "stopped")


def _repeat(draft: StateDraft, event: events.AggregatorLost | events.StateLost) -> None:
    if isinstance(event, events.AggregatorLost):
        _collect_again(draft, event.fragment, event.reason)
    else:
        _begin_anew(draft, event.why)


def _end_sat_out(draft: StateDraft, fragment: int) -> None:
    """End a round that all sites have sat out: without a version, and as one of `rounds.total` rounds."""
    round_ = draft.round(fragment)
    in_a_row = round_.sat_out_in_a_row + 1
    ended = (fragment, round_.head, in_a_row, draft.state.next_ticket, round_.number, round_.sat_out)
    draft.effects.append(events.RoundSatOut(*ended))
    draft.change_round(fragment, sat_out_rounds=round_.sat_out_rounds + 1, sat_out_in_a_row=in_a_row)
    _expire(draft, fragment)
    _go_on(draft, fragment, "all sites sat out", "all sites sat out the last round")


def _collect_again(draft: StateDraft, fragment: int, reason: str) -> None:
    """Reopen a round after its accepted updates were lost or became useless, as when a swarm loses an aggregator.

    The tickets of these updates are open again, so that their sites submit again.
    """
    round_ = draft.round(fragment)
    if round_.phase not in ("open", "closing"):
        return
    phase = advance(f"Fragment {fragment}", ROUND, round_.phase, "updates lost")
    lost = [ticket for ticket in round_.tickets.values() if ticket.state == "accepted"]
    if not lost and phase == round_.phase:
        return
    for ticket in lost:
        state = advance(f"Ticket {ticket.id}", TICKET, ticket.state, "updates lost")
        draft.put(replace(ticket, state=state, order=0))
    alive = draft.state.active_s.keys()
    expected = {ticket.site: draft.now_s for ticket in lost if ticket.site in alive} | dict(round_.expected)
    draft.change_round(fragment, phase=phase, expected=expected, frozen=(), until_s=None, first_s=None)
    draft.effects.append(
        events.RoundReopened(fragment, round_.head, tuple(sorted(ticket.id for ticket in lost)), reason)
    )
    # Sites that have left are not expected any more.
    draft.effects.append(events.ExpectedChanged(fragment, round_.head, tuple(sorted(expected))))
    draft.wake = True
    _review_rounds(draft)


def _begin_anew(draft: StateDraft, why: str) -> None:
    """Let the algorithm's state begin at zero, in the open round and at all sites.

    Updates that were formed with the earlier state do not fit to the new one. So all tickets of the round end, those of
    accepted updates, too, and each site gets a new one. Such algorithms have one fragment.
    """
    if draft.round(0).phase != "open":
        return
    _collect_again(draft, 0, STATE_BEGINS)
    _end_open(draft, 0, "state begins anew", STATE_BEGINS)
    draft.effects.append(events.GenerationBegun(draft.round(0).head, why))
    draft.wake = True


# -- the state after a start


def restore(rules: Rules, journal: Snapshot, now_s: float) -> StepResult:
    """Return the state that the journal describes, and the effects that were not carried out before a crash.

    Heartbeat timeouts and deadlines restart at `now_s`; no site is late with its first update yet. A round that was
    being aggregated stays `closing`: the caller aggregates it again and reports `VersionCommitted`. If the server
    crashes again, another call returns the same state, whether or not the effects of this call were written to the
    journal.

    Args:
        rules: rules of the rounds.
        journal: the decisions in the journal.
        now_s: current time in seconds.
    """
    tickets: list[dict[str, IssuedTicket]] = [{} for _ in journal.fragments]
    for ticket in sorted(journal.tickets, key=lambda ticket: ticket.id):
        recorded = journal.fragments[ticket.fragment]
        is_of_round = ticket.base_version == recorded.head and ticket.id >= recorded.first_ticket
        if rules.policy.is_async(recorded.done + 1):
            is_of_round = ticket.is_live or ticket.id in recorded.sitting_out
        # a site that joined again in the round that it had sat out is expected once more
        if is_of_round and not (ticket.state == "sat out" and ticket.site in (recorded.expected or ())):
            tickets[ticket.fragment][ticket.site] = ticket
    # an evaluation may say so while a round is open, which then is the last one, or while the run is paused
    stopped = rules.tracking.stops(journal.progress) and (journal.finished or not journal.paused)
    rounds = tuple(
        replace(
            _restored(rules, fragment, mine, now_s, ends=stopped or journal.stopping),
            lost=fragment.lost,
            sat_out_rounds=fragment.sat_out_rounds,
            sat_out_in_a_row=fragment.sat_out_in_a_row,
        )
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
        paused=journal.paused,
        stopping=journal.stopping,
        proven=journal.proven | {each.site for each in journal.tickets if each.state == "accepted"},
    )
    draft = StateDraft(state, now_s)
    for fragment, round_ in enumerate(rounds):
        if round_.phase == "closing" and not round_.frozen and journal.paused:
            _hold(draft, fragment, "version committed while paused")
        elif round_.phase == "closing" and not round_.frozen:  # crash after the commit, before the next round opened
            _open_next(draft, fragment, "version committed")
        elif round_.phase == "closing":
            _expire(draft, fragment)
        elif round_.phase == "finished":
            _end_open(draft, fragment, "run finished", "the run is finished")
    _review_rounds(draft)
    if draft.state.finished and not journal.finished:
        draft.effects.append(events.RunFinished())
    return draft.result()


def _restored(
    rules: Rules, journal: FragmentSnapshot, tickets: dict[str, IssuedTicket], now_s: float, *, ends: bool
) -> CurrentRound:
    head = journal.head
    if rules.rounds and journal.done >= rules.rounds:
        return CurrentRound("finished", head, tickets=tickets)
    if journal.frozen:
        return CurrentRound("closing", head, now_s, tickets=tickets, frozen=journal.frozen)
    if journal.expected is not None:
        expected = dict.fromkeys(journal.expected, now_s)
        first_s = now_s if any(ticket.state == "accepted" for ticket in tickets.values()) else None
        return CurrentRound("open", head, now_s, expected, tickets, first_s=first_s)
    phase = "finished" if ends else "closing" if journal.started else "gathering"
    return CurrentRound(phase, head, tickets=tickets)


# -- rounds open, expect sites and close


def _review_rounds(draft: StateDraft) -> None:
    """Update all rounds after a change of members, tickets or time. Close those that the policy closes."""
    rules = draft.state.rules
    for fragment in range(len(draft.state.rounds)):
        waits = rules.held or draft.state.paused or len(draft.state.seen_s) < rules.sites
        if draft.round(fragment).phase == "gathering" and not waits:
            _open_next(draft, fragment, "enough workers joined")
        if draft.round(fragment).phase == "open":
            limit, head = rules.max_staleness, draft.round(fragment).head
            if limit is not None:  # expire tickets with an update that would be refused as too stale
                reason = f"its base is more than async.max_staleness = {limit} behind version {head}"
                _end_open(draft, fragment, "too far behind", reason, oldest=head - limit)
            newcomers = draft.state.newcomers(fragment)
            if late := {site for site, until_s in newcomers.items() if draft.now_s >= until_s}:
                draft.change(late=draft.state.late | late)
                _waited_in_vain(draft, fragment)
            _revise(draft, fragment)
            _judge(draft, fragment)


def _waited_in_vain(draft: StateDraft, fragment: int) -> None:
    """Count the time for which a round has waited for sites that did not contribute."""
    round_ = draft.round(fragment)
    in_vain_s = draft.now_s - (round_.opened_s if round_.last_s is None else round_.last_s)
    draft.change_round(fragment, last_s=draft.now_s, in_vain_s=round_.in_vain_s + in_vain_s)


def _open_next(draft: StateDraft, fragment: int, event: str) -> None:
    """Open the next round of a fragment for sites drawn from the live sites.

    If too few sites are alive now, others are added later. An asynchronous round takes over tickets of earlier rounds:
    open tickets, and tickets with accepted updates that were not aggregated.

    Args:
        draft: the new state, which this function changes.
        fragment: index of the fragment (part of the model); 0 if the model is not divided.
        event: the event that opens the round, from the table of transitions `ROUND`.
    """
    round_ = draft.round(fragment)
    phase = advance(f"Fragment {fragment}", ROUND, round_.phase, event)
    rules, alive = draft.state.rules, draft.state.awaited
    drawn = rules.sampling.draw(alive, fragment, round_.head + round_.sat_out_rounds, at_least=rules.floor)
    expected = dict.fromkeys(drawn, draft.now_s)
    tickets = _pending_tickets(round_) if draft.state.is_async(fragment) else {}
    waits = any(ticket.state == "accepted" for ticket in tickets.values())
    draft.change_round(
        fragment,
        phase=phase,
        opened_s=draft.now_s,
        expected=expected,
        tickets=tickets,
        frozen=(),
        until_s=None,
        first_s=draft.now_s if waits else None,
        last_s=draft.now_s if waits else None,
        in_vain_s=max(0.0, round_.in_vain_s - IN_VAIN_SHARE * (draft.now_s - round_.opened_s)),
    )
    draft.effects.append(events.RoundOpened(fragment, round_.head, tuple(expected)))
    draft.wake = True


def _revise(draft: StateDraft, fragment: int) -> None:
    """Set the expected sites of an open round.

    In an asynchronous round, these are all sites that may submit and do not sit out the round, and all sites with an
    accepted update. No round expects a site that is late with its first update.

    In a synchronous round, these are:
      - the sites with an accepted update, alive or not;
      - of the sites that may still submit: those with an open ticket, and those that were expected before, do not sit
        out the round, and have no refused ticket.
    If these are too few to close the round, other live sites without a ticket are added, oldest lease first.
    """
    round_, members = draft.round(fragment), draft.state.members
    floor, alive = draft.state.rules.floor_without(len(round_.sat_out)), draft.state.awaited
    state_of = {site: ticket.state for site, ticket in round_.tickets.items()}
    if draft.state.is_async(fragment):
        accepted = {site for site, state in state_of.items() if state == "accepted"}
        _expect(draft, fragment, {*(site for site in alive if state_of.get(site) != "sat out"), *accepted})
        return
    are_here = len(round_.expected) >= floor and round_.expected.keys() <= alive
    if are_here and state_of.keys() <= round_.expected.keys() and not {"refused", "sat out"} & {*state_of.values()}:
        return  # shortcut for large rounds: the rest would give the same result
    wanted = {site for site in round_.expected if site in alive and state_of.get(site) not in ("refused", "sat out")}
    wanted.update(
        site for site, state in state_of.items() if state == "accepted" or (state == "open" and site in alive)
    )
    if len(wanted) < floor:
        spare = [
            m.site for m in leases.alive(members) if m.site in alive and m.site not in wanted and m.site not in state_of
        ]
        wanted.update(spare[: floor - len(wanted)])
    _expect(draft, fragment, wanted)


def _expect(draft: StateDraft, fragment: int, wanted: set[str]) -> None:
    round_ = draft.round(fragment)
    if wanted != round_.expected.keys():
        expected = {site: round_.expected.get(site, draft.now_s) for site in sorted(wanted)}
        draft.change_round(fragment, expected=expected)
        draft.effects.append(events.ExpectedChanged(fragment, round_.head, tuple(expected)))
        draft.wake = True


def _judge(draft: StateDraft, fragment: int) -> None:
    if draft.state.all_sat_out(fragment):
        _end_sat_out(draft, fragment)
        return
    round_, policy = draft.round(fragment), draft.state.rules.policy
    if type(policy) is Barrier and round_.until_s is None:
        states = [ticket.state for ticket in round_.tickets.values()]
        if states.count("accepted") < len(round_.expected):
            return  # shortcut for large rounds: an update is missing, so the policy would decide to wait
    round_view = draft.state.view(fragment)
    decision = policy.decide(round_view, draft.now_s)
    if isinstance(decision, StayOpen):
        if decision.until_s != round_.until_s:
            draft.change_round(fragment, until_s=decision.until_s)
        return
    # Every accepted update was acknowledged, so a synchronous round must aggregate all of them. An asynchronous round
    # may leave some for the next round.
    accepted = {ticket.id for ticket in round_view.accepted}
    is_async = draft.state.is_async(fragment)
    fit = accepted.issuperset(decision.tickets) if is_async else accepted == set(decision.tickets)
    if not fit or len(set(decision.tickets)) < max(round_view.floor, len(decision.tickets)):
        raise IllegalTransition(
            f"The policy {str(policy)!r} closes a round with {decision.tickets}: it must take each of the accepted "
            f"tickets {'at most ' if is_async else ''}once, {sorted(accepted)}, and at least {round_view.floor}."
        )
    phase = advance(f"Fragment {fragment}", ROUND, round_.phase, "policy closes")
    draft.change_round(fragment, phase=phase, expected={}, frozen=decision.tickets, until_s=None, first_s=None)
    draft.effects.append(events.RoundClosed(fragment, round_.head, decision.tickets))
    _expire(draft, fragment)


def _pending_tickets(round_: CurrentRound) -> dict[str, IssuedTicket]:
    """Return site → ticket, for the open tickets, and those with an accepted update that is not being aggregated."""
    return {
        site: ticket for site, ticket in round_.tickets.items() if ticket.is_live and ticket.id not in round_.frozen
    }


def _drop_ended(draft: StateDraft, fragment: int) -> None:
    """In an asynchronous round, drop the tickets of updates that were refused or did not come in time.

    In a synchronous round, keep all.
    """
    if draft.state.is_async(fragment):
        kept = {
            site: ticket
            for site, ticket in draft.round(fragment).tickets.items()
            if ticket.is_live or ticket.state == "sat out"
        }
        draft.change_round(fragment, tickets=kept)


def _expire(draft: StateDraft, fragment: int) -> None:
    """End the open tickets of a synchronous round that has closed.

    Call this after adding the effect `RoundClosed`, so that a crash between the effects cannot leave an open round with
    expired tickets.
    """
    if not draft.state.is_async(fragment):
        reason = f"the round from version {draft.round(fragment).head} closed without it"
        _end_open(draft, fragment, "round closed without it", reason)


def _end_open(
    draft: StateDraft, fragment: int, event: str, reason: str, *, site: str = "", oldest: float = math.inf
) -> None:
    """End open tickets of a fragment: those of one site or of all sites, with a base version before `oldest`.

    Args:
        draft: the new state, which this function changes.
        fragment: index of the fragment (part of the model); 0 if the model is not divided.
        event: the event that ends the tickets, from the table of transitions `TICKET`.
        reason: the reason, which the sites get.
        site: the site; empty for all sites.
        oldest: tickets with this base version or a newer one stay open; infinity ends all tickets.
    """
    tickets = [
        ticket
        for ticket in draft.round(fragment).tickets.values()
        if ticket.state == "open" and ticket.site == (site or ticket.site) and ticket.base_version < oldest
    ]
    for ticket in tickets:
        state = advance(f"Ticket {ticket.id}", TICKET, ticket.state, event)
        draft.put(replace(ticket, state=state, reason=reason))
    _drop_ended(draft, fragment)
    if tickets:
        draft.effects.append(events.TicketsExpired(tuple(sorted(ticket.id for ticket in tickets)), reason))
