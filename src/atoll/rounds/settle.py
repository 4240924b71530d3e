"""Bringing rounds to where members, tickets and time have them: opening, whom they expect, closing.

`settle` is a function of the state alone, so live running and recovery cannot come to different answers.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.rounds import membership
from atoll.rounds.draft import Draft
from atoll.rounds.effects import ExpectedChanged, RoundClosed, RoundOpened, TicketsExpired
from atoll.rounds.policy import Wait
from atoll.rounds.state import Round, view
from atoll.rounds.transitions import ROUND, TICKET, IllegalTransition, advance


def settle(draft: Draft) -> None:
    """Bring every round to where members, tickets and time have it, and ask its policy."""
    for fragment, round_ in enumerate(draft.state.rounds):
        if round_.phase == "gathering" and len(draft.state.seen_s) >= draft.state.rules.num_workers:
            open_next(draft, fragment, "enough workers joined")
        if draft.round(fragment).phase == "open":
            _revise(draft, fragment)
            _judge(draft, fragment)


def open_next(draft: Draft, fragment: int, event: str) -> None:
    """The next round, for who is drawn of those alive now; where they are too few, `_revise` adds others."""
    round_ = draft.round(fragment)
    phase = advance(f"Fragment {fragment}", ROUND, round_.phase, event)
    rules, alive = draft.state.rules, draft.state.seen_s
    drawn = rules.sampling.draw(alive, fragment, round_.head, at_least=rules.floor)
    expected = dict.fromkeys(drawn, draft.now_s)
    opened = Round(phase, round_.head, opened_s=draft.now_s, expected=expected, lost=round_.lost)
    draft.set_round(fragment, opened)
    draft.emit(RoundOpened(fragment, round_.head, tuple(expected)))
    draft.wake.add(fragment)


def _revise(draft: Draft, fragment: int) -> None:
    """Whom an open round expects.

    Who has an accepted update, alive or not. Of the others: who is alive, was expected or holds an open
    ticket, and was not refused. Where they are too few to close it, late joiners and those who were not drawn
    help, in order of their leases.
    """
    round_, members, floor = draft.round(fragment), draft.state.members, draft.state.rules.floor
    alive = draft.state.seen_s.keys()
    state_of = {site: ticket.state for site, ticket in round_.tickets.items()}
    wanted = {site for site in round_.expected if site in alive and state_of.get(site) != "refused"}
    wanted.update(
        site for site, state in state_of.items() if state == "accepted" or (state == "open" and site in alive)
    )
    if len(wanted) < floor:
        spare = [m.site for m in membership.alive(members) if m.site not in wanted and m.site not in state_of]
        wanted.update(spare[: floor - len(wanted)])
    if wanted != round_.expected.keys():
        expected = {site: round_.expected.get(site, draft.now_s) for site in sorted(wanted)}
        draft.change_round(fragment, expected=expected)
        draft.emit(ExpectedChanged(fragment, round_.head, tuple(expected)))
        draft.wake.add(fragment)


def _judge(draft: Draft, fragment: int) -> None:
    round_, seen = draft.round(fragment), view(draft.state, fragment)
    decision = draft.state.rules.policy.decide(seen, draft.now_s)
    if isinstance(decision, Wait):
        if decision.until_s != round_.until_s:
            draft.change_round(fragment, until_s=decision.until_s)
        return
    # Every accepted update was acknowledged, so none may be left behind when its round ends.
    accepted = sorted(update.ticket for update in seen.accepted)
    if sorted(decision.tickets) != accepted or len(accepted) < seen.floor:
        raise IllegalTransition(
            f"{draft.state.rules.policy} closes a round with tickets {decision.tickets}; "
            f"accepted are {accepted}, needed {seen.floor}."
        )
    phase = advance(f"Fragment {fragment}", ROUND, round_.phase, "policy closes")
    draft.change_round(fragment, phase=phase, expected={}, frozen=decision.tickets, until_s=None)
    draft.emit(RoundClosed(fragment, round_.head, decision.tickets))
    expire(draft, fragment)


def expire(draft: Draft, fragment: int) -> None:
    """End the open tickets of a closed round. After `RoundClosed`: no crash leaves an open round without any."""
    tickets = [ticket for ticket in draft.round(fragment).tickets.values() if ticket.state == "open"]
    reason = f"the round from version {draft.round(fragment).head} closed without it"
    for ticket in tickets:
        state = advance(f"Ticket {ticket.id}", TICKET, ticket.state, "round closed without it")
        draft.put(replace(ticket, state=state, reason=reason))
    if tickets:
        draft.emit(TicketsExpired(tuple(sorted(ticket.id for ticket in tickets)), reason))
