"""Make a worker leave its run when its process ends, even after an error or a signal.

SIGTERM and SIGHUP (the end of an ssh session) raise an exception in the script, as Ctrl-C does. When Python exits,
every worker that is still joined leaves its run and tells the server the error. Python does not pass the exit code to
exit handlers, so while a worker is joined, `sys.exit` is replaced by a function that remembers the code. If no Python
code runs at the end (SIGKILL, a crash of a library), the command `atoll worker` makes the worker leave. For this, the
process writes its lease, the token that the server gave the worker, to a folder.

Python handles signals only between two bytecode instructions. It cannot do so while native code hangs, so a thread
watches for this case and ends the process. A second signal ends the process in any case. Python drops an exception that
is raised in a finalizer (`__del__`) or in a fork handler. So a signal that arrives during one of these is sent again
until its exception reaches the script.
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

from atoll.errors import ServerFailed, Superseded
from atoll.posix import no_sync, open_own, own_folder, read_own, replace_file

if TYPE_CHECKING:
    from atoll.transport.http_client import Http

LEASES = "ATOLL_LEASES"
"""Variable that `atoll worker` sets: the folder where the script's process writes its lease."""

LAST_STATUS = "ATOLL_LAST_STATUS"
"""Variable that a recipe's `ServerEnv` sets: the file for the server's last status.

The status is written when the worker leaves, because the server may be gone afterwards.
"""
WHY_FAILED = "why-failed"
"""File beside it: the reason with which the run has failed at the server, if it has ended the worker."""

UNNOTED = "the server notices only after heartbeat_timeout_s."

GOODBYE_S = 5.0
"""Seconds to wait for the server's answer when leaving. If none comes, the server will notice that heartbeats stop."""

WATCHED = (signal.SIGTERM, signal.SIGHUP)
"""Signals that raise `EndedBySignal` in the script. Under nohup, SIGHUP stays ignored."""

AGAIN_S = 0.05
"""Seconds until a signal that Python dropped is sent again."""

