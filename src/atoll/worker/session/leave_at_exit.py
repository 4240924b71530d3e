"""A process that ends without leaving its run: the server is told all the same, so that no round waits for it.

SIGTERM unwinds the script, as Ctrl-C does, and so does SIGHUP, which the end of an ssh session sends. What is still
joined when Python exits leaves then, and says by which error. Python tells its exit handlers no exit code, so that of
`sys.exit` is remembered while anything is joined. For an end that runs no Python (SIGKILL, a crash of a library),
`atoll worker` leaves in the script's name: it finds the lease in a folder.

Python handles a signal only between two of its own instructions. A thread watches for one that it does not get to
handle, as native code hangs; a second signal ends the process in any case. Python drops what is raised in a finalizer
(`__del__`) or a handler at fork: a signal that comes there is sent again until it unwinds the script.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

if TYPE_CHECKING:
    from atoll.transport.http_client import Http

LEASES = "ATOLL_LEASES"
"""The folder where a process notes its lease for `atoll worker`, which set this variable."""

LAST_STATUS = "ATOLL_LAST_STATUS"
"""Set by a recipe's `ServerEnv`: the file that the server's last status goes to, as the server may be gone by then."""

UNNOTED = "the server learns of it only when heartbeat_timeout_s is over."

GOODBYE_S = 5.0
"""A server that does not answer for so long is left without a word: it learns of it by the silence."""

WATCHED = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process by default. SIGHUP is ignored under nohup, and stays so."""

AGAIN_S = 0.05
"""So long after a signal that Python dropped it is sent again."""

HANG_S = 5.0
"""Python has so long to handle a signal before the process ends without it."""

ENDED_WELL = (None, 0, 128 + signal.SIGINT)
"""Exit codes of a script that has not failed: it is done, or its user ended it."""


class EndedBySignal(SystemExit):
    """A signal ends the program, with exit code 128 + its number; what it has opened is closed on the way."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"ended by {signal.Signals(self.number).name}"


def last_words(error: BaseException | None) -> str | None:
    """What the server is told of the error that ended training; None where it ended well, or its user ended it."""
    if isinstance(error, EndedBySignal):
        return str(error)
    if error is None or isinstance(error, KeyboardInterrupt | GeneratorExit):
        return None
    if isinstance(error, SystemExit):
        if error.code in ENDED_WELL:
            return None
        for number in WATCHED:  # a handler of the script's own, that exits as shells have it
            if error.code == 128 + number:
                return str(EndedBySignal(number))
    return "".join(traceback.format_exception_only(error)).strip()


class Joined(Protocol):
    """What takes part in a run."""

    def leave(self, error: str | None = None) -> None:
        """Deregister; again does nothing."""


_joined: weakref.WeakSet[Joined] = weakref.WeakSet()
_pid = 0  # of the process that watches: a fork of it has joined nothing
_exit: SystemExit | None = None
"""What the main thread's last `sys.exit`, or a signal, raised while anything was joined."""
_handled = 0  # signals, by `_unwind`
_said = False  # that a lease cannot be noted


class _Forking(threading.local):
    """The signals that the calling thread let through before the fork that it is in, and those around that fork.

    Attributes:
        began_s: when the outermost fork began. A handler of the script's own that raises in ours may leave `masks`.
    """

    masks: tuple[set[signal.Signals | int], ...] = ()
    began_s: float = 0.0


_forking = _Forking()


def watch_exit(joined: Joined) -> None:
    """Let it leave when this process ends, by SIGTERM or SIGHUP, too; a script's own handler of these stays."""
    global _pid, _exit
    if _pid != os.getpid():
        _pid = os.getpid()
        _joined.clear()
        atexit.register(_leave_all)
    _joined.add(joined)
    _exit = None
    _EXIT.replace()
    _UNRAISABLE.replace()
    if threading.current_thread() is threading.main_thread():
        for number in WATCHED:
            if signal.getsignal(number) is signal.SIG_DFL:
                _unwind_at_the_first(number)
        _watch_signals()


def has_left(joined: Joined) -> None:
    """It need not leave any more; behind the last one `sys.exit`, hooks and signals are Python's own again."""
    _joined.discard(joined)
    if _joined:
        return
    _EXIT.restore()
    _UNRAISABLE.restore()
    if threading.current_thread() is threading.main_thread():
        for number in WATCHED:
            if signal.getsignal(number) is _unwind:
                signal.signal(number, signal.SIG_DFL)


def what_ends() -> BaseException | None:
    """The error by which this process ends, asked when Python exits: nothing caught it. None where it ends well."""
    return getattr(sys, "last_value", None) or _exit


class _Replaced:
    """A function of `sys` that is replaced while anything is joined.

    Each time by another object: other code may have taken the last one into a function of its own meanwhile, and it
    must go on to what was there before it, not to that function.
    """

    def __init__(self, name: str, made_of: Callable[[Any], Any]) -> None:
        self._name, self._made_of = name, made_of
        self._ours: object = None
        self._before: object = None

    def replace(self) -> None:
        """Nothing where it is replaced already."""
        before = getattr(sys, self._name)
        if before is not self._ours:
            self._before, self._ours = before, self._made_of(before)
            setattr(sys, self._name, self._ours)

    def restore(self) -> None:
        """Nothing where other code has replaced it since."""
        if getattr(sys, self._name) is self._ours:
            setattr(sys, self._name, self._before)


def _remembering_exit(python_exit: Callable[[sys._ExitCode | None], NoReturn]) -> Callable[..., NoReturn]:
    def remember(status: sys._ExitCode | None = None, /) -> NoReturn:
        global _exit
        if threading.current_thread() is threading.main_thread():  # in another thread it ends that thread alone
            _exit = SystemExit(status)
        python_exit(status)

    return remember


