"""A process that trains simulated sites: it loads the user's code once, then trains one site at a time.

`Station` does the training in any process. On this machine, `LocalProcess` starts a process that runs `main`. Messages:

    from the simulation                        to the simulation
    begin      what to load                    ready | bad    the script is loaded | cannot be loaded
    version    the file of a version
    train      a job, and its spool's file     answer         the result of the job

Jobs are sent in advance. For each job, the simulation also writes its number into a pipe that both sides can read: the
side that reads the number owns the job. So the simulation can take back a job that this process has not begun.
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
from atoll.simulate.simulated_site import Shared, SimulatedSite
from atoll.worker.training.federated_loop import Worker, taken_by
from atoll.worker.training.functional_loop import forget

LAST_WORDS_CHARS = 2000
FOLDERS = 1000
"""Number of cached `Path` objects of sites' folders: creating one takes as long as reading a tensor."""
NUMBER_BYTES = 8
_PR_SET_PDEATHSIG = 1


class Station:
    """Trains simulated sites in one process.

    Args:
        beginning: the script, the run's description, and the seed.

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
        built_for = (torch.version.cuda, torch.version.hip, getattr(torch.version, "xpu", None))  # asks no device
        is_cpu = not any(built_for) and not torch.backends.mps.is_built()
        self._seed_torch = torch.default_generator.manual_seed if is_cpu else torch.manual_seed  # 100 × slower
        self._begin_random("", 0)  # the script draws the same numbers in every process while it is loaded
        self._script = Script(beginning.script, beginning.arguments)
        gc.freeze()  # else full collections, which come often here, visit all objects of torch

    def train(self, job: SiteRound, base_fd: int, spool_fd: int) -> Answer:
        """Train one round of one simulated site, and return its answer.

        Args:
            job: the site and its round.
            base_fd: file descriptor of the version to train from; the caller closes it.
            spool_fd: file descriptor to which the update is written; the caller closes it.
        """
        try:
            site = SimulatedSite(self._shared, job, os.dup(base_fd), spool_fd, self._folder_of(job.site))
        except (AtollError, OSError) as error:  # the site's local state is lost or unreadable
            return answer_to(error)
        try:
            self._begin_random(job.site, job.ticket.round)
            worker = Worker(site)
            with taken_by(worker):
                self._script.train(worker)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if not (isinstance(error, SystemExit) and not error.code):
                return answer_to(error, site.counters.bytes_down)
        finally:
            site.close()
            forget()
        return Answer(site.update, site.stats, bytes_down=site.counters.bytes_down)

    def _begin_random(self, site: str, round_: int) -> None:
        """Seed torch, random and NumPy from the run's seed, the site's name and the round.

        So a site's random numbers do not depend on the process or on the sites trained in it before.
        """
        drawn = int.from_bytes(blake3(f"{self._seed} {round_} {site}".encode()).digest(8), "little")
        self._seed_torch(drawn)
        random.seed(drawn)
        np.random.seed(drawn % 2**32)


def answer_to(error: BaseException, bytes_down: int = 0) -> Answer:
    """Return the answer for a site that failed with an error; the traceback begins at the user's first line."""
    trace: TracebackType | None = error.__traceback__
    here = os.path.dirname(__file__)
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(here):
        trace = trace.tb_next  # skip Atoll's frames
    text = "".join(traceback.format_exception(type(error), error.with_traceback(None), trace))
    last = "".join(traceback.format_exception_only(error)).strip()
    words, disk = last[-LAST_WORDS_CHARS:] or type(error).__name__, _of_the_disk(error)
    return Answer(error=disk or words, trace=text, bytes_down=bytes_down, disk=bool(disk))


def _of_the_disk(error: BaseException) -> str:
    """Return the message of a disk error among an error's causes; empty if there is none."""
    for cause in causes(error):
        if isinstance(cause, StoreError):
            return cause.message
        if isinstance(cause, OSError) and cause.errno in FULL:
            return f"{cause.filename or 'a file'}: {cause.strerror}."
    return ""


def _say_little() -> None:
    """Log only warnings of simulated sites, on standard error."""
    logger = logging.getLogger("atoll")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(VisibleLines("atoll: "))
    handler.addFilter(Seldom())
    logger.handlers[:] = [handler]
    logger.setLevel(logging.WARNING)
    logger.propagate = False


# -- a process on this machine


def main(channel_fd: int, numbers_fd: int, parent: int) -> None:
    """Train jobs of the simulation at the other end of the socket until the simulation has ended.

    Args:
        channel_fd: file descriptor of the socket.
        numbers_fd: file descriptor of the read end of the pipe with job numbers.
        parent: process id of the simulation. On Linux, the kernel kills this process when the simulation ends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
    _print_whole_lines()
    with contextlib.suppress(EOFError, OSError):
        _Child(ProcessPipe(socket.socket(fileno=channel_fd)), numbers_fd).serve()


def take_number(fd: int) -> int | None:
    """Return the next job number from the pipe; None if the pipe is empty.

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

    All processes share standard error, and PYTHONUNBUFFERED would print parts of lines.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


class _Child:
    def __init__(self, channel: ProcessPipe, numbers_fd: int) -> None:
        self._channel, self._numbers_fd = channel, numbers_fd
        self._jobs: dict[int, tuple[dict[str, Any], int]] = {}  # received and not begun, oldest first
        self._bases: dict[str, int] = {}  # digest of a version → its file descriptor, oldest first

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
                if os.getpid() != pid:  # the script forked: this is the child
                    os._exit(1)
                os.close(spool_fd)
            self._channel.send({"what": "answer", "job": number, **answer.to_json()})

    def _next_number(self) -> int:
        while (number := take_number(self._numbers_fd)) is None:  # no job, or it was taken back
            select.select([self._numbers_fd], [], [])
        return number

    def _job(self, number: int) -> tuple[dict[str, Any], int]:
        """Return the job with this number and its spool's descriptor; drop earlier jobs, which were taken back.

        Also close versions older than the one that the job needs.
        """
        while number not in self._jobs:
            told, fd = self._channel.receive()
            assert fd is not None
            if told["what"] == "version":
                self._bases[told["digest"]] = fd
                continue
            if (before := self._jobs.pop(told["job"], None)) is not None:  # taken back, then sent again
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
