"""Processes on this machine that train simulated sites.

`LocalProcess` is the simulation's side of a process; `main` runs in the process.

A process loads the user's code once, or has it as a fork of the simulation's process. Then it trains one site at a
time. Messages and file descriptors are sent over a socket pair:

    from the simulation                        to the simulation
    begin      what to load                    ready | bad    the script is loaded | cannot be loaded
    version    the file of a version
    train      a job, and its spool's file     result         the result of a job

While a process works on one job, it is sent up to `AHEAD` further jobs in advance. For each job, the simulation also
writes the job's number into a pipe that both sides can read: the side that reads the number owns the job. So the
simulation can take back a job that the process has not begun.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.child_processes import PipedProcess, ProcessPipe
from atoll.errors import AtollError, ConfigError, RunFailed
from atoll.posix import OwnedFile
from atoll.simulate import engine
from atoll.simulate.engine import Beginning, Job, JobResult, Killed, SiteRound
from atoll.simulate.simulated_site import SiteTrainer
from atoll.system_calls import pipe_without_blocking

NUMBER_BYTES = 8
_PR_SET_PDEATHSIG = 1
AHEAD = 8
"""Number of jobs that a process gets in advance. With 0, waiting for a job takes longer than training a small model."""
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(16 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20)}
"""Variables that make malloc keep freed buffers of some MiB, so that it need not get new pages in every round."""


OF_OTHERS = ("ATOLL_SERVER", "ATOLL_SITE", "ATOLL_DIR", "ATOLL_FAILPOINTS")
"""Variables that are meant for other processes."""


class LocalHost:
    """Starts the processes of a simulation on this machine.

    Args:
        function: the training code if no name leads to it: a function of a notebook cell, a lambda, a partial. The
            processes are then forks of this one, and have it with all that it refers to. None: they load the script.
    """

    name, kind, ahead = "local", "a process", AHEAD

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def open(self) -> None:
        """Do nothing: this machine needs no preparation."""

    def begin(self, beginning: Beginning) -> LocalProcess:
        """Start a process and return it; the process then loads the script."""
        return LocalProcess(beginning, self._function)

    def close(self) -> None:
        """Do nothing: `open` has created nothing."""


class LocalProcess:
    """A process on this machine that trains simulated sites: the simulation's side."""

    def __init__(self, beginning: Beginning, function: Callable[..., Any] | None = None) -> None:
        self._base = ""  # digest of the version that was sent to the process last
        self._numbers, self._put = OwnedFile(), OwnedFile()
        self._numbers.fd, self._put.fd = pipe_without_blocking()
        numbers, parent = self._numbers.fd, os.getpid()
        if function is not None:
            self._process = PipedProcess.forked(
                lambda channel: main(channel, numbers, parent, function), Path(beginning.sites).parent
            )
        else:
            environment = {"PYTHONHASHSEED": "0"} | _MEMORY | dict(os.environ)  # same order of sets in every process
            for name in OF_OTHERS:
                environment.pop(name, None)
            self._process = PipedProcess(
                "atoll.simulate.local_processes", numbers, parent, environment=environment, inherited=[numbers]
            )
        self.pid, self._pipe = self._process.pid, self._process.pipe
        with contextlib.suppress(OSError):  # if the process has ended, `ready` reports that
            self._pipe.send({"what": "begin", "beginning": beginning.model_dump(mode="json")})

    def ready(self) -> None:
        """Wait until the process has loaded the script.

        Raises:
            ConfigError: the script cannot be loaded.
            Killed: a signal killed the process.
            RunFailed: the process ended by itself, or did not load the script within `START_S`.
        """
        late = threading.Event()

        def end() -> None:
            late.set()
            self.kill()

        slow = threading.Timer(engine.START_S, end)
        slow.start()
        try:
            message, _ = self._pipe.receive()
        except EOFError:
            code = self._process.bury()
            if late.is_set():
                raise RunFailed(
                    f"A process of the simulation was not ready after {engine.START_S:g} s, and was stopped.",
                    "Its output shows how far it came. Most often, the script does too much when it is imported.",
                ) from None
            if code < 0:
                raise Killed(
                    f"A process of the simulation was killed by {signal.Signals(-code).name} before it was ready.",
                    "The kernel does this if memory is short: use fewer processes. The same command "
                    "continues the simulation.",
                ) from None
            raise RunFailed(
                f"A process of the simulation ended with exit code {code} before it was ready.",
                "Its output shows why. Most often, the script ends the process when it is imported.",
            ) from None
        finally:
            slow.cancel()
        if message["what"] == "bad":
            raise ConfigError(message["message"], message["remedy"])

    def give(self, job: Job) -> None:
        """Send a job. If the process does not have the job's version yet, send the version first.

        If the process has ended, only `hear` reports this.
        """
        with contextlib.suppress(OSError):
            if self._base != job.ticket.base_digest:
                self._base = job.ticket.base_digest
                self._pipe.send({"what": "version", "digest": self._base}, job.base.fd)
            self._pipe.send({"what": "train", "job": job.ticket.id, "round": job.round.model_dump()}, job.spool_fd)
            os.write(self._put.fd, job.ticket.id.to_bytes(NUMBER_BYTES, "little"))

    def take_back(self) -> int | None:
        """Take back the oldest job that the process has not begun, and return its number; None if there is none."""
        return take_number(self._numbers.fd)

    def hear(self) -> tuple[int, JobResult] | None:
        """Wait for the next result. Return (number of the job, result); None if the process has ended."""
        try:
            message, _ = self._pipe.receive()
        except (EOFError, OSError):
            return None
        return message["job"], JobResult.from_json(message["result"])

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def bury(self) -> str:
        """Wait until the process has ended, kill its child processes, and return how it ended. Idempotent."""
        code = self._process.bury()
        return f"ended with signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


