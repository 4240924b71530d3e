"""Processes of this machine that train simulated sites, each behind a socket pair that also carries descriptors."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

from atoll.aggregation.aggregator_process import ProcessPipe
from atoll.errors import ConfigError, RunFailed
from atoll.posix import OwnedFile
from atoll.simulate import engine
from atoll.simulate.engine import Killed
from atoll.simulate.job_messages import Answer, Beginning, Job
from atoll.simulate.site_process import NUMBER_BYTES, take_number

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


class LocalHost:
    """This machine."""

    name, kind, ahead = "local", "a process", AHEAD

    def open(self) -> None:
        """Do nothing."""

    def begin(self, beginning: Beginning) -> LocalProcess:
        """Start a process, which begins to load the script."""
        return LocalProcess(beginning)

    def close(self) -> None:
        """Do nothing."""


class LocalProcess:
    """A process behind a socket pair, and behind a pipe with the numbers of its jobs: see `site_process`."""

    def __init__(self, beginning: Beginning) -> None:
        self._base = ""  # digest of the version that it has
        self._numbers, self._put = OwnedFile(), OwnedFile()
        self._numbers.fd, self._put.fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        mine, theirs = ProcessPipe.pair()
        environment = {"PYTHONHASHSEED": "0"} | _MEMORY | dict(os.environ)  # the order of sets is the same in all
        for name in ("ATOLL_SERVER", "ATOLL_SITE", "ATOLL_DIR", "ATOLL_FAILPOINTS"):  # these are for other processes
            environment.pop(name, None)
        try:
            self._popen = subprocess.Popen(
                [
                    *(sys.executable, "-c", _MAIN),
                    *map(str, (theirs.fileno(), self._numbers.fd, os.getpid())),
                    *sys.path,
                ],
                pass_fds=[theirs.fileno(), self._numbers.fd],
                stdin=subprocess.DEVNULL,
                stdout=2,  # keep its output apart from a summary
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the simulation alone, which ends this
            )
        finally:
            theirs.close()
        self.pid = self._popen.pid
        self._channel = ProcessPipe(mine)
        with contextlib.suppress(OSError):  # `ready` tells how it ended
            self._channel.send({"what": "begin", "beginning": beginning.model_dump(mode="json")})

    def ready(self) -> None:
        """Wait until it has loaded the script.

        Raises:
            ConfigError: that cannot be loaded. Killed, RunFailed: it has ended.
        """
        late = threading.Event()

        def end() -> None:
            late.set()
            self.kill()

        slow = threading.Timer(engine.START_S, end)
        slow.start()
        try:
            told, _ = self._channel.receive()
        except EOFError:
            self.bury()
            code = self._popen.returncode
            if late.is_set():
                raise RunFailed(
                    f"A process of the simulation has not begun within {engine.START_S:g} s, and was ended.",
                    "What it printed says how far it came; most often the script's file does much when it is imported.",
                ) from None
            if code < 0:
                raise Killed(
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
        with contextlib.suppress(OSError):
            if self._base != job.ticket.base_digest:
                self._base = job.ticket.base_digest
                self._channel.send({"what": "version", "digest": self._base}, job.base.fd)
            self._channel.send({"what": "train", "job": job.ticket.id, **job.round.to_json()}, job.spool_fd)
            os.write(self._put.fd, job.ticket.id.to_bytes(NUMBER_BYTES, "little"))

    def take_back(self) -> int | None:
        """Take the number of the oldest job that it has not begun out of the pipe."""
        return take_number(self._numbers.fd)

    def hear(self) -> tuple[int, Answer] | None:
        """Return the next answer and its job's ticket; None once the process has ended."""
        try:
            told, _ = self._channel.receive()
        except (EOFError, OSError):
            return None
        del told["what"]
        return told.pop("job"), Answer.from_json(told)

    def kill(self) -> None:
        """Kill it."""
        self._popen.kill()

    def bury(self) -> str:
        """Wait for its end, end what it has started, and return how it ended. Idempotent."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._channel.close()
        code = self._popen.wait()
        return f"ended with signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
