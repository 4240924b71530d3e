"""Restore the state of the round machine from the journal."""

from __future__ import annotations

from atoll.rounds.events import RunFinished
from atoll.rounds.opening import end_open, expire, open_next, settle
from atoll.rounds.state import (
    Draft,
    FragmentSnapshot,
    Result,
    Round,
    Rules,
    Snapshot,
    State,
)
from atoll.rounds.transitions import Ticket


def restore(rules: Rules, journal: Snapshot, now_s: float) -> Result:
    """Return the state in the journal, and the effects that a crash has left undone.

    Heartbeat timeouts and deadlines restart at `now_s`. A round that was being reduced stays `closing`: the caller
    reduces it again and reports `VersionCommitted`. A second restore gives the same state, whether or not the effects
    were written to the journal.

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
