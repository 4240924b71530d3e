"""The engine of one machine: a few processes, each behind a socket pair that also carries file descriptors."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque

from atoll.aggregation.aggregator_process import Channel
from atoll.errors import ConfigError, RunFailed
from atoll.simulate.job_messages import ATTEMPTS, START_S, Answer, Beginning, Heard, Job, overdue
from atoll.simulate.site_process import NUMBER_BYTES, take_number

LOG = logging.getLogger("atoll.simulate")

AHEAD = 8
"""Jobs that a process is given ahead. With none, processes wait longer for jobs than they train a small model."""
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(16 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20)}
"""Let a process keep buffers of a few MiB, instead of asking the kernel for each page again with every update."""

_MAIN = """
import sys
sys.path[:] = sys.argv[4:]
from atoll.simulate.site_process import main
main(*map(int, sys.argv[1:4]))
"""


class LocalEngine:
    """Processes of this machine.

    Args:
        processes: how many.
    """

    name = "local"

    def __init__(self, processes: int) -> None:
        self._count = processes
        self._lock = threading.Lock()  # guards what follows
        self._crew: list[_Process] = []
        self._waiting: deque[Job] = deque()
        self._closed = False
        self._beginning: Beginning
        self._heard: Heard

    @property
    def capacity(self) -> int:
        """For each process, one job under way and `AHEAD` behind it."""
        return self._count * (1 + AHEAD)

    def start(self, beginning: Beginning, heard: Heard) -> None:
        """Start all processes before waiting for any, then a thread for each; on an error, end all of them."""
        self._beginning, self._heard = beginning, heard
        try:
            for _ in range(self._count):  # all of them first: each needs seconds to import torch
                self._crew.append(_Process(beginning))
            for process in self._crew:
                process.ready()
        except BaseException:
            self.close()
            raise
        for process in self._crew:
            self._listen(process)

    def put(self, job: Job) -> None:
        """Queue the job, and hand out what processes have room for; drop it after `close`."""
        with self._lock:
            if self._closed:
                return
            self._waiting.append(job)
            self._hand_out()

    def free(self, longer_s: float) -> None:
        """Kill the overdue process if a job is queued, or waits behind another one at a process."""
        with self._lock:
            if not self._waiting and all(len(process.jobs) <= 1 for process in self._crew):
                return
            begun = [process for process in self._crew if process.jobs and process.stuck is None]
            if (longest := overdue(begun, longer_s)) is not None:
                longest.stuck = next(iter(longest.jobs))
                longest.kill()

    def pids(self) -> list[int]:
        """Return the processes that run; one that is being replaced is not among them."""
        with self._lock:
            return [process.pid for process in self._crew]

    def close(self) -> None:
        """Kill all processes before reaping any; jobs under way are not answered."""
        with self._lock:
            self._closed = True
            crew, self._crew = self._crew, []
        for process in crew:
            process.kill()
        for process in crew:
            process.bury()
            process.close()

    def _hand_out(self) -> None:
        """Give waiting jobs to the process with the fewest; idle ones take jobs behind a slow one. Under the lock."""
        while self._crew:
            process = min(self._crew, key=lambda each: len(each.jobs))
            if self._waiting and len(process.jobs) <= AHEAD:
                process.give(self._waiting.popleft())
                continue
            if process.jobs or (job := self._taken_back()) is None:
                return
            process.give(job)

    def _taken_back(self) -> Job | None:
        """Return a job that its process has not begun."""
        most = max(self._crew, key=lambda each: len(each.jobs))
        return most.take_back() if len(most.jobs) > 1 else None

    def _listen(self, process: _Process) -> None:
        threading.Thread(target=self._hear, args=(process,), name="atoll-simulate", daemon=True).start()

    def _hear(self, process: _Process) -> None:
        """Hear a process and its replacements, which die with the thread that started them: this one."""
        try:
            self._hear_all(process)
        except Exception as error:
            self._heard.failed_to_go_on(error)

    def _hear_all(self, process: _Process) -> None:
        while True:
            while (told := process.hear()) is not None:
                job, answer = told
                if job is None:  # the script has forked, and returned twice
                    LOG.warning("ignored an answer to no job: does the script fork, and return twice?")
                    continue
                with self._lock:
                    process.jobs.pop(job.ticket.ticket, None)
                    process.since_s = time.monotonic()
                    self._hand_out()
                self._heard.answered(job, answer)
            other = self._instead_of(process)
            if other is None:
                return
            process = other

    def _instead_of(self, process: _Process) -> _Process | None:
        """Replace a process that has ended; the new one begins the job that it had."""
        code = process.bury()
        with self._lock:
            if self._closed:
                return None
            self._crew.remove(process)
            while (job := process.take_back()) is not None:
                self._waiting.appendleft(job)
            begun = list(process.jobs.values())  # one at most
        process.close()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        doing = f" while it trained {begun[0].site}" if begun else ""
        LOG.warning("a process of the simulation ended with %s%s; another one takes its place", how, doing)
        for job in begun:
            if process.stuck == job.ticket.ticket:
                self._heard.answered(job, Answer(stuck=True))
                continue
            job.attempts += 1
            if job.attempts == ATTEMPTS:
                self._heard.answered(job, Answer(error=f"its process ended with {how}, {ATTEMPTS} times in a row"))
            else:
                with self._lock:
                    self._waiting.appendleft(job)
        try:
            other = self._begun()
        except Exception as error:
            self._heard.failed_to_go_on(error)
            return None
        with self._lock:
            if not self._closed:
                self._crew.append(other)
                self._hand_out()
                return other
        other.kill()
        other.bury()
        other.close()
        return None

    def _begun(self) -> _Process:
        """Return a new process that is ready; try again if it is killed before.

        Raises:
            ConfigError, RunFailed: as `_Process.ready`.
        """
        for attempt in range(1, ATTEMPTS + 1):
            other = _Process(self._beginning)
            try:
                other.ready()
                break
            except _Killed:
                other.close()
                if attempt == ATTEMPTS or self._closed:
                    raise
        return other


class _Killed(RunFailed):
    """A signal ended a process before it was ready."""


class _Process:
    """One process, and the jobs that it was given and has not answered, oldest first.

    Attributes:
        since_s: when it was given the first of them, or gave its last answer.
        stuck: the ticket of the job that took too long; None if the process was not ended for one.
    """

    def __init__(self, beginning: Beginning) -> None:
        self.jobs: dict[int, Job] = {}
        self.since_s = time.monotonic()
        self.stuck: int | None = None
        self._base = ""  # digest of the version that it has
        self._numbers_fd, self._put_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        mine, theirs = Channel.pair()
        environment = {"PYTHONHASHSEED": "0"} | _MEMORY | dict(os.environ)  # the order of sets is the same in all
        for name in ("ATOLL_SERVER", "ATOLL_SITE", "ATOLL_DIR", "ATOLL_FAILPOINTS"):  # these are for other processes
            environment.pop(name, None)
        try:
            self._popen = subprocess.Popen(
                [
                    *(sys.executable, "-c", _MAIN),
                    *map(str, (theirs.fileno(), self._numbers_fd, os.getpid())),
                    *sys.path,
                ],
                pass_fds=[theirs.fileno(), self._numbers_fd],
                stdin=subprocess.DEVNULL,
                stdout=2,  # keep its output apart from a summary
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the simulation alone, which ends this
            )
        finally:
            theirs.close()
        self.pid = self._popen.pid
        self._channel = Channel(mine)
        with contextlib.suppress(OSError):  # `ready` tells how it ended
            self._channel.send({"what": "begin", "beginning": beginning.model_dump(mode="json")})

    def ready(self) -> None:
        """Wait until it has loaded the script.

        Raises:
            ConfigError: that cannot be loaded. RunFailed: it has ended.
        """
        late = threading.Event()

        def end() -> None:
            late.set()
            self.kill()

        slow = threading.Timer(START_S, end)
        slow.start()
        try:
            told, _ = self._channel.receive()
        except EOFError:
            code = self.bury()
            if late.is_set():
                raise RunFailed(
                    f"A process of the simulation has not begun within {START_S:g} s, and was ended.",
                    "What it printed says how far it came; most often the script's file does much when it is imported.",
                ) from None
            if code < 0:
                raise _Killed(
                    f"A process of the simulation was ended by {signal.Signals(-code).name} before it began.",
                    "Where memory is short the kernel does so: take fewer processes. The same command goes on.",
                ) from None
            raise RunFailed(
                f"A process of the simulation ended with code {code} before it began.",
                "What it printed says why; most often the script's file ends it when it is imported.",
            ) from None
        finally:
            slow.cancel()
        if told["what"] == "bad":
            raise ConfigError(told["message"], told["remedy"])

    def give(self, job: Job) -> None:
        """Have it train a job; `hear` tells if it has ended."""
        if not self.jobs:
            self.since_s = time.monotonic()
        self.jobs[job.ticket.ticket] = job
        with contextlib.suppress(OSError):
            if self._base != job.ticket.base_digest:
                self._base = job.ticket.base_digest
                self._channel.send({"what": "version", "digest": self._base}, job.base.fd)
            self._channel.send({"what": "train", "job": job.ticket.ticket, **job.round.to_json()}, job.spool_fd)
            os.write(self._put_fd, job.ticket.ticket.to_bytes(NUMBER_BYTES, "little"))

    def take_back(self) -> Job | None:
        """Take the oldest job that it has not begun away from it, and return that job."""
        number = take_number(self._numbers_fd)
        return None if number is None else self.jobs.pop(number)

    def hear(self) -> tuple[Job | None, Answer] | None:
        """Return the next answer and its job (None if no job has this number); None once the process has ended."""
        try:
            told, _ = self._channel.receive()
        except (EOFError, OSError):
            return None
        del told["what"]
        job = self.jobs.get(told.pop("job"))
        return job, Answer.from_json(told)

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        """Close its files. Idempotent."""
        fds, self._numbers_fd, self._put_fd = (self._numbers_fd, self._put_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def bury(self) -> int:
        """Wait for its end, end what it has started, and return its exit code."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._channel.close()
        return self._popen.wait()
