"""Explores schedules of the round machine: a simulated world, its faults, and a search for one that breaks a promise.

    explore(examples=200)                              # raises Violation when some schedule breaks an invariant
    explore(examples=200, mutant="no dedupe")          # must raise: the bug is planted

A schedule is plain data: what each message meets (delivery, loss, doubling, delay), which journal writes kill the
server, what happens to workers and clocks. `simulate` plays it on a virtual clock; then the faults stop, and a
version has to come within bounded virtual time. Hypothesis draws schedules and shrinks the one that fails.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import hypothesis
import hypothesis.strategies as st

from atoll.rounds import events
from atoll.rounds.closing_policy import AsyncBuffer, Barrier, Policy, QuorumDeadline
from atoll.rounds.sampling import Sampling
from atoll.rounds.state import Rules
from harness.sim_checks import Checks, Violation
from harness.sim_server import MUTANTS, RESTART_S, Mutant, Reply, Request, SimServer
from harness.sim_worker import SimWorker, Site

__all__ = ["MUTANTS", "Fault", "Schedule", "Violation", "explore", "schedules", "simulate"]

FAULTS_END_S = 150.0
LIVENESS_S = 400.0
"""Longest time to a version once faults have stopped; a heartbeat timeout, a deadline and a few retries fit in."""

DAY_S = 86_400.0
HEARTBEAT_TIMEOUT_S = 40.0
TRANSIT_S = 1.0
LATE_S = 23.0


@dataclass(frozen=True)
class Fault:
    """At `at_s` something happens to a worker, or to the wall clock."""

    at_s: int
    kind: str
    worker: int


FAULTS = (
    "kill",
    "restart",
    "twin",
    "stop",
    "continue",
    "leave",
    "fail",
    "end",
    "poison",
    "clock forward",
    "clock back",
)
OF_THE_ADMIN: dict[str, events.RunPaused | events.RunResumed | events.RunStopped] = {
    "pause": events.RunPaused(),
    "resume": events.RunResumed(),
    "stop run": events.RunStopped(),
    "stop run now": events.RunStopped(now=True),
}
FATES = ("deliver", "deliver", "deliver", "deliver", "lose", "double", "late", "late reply")


@dataclass(frozen=True)
class Schedule:
    """One run, settings and faults.

    Args:
        buffer: of an asynchronous run; 0: it is synchronous.
        grace_s, sync_first, max_staleness: of an asynchronous run.
        fates: what each message meets in turn, from the beginning again when they are used up.
        crashes: (so many journal writes later, `before` or `after` it) the server's process ends, each in turn.
    """

    workers: int
    sites: int
    min_sites: int
    quorum: int
    deadline_s: int
    fragments: int
    sample_fraction: float = 1.0
    fates: tuple[str, ...] = ("deliver",)
    crashes: tuple[tuple[int, str], ...] = ()
    faults: tuple[Fault, ...] = ()
    buffer: int = 0
    grace_s: int = 0
    sync_first: int = 0
    max_staleness: int | None = None

    def rules(self, mutant: Mutant = "") -> Rules:
        undercut = mutant == "quorum of one"
        quorum, min_sites = (1, 1) if undercut else (self.quorum, self.min_sites)
        policy: Policy = QuorumDeadline(quorum, self.deadline_s) if self.quorum else Barrier()
        if self.buffer:
            policy = AsyncBuffer(1 if undercut else self.buffer, self.grace_s, self.sync_first)
        sampling = Sampling(self.sample_fraction)
        return Rules(
            self.sites,
            min_sites,
            HEARTBEAT_TIMEOUT_S,
            0,
            policy,
            sampling,
            self.fragments,
            max_staleness=self.max_staleness,
        )


class World:
    """Virtual time, the network, the server's disk, and all processes in it."""

    def __init__(self, schedule: Schedule, mutant: Mutant) -> None:
        self.schedule = schedule
        self.now_s = 0.0
        self.wall_jump_s = 0.0
        self.calm = False
        self.checks = Checks(
            floor=max(1, schedule.min_sites, schedule.quorum),
            deadline_s=schedule.deadline_s if schedule.quorum else None,
            timeout_s=HEARTBEAT_TIMEOUT_S,
            fragments=schedule.fragments,
            async_after=schedule.sync_first if schedule.buffer else None,
            max_staleness=schedule.max_staleness,
        )
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._fates = itertools.cycle(schedule.fates)
        self._crashes = iter(schedule.crashes)
        self._next_crash = next(self._crashes, None)
        self._writes = 0
        self.server = SimServer(schedule.rules(mutant), self, self.checks, mutant)
        self.sites = [Site(f"site-{number}", number) for number in range(schedule.workers)]
        self.workers = [[self._worker(site)] for site in self.sites]
        for fault in schedule.faults:
            self.after(fault.at_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def _worker(self, site: Site) -> SimWorker:
        return SimWorker(site, self, self.checks, self.schedule.fragments)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + seconds, next(self._order), action))

    def run(self, until_s: float, done: Callable[[], bool] = lambda: False) -> None:
        while self._queue and self._queue[0][0] <= until_s and not done():
            self.now_s, _, action = heapq.heappop(self._queue)
            self.checks.now_s = self.now_s
            action()

    def crashes(self) -> str:
        self._writes += 1
        if self.calm or self._next_crash is None or self._writes < self._next_crash[0]:
            return ""
        when = self._next_crash[1]
        self._next_crash, self._writes = next(self._crashes, None), 0
        return when

    def send(self, request: Request, receive: Callable[[Reply], None]) -> None:
        fate = "deliver" if self.calm else next(self._fates)
        back_s = LATE_S if fate == "late reply" else TRANSIT_S

        def arrive() -> None:
            for reply in self.server.handle(request):
                self.after(back_s, lambda reply=reply: receive(reply))  # type: ignore[misc]

        if fate != "lose":
            self.after(LATE_S if fate == "late" else TRANSIT_S, arrive)
        if fate == "double":
            self.after(LATE_S, arrive)

    def _strike(self, fault: Fault) -> None:
        number = fault.worker % len(self.sites)
        site, processes = self.sites[number], self.workers[number]
        newest = processes[-1]
        self.checks.counts[fault.kind] += 1
        match fault.kind:
            case "kill":
                newest.kill()
            case "restart":
                newest.kill()
                processes.append(self._worker(site))
            case "twin":
                processes.append(self._worker(site))
            case "stop":
                newest.stop()
            case "continue":
                newest.carry_on()
            case "end":
                newest.end()
            case "leave" | "fail":
                newest.leave("out of memory" if fault.kind == "fail" else "")
            case "poison":
                site.poisoned = True
            case "clock forward" | "clock back":
                self.wall_jump_s += DAY_S if fault.kind == "clock forward" else -DAY_S
            case kind if kind in OF_THE_ADMIN:
                self.server.control(OF_THE_ADMIN[kind])
            case "lose":
                self.server.lose(fault.worker % self.schedule.fragments)

    def heal(self) -> None:
        """Faults stop: messages arrive, the disk holds, and every site has one process that runs."""
        self.calm = True
        self.after(2 * RESTART_S, lambda: self.server.control(events.RunResumed()))  # the server may be down now
        for site, processes in zip(self.sites, self.workers, strict=True):
            for process in processes:
                process.carry_on()
            if processes[-1].ends:
                processes[-1].kill()
            if not processes[-1].running:
                processes.append(self._worker(site))