def _sending_again(before: Callable[[sys.UnraisableHookArgs], Any]) -> Callable[[sys.UnraisableHookArgs], None]:
    """A hook for errors that Python drops: a signal among them, or behind one of them, is sent again."""

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        error: BaseException | None = dropped.exc_value
        while error is not None and not isinstance(error, EndedBySignal):
            error = error.__context__
        if error is not None and threading.current_thread() is threading.main_thread():
            _send_again(error.number)
        if error is not dropped.exc_value or error is None:
            before(dropped)

    return hook


_EXIT = _Replaced("exit", _remembering_exit)
_UNRAISABLE = _Replaced("unraisablehook", _sending_again)


def _unwind(number: int, frame: FrameType | None) -> None:
    global _exit, _handled
    _handled += 1
    if _forking.masks:
        if time.monotonic() - _forking.began_s < HANG_S:
            _send_again(number)  # to raise here would also leave a handler at fork half done
            return
        before, _forking.masks = _forking.masks[0], ()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    signal.signal(number, signal.SIG_DFL)  # a second one ends a program that does not unwind
    if _pid != os.getpid() or not _joined:  # a fork, or the last one left in another thread
        signal.raise_signal(number)
    _exit = EndedBySignal(number)
    raise _exit


def _send_again(number: int) -> None:
    global _exit
    _exit = EndedBySignal(number)
    if not threading.main_thread().is_alive():  # Python ends already: the exit handlers run
        return
    _unwind_at_the_first(number)
    sending = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))  # not from here, where it would be dropped, too
    sending.daemon = True
    sending.start()


def _unwind_at_the_first(number: int) -> None:
    """Unwind the script at this signal. A second one ends the process, even where Python never handles the first.

    The kernel forgets the handler once it is called; only glibc can say it.
    """
    signal.signal(number, _unwind)
    with contextlib.suppress(AttributeError, OSError):
        sysv_signal = ctypes.CDLL(None).sysv_signal
        sysv_signal.restype, sysv_signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
        handler = sysv_signal(number, None)  # Python's; the default for a moment
        sysv_signal(number, handler)


def _watch_signals() -> None:
    """Watch, in a thread, for a signal that is not handled. A program that has a wakeup descriptor keeps it."""
    before = signal.set_wakeup_fd(-1)
    if before != -1:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _keep_from_forks(writer)
    threading.Thread(target=_end_a_hang, args=(reader,), name="atoll-signals", daemon=True).start()


def _keep_from_forks(writer: int) -> None:
    """Block signals around a fork, until the child has a wakeup pipe of its own.

    A signal to the child that came earlier would be written to the parent's pipe, as if it were the parent's, and the
    child would lose it: a child that was to end would live on.
    """

    def hold() -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if not _forking.masks:
            _forking.began_s = time.monotonic()
        _forking.masks += (before,)  # of the thread that forks, which is the one that the fork has
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)

    def release() -> None:
        masks = _forking.masks  # none where a signal has ended `hold` before it began
        try:
            if masks:
                signal.pthread_sigmask(signal.SIG_SETMASK, masks[-1])
        finally:
            _forking.masks = masks[:-1]

    def release_fork() -> None:
        try:
            _stop_watching(writer)
        finally:
            if masks := _forking.masks:
                _forking.masks = ()
                signal.pthread_sigmask(signal.SIG_SETMASK, masks[0])

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=release_fork)


def _stop_watching(writer: int) -> None:
    found = signal.set_wakeup_fd(-1)
    if found != writer:
        signal.set_wakeup_fd(found)


def _end_a_hang(reader: int) -> None:
    while number := os.read(reader, 1):
        before = _handled
        if number[0] not in WATCHED or signal.getsignal(number[0]) is not _unwind:
            continue
        time.sleep(HANG_S)
        if _handled == before and _joined:
            words = f"{EndedBySignal(number[0])}, which Python did not get to handle"
            for joined in list(_joined):
                leaving = threading.Thread(target=joined.leave, args=(words,), daemon=True)
                leaving.start()
                leaving.join(2 * GOODBYE_S)
            os._exit(128 + number[0])


def _leave_all() -> None:
    if _pid != os.getpid():
        return
    main = threading.current_thread() is threading.main_thread()
    handled = [number for number in WATCHED if main and signal.getsignal(number) is _unwind]
    for number in handled:
        signal.signal(number, signal.SIG_IGN)  # this is the end already, and takes `GOODBYE_S` at most
    try:
        for joined in list(_joined):
            joined.leave(last_words(what_ends()))
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def note_lease(site: str, server: str, lease: str) -> None:
    """Note a lease where `atoll worker` finds it. Training goes on without the note where it cannot be written."""
    from atoll.worker.log_lines import LOG

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


def keep_last_status(http: Http) -> None:
    """Ask the server for its status, where the program that started this site wants to know it.

    Raises:
        AtollError: the server does not answer.
    """
    from atoll.protocol import routes
    from atoll.protocol.status_messages import Status

    if place := os.environ.get(LAST_STATUS):
        text = http.get(routes.STATUS, Status).model_dump_json()
        beside = Path(f"{place}.{os.getpid()}")  # ranks of one site leave at the same time
        beside.write_text(text, encoding="utf-8")
        beside.replace(place)


def leave_for(folder: Path, why: str) -> list[str]:
    """Give back the leases that a process noted in a folder and did not give back itself; returns their sites.

    Args:
        why: what ended the process; the server shows it.
    """
    from atoll.errors import AtollError
    from atoll.protocol import messages, routes
    from atoll.transport.http_client import http_to
    from atoll.worker.log_lines import LOG

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
