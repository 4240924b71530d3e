"""What a member, a round and a ticket can become: three small tables, and the one function that reads them.

The machine changes none of these states except through `advance`, so the tables are the rules. The documentation
draws them (`tools/diagrams.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Table = Mapping[tuple[str, str], str]
"""(state, what happens) → next state. What is not listed cannot happen."""


class IllegalTransition(RuntimeError):
    """The machine was told what cannot be: a mistake in Atoll's own code, never in what a peer sent."""


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
"""A site. Every join grants a new lease and voids the one before, also while the member is alive."""

ROUND: Table = {
    ("gathering", "enough workers joined"): "open",
    ("open", "policy closes"): "closing",
    ("open", "aggregator lost"): "open",
    ("closing", "aggregator lost"): "open",
    ("closing", "version committed"): "open",
    ("closing", "last version committed"): "finished",
}
"""A fragment's rounds. It gathers once, before round one; later a commit opens the next round at once."""

TICKET: Table = {
    ("open", "update accepted"): "accepted",
    ("open", "update refused"): "refused",
    ("open", "round closed without it"): "expired",
    ("open", "replaced by a newer one"): "expired",
    ("open", "too far behind"): "expired",
    ("open", "its site ends"): "expired",
    ("open", "run finished"): "expired",
    ("accepted", "update accepted"): "accepted",
    ("accepted", "aggregator lost"): "open",
    ("accepted", "version committed"): "counted",
    ("refused", "update refused"): "refused",
}
"""The right to submit one update. Being told the same thing twice changes nothing."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """`state` is a row of the table `TICKET`; `reason` says why it was refused or has expired.

    `order` is the place of its update among all that were accepted; 0 before.
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
        """Whether an update may still come under it, or waits to be reduced or committed."""
        return self.state in ("open", "accepted")


def advance(what: str, table: Table, state: str, event: str) -> str:
    """The state that follows.

    Args:
        what: the subject of the message.

    Raises:
        IllegalTransition: the table does not list it.
    """
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{what} is {state}; {event!r} cannot happen to it.") from None
