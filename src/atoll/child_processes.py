"""Processes that a command or a recipe starts and is answerable for: none of them outlives it."""

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
"""From SIGTERM to SIGKILL."""

_PR_SET_PDEATHSIG = 1


class Terminated(BaseException):
    """SIGTERM; not an error, so that nothing on the way catches it."""


def raise_on_sigterm() -> None:
    """Let SIGTERM unwind the program as Ctrl-C does."""

    def handler(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, handler)


class Children:
    """Starts processes; as a context manager, ends what is left of them.

    Each has a session of its own, so that Ctrl-C reaches them only through `stop`: workers first, the server last. On
    Linux they also get a SIGTERM when this process is killed.
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
        """Start a process that runs this Python on `argv`.

        Args:
            log: file for what it prints; both streams, or with `piped` only standard error.
            piped: give it a pipe for standard input and output each.
        """
        file = log.open("wb") if log is not None else None
        try:
            with _uninterrupted():  # else Ctrl-C may leave a process that is not in the list
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
        """SIGTERM, in the reverse order of their start; SIGKILL for what is still there after `GRACE_S`."""
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
"""`preexec_fn` of a child that gets SIGTERM when this process is killed; None where only Linux could do it."""


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals that would unwind the program do so at the end of the block."""
    came: list[int] = []
    try:
        with _handled_by(lambda number, _: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Within, SIGINT and SIGTERM come to `handler`; off the main thread, to which alone they come, nothing is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
