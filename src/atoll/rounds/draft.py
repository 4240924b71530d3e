"""The state being made in one step, and the effects so far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atoll.rounds import membership
from atoll.rounds.effects import Effect, Woken
from atoll.rounds.state import Round, State, Ticket
from atoll.rounds.transitions import IllegalTransition

Result = tuple[State, tuple[Effect, ...]]


class Draft:
    """Lives for one step. Nothing that `state` holds is ever changed in place."""

    __slots__ = ("effects", "now_s", "state", "wake")

    def __init__(self, state: State, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []
        self.wake: set[int] = set()

    def result(self) -> Result:
        return self.state, (*self.effects, *(Woken(fragment) for fragment in sorted(self.wake)))

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def change(self, **fields: Any) -> None:
        self.state = replace(self.state, **fields)

    def round(self, fragment: int) -> Round:
        if not 0 <= fragment < len(self.state.rounds):
            raise IllegalTransition(f"There is no fragment {fragment}; there are {len(self.state.rounds)}.")
        return self.state.rounds[fragment]

    def set_round(self, fragment: int, round_: Round) -> None:
        rounds = self.state.rounds
        self.change(rounds=(*rounds[:fragment], round_, *rounds[fragment + 1 :]))

    def change_round(self, fragment: int, **fields: Any) -> None:
        self.set_round(fragment, replace(self.round(fragment), **fields))

    def put(self, ticket: Ticket) -> None:
        tickets = self.round(ticket.fragment).tickets
        self.change_round(ticket.fragment, tickets={**tickets, ticket.site: ticket})

    def see(self, site: str) -> None:
        self.change(seen_s={**self.state.seen_s, site: self.now_s})

    def hears(self, site: str, lease: int) -> bool:
        """Whether `lease` speaks for `site`: a sign of life if so, and a refusal if not."""
        refused = membership.refusal(self.state.members, site, lease)
        if refused:
            self.emit(refused)
        else:
            self.see(site)
        return not refused
