"""A server in a simulated world: its ledger is the real one, and any write to its journal may be its last.

The pass over the tensors is a weighted mean of fractions, so that "exact" means exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Protocol

from atoll.rounds import events, machine
from atoll.rounds.state import Rules, State
from atoll.server.coordinator.ledger import Change, Ledger, nothing
from harness.sim_checks import Checks, MadeUpdate
from harness.sim_journal import SimJournal, initial, snapshot

PASS_S = 2.0
RESTART_S = 3.0

Mutant = str
MUTANTS: dict[Mutant, str] = {
    "no dedupe": "a submission sent twice is accepted twice",
    "acknowledge before journal": "the receipt leaves before the accept is written",
    "lost expected": "a restart forgets which sites the open round expects",
    "quorum of one": "rounds close with a single update, whatever the settings say",
    "two-step commit": "the version is written, and the head moves by another write",
    "wall clock": "time comes from a clock that people set",
    "no fencing": "an update is accepted under any lease",
}
"""Bugs to plant: what a schedule explorer must find. They are bugs of the server around the machine, or of its use."""


@dataclass(frozen=True)
class Submit:
    """A worker's update for `ticket`, complete."""

    site: str
    lease: int
    ticket: int
    update: MadeUpdate


@dataclass(frozen=True)
class Receipt:
    """The update of `ticket` is in the journal."""

    ticket: int


@dataclass(frozen=True)
class Rejected:
    """The update of `ticket` does not count, and never will."""

    ticket: int
    reason: str


Request = (
    events.WorkerJoined | events.WorkerSeen | events.WorkerEnds | events.WorkerLeft | events.TicketRequested | Submit
)
Reply = (
    events.LeaseGranted | events.LeaseRefused | events.TicketIssued | events.TicketWithheld | Receipt | Rejected | None
)


class Crash(Exception):
    """The server's process ends here."""


class Surroundings(Protocol):
    """What server and workers see of the world. A request may be lost, late or doubled; so may its reply."""

    now_s: float
    wall_jump_s: float

    def after(self, seconds: float, action: Callable[[], None]) -> None: ...

    def send(self, request: Request, receive: Callable[[Reply], None]) -> None: ...

    def crashes(self) -> str:
        """Where the server's process ends, as seen from its next write: `before`, `after`, or an empty string."""
        ...


@dataclass
class RunJournal(SimJournal):
    """With the updates themselves, and the one parameter of each fragment's head."""

    updates: list[tuple[int, MadeUpdate]] = field(default_factory=list)
    model: list[Fraction] = field(default_factory=list)


