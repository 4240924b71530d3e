"""Queries of the round machine's state: why a round waits, which site may submit, and the next deadline.

The closing policy of an open round determines what the round waits for (`closing_policy.StayOpen`).
"""

from __future__ import annotations

from atoll.format_text import counted
from atoll.rounds import leases
from atoll.rounds.closing_policy import StayOpen
from atoll.rounds.events import LeaseRefused
from atoll.rounds.state import State, ticket_by_id, view
from atoll.rounds.transitions import Ticket


def missing(state: State, fragment: int) -> tuple[tuple[str, float], ...]:
    """Return the sites that the open round waits for, each with the time since which the round waits for it.

    The sites are sorted by name. If no round is open, the result is empty.
    """
    round_ = state.rounds[fragment]
    if round_.phase != "open":
        return ()
    return tuple((site, round_.expected[site]) for site in state.rules.policy.awaited(view(state, fragment)))


def why(state: State, fragment: int, now_s: float) -> str:
    """Return what the fragment does or waits for, as a sentence without subject, for example "waits for clinic-a"."""
    round_ = state.rounds[fragment]
    if round_.phase == "gathering" and state.rules.held:
        return "does not train at present: a workflow of tasks has the sites"
    if round_.phase == "gathering":
        joined = len(leases.alive(state.members))
        return f"waits for {state.rules.sites} sites to join, {joined} {'has' if joined == 1 else 'have'}"
    if round_.phase == "closing":
        return f"reduces {counted(len(round_.frozen), 'update')} of round {round_.number}"
    if round_.phase == "finished":
        return "; ".join(filter(None, ["is finished", state.rules.tracking.why(state.progress)]))
    decision = state.rules.policy.decide(view(state, fragment), now_s)
    return decision.reason if isinstance(decision, StayOpen) else "is about to close"


def may_submit(state: State, site: str, lease: int, ticket: int) -> LeaseRefused | str | None:
    """Return None if the process that holds `lease` may submit an update for `ticket` now.

    Otherwise return a `LeaseRefused`, or a sentence that says what is wrong with the ticket. A ticket that already has
    an accepted update gives such a sentence, too. The caller must then check in the journal whether the request only
    repeats the accepted update.
    """
    refused = leases.refusal(state.members, site, lease)
    if refused:
        return refused
    if not 0 < ticket < state.next_ticket:
        return f"Ticket {ticket} was never issued."
    issued = ticket_by_id(state, ticket)
    if issued is None:
        return f"Ticket {ticket} is over: its round has closed, or a newer ticket has replaced it."
    if issued.site != site:
        return f"Ticket {ticket} was not issued to {site!r}."
    if issued.state != "open":
        return f"Ticket {ticket} is {issued.state}{': ' if issued.reason else ''}{issued.reason}."
    limit = state.rules.max_staleness  # called for every part, so skip the calculation if there is no limit
    if limit is not None and (lag := staleness(state, issued)) > limit:
        return (
            f"Ticket {ticket} is too late: its update would be {lag} versions behind; async.max_staleness is {limit}."
        )
    return None


def staleness(state: State, ticket: Ticket) -> int:
    """Return the number of versions between a ticket's base and the version that its update would be applied to now.

    Lost versions count, too, so an update may be treated as older than it is. The result is 0 in a synchronous round.
    """
    round_ = state.rounds[ticket.fragment]
    if not state.is_async(ticket.fragment):
        return 0
    steps = state.rules.policy.steps_before(len(view(state, ticket.fragment).accepted))
    return round_.head + (round_.phase == "closing") + steps - ticket.base_version


def due(state: State, site: str) -> int:
    """Return the fragment that a site should train first: the one with the fewest committed rounds.

    If the server has already accepted the site's update for a fragment's current round, that fragment comes last.
    """
    accepted = [
        (ticket := round_.tickets.get(site)) is not None and ticket.state == "accepted" for round_ in state.rounds
    ]
    return min(range(len(state.rounds)), key=lambda f: (accepted[f], state.rounds[f].done, f))


def next_deadline_s(state: State) -> float | None:
    """Return the time at which a `TimePassed` event is due next; None if no event is due.

    A sign of life of a worker can move this time. So, when a timer fires, call this function again.
    """
    times = [round_.until_s for round_ in state.rounds if round_.phase == "open" and round_.until_s is not None]
    timeout_s = state.rules.heartbeat_timeout_s
    if timeout_s and state.seen_s:
        times.append(min(state.seen_s.values()) + timeout_s)
    return min(times, default=None)
