"""A driver that makes tests of the machine read like a story: sites join, pull, submit, and something comes of it."""

from __future__ import annotations

from harness.sim_journal import SimJournal, initial, snapshot

from atoll.rounds import events, machine
from atoll.rounds.early_stopping import Measurement
from atoll.rounds.state import Rules


class Story:
    """Runs events through the machine, and after each compares what a restart would make of the journal."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.now_s = 0.0
        self.state = initial(rules)
        self.journal = SimJournal.of(self.state)

    def send(self, event: events.Event) -> tuple[events.Effect, ...]:
        before, image = self.state, repr(self.state)
        self.state, effects = machine.step(self.state, event, self.now_s)
        assert repr(before) == image, "step changed its input"
        match event:
            case events.UpdateAccepted(ticket, order):
                self.journal.accept(ticket, order)
            case events.RefusedUpdate(ticket, reason):
                self.journal.refuse(ticket, reason)
            case events.SatOut(ticket):
                self.journal.sit_out(ticket)
            case events.VersionCommitted(fragment, version, value):
                self.journal.move_head(fragment, version, value)
            case events.VersionEvaluated(version, number, float(value)):
                self.journal.measured.append(Measurement(version, number, value))
        for effect in effects:
            self.journal.apply(effect)
        restored, undone = machine.restore(self.rules, self.journal.snapshot(), self.now_s)
        if not self.state.late:  # after a restart, a late site has its time once more
            assert not undone
            assert snapshot(restored) == snapshot(self.state)
        return effects

    def wait(self, seconds: float) -> tuple[events.Effect, ...]:
        self.now_s += seconds
        return self.send(events.TimePassed())

    def lease(self, site: str) -> int:
        return self.state.members[site].lease

    def join(self, *sites: str) -> tuple[events.Effect, ...]:
        return [self.send(events.WorkerJoined(site)) for site in sites][-1]

    def leave(self, site: str, error: str = "") -> tuple[events.Effect, ...]:
        return self.send(events.WorkerLeft(site, self.lease(site), error))

    def seen(self, site: str) -> tuple[events.Effect, ...]:
        return self.send(events.WorkerSeen(site, self.lease(site)))

    def ask(self, site: str, fragment: int = 0) -> events.Effect:
        """The answer to a request for a ticket."""
        effects = self.send(events.TicketRequested(site, self.lease(site), fragment))
        return next(effect for effect in effects if isinstance(effect, events.TicketIssued | events.TicketWithheld))

    def ticket(self, site: str, fragment: int = 0) -> int:
        answer = self.ask(site, fragment)
        assert isinstance(answer, events.TicketIssued), answer
        return answer.ticket

    def withheld(self, site: str, fragment: int = 0) -> str:
        answer = self.ask(site, fragment)
        assert isinstance(answer, events.TicketWithheld), answer
        return answer.reason

    def accept(self, ticket: int) -> tuple[events.Effect, ...]:
        return self.send(events.UpdateAccepted(ticket, self.journal.next_order))

    def refuse(self, ticket: int, reason: str = "layer.weight is not finite") -> tuple[events.Effect, ...]:
        return self.send(events.RefusedUpdate(ticket, reason))

    def submit(self, *sites: str, fragment: int = 0) -> tuple[events.Effect, ...]:
        """Each asks for its ticket and has its update accepted; the effects of the last."""
        return [self.accept(self.ticket(site, fragment)) for site in sites][-1]

    def sit_out(self, *sites: str, fragment: int = 0) -> tuple[events.Effect, ...]:
        """Each asks for its ticket and sits out the round; the effects of the last."""
        return [self.send(events.SatOut(self.ticket(site, fragment))) for site in sites][-1]

    def commit(self, fragment: int = 0, value: float | None = None) -> tuple[events.Effect, ...]:
        return self.send(events.VersionCommitted(fragment, self.state.rounds[fragment].head + 1, value))

    def expected(self, fragment: int = 0) -> tuple[str, ...]:
        return tuple(self.state.rounds[fragment].expected)

    def phase(self, fragment: int = 0) -> str:
        return self.state.rounds[fragment].phase

    def missing(self, fragment: int = 0) -> tuple[str, ...]:
        return tuple(site for site, _ in self.state.missing(fragment))

    def why(self, fragment: int = 0) -> str:
        return self.state.why(fragment, self.now_s)


def closed(effects: tuple[events.Effect, ...]) -> list[tuple[int, ...]]:
    """The tickets of every round that these effects close."""
    return [effect.tickets for effect in effects if isinstance(effect, events.RoundClosed)]
