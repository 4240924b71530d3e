"""A process of a simulation on this machine. `LocalEngine` starts it; it ends with the simulation.

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
import io
import os
import select
import signal
import socket
import sys
from typing import Any

from atoll.aggregation.aggregator_process import Channel
from atoll.errors import AtollError
from atoll.simulate.job_messages import Beginning, SiteRound
from atoll.simulate.train_sites import Station

NUMBER_BYTES = 8
_PR_SET_PDEATHSIG = 1


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
        _Child(Channel(socket.socket(fileno=channel_fd)), numbers_fd).serve()


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
    def __init__(self, channel: Channel, numbers_fd: int) -> None:
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