# -- in the process


def main(channel_fd: int, numbers_fd: int, parent: int, function: Callable[..., Any] | None = None) -> None:
    """Work on the jobs that arrive through the socket until the simulation has ended: the main function of the process.

    Args:
        channel_fd: file descriptor of the socket.
        numbers_fd: file descriptor of the read end of the pipe with job numbers.
        parent: process id of the simulation. On Linux, the kernel kills this process when the simulation ends.
        function: the training code of a process that was forked.
    """
    for name in OF_OTHERS:
        os.environ.pop(name, None)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
    _print_whole_lines()
    with contextlib.suppress(EOFError, OSError):
        _TrainingProcess(ProcessPipe(socket.socket(fileno=channel_fd)), numbers_fd, function).serve()


def take_number(fd: int) -> int | None:
    """Return the next job number from the pipe; None if the pipe is empty.

    Args:
        fd: file descriptor of the read end of the pipe.

    Raises:
        EOFError: the simulation has ended.
    """
    try:
        read = os.read(fd, NUMBER_BYTES)
    except BlockingIOError:
        return None
    if not read:
        raise EOFError
    return int.from_bytes(read, "little")


def _print_whole_lines() -> None:
    """Make standard output and error line-buffered, so that lines of different processes do not mix.

    In every process, both lead to the simulation's standard error. PYTHONUNBUFFERED would print parts of lines.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


class _TrainingProcess:
    def __init__(self, channel: ProcessPipe, numbers_fd: int, function: Callable[..., Any] | None) -> None:
        self._channel, self._numbers_fd, self._function = channel, numbers_fd, function
        self._jobs: dict[int, tuple[SiteRound, int]] = {}  # received and not begun, oldest first
        self._bases: dict[str, int] = {}  # digest of a version → its file descriptor, oldest first

    def serve(self) -> None:
        data, _ = self._channel.receive()
        try:
            trainer = SiteTrainer(Beginning.model_validate(data["beginning"]), self._function)
        except AtollError as error:
            if error.trace:
                print(error.trace, file=sys.stderr)
            self._channel.send({"what": "bad", "message": error.message, "remedy": error.remedy})
            return
        self._channel.send({"what": "ready"})
        pid = os.getpid()
        while True:
            number = self._next_number()
            job, spool_fd = self._job(number)
            try:
                result = trainer.train(job, self._bases[job.ticket.base_digest], spool_fd)
            finally:
                if os.getpid() != pid:  # the script forked: this is the child
                    os._exit(1)
                os.close(spool_fd)
            self._channel.send({"what": "result", "job": number, "result": result.to_json()})

    def _next_number(self) -> int:
        while (number := take_number(self._numbers_fd)) is None:  # no job, or it was taken back
            poll_number = select.poll()  # `select` takes no descriptor above 1,023
            poll_number.register(self._numbers_fd, select.POLLIN)
            poll_number.poll()
        return number

    def _job(self, number: int) -> tuple[SiteRound, int]:
        """Return the job with this number, and the descriptor of the file for its update.

        Drop jobs that were taken back. Also close the files of versions older than the one that the job needs.
        """
        while number not in self._jobs:
            message, fd = self._channel.receive()
            assert fd is not None
            if message["what"] == "version":
                self._bases[message["digest"]] = fd
                continue
            if (before := self._jobs.pop(message["job"], None)) is not None:  # taken back, then sent again
                os.close(before[1])
            self._jobs[message["job"]] = SiteRound.model_validate(message["round"]), fd
        while (earlier := next(iter(self._jobs))) != number:
            os.close(self._jobs.pop(earlier)[1])
        job, spool_fd = self._jobs.pop(number)
        for digest in list(self._bases):
            if digest == job.ticket.base_digest:
                break
            os.close(self._bases.pop(digest))
        return job, spool_fd
