"""Bring rounds to where members, tickets and time have them: open them, set the sites they expect, close them.

`settle` is a function of the state alone, so a live run and a recovery come to the same answers.
"""

from __future__ import annotations

import math
from dataclasses import replace

from atoll.rounds import leases
from atoll.rounds.closing_policy import Barrier, Wait
from atoll.rounds.events import ExpectedChanged, RoundClosed, RoundOpened, TicketsExpired
from atoll.rounds.state import Draft, Round, view
from atoll.rounds.transitions import ROUND, TICKET, IllegalTransition, Ticket, advance


def settle(draft: Draft) -> None:
    """Bring every round to where members, tickets and time have it, and ask its policy."""
    rules = draft.state.rules
    for fragment, round_ in enumerate(draft.state.rounds):
        if round_.phase == "gathering" and not rules.held and len(draft.state.seen_s) >= rules.sites:
            open_next(draft, fragment, "enough workers joined")
        if draft.round(fragment).phase == "open":
            limit, head = rules.max_staleness, draft.round(fragment).head
            if limit is not None:  # their updates would be refused whenever they came
                reason = f"its base is more than async.max_staleness {limit} versions behind version {head}"
                end_open(draft, fragment, "too far behind", reason, oldest=head - limit)
            _revise(draft, fragment)
            _judge(draft, fragment)


def open_next(draft: Draft, fragment: int, event: str) -> None:
    """Open the next round for the sites that are drawn of those alive now; if they are too few, `_revise` adds others.

    An asynchronous round takes over tickets that are still good: open ones, and updates that wait for their turn.
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
    """Set the sites that an open round expects.

    Sites with an accepted update, alive or not. Also live sites that submit more, were expected or hold an open ticket,
    and were not refused. If they are too few to close the round, late joiners and sites that were not drawn help, in
    order of their leases.
    """
    round_, members, floor = draft.round(fragment), draft.state.members, draft.state.rules.floor
    alive = draft.state.active_s.keys()
    state_of = {site: ticket.state for site, ticket in round_.tickets.items()}
    if draft.state.is_async(fragment):
        _expect(draft, fragment, {*alive, *(site for site, state in state_of.items() if state == "accepted")})
        return
    are_here = len(round_.expected) >= floor and round_.expected.keys() <= alive
    if are_here and state_of.keys() <= round_.expected.keys() and "refused" not in state_of.values():
        return  # what follows comes to the same, and is what large rounds take long for
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
            return  # it waits for the others; a view of every update takes longest of all, and comes to the same
    seen = view(draft.state, fragment)
    decision = policy.decide(seen, draft.now_s)
    if isinstance(decision, Wait):
        if decision.until_s != round_.until_s:
            draft.change_round(fragment, until_s=decision.until_s)
        return
    # Every accepted update was acknowledged, so none may be left behind when its round ends; an asynchronous one leaves
    # the others to the next.
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
    """Tickets of an asynchronous round that outlive it: open ones, and accepted ones that are not being reduced."""
    return {
        site: ticket for site, ticket in round_.tickets.items() if ticket.is_live and ticket.id not in round_.frozen
    }


def drop_ended(draft: Draft, fragment: int) -> None:
    """Forget what has ended of an asynchronous round: nothing there hangs on it."""
    if draft.state.is_async(fragment):
        tickets = draft.round(fragment).tickets
        draft.change_round(fragment, tickets={site: ticket for site, ticket in tickets.items() if ticket.is_live})


def expire(draft: Draft, fragment: int) -> None:
    """End the open tickets of a closed round. After `RoundClosed`: no crash leaves an open round without any."""
    if not draft.state.is_async(fragment):
        reason = f"the round from version {draft.round(fragment).head} closed without it"
        end_open(draft, fragment, "round closed without it", reason)


def end_open(draft: Draft, fragment: int, event: str, reason: str, *, site: str = "", oldest: float = math.inf) -> None:
    """`event` ends the open tickets of a fragment.

    Args:
        site: with open tickets; empty: all sites.
        oldest: base version that a ticket may have and stay open.
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
