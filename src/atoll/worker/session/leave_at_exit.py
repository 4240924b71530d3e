"""Make a worker leave its run when its process ends, even after an error or a signal.

SIGTERM and SIGHUP (the end of an ssh session) raise an exception in the script, as Ctrl-C does. A `with` block sees the
exception that ends it, and tells the server. A worker that is still joined when Python exits leaves then, and tells the
server of an uncaught exception or a signal. Python does not tell exit handlers the code of `sys.exit`, but `atoll
worker` sees it: a worker that does not know how its process ends leaves its lease, the token that the server gave it,
to this command. The same happens if no Python code runs at the end (SIGKILL, a crash of a library). For this, the
process writes its lease to a folder.

Python handles signals only between two bytecode instructions, so native code that hangs delays a signal, and Python
drops an exception that is raised in a finalizer (`__del__`) or in a fork handler. SIGKILL ends such a process.
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
from typing import Protocol

from atoll.errors import ServerFailed, Superseded
from atoll.posix import no_sync, open_own, own_folder, read_own, replace_file

LEASES = "ATOLL_LEASES"
"""Variable that `atoll worker` sets: the folder where the script's process writes its lease."""

UNNOTED = "the server notices only after heartbeat_timeout_s."

GOODBYE_S = 5.0
"""Seconds to wait for the server's answer when leaving. If none comes, the server will notice that heartbeats stop."""

WATCHED = (signal.SIGTERM, signal.SIGHUP)
"""Signals that raise `EndedBySignal` in the script. Under nohup, SIGHUP stays ignored."""

ENDED_WELL = (None, 0, 128 + signal.SIGINT)
"""Exit codes of a script that has not failed: it finished, or the user interrupted it."""


