"""Child processes of a command or a recipe. They are ended when the command or recipe ends."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType

GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL, in seconds."""

_PR_SET_PDEATHSIG = 1


class Terminated(BaseException):
    """The exception that SIGTERM raises. It is a BaseException, so that `except Exception` does not catch it."""


def raise_on_sigterm() -> None:
    """Make SIGTERM raise `Terminated`, so that it unwinds the program like Ctrl-C."""

    def handler(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, handler)


class Children:
    """A set of child processes. At the end of a `with` block, those that still run are stopped.

    Each child has its own session, so that Ctrl-C does not reach it directly. `stop` ends the children in reverse order
    of their start. On Linux, the children also get SIGTERM when this process is killed.
    """

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def spawn(
        self,
        name: str,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path | None = None,
        piped: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a process that runs this Python with `argv`.

        Args:
            name: name of the process in `processes`.
            argv: arguments of the Python interpreter.
            environment: all environment variables of the process.
            log: file for its standard output and standard error; with `piped`, only for standard error.
            piped: whether to connect its standard input and output to pipes.
        """
        file = log.open("wb") if log is not None else None
        try:
            with _uninterrupted():  # else Ctrl-C could leave a process that is not in the dict
                process = self.processes[name] = subprocess.Popen(
                    [sys.executable, *argv],
                    env=dict(environment),
                    stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if piped else file,
                    stderr=file if piped else subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=END_WITH_PARENT,
                )
        finally:
            if file is not None:
                file.close()
        return process

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Send SIGTERM to the children, in reverse order of their start. After `GRACE_S`, kill those that still run."""
        with _handled_by(signal.SIG_IGN):  # a second Ctrl-C must not leave half of the processes running
            alive = [process for process in reversed(self.processes.values()) if process.poll() is None]
            for process in alive:
                process.terminate()
            end = time.monotonic() + GRACE_S
            for process in alive:
                try:
                    process.wait(max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            for process in self.processes.values():
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        with contextlib.suppress(OSError):
                            stream.close()


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
END_WITH_PARENT = partial(_LIBC.prctl, _PR_SET_PDEATHSIG, signal.SIGTERM) if _LIBC is not None else None
"""A `preexec_fn`: it makes Linux send SIGTERM to the child when this process is killed. None on other systems."""


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block."""
    came: list[int] = []
    try:
        with _handled_by(lambda number, _: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Let `handler` handle SIGINT and SIGTERM within the block. In other threads than the main thread, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
