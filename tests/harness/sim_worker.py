"""A worker in a simulated world: a process that polls, trains and submits, and the disk that outlives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from atoll.rounds import events
from harness.sim_checks import Checks, MadeUpdate
from harness.sim_server import Receipt, Rejected, Reply, Submit, Surroundings

POLL_S = 4.0
BEAT_S = 10.0
TRAIN_S = 5.0


@dataclass
class Site:
    """What outlives a process: the outbox of each fragment, and which updates were acknowledged."""

    name: str
    number: int
    outbox: dict[int, tuple[int, MadeUpdate]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    poisoned: bool = False
    processes: int = 0


class SimWorker:
    """One process of `site`. Each fragment asks, trains, submits and asks again, at its own pace."""

    def __init__(self, site: Site, world: Surroundings, checks: Checks, fragments: int) -> None:
        site.processes += 1
        self.site, self.world, self.checks = site, world, checks
        self.number = site.processes
        self.lease = 0
        self.running = True
        self.stopped = self.ends = False
        self._held: list[Reply] = []
        self._training: dict[int, int] = {}
        for fragment in range(fragments):
            self._every(POLL_S, lambda fragment=fragment: self._poll(fragment))  # type: ignore[misc]
        self._every(BEAT_S, self._beat)

    def _every(self, seconds: float, action: Callable[[], None]) -> None:
        def again() -> None:
            if self.running:
                if not self.stopped:
                    action()
                self.world.after(seconds, again)

        again()

    def kill(self) -> None:
        self.running = False

    def stop(self) -> None:
        """As SIGSTOP: nothing is sent, replies wait."""
        self.stopped = True

    def carry_on(self) -> None:
        """As SIGCONT."""
        self.stopped = False
        held, self._held = self._held, []
        for reply in held:
            self._receive(reply)

    def leave(self, error: str) -> None:
        if self.lease:
            self.world.send(events.WorkerLeft(self.site.name, self.lease, error), self._receive)
        self.kill()

    def end(self) -> None:
        """Submit nothing more but what is under way, and stay for the results; heartbeats say so."""
        self.ends = True
        self._beat()

    def _beat(self) -> None:
        if self.lease:
            kind = events.WorkerEnds if self.ends else events.WorkerSeen
            self.world.send(kind(self.site.name, self.lease), self._receive)

    def _poll(self, fragment: int) -> None:
        name = self.site.name
        if not self.lease:
            if fragment == 0:
                self.world.send(events.WorkerJoined(name), self._receive)
        elif fragment in self.site.outbox:
            ticket, update = self.site.outbox[fragment]
            self.world.send(Submit(name, self.lease, ticket, update), self._receive)
        elif fragment not in self._training:
            self.world.send(events.TicketRequested(name, self.lease, fragment), self._receive)

    def _receive(self, reply: Reply) -> None:
        if not self.running:
            return
        if self.stopped:
            self._held.append(reply)
            return
        match reply:
            case events.LeaseGranted(_, lease):
                self.lease = max(self.lease, lease)
            case events.LeaseRefused(superseded=superseded):
                self.lease = 0
                if superseded and self.number < self.site.processes:
                    self.kill()
            case events.TicketIssued(_, ticket, fragment):
                self._train(ticket, fragment)
            case Receipt(ticket):
                self.site.done.add(ticket)
                self._forget(ticket)
            case Rejected(ticket):
                self._forget(ticket)

    def _forget(self, ticket: int) -> None:
        self.site.outbox = {f: kept for f, kept in self.site.outbox.items() if kept[0] != ticket}

    def _train(self, ticket: int, fragment: int) -> None:
        """Begin, unless the reply is an old one: of an update that is done or waits in the outbox."""
        reopened = ticket in self.checks.reopened
        if (
            reopened
            and ticket in self.site.done
            and fragment not in self.site.outbox
            and fragment not in self._training
        ):
            self.site.outbox[fragment] = (ticket, self.checks.made[ticket])  # what it sent is collected once more
            return
        old = ticket in self.site.done or ticket <= self._training.get(fragment, 0)
        if old or fragment in self.site.outbox:
            return
        self.checks.trains(ticket)
        self._training[fragment] = ticket
        self.world.after(TRAIN_S + self.site.number, lambda: self._trained(ticket, fragment))

    def _trained(self, ticket: int, fragment: int) -> None:
        if not self.running or self._training.get(fragment) != ticket:
            return
        if self.stopped:
            self.world.after(POLL_S, lambda: self._trained(ticket, fragment))
            return
        del self._training[fragment]
        value = None if self.site.poisoned else Fraction(7 * self.site.number + 3, ticket + 1)
        self.site.poisoned = False
        update = MadeUpdate(self.site.name, value, self.site.number + 1)
        self.checks.made[ticket] = update
        self.site.outbox[fragment] = (ticket, update)
