"""A driver that makes tests of the machine read like a story: who joins, pulls, submits, and what came of it."""

from __future__ import annotations

from harness.sim_journal import SimJournal

from atoll.rounds import machine
from atoll.rounds.events import (
    Effect,
    Event,
    RoundClosed,
    TicketIssued,
    TicketRequested,
    TicketWithheld,
    TimePassed,
    UpdateAccepted,
    UpdateRefused,
    VersionCommitted,
    WorkerJoined,
    WorkerLeft,
    WorkerSeen,
)


class Story:
    """Runs events through the machine, and after each compares what a restart would make of the journal."""

    def __init__(self, rules: machine.Rules, heads: tuple[int, ...] | None = None) -> None:
        self.rules = rules
        self.now_s = 0.0
        self.state = machine.initial(rules, heads)
        self.journal = SimJournal.of(self.state)

    def send(self, event: Event) -> tuple[Effect, ...]:
        before, image = self.state, repr(self.state)
        self.state, effects = machine.step(self.state, event, self.now_s)
        assert repr(before) == image, "step changed its input"
        match event:
            case UpdateAccepted(ticket, order):
                self.journal.accept(ticket, order)
            case UpdateRefused(ticket, reason):
                self.journal.refuse(ticket, reason)
            case VersionCommitted(fragment, version, value):
                self.journal.move_head(fragment, version, value)
        for effect in effects:
            self.journal.apply(effect)
        restored, undone = machine.restore(self.rules, self.journal.snapshot(), self.now_s)
        assert not undone
        assert machine.snapshot(restored) == machine.snapshot(self.state)
        return effects

    def wait(self, seconds: float) -> tuple[Effect, ...]:
        self.now_s += seconds
        return self.send(TimePassed())

    def lease(self, site: str) -> int:
        return self.state.members[site].lease

    def join(self, *sites: str) -> tuple[Effect, ...]:
        return [self.send(WorkerJoined(site)) for site in sites][-1]

    def leave(self, site: str, error: str = "") -> tuple[Effect, ...]:
        return self.send(WorkerLeft(site, self.lease(site), error))

    def seen(self, site: str) -> tuple[Effect, ...]:
        return self.send(WorkerSeen(site, self.lease(site)))

    def ask(self, site: str, fragment: int = 0) -> Effect:
        """The answer to a request for a ticket."""
        effects = self.send(TicketRequested(site, self.lease(site), fragment))
        return next(effect for effect in effects if isinstance(effect, TicketIssued | TicketWithheld))

    def ticket(self, site: str, fragment: int = 0) -> int:
        answer = self.ask(site, fragment)
        assert isinstance(answer, TicketIssued), answer
        return answer.ticket

    def withheld(self, site: str, fragment: int = 0) -> str:
        answer = self.ask(site, fragment)
        assert isinstance(answer, TicketWithheld), answer
        return answer.reason

    def accept(self, ticket: int) -> tuple[Effect, ...]:
        return self.send(UpdateAccepted(ticket, self.journal.next_order))

    def refuse(self, ticket: int, reason: str = "layer.weight is not finite") -> tuple[Effect, ...]:
        return self.send(UpdateRefused(ticket, reason))

    def submit(self, *sites: str, fragment: int = 0) -> tuple[Effect, ...]:
        """Each asks for its ticket and has its update accepted; the effects of the last."""
        return [self.accept(self.ticket(site, fragment)) for site in sites][-1]

    def commit(self, fragment: int = 0, value: float | None = None) -> tuple[Effect, ...]:
        return self.send(VersionCommitted(fragment, self.state.rounds[fragment].head + 1, value))

    def expected(self, fragment: int = 0) -> tuple[str, ...]:
        return tuple(self.state.rounds[fragment].expected)

    def phase(self, fragment: int = 0) -> str:
        return self.state.rounds[fragment].phase

    def missing(self, fragment: int = 0) -> tuple[str, ...]:
        return tuple(site for site, _ in machine.missing(self.state, fragment))

    def why(self, fragment: int = 0) -> str:
        return machine.why(self.state, fragment, self.now_s)


def closed(effects: tuple[Effect, ...]) -> list[tuple[int, ...]]:
    """The tickets of every round that these effects close."""
    return [effect.tickets for effect in effects if isinstance(effect, RoundClosed)]
