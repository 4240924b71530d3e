"""Start child processes: a group that ends with this process, or one process that exchanges messages through a pipe."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from atoll.errors import Terminated as Terminated
from atoll.posix import open_own, usable
from atoll.system_calls import memory_file

GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL, in seconds."""

_PR_SET_PDEATHSIG = 1


def raise_on_sigterm() -> None:
    """Make SIGTERM raise `Terminated` in the main thread, so that `with` and `finally` blocks run, as after Ctrl-C."""

    def handler(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, handler)


class Children:
    """A set of child processes. The end of a `with` block stops the processes that still run.

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
        appends: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a process of this Python interpreter with `argv`.

        Args:
            name: key of the process in the attribute `processes`.
            argv: arguments of the Python interpreter.
            environment: all environment variables of the process.
            log: file for the standard output and standard error of the process; None: both go to the standard output
                of the current process.
            appends: whether to keep what the log has already.
        """
        file = None
        if log is not None:
            with usable(log.parent):
                how = os.O_APPEND if appends else os.O_TRUNC
                file = os.fdopen(open_own(log, os.O_WRONLY | os.O_CREAT | how), "wb")
        try:
            with _uninterrupted():  # else Ctrl-C could leave a process that is not in the dict
                process = self.processes[name] = subprocess.Popen(
                    [sys.executable, *argv],
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
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
        """Send SIGTERM to the children, the last started first. After `GRACE_S` seconds, kill those that still run.

        A second Ctrl-C, or SIGTERM, kills them at once.
        """
        alive = [process for process in reversed(self.processes.values()) if process.poll() is None]

        def kill(*_: object) -> None:
            for process in alive:
                process.kill()

        with _handled_by(kill):  # a second Ctrl-C must not leave half of the processes running
            for process in alive:
                process.terminate()
            end = time.monotonic() + GRACE_S
            for process in alive:
                try:
                    process.wait(max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
END_WITH_PARENT = partial(_LIBC.prctl, _PR_SET_PDEATHSIG, signal.SIGTERM) if _LIBC is not None else None
"""A `preexec_fn`: it makes Linux send SIGTERM to the child when this process is killed. None on other systems."""


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block."""
    received: list[int] = []
    try:
        with _handled_by(lambda number, _: received.append(number)):
            yield
    finally:
        if received:
            signal.raise_signal(received[0])


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Let `handler` handle SIGINT and SIGTERM within the block. Outside the main thread, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


# -- a process that gets messages


MOST_MESSAGE_BYTES = 2**16
"""Maximum size of a message in a `ProcessPipe`. A longer message is sent in a memory file."""
LONG = b"+"
"""Sent in place of a long message, together with the descriptor of a memory file that contains the message."""


class ProcessPipe:
    """One end of the connection between two processes. A message is JSON, and may carry a file descriptor.

    Any thread may call `send`; only one thread may call `receive`.

    Args:
        end: one of the two sockets from `pair`. `close` closes the socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Return two connected sockets that preserve message boundaries."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send(self, message: dict[str, Any], fd: int | None = None) -> None:
        """Send a message. The other side gets a duplicate of `fd`; the caller keeps `fd` and closes it.

        Raises:
            OSError: the other side has closed the connection.
        """
        data = json.dumps(message).encode()
        with contextlib.ExitStack() as stack:
            fds = [] if fd is None else [fd]
            if len(data) > MOST_MESSAGE_BYTES:
                text = stack.enter_context(open(memory_file("message"), "wb", buffering=0))
                text.write(data)
                data, fds = LONG, [text.fileno(), *fds]
            if fds:
                socket.send_fds(self._socket, [data], fds)
            else:
                self._socket.send(data)

    def receive(self) -> tuple[dict[str, Any], int | None]:
        """Return the next message, and its file descriptor (None if it has none). The caller closes the descriptor.

        Raises:
            EOFError: the other side has closed the connection.
        """
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, MOST_MESSAGE_BYTES, 2)
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        for each in fds:
            os.set_inheritable(each, False)
        if data == LONG:
            with open(fds.pop(0), "rb") as text:
                text.seek(0)
                data = text.read()
        return json.loads(data), fds[0] if fds else None

    def fileno(self) -> int:
        """Return the descriptor of this end."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection. A running `receive`, here or at the other side, raises `EOFError`. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


_forking = threading.Lock()


class _Forked:
    """A forked process, with the methods of `subprocess.Popen` that are used here."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None
        self._lock = threading.Lock()  # two threads may wait

    def kill(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        with self._lock:
            if self._code is None:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            return self._code


def _be_child(main: Callable[[], object], let_go: Path) -> NoReturn:
    """Run `main` in a process that was just forked, then end the process."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)  # of the parent's event loop
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in map(int, os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ()):
            with contextlib.suppress(OSError):  # the folder's own descriptor
                if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{let_go.resolve()}{os.sep}"):
                    os.dup2(nothing, fd)  # not closed: an object that owns the number may close it later
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 (those of a notebook are no files)
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class PipedProcess:
    """A child process that runs the function `main` of a module. Exchange messages with it through `pipe`.

    The child's standard output goes to standard error. Ctrl-C does not reach the child.

    Args:
        module: name of the module. The child gets this process's `sys.path`.
        numbers: arguments of `main` after the first one, which is the file descriptor of the child's end of the pipe.
        environment: all environment variables of the child.
        inherited: further file descriptors that the child inherits.
    """

    def __init__(
        self, module: str, *numbers: int, environment: Mapping[str, str], inherited: Sequence[int] = ()
    ) -> None:
        own_end, child_end = ProcessPipe.pair()
        numbers = child_end.fileno(), *numbers
        code = f"import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main{numbers}"
        try:
            self._popen: subprocess.Popen[bytes] | _Forked = subprocess.Popen(
                [sys.executable, "-c", code, *sys.path],
                pass_fds=[child_end.fileno(), *inherited],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=dict(environment),
                start_new_session=True,
            )
        finally:
            child_end.close()
        self.pid, self.pipe = self._popen.pid, ProcessPipe(own_end)

    @classmethod
    def forked(cls, main: Callable[[int], object], let_go: Path) -> PipedProcess:
        """Return a fork of this process that calls `main`, which therefore may be a function that no name leads to.

        The child has one thread, and no signal handlers of this process.

        Args:
            main: gets the file descriptor of the child's end of the pipe.
            let_go: the child keeps no file of this folder open: its locks are this process's.
        """
        process = cls.__new__(cls)
        with _forking, warnings.catch_warnings():  # else another fork could keep the child's end open
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            own_end, child_end = ProcessPipe.pair()
            if not (pid := os.fork()):
                _be_child(partial(main, child_end.fileno()), let_go)
            child_end.close()
        process.pid, process.pipe, process._popen = pid, ProcessPipe(own_end), _Forked(pid)
        return process

    def kill(self) -> None:
        """Kill the process."""
        self._popen.kill()

    def bury(self) -> int:
        """Wait until the child has ended, kill the processes that it has forked, and return the child's exit code.

        Idempotent. The exit code is negative if a signal ended the child.
        """
        with contextlib.suppress(ChildProcessError, ProcessLookupError):  # already waited for, or no fork left
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            os.killpg(self.pid, signal.SIGKILL)
        self.pipe.close()
        return self._popen.wait()