class EndedBySignal(SystemExit):
    """The exception that a signal raises in the script. The exit code is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"ended by {signal.Signals(self.number).name}"


def last_words(error: BaseException | None) -> str | None:
    """Return the text that tells the server which error ended training.

    Return None if training ended well, or if the user interrupted it. If another process of the site has taken over, or
    the run has failed at the server, also tell `atoll worker`, which then does not restart this one.
    """
    if isinstance(error, Superseded | ServerFailed) and (folder := os.environ.get(LEASES)):
        with contextlib.suppress(OSError):
            name = SUPERSEDED if isinstance(error, Superseded) else RUN_FAILED
            own_folder(Path(folder), Path(folder).parent)
            os.close(open_own(Path(folder, name), os.O_WRONLY | os.O_CREAT))
    if isinstance(error, EndedBySignal):
        return str(error)
    if error is None or isinstance(error, KeyboardInterrupt | GeneratorExit):
        return None
    if isinstance(error, SystemExit):
        if error.code in ENDED_WELL:
            return None
        for number in WATCHED:  # the script's own handler may exit with the shell's code for the signal
            if error.code == 128 + number:
                return str(EndedBySignal(number))
    return "".join(traceback.format_exception_only(error)).strip()


class LeavesAtExit(Protocol):
    """An object that is part of a run until it leaves, such as `Session`."""

    def leave(self, error: str | None = None) -> None:
        """Leave the run. A second call does nothing."""


_joined: weakref.WeakSet[LeavesAtExit] = weakref.WeakSet()
_pid = 0  # id of the process that `_joined` belongs to; a fork of it has joined nothing
_signal: EndedBySignal | None = None
"""The exception of the last signal, which a script may have caught. Reset when a worker joins."""
_is_warned = False  # whether the warning about an unwritable lease was logged


def watch_exit(joined: LeavesAtExit) -> None:
    """Make `joined` leave its run when this process ends, even by SIGTERM or SIGHUP.

    Signal handlers that the script has set are not replaced.
    """
    global _pid, _signal
    if _pid != os.getpid():
        _pid = os.getpid()
        _joined.clear()
        atexit.register(_leave_all)
    _joined.add(joined)
    _signal = None
    if threading.current_thread() is threading.main_thread():
        for number in WATCHED:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _unwind)


def has_left(joined: LeavesAtExit) -> None:
    """Stop watching an object that has left its run. If no joined object remains, restore the signal handlers."""
    _joined.discard(joined)
    if not _joined and threading.current_thread() is threading.main_thread():
        for number in WATCHED:
            if signal.getsignal(number) is _unwind:
                signal.signal(number, signal.SIG_DFL)


def what_ends() -> BaseException | None:
    """Return the uncaught exception or the signal that ends this process, if Atoll knows one. Only valid at its end.

    The exception of `sys.exit` is not known.
    """
    return getattr(sys, "last_value", None) or _signal


def command_sees_end() -> bool:
    """Return whether Python exits for a reason unknown here, and `atoll worker` waits for this process's exit code.

    The command knows only the code of the process that it has started itself, and writes its own id into the name of
    the folder for leases.
    """
    is_exiting = not threading.main_thread().is_alive()
    return is_exiting and what_ends() is None and f"_{os.getppid()}-" in Path(os.environ.get(LEASES, "")).name


def _unwind(number: int, frame: FrameType | None) -> None:
    global _signal
    signal.signal(number, signal.SIG_DFL)  # a second signal ends a program that does not unwind
    if _pid != os.getpid() or not _joined:  # this is a fork, or the last worker left in another thread
        signal.raise_signal(number)
    _signal = EndedBySignal(number)
    raise _signal


def _leave_all() -> None:
    if _pid != os.getpid():
        return
    main = threading.current_thread() is threading.main_thread()
    handled = [number for number in WATCHED if main and signal.getsignal(number) is _unwind]
    for number in handled:
        signal.signal(number, signal.SIG_IGN)  # the process ends already; leaving takes at most `GOODBYE_S` each
    try:
        for joined in list(_joined):
            joined.leave(last_words(what_ends()))
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


SUPERSEDED = ".superseded"
"""File in the folder `ATOLL_LEASES`: another process has joined as a site of this command."""
RUN_FAILED = ".run-failed"
"""File in the folder `ATOLL_LEASES`: the run of a site of this command has failed at the server."""


def note_lease(site: str, server: str, lease: str) -> None:
    """Write a worker's lease to a file in the folder `ATOLL_LEASES`, where `atoll worker` finds it.

    With the lease, `atoll worker` can make the site leave if this process is killed. The folder exists only while it
    contains leases, so that no folder stays behind if `atoll worker` itself is killed. If the file cannot be written,
    log a warning, once.

    Args:
        site: the site's name.
        server: address of the server.
        lease: the token that the server gave the worker on joining.
    """
    from atoll.worker.log_lines import LOG

    global _is_warned
    if not (folder := os.environ.get(LEASES)):
        return
    target, temporary = Path(folder, site), Path(folder, f".{site}.{os.getpid()}")
    try:
        own_folder(target.parent, target.parent.parent)
        replace_file(target, [f"{server}\n{lease}\n".encode()], temporary=temporary, sync=no_sync)
    except OSError as error:
        if not _is_warned:
            LOG.warning(
                "%s: the lease could not be written to a file: %s. If this process is killed, %s", site, error, UNNOTED
            )
        _is_warned = True


def forget_lease(site: str, lease: str) -> None:
    """Remove the file of a lease after the worker has left. If the file already has a newer process's lease, keep it.

    If the folder is empty then, remove the folder, too.
    """
    if folder := os.environ.get(LEASES):
        path = Path(folder, site)
        with contextlib.suppress(OSError, ValueError):  # there is no file; or the folder has other leases
            if _noted_in(path)[1:] == [lease]:
                path.unlink()
                path.parent.rmdir()


def _noted_in(path: Path) -> list[str]:
    """Return the lines of a lease's file: the server's address and the lease."""
    return read_own(path).decode().splitlines()


def leave_for(folder: Path, why: str | None) -> list[str]:
    """After a process has ended, make its sites leave their run. Return the names of the sites that have left.

    Args:
        folder: the folder that `ATOLL_LEASES` named for the process, with a file for each lease.
        why: the error that ended the process, which the server's status shows; None: it ended well.
    """
    from atoll.errors import AtollError
    from atoll.protocol import messages, routes
    from atoll.transport.http_client import http_to
    from atoll.worker.log_lines import LOG

    names = []
    for path in sorted(folder.glob("[!.]*")):
        try:
            server, lease = _noted_in(path)
            with contextlib.closing(http_to(server, site=path.name)) as http:
                http.lease = lease
                http.send(routes.LEAVE, messages.Leave(error=why), timeout_s=GOODBYE_S)
            names.append(path.name)
        except (AtollError, OSError, ValueError) as error:
            # the server does not answer, or has declared the site dead; or the token's file no longer exists
            LOG.debug("%s: could not leave the run: %s", path.name, error)
    return names
