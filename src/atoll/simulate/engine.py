"""What is the same wherever simulated sites are trained: jobs go to processes, and a process that ends is replaced."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from atoll.errors import RunFailed
from atoll.simulate.job_messages import Answer, Beginning, Job

LOG = logging.getLogger("atoll.simulate")

ATTEMPTS = 3
"""A site fails once so many processes have ended while they trained it."""
START_S = 120.0
"""A process has to load the script within this time."""


class Killed(RunFailed):
    """A process was ended from outside before it was ready."""


class Process(Protocol):
    """A process that trains one simulated site at a time. `pid`: 0 on another machine."""

    pid: int

    def ready(self) -> None:
        """Wait until it has loaded the script.

        Raises:
            ConfigError: that cannot be loaded. Killed: another one may be ready. RunFailed: no process can be.
        """
        ...

    def give(self, job: Job) -> None:
        """Have it train a job, after those that it has; `hear` tells if it has ended."""
        ...

    def take_back(self) -> int | None:
        """Return the ticket of the oldest job that it has not begun, and now never begins; None if there is none."""
        ...

    def hear(self) -> tuple[int, Answer] | None:
        """Wait for the next answer, and return it with the ticket of its job; None once the process has ended."""
        ...

    def kill(self) -> None:
        """End it."""
        ...

    def bury(self) -> str:
        """Wait for its end, and return how it ended. Idempotent."""
        ...


class Host(Protocol):
    """Where processes run. `name`: for people; `kind`: of its processes; `ahead`: jobs that one is given ahead."""

    name: str
    kind: str
    ahead: int

    def open(self) -> None:
        """Be ready to start processes.

        Raises:
            ServerUnreachable: it cannot be reached.
        """
        ...

    def begin(self, beginning: Beginning) -> Process:
        """Start a process, which begins to load the script."""
        ...

    def close(self) -> None:
        """Free what `open` has made. Idempotent."""
        ...


class Heard(Protocol):
    """Hears what the processes of an engine answer, in any thread."""

    def answered(self, job: Job, answer: Answer) -> None:
        """A job has ended, with this answer."""
        ...

    def failed_to_go_on(self, error: Exception) -> None:
        """The engine cannot go on."""
        ...


@dataclass(eq=False)
class _Member:
    """A process, and what it is doing.

    Attributes:
        jobs: ticket → job that it was given and has not answered, oldest first.
        since_s: when it was given the first of them, or gave its last answer.
        stuck: the ticket of the job that took too long; None if the process was not ended for one.
    """

    process: Process
    jobs: dict[int, Job] = field(default_factory=dict)
    since_s: float = 0.0
    stuck: int | None = None

    def give(self, job: Job) -> None:
        if not self.jobs:
            self.since_s = time.monotonic()
        self.jobs[job.ticket.id] = job
        self.process.give(job)

    def take_back(self) -> Job | None:
        ticket = self.process.take_back()
        return None if ticket is None else self.jobs.pop(ticket)


class Engine:
    """Processes that train simulated sites, each one at a time.

    Args:
        host: where they run.
        processes: how many.

    Attributes:
        capacity: jobs that it takes at a time: more than there are processes, so that none waits for the next job.
    """

    def __init__(self, host: Host, processes: int) -> None:
        self._host, self._count, self.name = host, processes, host.name
        self.capacity = processes * (1 + max(1, host.ahead))
        self._lock = threading.Lock()  # guards what follows
        self._crew: list[_Member] = []
        self._waiting: deque[Job] = deque()
        self._closed = False
        self._beginning: Beginning
        self._heard: Heard

    def start(self, beginning: Beginning, heard: Heard) -> None:
        """Start all processes before waiting for any, then a thread for each; on an error, end all of them.

        Raises:
            ConfigError: the script cannot be loaded. RunFailed: a process ended before it began.
            ServerUnreachable: the host cannot be reached.
        """
        self._beginning, self._heard = beginning, heard
        try:
            self._host.open()
            for _ in range(self._count):  # all of them first: each needs seconds to import torch
                self._crew.append(_Member(self._host.begin(beginning)))
            for member in self._crew:
                member.process.ready()
        except BaseException:
            self.close()
            raise
        for member in self._crew:
            threading.Thread(target=self._hear, args=(member,), name="atoll-simulate", daemon=True).start()

    def put(self, job: Job) -> None:
        """Train it soon, and report the answer; when its process ends, another one begins it again."""
        with self._lock:
            if not self._closed:
                self._waiting.append(job)
                self._hand_out()

    def free(self, longer_s: float) -> None:
        """If jobs wait, end the process that has trained one site for longest, and for longer than this.

        The answer of that job is `stuck`; another process takes its place.
        """
        with self._lock:
            if not self._waiting and all(len(member.jobs) <= 1 for member in self._crew):
                return
            begun = [member for member in self._crew if member.jobs and member.stuck is None]
            longest = min(begun, key=lambda each: each.since_s, default=None)
            if longest is not None and time.monotonic() - longest.since_s > longer_s:
                longest.stuck = next(iter(longest.jobs))
                longest.process.kill()

    def pids(self) -> list[int]:
        """Return the processes on this machine; one that is being replaced is not among them."""
        with self._lock:
            return [member.process.pid for member in self._crew if member.process.pid]

    def close(self) -> None:
        """Kill all processes before burying any, and report no further answer. Idempotent."""
        with self._lock:
            self._closed = True
            crew, self._crew = self._crew, []
        for member in crew:
            member.process.kill()
        for member in crew:
            member.process.bury()
        self._host.close()

    def _hand_out(self) -> None:
        """Give waiting jobs to the process with the fewest; idle ones take jobs behind a slow one. Under the lock."""
        while self._crew:
            member = min(self._crew, key=lambda each: len(each.jobs))
            if self._waiting and len(member.jobs) <= self._host.ahead:
                member.give(self._waiting.popleft())
                continue
            most = max(self._crew, key=lambda each: len(each.jobs))
            if member.jobs or len(most.jobs) <= 1 or (job := most.take_back()) is None:
                return
            member.give(job)

    def _hear(self, member: _Member | None) -> None:
        """Hear a process and its replacements, which die with the thread that started them: this one."""
        try:
            while member is not None:
                while (told := member.process.hear()) is not None:
                    with self._lock:
                        job = member.jobs.pop(told[0], None)
                        member.since_s = time.monotonic()
                        self._hand_out()
                    if job is None:  # the script has forked, and returned twice
                        LOG.warning("ignored an answer to no job: does the script fork, and return twice?")
                    else:
                        self._heard.answered(job, told[1])
                member = self._replace(member)
        except Exception as error:
            if not self._closed:
                self._heard.failed_to_go_on(error)

    def _replace(self, member: _Member) -> _Member | None:
        """Return another process in place of one that has ended; it begins the job that this one had."""
        how = member.process.bury()
        with self._lock:
            if self._closed:
                return None
            self._crew.remove(member)
            while (job := member.take_back()) is not None:
                self._waiting.appendleft(job)
            begun = list(member.jobs.values())  # one at most
        doing = f" while it trained {begun[0].site}" if begun else ""
        LOG.warning("%s of the simulation %s%s; another one takes its place", self._host.kind, how, doing)
        for job in begun:
            self._begin_again(job, how, is_stuck=member.stuck == job.ticket.id)
        other = _Member(self._begun())
        with self._lock:
            if not self._closed:
                self._crew.append(other)
                self._hand_out()
                return other
        other.process.kill()
        other.process.bury()
        return None

    def _begin_again(self, job: Job, how: str, *, is_stuck: bool) -> None:
        """Let another process train a job after its process has ended, unless that happened too often."""
        job.attempts += 1
        if is_stuck:
            self._heard.answered(job, Answer(stuck=True))
        elif job.attempts == ATTEMPTS:
            self._heard.answered(job, Answer(error=f"its process {how}, {ATTEMPTS} times in a row"))
        else:
            with self._lock:
                self._waiting.appendleft(job)

    def _begun(self) -> Process:
        """Return a new process that is ready; try again if it is killed before."""
        for attempt in range(1, ATTEMPTS + 1):
            process = self._host.begin(self._beginning)
            try:
                process.ready()
                break
            except Killed:
                process.bury()
                if attempt == ATTEMPTS or self._closed:
                    raise
        return process