class SimServer:
    """One server over one journal; `handle` answers a request, or does not, because it crashed."""

    def __init__(self, rules: Rules, world: Surroundings, checks: Checks, mutant: Mutant) -> None:
        self.rules, self.world, self.checks, self.mutant = rules, world, checks, mutant
        self._event: events.Event | None = None
        self.ledger = self._new_ledger()
        self.ledger.restore(snapshot(initial(rules)), self._act)
        self.journal = RunJournal(SimJournal.of(self.state).fragments, model=[Fraction(0)] * rules.fragments)
        self._written = False
        self.up = True
        self.process = 0  # timers and passes of a process that crashed do nothing
        self._armed_s: float | None = None

    @property
    def state(self) -> State:
        return self.ledger.state

    def _new_ledger(self) -> Ledger:
        return Ledger(self.rules, self._write_all, clock=self._clock_s)

    def _act(self, effect: events.Effect) -> None:
        if isinstance(effect, events.RoundClosed):
            self._later(PASS_S, lambda: self._pass(effect.fragment))

    def _write_all(self, change: Change) -> None:
        """One transaction: a crash comes before it or after it."""

        def rows() -> None:
            change.row()
            for effect in change.decided:
                self._record(effect)

        if isinstance(self._event, events.WorkerEnds):  # before the checks see what follows from it
            self.checks.ends(self._event.site)
        self._write(rows)
        self._written = True

    def handle(self, request: Request) -> list[Reply]:
        """The replies to `request`; none where the server is down or goes down over it."""
        if not self.up:
            return []
        replies: list[Reply] = []
        self._surviving(lambda: self._serve(request, replies))
        return replies

    def lose(self, fragment: int) -> None:
        """Of a swarm: the worker that aggregates a fragment is lost, with all that it had collected."""
        if self.up:
            self._surviving(lambda: self._forget(fragment))

    def control(self, event: events.RunPaused | events.RunResumed | events.RunStopped) -> None:
        """The admin pauses, resumes or stops the run."""
        if self.up:
            self._surviving(lambda: self._controlled(event))

    def _controlled(self, event: events.RunPaused | events.RunResumed | events.RunStopped) -> None:
        self._run(event)
        self._compare()

    def _forget(self, fragment: int) -> None:
        self._run(events.AggregatorLost(fragment, "it has gone"))
        self._compare()

    def _surviving(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._arm()
        except Crash:
            self.up = False
            self.process += 1
            self.checks.counts["crashes"] += 1
            self.world.after(RESTART_S, lambda: self._surviving(self._start))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        process = self.process
        self.world.after(seconds, lambda: self._surviving(action) if process == self.process else None)

    def _clock_s(self) -> float:
        return self.world.now_s + (self.world.wall_jump_s if self.mutant == "wall clock" else 0.0)

    def _arm(self) -> None:
        """One timer for the machine's next deadline."""
        due_s = self.state.next_deadline_s
        if due_s is not None and (self._armed_s is None or due_s < self._armed_s):
            self._armed_s = due_s
            self._later(max(0.0, due_s - self._clock_s()), self._tick)

    def _tick(self) -> None:
        self._armed_s = None
        self._run(events.TimePassed())

    def _write(self, row: Callable[[], None]) -> None:
        fate = self.world.crashes()
        if fate == "before":
            raise Crash
        row()
        if fate == "after":
            raise Crash

    def _start(self) -> None:
        """Recovery. Whatever was written, restoring twice is restoring once."""
        self.checks.nothing_lost(self.journal)
        self.checks.up_since_s = self.world.now_s
        journal = self.journal.snapshot()
        if self.mutant == "lost expected":
            lost = [replace(f, expected=f.expected and ()) for f in journal.fragments]
            journal = replace(journal, fragments=tuple(lost))
        restored, undone = machine.restore(self.rules, journal, self._clock_s())
        twice = machine.restore(self.rules, replace(snapshot(restored), proven=restored.proven), self._clock_s())
        self.checks.require(twice == (restored, ()), "restoring what was restored changes it")
        self._armed_s = None
        self.ledger = self._new_ledger()
        self.ledger.restore(journal, self._act)
        self.up = True
        already = {effect.fragment for effect in undone if isinstance(effect, events.RoundClosed)}
        for fragment, round_ in enumerate(restored.rounds):
            if round_.phase == "closing" and fragment not in already:
                self._later(PASS_S, lambda fragment=fragment: self._pass(fragment))  # type: ignore[misc]
        self._compare()

    def _run(self, event: events.Event, row: Callable[[], object] = nothing) -> tuple[events.Effect, ...]:
        self._event, self._written = event, False
        effects = self.ledger.record(event, row)
        if isinstance(event, events.WorkerEnds) and event.site in self.state.ending:
            self.checks.ends(event.site)
        if self._written:
            self._compare()
        return effects

    def _record(self, effect: events.Effect) -> None:
        self.checks.require(self.journal.apply(effect), f"{effect} is not for the journal")
        if isinstance(effect, events.RoundReopened):
            self.journal.updates = [each for each in self.journal.updates if each[0] not in effect.tickets]
        self.checks.journalled(effect)

    def _compare(self) -> None:
        if self.state.ending:  # a restart awaits them until they say it again
            return
        restored, undone = machine.restore(self.rules, self.journal.snapshot(), self._clock_s())
        self.checks.require(
            undone == () and snapshot(restored) == snapshot(self.state),
            f"the journal makes {snapshot(restored)} of {snapshot(self.state)}; undone: {undone}",
        )

    def _serve(self, request: Request, replies: list[Reply]) -> None:
        if not isinstance(request, events.WorkerJoined):
            self.checks.heard(request.site, request.lease)
        if isinstance(request, Submit):
            self._submit(request, replies)
            return
        effects = self._run(request)
        answers = (events.LeaseGranted, events.LeaseRefused, events.TicketIssued, events.TicketWithheld)
        replies.extend([effect for effect in effects if isinstance(effect, answers)][:1])

    def _submit(self, request: Submit, replies: list[Reply]) -> None:
        self._run(events.WorkerSeen(request.site, request.lease))  # its bytes were a sign of life
        verdict = self.state.may_submit(request.site, request.lease, request.ticket)
        ticket = self.journal.tickets[request.ticket]
        again = ticket.state in ("accepted", "counted")
        if self.mutant == "no fencing" and isinstance(verdict, events.LeaseRefused) and ticket.state == "open":
            verdict = None
        if self.mutant == "no dedupe" and ticket.state == "accepted" and not isinstance(verdict, events.LeaseRefused):
            verdict, again = None, False
        if isinstance(verdict, events.LeaseRefused):
            replies.append(verdict)
        elif again:
            replies.append(Receipt(request.ticket))
        elif verdict is not None:
            replies.append(Rejected(request.ticket, verdict))
        elif request.update.value is None:
            self._run(events.RefusedUpdate(request.ticket, "not finite"), lambda: self._refuse(request.ticket))
            replies.append(Rejected(request.ticket, "not finite"))
        elif self.mutant == "acknowledge before journal":
            self._acknowledge(request.ticket, replies)
            self._accept(request)
        else:
            self._accept(request)
            self._acknowledge(request.ticket, replies)

    def _acknowledge(self, ticket: int, replies: list[Reply]) -> None:
        self.checks.acknowledged.add(ticket)
        replies.append(Receipt(ticket))

    def _accept(self, request: Submit) -> None:
        order = self.journal.next_order

        def row() -> None:
            self.checks.accepts(request.ticket, request.site, request.lease)
            self.journal.accept(request.ticket, order)
            self.journal.updates.append((request.ticket, request.update))

        self._run(events.UpdateAccepted(request.ticket, order), row)

    def _refuse(self, number: int) -> None:
        ticket = self.journal.tickets[number]
        self.journal.refuse(number, "not finite")
        self.checks.refuses(ticket.site, ticket.fragment)

    def _pass(self, fragment: int) -> None:
        """Reduce the frozen round and move the head: one write."""
        round_ = self.state.rounds[fragment]
        if round_.phase != "closing":  # it was opened again meanwhile
            return
        updates = [(number, update) for number, update in self.journal.updates if number in round_.frozen]
        total = sum(update.weight for _, update in updates)
        mean = sum((Fraction(u.weight, total) * (u.value or 0) for _, u in updates), Fraction(0))
        value = self.journal.model[fragment] + mean

        def write_model() -> None:
            self.journal.model[fragment] = value

        def move_head() -> None:
            self.journal.move_head(fragment, round_.head + 1)
            self.checks.commits(fragment, round_.head + 1, round_.frozen, self.journal.model[fragment])

        def commit() -> None:
            write_model()
            move_head()

        if self.mutant == "two-step commit":
            self._write(write_model)
        row = move_head if self.mutant == "two-step commit" else commit
        self._run(events.VersionCommitted(fragment, round_.head + 1), row)
