"""The engine of a simulation: gives jobs (one round of one site) to processes, and replaces processes that end.

The processes run on this machine or on Ray.

The classes of the messages between a simulation and its processes are `Beginning`, `SiteRound` and `JobResult`. They
are sent as JSON.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from atoll.aggregation.check_arriving_parts import PartStats
from atoll.errors import RunFailed
from atoll.protocol import messages
from atoll.store.journal_tables import VersionRow
from atoll.store.versions import Pin

LOG = logging.getLogger("atoll.simulate")

ATTEMPTS = 3
"""A site fails if this many processes in a row end while they train it."""
START_S = 120.0
"""Seconds within which a new process must have loaded the script."""


class Beginning(BaseModel):
    """The first message to a process: what the process needs before it can train sites.

    Attributes:
        script: the name of the user's training code, as `name_of` in script.py returns it.
        arguments: the script's arguments, for `sys.argv`.
        path: folders to import from; they come first in `sys.path`.
        info: the description of the run, as real workers get it from a server.
        schema_message: the schema of the model (names, shapes and dtypes), as real workers get it from a server.
        threads: number of PyTorch threads in each process.
        seed: the run's seed, for the random numbers of simulated sites.
        sites: the folder that holds a folder of local state for each site.
        own: kind, name in messages and place of the run's own code, which each process registers.
        names: the names of all sites, in their order.
    """

    script: str
    arguments: tuple[str, ...]
    path: tuple[str, ...]
    info: messages.RunInfo
    schema_message: messages.SchemaMessage
    threads: int
    seed: int
    sites: str
    own: tuple[tuple[str, str, str], ...] = ()
    names: tuple[str, ...] = ()


class SiteRound(BaseModel, frozen=True):
    """The message that tells a process to train one simulated site for one round.

    Attributes:
        site: name of the site.
        ticket: the site's ticket for the round, which names the version to train from.
        outcomes: the states of the site's earlier updates on which its local state may depend.
        counts: whether an earlier update of this site has been accepted in the run.
        counted: the site's last counted update, which its algorithm's state must include; None if the algorithm keeps
            no state at sites.
    """

    site: str
    ticket: messages.Ticket
    outcomes: tuple[messages.Outcome, ...]
    counts: bool
    counted: messages.Counted | None


@dataclass(eq=False)
class Job:
    """A `SiteRound`, with the files that a process needs for it.

    Attributes:
        round: the message for the process.
        base: the version of the global model to train from, protected from deletion while a process trains from it.
        spool_fd: the descriptor of the file (spool) to which the process writes the update; the server's store closes
            it.
        update_bytes: size of an update, in bytes.
        release: lets the store reuse the spool. Call it when no process writes to the spool any more.
        attempts: number of processes that have ended while they worked on this job.
    """

    round: SiteRound
    base: Pin[VersionRow]
    spool_fd: int
    update_bytes: int
    release: Callable[[], object]
    attempts: int = 0

    @property
    def site(self) -> str:
        """Name of the site that this job trains."""
        return self.round.site

    @property
    def ticket(self) -> messages.Ticket:
        """The ticket for the round. It names the version to train from."""
        return self.round.ticket


@dataclass(frozen=True)
class JobResult:
    """The result of a job.

    Attributes:
        update: the message with which the site submitted; None if the script raised, sat out the round, or returned
            without an update.
        stats: digest and norm of each part of the update. The update itself is in the job's file.
        error: the script's error without its traceback; empty if the script raised nothing.
        trace: the error with its traceback.
        bytes_down: bytes of tensors that the site has loaded.
        stuck: whether the engine killed the process, because the script ran too long while other sites waited.
        disk: whether `error` is about a full or failing disk, and not about the script.
        remedy: what to change in the script, if the script cannot be used in any simulation; else empty.
        sit_out: the message with which the site sat out the round; None if it did not.
    """

    update: messages.Complete | None = None
    stats: tuple[PartStats, ...] = ()
    error: str = ""
    trace: str = ""
    bytes_down: int = 0
    stuck: bool = False
    disk: bool = False
    remedy: str = ""
    sit_out: messages.SitOut | None = None

    def to_json(self) -> dict[str, Any]:
        """Return this result as JSON values, to send it to the simulation."""
        update = self.update.model_dump() if self.update is not None else None
        sit_out = self.sit_out.model_dump() if self.sit_out is not None else None
        stats = [(each.digest.hex(), each.sumsq.hex(), each.bad) for each in self.stats]
        return {**vars(self), "update": update, "stats": stats, "sit_out": sit_out}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> JobResult:
        """Return the result that `to_json` encoded as `fields`."""
        update = messages.Complete(**fields["update"]) if fields["update"] is not None else None
        sit_out = messages.SitOut(**fields["sit_out"]) if fields["sit_out"] is not None else None
        stats = tuple(PartStats(bytes.fromhex(d), float.fromhex(s), bad) for d, s, bad in fields["stats"])
        return cls(**{**fields, "update": update, "stats": stats, "sit_out": sit_out})


class Killed(RunFailed):
    """The error for a process that a signal killed before it was ready. A new process may succeed."""


class Process(Protocol):
    """A process that trains one simulated site at a time.

    Attributes:
        pid: the process id; 0 if the process is on another machine.
    """

    pid: int

    def ready(self) -> None:
        """Wait until the process has loaded the script.

        Raises:
            ConfigError: the script cannot be loaded.
            Killed: a signal killed the process; a new process may succeed.
            RunFailed: the process ended or did not start in time; a new process would fail, too.
        """

    def give(self, job: Job) -> None:
        """Queue a job behind the process's other jobs. If the process has ended, only `hear` reports this."""

    def take_back(self) -> int | None:
        """Remove the oldest job that the process has not begun. Return its ticket number; None if there is none."""

    def hear(self) -> tuple[int, JobResult] | None:
        """Wait for the next result. Return (ticket number of the job, result); None if the process has ended."""

    def kill(self) -> None:
        """Kill the process."""

    def bury(self) -> str:
        """Wait until the process has ended. Return how it ended, as a text for the log. Idempotent."""