HANG_S = 5.0
"""Seconds that Python has to handle a signal before the watching thread ends the process."""

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
    the run has failed at the server, also tell `atoll worker`, which then does not restart this one. A recipe gets the
    reason of such a failure.
    """
    if isinstance(error, Superseded | ServerFailed) and (folder := os.environ.get(LEASES)):
        with contextlib.suppress(OSError):
            name = SUPERSEDED if isinstance(error, Superseded) else RUN_FAILED
            own_folder(Path(folder), Path(folder).parent)
            os.close(open_own(Path(folder, name), os.O_WRONLY | os.O_CREAT))
    if isinstance(error, ServerFailed) and (path := os.environ.get(LAST_STATUS)):
        with contextlib.suppress(OSError):
            replace_file(Path(path).with_name(WHY_FAILED), [error.message.encode()], sync=no_sync)
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
_exit: SystemExit | None = None
"""The exception of the last `sys.exit` in the main thread, or of a signal. Reset when a worker joins."""
_handled = 0  # number of signals that `_unwind` has handled
_is_warned = False  # whether the warning about an unwritable lease was logged


class _Forking(threading.local):
    """The state of the calling thread while it forks.

    Attributes:
        masks: for each fork that is in progress, the thread's signal mask before the fork, outermost fork first; empty
            outside a fork. If a signal handler of the script raises an error during a fork, old masks may stay here.
        began_s: time at which the outermost fork began.
    """

    masks: tuple[set[signal.Signals | int], ...] = ()
    began_s: float = 0.0


_forking = _Forking()


def watch_exit(joined: LeavesAtExit) -> None:
    """Make `joined` leave its run when this process ends, even by SIGTERM or SIGHUP.

    Signal handlers that the script has set are not replaced.
    """
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


def has_left(joined: LeavesAtExit) -> None:
    """Stop watching an object that has left its run.

    If no joined object remains, restore `sys.exit`, `sys.unraisablehook` and the signal handlers.
    """
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
    """Return the uncaught exception that ends this process; None after a normal end. Only valid while Python exits."""
    return getattr(sys, "last_value", None) or _exit


class _Replaced:
    """A function of `sys` that is replaced while a worker is joined.

    If other code has set another function since the last `replace`, the next one makes a new replacement. The other
    function may call the earlier replacement. If that one called the other function in turn, the calls would never end.

    Args:
        name: the function's name in `sys`.
        made_of: returns the replacement, given the function that it replaces.
    """

    def __init__(self, name: str, made_of: Callable[[Any], Any]) -> None:
        self._name, self._made_of = name, made_of
        self._ours: object = None
        self._before: object = None

    def replace(self) -> None:
        """Replace the function, unless it is replaced already."""
        before = getattr(sys, self._name)
        if before is not self._ours:
            self._before, self._ours = before, self._made_of(before)
            setattr(sys, self._name, self._ours)

    def restore(self) -> None:
        """Restore the function that `replace` replaced. If other code has set another function since, do nothing."""
        if getattr(sys, self._name) is self._ours:
            setattr(sys, self._name, self._before)


def _remembering_exit(python_exit: Callable[[sys._ExitCode | None], NoReturn]) -> Callable[..., NoReturn]:
    def remember(status: sys._ExitCode | None = None, /) -> NoReturn:
        global _exit
        if threading.current_thread() is threading.main_thread():  # elsewhere `sys.exit` ends only the calling thread
            _exit = SystemExit(status)
        python_exit(status)

    return remember


def _sending_again(before: Callable[[sys.UnraisableHookArgs], Any]) -> Callable[[sys.UnraisableHookArgs], None]:
    """Return a `sys.unraisablehook` that sends a signal again if Python has dropped the signal's exception.

    The hook also sends the signal again if Python has dropped an exception that was raised while the signal's exception
    was being handled.

    Args:
        before: the hook to call for each dropped exception except that of a signal.
    """

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
            _send_again(number)  # an exception here would also end a fork handler halfway
            return
        before, _forking.masks = _forking.masks[0], ()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    signal.signal(number, signal.SIG_DFL)  # a second signal ends a program that does not unwind
    if _pid != os.getpid() or not _joined:  # this is a fork, or the last worker left in another thread
        signal.raise_signal(number)
    _exit = EndedBySignal(number)
    raise _exit


def _send_again(number: int) -> None:
    global _exit
    _exit = EndedBySignal(number)
    if not threading.main_thread().is_alive():  # Python is exiting, and the exit handlers run
        return
    _unwind_at_the_first(number)
    sending = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))  # raised here, it would be dropped again
    sending.daemon = True
    sending.start()


def _unwind_at_the_first(number: int) -> None:
    """Make the next signal with this number raise an exception in the script, and a second one end the process.

    The second one ends the process even if native code hangs: glibc's `sysv_signal` makes the kernel reset the handler
    after one call. Without glibc, only Python resets the handler, and it cannot do so during a hang.
    """
    signal.signal(number, _unwind)
    with contextlib.suppress(AttributeError, OSError):
        sysv_signal = ctypes.CDLL(None).sysv_signal
        sysv_signal.restype, sysv_signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
        handler = sysv_signal(number, None)  # returns Python's C handler, and sets the default for a moment
        sysv_signal(number, handler)


def _watch_signals() -> None:
    """Start a thread that ends the process if a signal arrives but Python does not handle it.

    Python tells the thread about signals through a wakeup descriptor. If the program has set its own
    descriptor, keep that one and start no thread.
    """
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
    """Block signals during a fork, until the child process no longer shares the parent's pipe for signals.

    Otherwise, Python in the child would report an early signal to the parent's pipe, and the child would not end.

    Args:
        writer: the write end of the parent's pipe (its signal wakeup descriptor).
    """

    def hold() -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if not _forking.masks:
            _forking.began_s = time.monotonic()
        _forking.masks += (before,)  # the forking thread is the only thread in the child
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)

    def release() -> None:
        masks = _forking.masks  # empty if a signal ended `hold` before its first line
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
            words = f"{EndedBySignal(number[0])} while Python could not handle signals"
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


def keep_last_status(http: Http) -> None:
    """Write the server's status to the file that `ATOLL_LAST_STATUS` names, if this variable is set.

    Raises:
        AtollError: the server does not answer.
    """
    from atoll.protocol import routes
    from atoll.protocol.status_messages import Status

    if path := os.environ.get(LAST_STATUS):
        text = http.get(routes.STATUS, Status).model_dump_json()
        replace_file(Path(path), [text.encode()], sync=no_sync)


def leave_for(folder: Path, why: str) -> list[str]:
    """After a process has ended, make its sites leave their run. Return the names of the sites that have left.

    Args:
        folder: the folder that `ATOLL_LEASES` named for the process, with a file for each lease.
        why: what ended the process; the server's status shows it.
    """
    from atoll.errors import AtollError
    from atoll.protocol import messages, routes
    from atoll.transport.http_client import http_to
    from atoll.worker.log_lines import LOG

    names = []
    for path in sorted(folder.glob("[!.]*")):
        try:
            server, lease = _noted_in(path)
            with contextlib.closing(http_to(server)) as http:
                http.lease = lease
                http.send(routes.LEAVE, messages.Leave(error=why), timeout_s=GOODBYE_S)
            names.append(path.name)
        except (AtollError, OSError, ValueError) as error:
            # the server does not answer, or has declared the site dead; or the token's file no longer exists
            LOG.debug("%s: could not leave the run: %s", path.name, error)
    return names
