"""Open rounds, update their expected sites, and close them.

`settle` depends only on the state and the time, so a restarted server reaches the same result as one that kept running.
"""

from __future__ import annotations

import math
from dataclasses import replace

from atoll.rounds import leases
from atoll.rounds.closing_policy import Barrier, StayOpen
from atoll.rounds.events import ExpectedChanged, RoundClosed, RoundOpened, TicketsExpired
from atoll.rounds.state import Draft, Round, view
from atoll.rounds.transitions import ROUND, TICKET, IllegalTransition, Ticket, advance


def settle(draft: Draft) -> None:
    """Update every round after a change of members, tickets or time, and close it if the closing policy decides so."""
    rules = draft.state.rules
    for fragment, round_ in enumerate(draft.state.rounds):
        if round_.phase == "gathering" and not rules.held and len(draft.state.seen_s) >= rules.sites:
            open_next(draft, fragment, "enough workers joined")
        if draft.round(fragment).phase == "open":
            limit, head = rules.max_staleness, draft.round(fragment).head
            if limit is not None:  # expire tickets with an update that would be refused as too stale
                reason = f"its base is more than async.max_staleness {limit} versions behind version {head}"
                end_open(draft, fragment, "too far behind", reason, oldest=head - limit)
            _revise(draft, fragment)
            _judge(draft, fragment)


def open_next(draft: Draft, fragment: int, event: str) -> None:
    """Open the next round of a fragment for sites drawn from the live sites.

    If too few sites are alive now, others are added later. An asynchronous round takes over tickets of earlier rounds:
    open tickets, and tickets with accepted updates that were not reduced.

    Args:
        draft: the new state, which this function changes.
        fragment: index of the fragment (part of the model); 0 if the model is not divided.
        event: the event that opens the round, from the table of transitions `ROUND`.
    """
    round_ = draft.round(fragment)
    phase = advance(f"Fragment {fragment}", ROUND, round_.phase, event)
    rules, alive = draft.state.rules, draft.state.active_s
    drawn = rules.sampling.draw(alive, fragment, round_.head, at_least=rules.floor)
    expected = dict.fromkeys(drawn, draft.now_s)
    tickets = pending_tickets(round_) if draft.state.is_async(fragment) else {}
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
    )
    draft.effects.append(RoundOpened(fragment, round_.head, tuple(expected)))
    draft.wake.add(fragment)


def _revise(draft: Draft, fragment: int) -> None:
    """Set the expected sites of an open round.

    In an asynchronous round, these are all sites that may submit, and all sites with an accepted update.

    In a synchronous round, these are:
      - the sites with an accepted update, alive or not;
      - the sites that may still submit and that have an open ticket, or were expected before and not refused.
    If they are too few to close the round, other live sites without a ticket are added, oldest lease first.
    """
    round_, members, floor = draft.round(fragment), draft.state.members, draft.state.rules.floor
    alive = draft.state.active_s.keys()
    state_of = {site: ticket.state for site, ticket in round_.tickets.items()}
    if draft.state.is_async(fragment):
        _expect(draft, fragment, {*alive, *(site for site, state in state_of.items() if state == "accepted")})
        return
    are_here = len(round_.expected) >= floor and round_.expected.keys() <= alive
    if are_here and state_of.keys() <= round_.expected.keys() and "refused" not in state_of.values():
        return  # shortcut for large rounds: the rest would give the same result
    wanted = {site for site in round_.expected if site in alive and state_of.get(site) != "refused"}
    wanted.update(
        site for site, state in state_of.items() if state == "accepted" or (state == "open" and site in alive)
    )
    if len(wanted) < floor:
        spare = [
            m.site for m in leases.alive(members) if m.site in alive and m.site not in wanted and m.site not in state_of
        ]
        wanted.update(spare[: floor - len(wanted)])
    _expect(draft, fragment, wanted)


def _expect(draft: Draft, fragment: int, wanted: set[str]) -> None:
    round_ = draft.round(fragment)
    if wanted != round_.expected.keys():
        expected = {site: round_.expected.get(site, draft.now_s) for site in sorted(wanted)}
        draft.change_round(fragment, expected=expected)
        draft.effects.append(ExpectedChanged(fragment, round_.head, tuple(expected)))
        draft.wake.add(fragment)


def _judge(draft: Draft, fragment: int) -> None:
    round_, policy = draft.round(fragment), draft.state.rules.policy
    if type(policy) is Barrier and round_.until_s is None:
        states = [ticket.state for ticket in round_.tickets.values()]
        if states.count("accepted") < len(round_.expected):
            return  # shortcut for large rounds: an update is missing, so the policy would decide to wait
    seen = view(draft.state, fragment)
    decision = policy.decide(seen, draft.now_s)
    if isinstance(decision, StayOpen):
        if decision.until_s != round_.until_s:
            draft.change_round(fragment, until_s=decision.until_s)
        return
    # Every accepted update was acknowledged, so a synchronous round must reduce all of them. An asynchronous round may
    # leave some to the next round.
    accepted = {ticket.id for ticket in seen.accepted}
    is_async = draft.state.is_async(fragment)
    fit = accepted.issuperset(decision.tickets) if is_async else accepted == set(decision.tickets)
    if not fit or len(set(decision.tickets)) < max(seen.floor, len(decision.tickets)):
        raise IllegalTransition(
            f"The policy {str(policy)!r} closes a round with the tickets {decision.tickets}, but the accepted tickets "
            f"are {sorted(accepted)}, and at least {seen.floor} are needed."
        )
    phase = advance(f"Fragment {fragment}", ROUND, round_.phase, "policy closes")
    draft.change_round(fragment, phase=phase, expected={}, frozen=decision.tickets, until_s=None, first_s=None)
    draft.effects.append(RoundClosed(fragment, round_.head, decision.tickets))
    expire(draft, fragment)


def pending_tickets(round_: Round) -> dict[str, Ticket]:
    """Return site → ticket for the tickets that are open, or have an accepted update that is not being reduced."""
    return {
        site: ticket for site, ticket in round_.tickets.items() if ticket.is_live and ticket.id not in round_.frozen
    }


def drop_ended(draft: Draft, fragment: int) -> None:
    """In an asynchronous round, drop the tickets that are neither open nor accepted. Keep all in a synchronous one."""
    if draft.state.is_async(fragment):
        tickets = draft.round(fragment).tickets
        draft.change_round(fragment, tickets={site: ticket for site, ticket in tickets.items() if ticket.is_live})


def expire(draft: Draft, fragment: int) -> None:
    """End the open tickets of a synchronous round that has closed.

    Call this after the effect `RoundClosed`. Then a crash between the effects cannot leave an open round with expired
    tickets.
    """
    if not draft.state.is_async(fragment):
        reason = f"the round from version {draft.round(fragment).head} closed without it"
        end_open(draft, fragment, "round closed without it", reason)


def end_open(draft: Draft, fragment: int, event: str, reason: str, *, site: str = "", oldest: float = math.inf) -> None:
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
    drop_ended(draft, fragment)
    if tickets:
        draft.effects.append(TicketsExpired(tuple(sorted(ticket.id for ticket in tickets)), reason))
