"""A process that trains simulated sites: it loads the user's code once, and trains one site at a time.

`Station` does so in any process. On this machine `LocalProcess` starts `main`, which ends with the simulation:

    from the simulation                 to the simulation
    begin      what to load             ready | bad    it is loaded | it cannot be
    version    a version's file
    train      a job, and its spool     answer         what became of it

Jobs are given ahead. For each, its number goes into a pipe that both sides read: the side that reads the number has the
job. So the simulation takes back a job that this process has not begun, and gives it to another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import logging
import os
import random
import select
import signal
import socket
import sys
import traceback
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from atoll.aggregation.aggregator_process import ProcessPipe
from atoll.errors import AtollError, StoreError, causes
from atoll.format_text import Seldom, VisibleLines
from atoll.posix import FULL
from atoll.simulate.job_messages import Answer, Beginning, SiteRound
from atoll.simulate.script import Script
from atoll.simulate.simulated_worker import Shared, SimulatedWorker
from atoll.worker.training.federated_loop import taken_by
from atoll.worker.training.functional_loop import forget

LAST_WORDS_CHARS = 2000
FOLDERS = 1000
"""Of sites. Their paths are kept: to make one takes as long as to read a tensor."""
NUMBER_BYTES = 8
_PR_SET_PDEATHSIG = 1


class Station:
    """Trains the simulated sites that one process is given.

    Raises:
        ConfigError: the script cannot be loaded.
    """

    def __init__(self, beginning: Beginning) -> None:
        sys.path[:] = [*beginning.path, *(each for each in sys.path if each not in beginning.path)]
        torch.set_num_threads(beginning.threads)
        _say_little()
        self._shared = Shared.of(beginning.info, beginning.schema_message)
        self._folder_of = lru_cache(FOLDERS)(Path(beginning.sites).joinpath)
        self._seed = beginning.seed
        built_for = (torch.version.cuda, torch.version.hip, getattr(torch.version, "xpu", None))  # asks no device yet
        is_cpu = not any(built_for) and not torch.backends.mps.is_built()
        self._seed_torch = torch.default_generator.manual_seed if is_cpu else torch.manual_seed  # 100 times as long
        self._begin_random("", 0)  # what it draws when it is loaded is the same in every process
        self._script = Script(beginning.script, beginning.arguments)
        gc.freeze()  # a full collection would look at all that torch has imported, at every so many simulated sites

    def train(self, job: SiteRound, base_fd: int, spool_fd: int) -> Answer:
        """Train one simulated site's round to its end.

        Args:
            base_fd: of the version to train from; stays the caller's.
            spool_fd: where the update goes; stays the caller's.
        """
        try:
            worker = SimulatedWorker(self._shared, job, os.dup(base_fd), spool_fd, self._folder_of(job.site))
        except (AtollError, OSError) as error:  # of what the site has kept
            return answer_to(error)
        try:
            self._begin_random(job.site, job.ticket.round)
            with taken_by(worker):
                self._script.train(worker)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if not (isinstance(error, SystemExit) and not error.code):
                return answer_to(error, worker.bytes_down)
        finally:
            worker.close()
            forget()
        return Answer(worker.update, worker.stats, bytes_down=worker.bytes_down)

    def _begin_random(self, site: str, round_: int) -> None:
        """Seed what a site draws by its name and the round, not by which site trained here before."""
        drawn = int.from_bytes(blake3(f"{self._seed} {round_} {site}".encode()).digest(8), "little")
        self._seed_torch(drawn)
        random.seed(drawn)
        np.random.seed(drawn % 2**32)


def answer_to(error: BaseException, bytes_down: int = 0) -> Answer:
    """Return the answer of a site that raised."""
    trace: TracebackType | None = error.__traceback__
    here = os.path.dirname(__file__)
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(here):
        trace = trace.tb_next  # to the user's first line
    text = "".join(traceback.format_exception(type(error), error.with_traceback(None), trace))
    last = "".join(traceback.format_exception_only(error)).strip()
    words, disk = last[-LAST_WORDS_CHARS:] or type(error).__name__, _of_the_disk(error)
    return Answer(error=disk or words, trace=text, bytes_down=bytes_down, disk=bool(disk))


def _of_the_disk(error: BaseException) -> str:
    """Return what failed, if it was the disk; else an empty text."""
    for cause in causes(error):
        if isinstance(cause, StoreError):
            return cause.message
        if isinstance(cause, OSError) and cause.errno in FULL:
            return f"{cause.filename or 'a file'}: {cause.strerror}."
    return ""


def _say_little() -> None:
    """Show warnings of simulated sites on standard error, and nothing of what they do."""
    logger = logging.getLogger("atoll")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(VisibleLines("atoll: "))
    handler.addFilter(Seldom())
    logger.handlers[:] = [handler]
    logger.setLevel(logging.WARNING)
    logger.propagate = False


# -- a process of this machine


def main(channel_fd: int, numbers_fd: int, parent: int) -> None:
    """Serve the simulation at the other end until it is gone.

    Args:
        channel_fd: a socket.
        numbers_fd: the pipe's end for reading.
        parent: its process; when that ends, however it does, this one is killed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
    _print_whole_lines()
    with contextlib.suppress(EOFError, OSError):
        _Child(ProcessPipe(socket.socket(fileno=channel_fd)), numbers_fd).serve()


