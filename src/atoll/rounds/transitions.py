"""Tables of the allowed transitions of members, rounds and tickets, and the function that applies them.

The round machine changes these states only through `advance`, so a transition that is not in a table cannot happen.
`tools/diagrams.py` draws the tables for the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Table = Mapping[tuple[str, str], str]
"""(state, event) → next state. Every other pair is an error."""


class IllegalTransition(RuntimeError):
    """Raised if an event is not possible in the current state. The cause is a bug in Atoll, never a wrong request."""


MEMBER: Table = {
    ("unknown", "joins"): "alive",
    ("alive", "joins"): "alive",
    ("alive", "falls silent"): "dead",
    ("alive", "leaves"): "left",
    ("alive", "fails"): "failed",
    ("dead", "joins"): "alive",
    ("left", "joins"): "alive",
    ("failed", "joins"): "alive",
}
"""Transitions of a site. Every join grants a new lease and voids the previous one, even while the site is alive."""

ROUND: Table = {
    ("gathering", "enough workers joined"): "open",
    ("open", "policy closes"): "closing",
    ("open", "all sites sat out"): "open",
    ("open", "all sites sat out the last round"): "finished",
    ("open", "all sites sat out while paused"): "paused",
    ("open", "updates lost"): "open",
    ("open", "stopped"): "finished",
    ("closing", "updates lost"): "open",
    ("closing", "version committed"): "open",
    ("closing", "version committed while paused"): "paused",
    ("closing", "last version committed"): "finished",
    ("paused", "resumed"): "open",
    ("paused", "stopped"): "finished",
    ("gathering", "stopped"): "finished",
}
"""Transitions of a fragment's rounds. `gathering` comes only before round 1; later, the end of a round opens the next,
or leads to `paused` if the admin has paused the run."""

TICKET: Table = {
    ("open", "update accepted"): "accepted",
    ("open", "update refused"): "refused",
    ("open", "site sits out"): "sat out",
    ("open", "round closed without it"): "expired",
    ("open", "replaced by a newer one"): "expired",
    ("open", "too far behind"): "expired",
    ("open", "its site ends"): "expired",
    ("open", "state begins anew"): "expired",
    ("open", "run finished"): "expired",
    ("accepted", "update accepted"): "accepted",
    ("accepted", "updates lost"): "open",
    ("accepted", "version committed"): "counted",
    ("refused", "update refused"): "refused",
    ("sat out", "site sits out"): "sat out",
}
"""Transitions of a ticket. A repeated acceptance or refusal of its update, or sitting out again, changes nothing."""


@dataclass(frozen=True, slots=True)
class IssuedTicket:
    """The right of a site to submit one update to a round.

    Args:
        id: number of the ticket.
        site: the site.
        fragment: index of the fragment (part of the model); 0 if the model is not divided.
        base_version: version that the site trains from.
        state: state in the table of transitions `TICKET`: `open`, `accepted`, `counted`, `refused`, `sat out` or
            `expired`.
        reason: why the update was refused, or why the ticket has expired.
        order: position of the update among all accepted updates of the run, from 1; 0 if it is not accepted.
    """

    id: int
    site: str
    fragment: int
    base_version: int
    state: str
    reason: str = ""
    order: int = 0

    @property
    def is_live(self) -> bool:
        """Whether the ticket is open, or its update is accepted but not yet in a committed version."""
        return self.state in ("open", "accepted")


def advance(what: str, table: Table, state: str, event: str) -> str:
    """Return the state of a member, round or ticket after an event.

    Args:
        what: name for the error message, for example "Ticket 3".
        table: table of the transitions.
        state: state before the event.
        event: the event.

    Raises:
        IllegalTransition: the table has no such transition.
    """
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{what} is {state}, so the event {event!r} is not possible.") from None
