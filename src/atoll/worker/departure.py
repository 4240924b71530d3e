"""A process that ends without leaving its run: the server is told all the same, so that no round waits for it.

SIGTERM unwinds the script, as Ctrl-C does, and so does SIGHUP, which the end of an ssh session sends. What is still
joined when Python exits leaves then, and says by which error. Python tells its exit handlers no exit code, so that of
`sys.exit` is remembered while anything is joined. For an end that runs no Python (SIGKILL, a crash of a library),
`atoll worker` leaves in the script's name: it finds the lease in a folder.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback
import weakref
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol

LEASES = "ATOLL_LEASES"
"""The folder where a process notes its lease for `atoll worker`, which set this variable."""

UNNOTED = "the server learns of it only when heartbeat_timeout_s is over."

GOODBYE_S = 5.0
"""A server that does not answer for so long is left without a word: it learns of it by the silence."""

WATCHED = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process by default. SIGHUP is ignored under nohup, and stays so."""

ENDED_WELL = (None, 0, *(128 + number for number in (signal.SIGINT, *WATCHED)))
"""Exit codes of a script that has not failed: it is done, or was told to end."""


class Terminated(SystemExit):
    """A signal ends the program, with exit code 128 + its number; what it has opened is closed on the way."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self._number = number

    def __str__(self) -> str:
        return f"ended by {signal.Signals(self._number).name}"


def last_words(error: BaseException | None) -> str | None:
    """What the server is told of the error that ended training; None where it ended well, or its user ended it."""
    if isinstance(error, Terminated):
        return str(error)
    if error is None or isinstance(error, KeyboardInterrupt | GeneratorExit):
        return None
    if isinstance(error, SystemExit) and error.code in ENDED_WELL:
        return None
    return "".join(traceback.format_exception_only(error)).strip()


class Joined(Protocol):
    """What takes part in a run."""

    def leave(self, error: str | None = None) -> None:
        """Deregister; again does nothing."""


_joined: weakref.WeakSet[Joined] = weakref.WeakSet()
_pid = 0  # of the process that watches: a fork of it has joined nothing
_exit: SystemExit | None = None
"""What the main thread's last `sys.exit`, or a signal, raised while anything was joined."""
_python_exit = sys.exit
_said = False  # that a lease cannot be noted


def watch_exit(joined: Joined) -> None:
    """Let it leave when this process ends, by SIGTERM or SIGHUP, too; a script's own handler of these stays."""
    global _pid, _exit, _python_exit
    if _pid != os.getpid():
        _pid = os.getpid()
        _joined.clear()
        atexit.register(_leave_all)
    _joined.add(joined)
    _exit = None
    if sys.exit is not _remembered_exit:
        _python_exit, sys.exit = sys.exit, _remembered_exit
    if threading.current_thread() is threading.main_thread():
        for number in WATCHED:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _unwind)


def has_left(joined: Joined) -> None:
    """It need not leave any more; behind the last one `sys.exit` is Python's own again."""
    _joined.discard(joined)
    if not _joined and sys.exit is _remembered_exit:
        sys.exit = _python_exit


def what_ends() -> BaseException | None:
    """The error by which this process ends, asked when Python exits: nothing caught it. None where it ends well."""
    return getattr(sys, "last_value", None) or _exit


def _remembered_exit(status: sys._ExitCode | None = None, /) -> NoReturn:
    global _exit
    if threading.current_thread() is threading.main_thread():  # in another thread it ends that thread alone
        _exit = SystemExit(status)
    _python_exit(status)


def _unwind(number: int, frame: FrameType | None) -> None:
    global _exit
    signal.signal(number, signal.SIG_DFL)  # a second one ends a program that does not unwind
    if _pid != os.getpid():
        signal.raise_signal(number)
    _exit = Terminated(number)
    raise _exit


def _leave_all() -> None:
    if _pid == os.getpid():
        for joined in list(_joined):
            joined.leave(last_words(what_ends()))


def note_lease(site: str, server: str, lease: str) -> None:
    """Note a lease where `atoll worker` finds it. Training goes on without the note where it cannot be written."""
    from atoll.worker.reporting import LOG

    global _said
    if not (folder := os.environ.get(LEASES)):
        return
    beside = Path(folder, f".{site}.{os.getpid()}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f"{server}\n{lease}\n")
        beside.replace(Path(folder, site))
    except OSError as error:
        if not _said:
            LOG.warning("%s: cannot note the lease: %s. If this process is killed, %s", site, error, UNNOTED)
        _said = True


def forget_lease(site: str, lease: str) -> None:
    """Remove the note of a lease that was given back; that of a newer process stays."""
    if folder := os.environ.get(LEASES):
        path = Path(folder, site)
        if path.exists() and path.read_text().splitlines()[1:] == [lease]:
            path.unlink()


def leave_for(folder: Path, why: str) -> list[str]:
    """Give back the leases that a process noted in a folder and did not give back itself; returns their sites.

    Args:
        why: what ended the process; the server shows it.
    """
    from atoll.errors import AtollError
    from atoll.wire import messages, routes
    from atoll.worker.address import http_to
    from atoll.worker.reporting import LOG

    left = []
    for path in sorted(folder.glob("[!.]*")):
        try:
            server, lease = path.read_text().splitlines()
            with contextlib.closing(http_to(server)) as http:
                http.lease = lease
                http.send(routes.LEAVE, messages.Leave(error=why), timeout_s=GOODBYE_S)
            left.append(path.name)
        except (AtollError, OSError, ValueError) as error:
            # the server is away, or has declared the site dead already; or the token's file is gone meanwhile
            LOG.debug("%s: could not be taken out of its run: %s", path.name, error)
    return left