def simulate(schedule: Schedule, mutant: Mutant = "") -> Counter[str]:
    """Play `schedule`; how often what happened.

    Raises:
        Violation: an invariant does not hold.
    """
    world = World(schedule, mutant)
    world.run(FAULTS_END_S)
    world.heal()
    heads = [len(versions) for versions in world.checks.versions]

    def moved() -> bool:
        return (world.server.up and world.server.state.finished) or all(
            len(now) > before for now, before in zip(world.checks.versions, heads, strict=True)
        )

    world.run(FAULTS_END_S + LIVENESS_S, moved)
    world.checks.require(moved(), f"no version came within {LIVENESS_S:g} s after the faults stopped")
    world.checks.nothing_lost(world.server.journal)
    world.checks.counts["finished"] += world.server.state.finished
    world.checks.counts["versions"] = sum(len(versions) for versions in world.checks.versions)
    return world.checks.counts


@st.composite
def schedules(draw: st.DrawFn, swarm: bool = False, admin: bool = False) -> Schedule:
    """Any schedule: up to four workers, two fragments, and a dozen faults; in a swarm, aggregating workers are lost.

    With `admin`, the admin may pause, resume and stop the run.
    """
    workers = draw(st.integers(2, 4))
    sites = draw(st.integers(1, workers))
    min_sites = draw(st.integers(1, sites))
    is_async = draw(st.booleans())
    kinds = FAULTS + ("lose",) * len(FAULTS) * swarm + (*OF_THE_ADMIN,) * 3 * admin
    fault = st.builds(Fault, st.integers(0, int(FAULTS_END_S)), st.sampled_from(kinds), st.integers(0, workers - 1))
    crash = st.tuples(st.integers(1, 25), st.sampled_from(("before", "after")))
    return Schedule(
        workers=workers,
        sites=sites,
        min_sites=min_sites,
        quorum=0 if is_async else draw(st.sampled_from((0, *range(min_sites, sites + 1)))),
        deadline_s=draw(st.integers(5, 60)),
        fragments=draw(st.integers(1, 2)),
        sample_fraction=1.0 if is_async else draw(st.sampled_from((1.0, 1.0, 0.5))),
        fates=tuple(draw(st.lists(st.sampled_from(FATES), min_size=1, max_size=30))),
        crashes=tuple(draw(st.lists(crash, max_size=10))),
        faults=tuple(draw(st.lists(fault, max_size=12))),
        buffer=draw(st.integers(min_sites, 3)) if is_async and min_sites <= 3 else min_sites * is_async,
        grace_s=draw(st.sampled_from((0, 0, 10))) if is_async else 0,
        sync_first=draw(st.integers(0, 2)) if is_async else 0,
        max_staleness=draw(st.sampled_from((None, 0, 1, 3))) if is_async else None,
    )


def explore(
    examples: int, mutant: Mutant = "", shrink: bool = True, swarm: bool = False, admin: bool = False
) -> Counter[str]:
    """Play `examples` schedules, the same ones each time; how often what happened in all of them.

    Args:
        mutant: a key of `MUTANTS` plants that bug.
        swarm: whether workers aggregate, and are lost with what they had collected.
        admin: whether the admin may pause, resume and stop the run.
        shrink: whether a schedule that fails is made small before it is reported.

    Raises:
        Violation: some schedule breaks an invariant; a note on it shows the schedule.
    """
    total: Counter[str] = Counter()
    phases = (hypothesis.Phase.generate, *((hypothesis.Phase.shrink,) if shrink else ()))

    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(schedules(swarm, admin))
    def play(schedule: Schedule) -> None:
        try:
            total.update(simulate(schedule, mutant))
        except Violation as violation:
            violation.add_note(f"in {schedule}")
            raise

    play()
    return total