class Host(Protocol):
    """Starts the processes of a simulation: on this machine, or on Ray.

    Attributes:
        name: the host's name in the log.
        kind: what the log calls one of its processes.
        ahead: number of jobs that a process gets in advance, in addition to the one that it is working on.
    """

    name: str
    kind: str
    ahead: int

    def open(self) -> None:
        """Prepare to start processes.

        Raises:
            ServerUnreachable: Ray cannot be reached or started.
        """

    def begin(self, beginning: Beginning) -> Process:
        """Start a process and return it; the process then loads the script."""

    def close(self) -> None:
        """Free what `open` has created. Idempotent."""


class Heard(Protocol):
    """The object to which an engine reports results and errors. The engine calls its methods from several threads."""

    def job_done(self, job: Job, result: JobResult) -> None:
        """Handle the result of a job."""

    def failed_to_go_on(self, error: Exception) -> None:
        """Handle an error after which the engine cannot go on."""


@dataclass(eq=False)
class _Member:
    """A process of the engine, with its jobs.

    Attributes:
        process: the process.
        jobs: the jobs that the process got and has not finished, by ticket, oldest first.
        since_s: the time at which the process began its current job, in seconds.
        stuck: the ticket number of the job that took too long, so that the engine killed the process; else None.
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
    """A group of processes that train simulated sites. Each process trains one site at a time.

    Args:
        host: starts the processes, on this machine or on Ray.
        processes: the number of processes.

    Attributes:
        name: the host's name, for the log.
        capacity: number of jobs that may be queued or running at a time. This is more than the number of processes, so
            that no process has to wait for its next job.
    """

    def __init__(self, host: Host, processes: int) -> None:
        self._host, self._count, self.name = host, processes, host.name
        self.capacity = processes * (1 + max(1, host.ahead))
        self._lock = threading.Lock()  # guards the attributes below
        self._crew: list[_Member] = []
        self._threads: list[threading.Thread] = []
        self._waiting: deque[Job] = deque()
        self._closed = False
        self._beginning: Beginning
        self._heard: Heard

    def start(self, beginning: Beginning, heard: Heard) -> None:
        """Start all processes, wait until each is ready, then start a thread for each. On an error, kill all processes.

        If another thread calls `close` meanwhile, all processes are killed, too.

        Args:
            beginning: what a process needs before its first job.
            heard: the object to which the results are reported.

        Raises:
            ConfigError: the script cannot be loaded.
            RunFailed: a process ended before it was ready.
            ServerUnreachable: Ray cannot be reached or started.
        """
        self._beginning, self._heard = beginning, heard
        try:
            self._host.open()
            # Start all before waiting for one: each needs seconds to import torch.
            crew = [self._take_on(self._host.begin(beginning)) for _ in range(self._count) if not self._closed]
            for member in filter(None, crew):
                member.process.ready()
        except BaseException:
            self.close()
            raise
        with self._lock:
            if not self._closed:
                for member in self._crew:
                    thread = threading.Thread(target=self._hear, args=(member,), name="atoll-simulate", daemon=True)
                    self._threads.append(thread)
                    thread.start()
                return
        self._host.close()  # it may have been opened after `close`

    def put(self, job: Job) -> None:
        """Queue a job; its result is reported later. If its process ends, the job is repeated, up to a limit."""
        with self._lock:
            if not self._closed:
                self._waiting.append(job)
                self._hand_out()

    def free(self, longer_s: float) -> None:
        """If jobs are waiting and the longest-running job has run for more than `longer_s` seconds, kill its process.

        The engine then reports a result with `stuck` set for this job, and starts another process.
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
        """Return the ids of the processes on this machine, except for one that is being replaced."""
        with self._lock:
            return [member.process.pid for member in self._crew if member.process.pid]

    def close(self) -> None:
        """Kill all processes, then wait until each has ended. No further result is reported. Idempotent."""
        with self._lock:
            self._closed = True
            crew, self._crew = self._crew, []
        for member in crew:
            member.process.kill()
        for member in crew:
            member.process.bury()
        for thread in self._threads:  # a thread may have started a process, which it ends once the process is ready
            thread.join()
        self._host.close()

    def _hand_out(self) -> None:
        """Give waiting jobs to the processes with the fewest jobs. The caller must hold `_lock`.

        If no jobs wait, take back a job that a busy process has not begun, and give it to an idle process.
        """
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
        """Report the results of a process, and replace the process when it ends: the main loop of a thread.

        The replacement must be started in this thread, because Linux kills a process when the thread that started it
        ends.
        """
        try:
            while member is not None:
                while (message := member.process.hear()) is not None:
                    with self._lock:
                        job = member.jobs.pop(message[0], None)
                        member.since_s = time.monotonic()
                        self._hand_out()
                    if job is None:  # the script forked, and both processes returned from it
                        LOG.warning("ignored a second result of one job: the script forks, and both processes return")
                    else:
                        self._heard.job_done(job, message[1])
                member = self._replace(member)
        except Exception as error:
            if not self._closed:
                self._heard.failed_to_go_on(error)

    def _replace(self, member: _Member) -> _Member | None:
        """Start a process in place of one that has ended. Return the new process; None if the engine is closed.

        Queue the jobs of the ended process again.
        """
        how = member.process.bury()
        with self._lock:
            if self._closed:
                return None
            self._crew.remove(member)
            while (job := member.take_back()) is not None:
                self._waiting.appendleft(job)
            begun = list(member.jobs.values())  # at most one job
        doing = f" while it trained {begun[0].site}" if begun else ""
        LOG.warning("%s of the simulation %s%s; starting another one in its place", self._host.kind, how, doing)
        for job in begun:
            self._begin_again(job, how, is_stuck=member.stuck == job.ticket.id)
        substitute = self._take_on(self._begun())
        with self._lock:
            self._hand_out()
        return substitute

    def _take_on(self, process: Process) -> _Member | None:
        """Add a process to the engine. If the engine was closed meanwhile, end the process and return None."""
        with self._lock:
            if not self._closed:
                self._crew.append(member := _Member(process))
                return member
        process.kill()
        process.bury()
        return None

    def _begin_again(self, job: Job, how: str, *, is_stuck: bool) -> None:
        """Repeat the job of a process that has ended. After `ATTEMPTS` attempts, report that the job has failed.

        Args:
            job: the job that the process was working on.
            how: how the process ended, as words.
            is_stuck: whether the engine killed the process because the job took too long. Then the job is not repeated.
        """
        job.attempts += 1
        if is_stuck:
            self._heard.job_done(job, JobResult(stuck=True))
        elif job.attempts == ATTEMPTS:
            self._heard.job_done(job, JobResult(error=f"its process {how}, {ATTEMPTS} times in a row"))
        else:
            with self._lock:
                self._waiting.appendleft(job)

    def _begun(self) -> Process:
        """Start a process, and return it when it is ready. If a signal kills it before that, start another one."""
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
