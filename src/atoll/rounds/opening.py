"""Open rounds, update their expected sites, and close them.

`settle` depends only on the state and the time, so a running server and a recovery reach the same result.
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
    """Update every round after a change of members, tickets or time, and close it if its policy says so."""
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

    If too few sites are drawn, `_revise` adds others later. An asynchronous round takes over live tickets of earlier
    rounds: open tickets, and tickets with accepted updates that were not reduced.

    Args:
        draft: the state in the making.
        fragment: index of the fragment.
        event: event of the table `ROUND` that opens the round.
    """
    round_ = draft.round(fragment)
    phase = advance(f"Fragment {fragment}", ROUND, round_.phase, event)
    rules, alive = draft.state.rules, draft.state.active_s
    drawn = rules.sampling.draw(alive, fragment, round_.head, at_least=rules.floor)
    expected = dict.fromkeys(drawn, draft.now_s)
    tickets = still_good(round_) if draft.state.is_async(fragment) else {}
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
      - the sites that may submit, and that hold an open ticket or were expected before and not refused.
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
            f"{policy} closes a round with tickets {decision.tickets}; "
            f"accepted are {sorted(accepted)}, needed {seen.floor}."
        )
    phase = advance(f"Fragment {fragment}", ROUND, round_.phase, "policy closes")
    draft.change_round(fragment, phase=phase, expected={}, frozen=decision.tickets, until_s=None, first_s=None)
    draft.effects.append(RoundClosed(fragment, round_.head, decision.tickets))
    expire(draft, fragment)


def still_good(round_: Round) -> dict[str, Ticket]:
    """Return site → ticket for the tickets that are open, or accepted and not being reduced."""
    return {
        site: ticket for site, ticket in round_.tickets.items() if ticket.is_live and ticket.id not in round_.frozen
    }


def drop_ended(draft: Draft, fragment: int) -> None:
    """In an asynchronous round, drop the tickets that are neither open nor accepted. Else do nothing."""
    if draft.state.is_async(fragment):
        tickets = draft.round(fragment).tickets
        draft.change_round(fragment, tickets={site: ticket for site, ticket in tickets.items() if ticket.is_live})


def expire(draft: Draft, fragment: int) -> None:
    """Expire the open tickets of a closed synchronous round.

    Call this after the effect `RoundClosed`. Then a crash between the effects cannot leave an open round with expired
    tickets.
    """
    if not draft.state.is_async(fragment):
        reason = f"the round from version {draft.round(fragment).head} closed without it"
        end_open(draft, fragment, "round closed without it", reason)


def end_open(draft: Draft, fragment: int, event: str, reason: str, *, site: str = "", oldest: float = math.inf) -> None:
    """End open tickets of a fragment.

    Args:
        draft: the state in the making.
        fragment: index of the fragment.
        event: event of the table `TICKET` that ends the tickets.
        reason: the reason, as the sites are told.
        site: site of the tickets to end; empty for all sites.
        oldest: oldest base version of tickets that stay open; infinity ends all tickets.
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