def take_number(fd: int) -> int | None:
    """Return the next number in the pipe; None if there is none now.

    Raises:
        EOFError: the simulation is gone.
    """
    try:
        read = os.read(fd, NUMBER_BYTES)
    except BlockingIOError:
        return None
    if not read:
        raise EOFError
    return int.from_bytes(read, "little")


def _print_whole_lines() -> None:
    """Print whole lines: all processes share standard error, and PYTHONUNBUFFERED would mix parts of their lines."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


class _Child:
    def __init__(self, channel: ProcessPipe, numbers_fd: int) -> None:
        self._channel, self._numbers_fd = channel, numbers_fd
        self._jobs: dict[int, tuple[dict[str, Any], int]] = {}  # those that came, oldest first
        self._bases: dict[str, int] = {}  # digest → file, oldest first

    def serve(self) -> None:
        told, _ = self._channel.receive()
        try:
            station = Station(Beginning.model_validate(told["beginning"]))
        except AtollError as error:
            if error.trace:
                print(error.trace, file=sys.stderr)
            self._channel.send({"what": "bad", "message": error.message, "remedy": error.remedy})
            return
        self._channel.send({"what": "ready"})
        pid = os.getpid()
        while True:
            number = self._next_number()
            told, spool_fd = self._job(number)
            try:
                answer = station.train(SiteRound.from_json(told), self._bases[told["ticket"]["base_digest"]], spool_fd)
            finally:
                if os.getpid() != pid:  # the script has forked, and returns here, too
                    os._exit(1)
                os.close(spool_fd)
            self._channel.send({"what": "answer", "job": number, **answer.to_json()})

    def _next_number(self) -> int:
        while (number := take_number(self._numbers_fd)) is None:  # no job has come, or it was taken back
            select.select([self._numbers_fd], [], [])
        return number

    def _job(self, number: int) -> tuple[dict[str, Any], int]:
        """Return the job of this number; jobs that came before it were taken back."""
        while number not in self._jobs:
            told, fd = self._channel.receive()
            assert fd is not None
            if told["what"] == "version":
                self._bases[told["digest"]] = fd
                continue
            if (before := self._jobs.pop(told["job"], None)) is not None:  # taken back, and given again
                os.close(before[1])
            self._jobs[told["job"]] = told, fd
        while (earlier := next(iter(self._jobs))) != number:
            os.close(self._jobs.pop(earlier)[1])
        told, spool_fd = self._jobs.pop(number)
        for digest in list(self._bases):
            if digest == told["ticket"]["base_digest"]:
                break
            os.close(self._bases.pop(digest))
        return told, spool_fd
