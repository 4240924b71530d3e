"""Start processes on this machine that train simulated sites. A socket pair carries messages and file descriptors."""

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
"""Number of jobs that a process gets in advance. With 0, waiting for a job takes longer than training a small model."""
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(16 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20)}
"""Make malloc keep freed buffers of a few MiB, so that the kernel need not supply their pages again in every round."""

_MAIN = """
import sys
sys.path[:] = sys.argv[4:]
from atoll.simulate.site_process import main
main(*map(int, sys.argv[1:4]))
"""


class LocalHost:
    """This machine, as the host of processes."""

    name, kind, ahead = "local", "a process", AHEAD

    def open(self) -> None:
        """Do nothing: this machine needs no preparation."""

    def begin(self, beginning: Beginning) -> LocalProcess:
        """Start a process and return it; the process then loads the script."""
        return LocalProcess(beginning)

    def close(self) -> None:
        """Do nothing: `open` has created nothing."""


class LocalProcess:
    """A process on this machine, connected by a socket pair and a pipe with the numbers of its jobs: `site_process`."""

    def __init__(self, beginning: Beginning) -> None:
        self._base = ""  # digest of the version that was sent to the process last
        self._numbers, self._put = OwnedFile(), OwnedFile()
        self._numbers.fd, self._put.fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        mine, theirs = ProcessPipe.pair()
        environment = {"PYTHONHASHSEED": "0"} | _MEMORY | dict(os.environ)  # same order of sets in every process
        for name in ("ATOLL_SERVER", "ATOLL_SITE", "ATOLL_DIR", "ATOLL_FAILPOINTS"):  # meant for other processes
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
                stdout=2,  # so that its output does not mix with a summary on standard output
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only the simulation, which then kills this process
            )
        finally:
            theirs.close()
        self.pid = self._popen.pid
        self._channel = ProcessPipe(mine)
        with contextlib.suppress(OSError):  # if the process has ended, `ready` reports that
            self._channel.send({"what": "begin", "beginning": beginning.model_dump(mode="json")})

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
        """Send a job to the process, after the job's version. If the process has ended, only `hear` reports that."""
        with contextlib.suppress(OSError):
            if self._base != job.ticket.base_digest:
                self._base = job.ticket.base_digest
                self._channel.send({"what": "version", "digest": self._base}, job.base.fd)
            self._channel.send({"what": "train", "job": job.ticket.id, **job.round.to_json()}, job.spool_fd)
            os.write(self._put.fd, job.ticket.id.to_bytes(NUMBER_BYTES, "little"))

    def take_back(self) -> int | None:
        """Read the number of the oldest job that the process has not begun from the pipe; None if the pipe is empty."""
        return take_number(self._numbers.fd)

    def hear(self) -> tuple[int, Answer] | None:
        """Wait for the next answer; return (ticket of the job, answer), or None once the process has ended."""
        try:
            told, _ = self._channel.receive()
        except (EOFError, OSError):
            return None
        del told["what"]
        return told.pop("job"), Answer.from_json(told)

    def kill(self) -> None:
        """Kill the process."""
        self._popen.kill()

    def bury(self) -> str:
        """Wait until the process has ended, kill its child processes, and return how it ended. Idempotent."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._channel.close()
        code = self._popen.wait()
        return f"ended with signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
