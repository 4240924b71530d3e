"""A process that ends without leaving its run: the server is told all the same, so that no round waits for it.

SIGTERM unwinds the script, as Ctrl-C does; what is still joined when Python exits leaves then. For an end that runs no
Python (SIGKILL, a crash of a library), `atoll worker` leaves in the script's name: it finds the lease in a folder.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Protocol

LEASES = "ATOLL_LEASES"
"""The folder where a process notes its lease for `atoll worker`, which set this variable."""

GOODBYE_S = 5.0
"""A server that does not answer for so long is left without a word: it learns of it by the silence."""

BY_SIGTERM = 128 + signal.SIGTERM


class Terminated(SystemExit):
    """SIGTERM came: the program ends with exit code 143, and what it has opened is closed on the way."""

    def __init__(self) -> None:
        super().__init__(BY_SIGTERM)

    def __str__(self) -> str:
        return "ended by SIGTERM"


class Joined(Protocol):
    """What takes part in a run."""

    def leave(self, error: str | None = None) -> None:
        """Deregister; again does nothing."""


_joined: weakref.WeakSet[Joined] = weakref.WeakSet()
_pid = 0  # of the process that watches: a fork of it has joined nothing
_terminated = False


def watch_exit(joined: Joined) -> None:
    """Let it leave when this process ends, by SIGTERM, too; a script's own handler of SIGTERM stays as it is."""
    global _pid
    if _pid != os.getpid():
        _pid = os.getpid()
        _joined.clear()
        atexit.register(_leave_all)
    _joined.add(joined)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _unwind)


def _unwind(number: int, frame: FrameType | None) -> None:
    global _terminated
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends a program that does not unwind
    if _pid != os.getpid():
        signal.raise_signal(signal.SIGTERM)
    _terminated = True
    raise Terminated


def _leave_all() -> None:
    if _pid == os.getpid():
        for joined in list(_joined):
            joined.leave(str(Terminated()) if _terminated else None)


def note_lease(site: str, server: str, lease: str) -> None:
    """Note a lease where `atoll worker` finds it."""
    if folder := os.environ.get(LEASES):
        beside = Path(folder, f".{site}.{os.getpid()}")
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f"{server}\n{lease}\n")
        beside.replace(Path(folder, site))


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

    left = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        server, lease = path.read_text().splitlines()
        http = http_to(server)
        http.lease = lease
        try:
            http.send(routes.LEAVE, messages.Leave(error=why), timeout_s=GOODBYE_S)
            left.append(path.name)
        except AtollError:
            pass  # the server is away, or has declared the site dead already: it learns of the end by the silence
        finally:
            http.close()
    return left
