"""Every error that Atoll raises, as one tree, and what a public function makes of one.

    AtollError                 1   any error of Atoll
    ├── ConfigError            2   a wrong run file, flag or ATOLL_ variable
    ├── UsageError             2   a wrong call of a public function
    ├── SchemaMismatch         6   the two sides have different models
    ├── UpdateRefused          6   an update that is not finite, too large or wrongly weighted
    ├── PeerError              6   an error that the other side reports
    │   ├── VersionSkew            different protocol versions
    │   ├── AuthError          8   a missing or wrong token or secret, or a foreign host name
    │   ├── LeaseLost              the server declared this worker dead or does not know it: join again
    │   ├── Superseded             a newer process joined under the same name
    │   ├── TicketClosed           the round of the ticket is over
    │   ├── Conflict               the ticket was used for other bytes
    │   ├── PartCorrupt            bytes changed during a transfer
    │   ├── Gone                   the requested data is no longer kept
    │   ├── Busy               ↻   the server asks for a later attempt
    │   └── BadRequest             the server did not understand the request
    ├── TransferError          5   a network error
    │   ├── ServerUnreachable  ↻   no server answers
    │   ├── ServerLost             no server answered for too long, or another run is at its address
    │   ├── TransferStalled    ↻   no byte moved within the idle timeout
    │   └── TransferAborted        the calling program aborted the transfer
    ├── StoreError             7   a disk error on this machine
    │   ├── DiskFull           ↻   no space left
    │   ├── StateLocked        4   another process owns the directory
    │   ├── StateCorrupt           a file does not match its digest
    │   └── SyncFailed             fsync failed: what was written may be lost
    ├── PortInUse              3   no wanted port can be bound
    └── RunFailed              9   the run cannot continue

Each names the side that erred, the value and the remedy. `code` is what travels on the wire and into logs. Those with ↻
may pass by themselves (`is_transient`): the same call is made again after a pause.

An error of Atoll reaches a user as one line on standard error, in commands, scripts and simulations alike. `public_api`
marks what users call: the frames inside Atoll go to the logger `atoll` at DEBUG, and a script that does not catch the
error ends with one line, which names the line of the script, and with the exit code.
"""

from __future__ import annotations

import errno
import functools
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from atoll.format_text import visible, visible_lines

LOG = logging.getLogger("atoll")

STOPS = (".", "?", "!", ":", "…")
"""What a cause may end with before the remedy begins."""


class AtollError(Exception):
    """Base of every error that Atoll raises on purpose.

    Args:
        message: which side erred and with which value, in one sentence.
        remedy: what to do about it, in one sentence; may be empty.
        trace: of the user's code, where that raised; a command prints it.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    retry_after_s: float | None = None

    def __init__(self, message: str, remedy: str = "", trace: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.trace = trace

    def __str__(self) -> str:
        if not self.remedy:
            return self.message
        stop = "" if self.message.rstrip().endswith(STOPS) else "."  # a cause may be quoted from somewhere else
        return f"{self.message.rstrip()}{stop} {self.remedy}"


class ConfigError(AtollError):
    """The run file, a flag or an ATOLL_ variable is wrong, or the settings of two sides contradict each other."""

    code, exit_code = "config", 2


class UsageError(AtollError):
    """A program calls Atoll wrongly, or user code gives what cannot be used."""

    code, exit_code = "usage", 2


class SchemaMismatch(AtollError):
    """Two models that must be the same differ in names, dtypes, shapes or tied tensors."""

    code, exit_code = "schema_mismatch", 6


class UpdateRefused(AtollError):
    """The server has quarantined an update; its round goes on with the others, or waits for another try."""

    code, exit_code = "update_refused", 6


class PeerError(AtollError):
    """The other side reports an error, or something that is not of Atoll answers at its address."""

    code, exit_code = "peer", 6


class VersionSkew(PeerError):
    """The two sides speak different protocols, or one cannot read a message of the other: upgrade one of them."""

    code = "version_skew"


class AuthError(PeerError):
    """The server refuses a request without its token, without an object's secret, or for a foreign host name."""

    code, exit_code = "auth", 8


class LeaseLost(PeerError):
    """The lease has ended, most often by silence, or the server does not know it: the worker has to join again."""

    code = "lease_lost"


class Superseded(PeerError):
    """A newer process has joined under the name of this site; this one takes no further part."""

    code = "superseded"


class TicketClosed(PeerError):
    """The round of a ticket or a task is over, or it was another site's: ask for the next one."""

    code = "ticket_closed"


class Conflict(PeerError):
    """A request contradicts what the server has: parts are missing, or other bytes came under the same ticket or id."""

    code = "conflict"


class PartCorrupt(PeerError):
    """Bytes that arrived do not match their BLAKE3: the part is to be sent or pulled again."""

    code = "part_corrupt"


class Gone(PeerError):
    """What was asked for does not exist, or is no longer kept: a version, its outer state, a ticket, an object."""

    code = "gone"


class Busy(PeerError):
    """The other side cannot serve the request now; `retry_after_s` says when to ask again, where it is known."""

    code = "busy"


class BadRequest(PeerError):
    """A request, a payload or an object is malformed; sent again as it is, it fails again."""

    code = "bad_request"


class TransferError(AtollError):
    """Bytes do not get through the network to the other side."""

    code, exit_code = "transfer", 5


class ServerUnreachable(TransferError):
    """Nothing answers at the address; or, where `is_other`, something that is not the server, or cannot prove it."""

    code = "unreachable"
    is_other = False


class ServerLost(TransferError):
    """No server has answered for ATOLL_GIVE_UP_S, or another run is at its address: the worker gives it up."""

    code = "server_lost"


class TransferStalled(TransferError):
    """A connection has moved no byte within the idle timeout, or the server answers neither a call nor heartbeats."""

    code = "stalled"


class TransferAborted(TransferError):
    """The calling program told a transfer to stop."""

    code = "aborted"


class StoreError(AtollError):
    """The disk or a file of this machine fails; a client meets `Busy` in its place, or `DiskFull`."""

    code, exit_code = "store", 7


class DiskFull(StoreError):
    """No space or quota is left, or less than `disk.min_free_bytes`; what was acknowledged is not lost."""

    code = "disk_full"


class StateLocked(StoreError):
    """Another process holds the lock of a server's state directory or of a site's folder."""

    code, exit_code = "state_locked", 4


class StateCorrupt(StoreError):
    """Files on this machine are damaged, cut off, missing or of different moments; they are not used."""

    code = "state_corrupt"


class SyncFailed(StoreError):
    """An fsync failed, so what was written last may be lost; it is never tried again, and the server must end."""

    code = "sync_failed"


class PortInUse(AtollError):
    """No wanted port can be bound: other processes listen there, or this user may not."""

    code, exit_code = "port_in_use", 3


class RunFailed(AtollError):
    """A run, a workflow or a simulation cannot go on."""

    code, exit_code = "run_failed", 9


def _tree(root: type[AtollError]) -> dict[str, type[AtollError]]:
    return {root.code: root} | {code: kind for sub in root.__subclasses__() for code, kind in _tree(sub).items()}


BY_CODE: dict[str, type[AtollError]] = _tree(AtollError)
"""Wire code → exception class; what a client raises when a server answers with that code."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Give an error, what it was raised from, and so on; each once, as one may be a cause of its own."""
    seen = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


# -- Errors that pass: waiting mends them.

RETRY_S = 2.0
"""After how long a write that failed for lack of space or open files is tried again."""
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)


def no_more_files(error: BaseException) -> bool:
    """Return whether a file could not be opened because too many are open."""
    for cause in causes(error):
        if isinstance(cause, SyncFailed):
            return False
        if isinstance(cause, OSError) and cause.errno in _NO_MORE_FILES:
            return True
    return False


def passing(error: BaseException) -> str | None:
    """Return in words what is lacking; None for an error that waiting does not mend."""
    if isinstance(error, DiskFull):
        return f"the disk is full: {error}"
    if no_more_files(error):
        return "too many files are open: the server may not open another; raise its limit (ulimit -n)."
    return None


def out_of_memory(error: BaseException | None) -> RunFailed | None:
    """Return the error that ends a server without memory for an object or a thread; None for other errors."""
    no_thread = isinstance(error, RuntimeError) and str(error) == "can't start new thread"
    if not no_thread and not isinstance(error, MemoryError):
        return None
    return RunFailed(
        "The server has run out of memory.",
        "Give it more, or lower disk.max_pinned_versions or run.threads. Start it again: what was acknowledged is not "
        "lost.",
    )


TRANSIENT = (ServerUnreachable, TransferStalled, Busy, DiskFull)
"""Errors that may pass by themselves: the same call is made again after a pause."""

UNPULLED = (*TRANSIENT, Gone, PartCorrupt, BadRequest)
"""What a pull from a worker of a swarm may end with; another worker may have the same bytes."""


def is_transient(error: BaseException) -> bool:
    """Return whether an error may pass by itself."""
    return isinstance(error, TRANSIENT)


# -- public functions

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_is_public_api"
_ENTRIES = ("__init__", "__call__", "__enter__", "__getitem__")
"""Methods with an underscore that users call."""

_hook_before: Callable[[type[BaseException], BaseException, TracebackType | None], Any] | None = None


def public_api(target: F) -> F:
    """Let errors leave a public function without the frames and the causes inside Atoll.

    Args:
        target: a function; or a class, for its constructor, its public methods and its properties. Generators are left
            alone: what they raise comes when they are iterated.
    """
    if not isinstance(target, type):
        function: F = _public_function(target)
        return function
    for name, member in list(vars(target).items()):
        if name.startswith("_") and name not in _ENTRIES:
            continue
        if inspect.isfunction(member) and not inspect.isgeneratorfunction(member):
            setattr(target, name, _public_function(member))
        elif isinstance(member, classmethod):
            setattr(target, name, classmethod(_public_function(member.__func__)))
        elif isinstance(member, property) and member.fget is not None:
            setattr(target, name, member.getter(_public_function(member.fget)))
    return target


def is_public_api(function: Callable[..., Any]) -> bool:
    """Return whether an error that leaves this function ends a script with one line and its exit code."""
    return _MARK in vars(function)


def _public_function(function: Any) -> Any:
    if is_public_api(function):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except AtollError as error:
            LOG.debug("%s", error, exc_info=True)
            _end_with_one_line()
            raise error.with_traceback(None) from None
        except KeyboardInterrupt:
            print_interrupt_in_a_line()
            raise

    vars(call)[_MARK] = True
    return call


def print_error(error: AtollError, where: str = "") -> None:
    """Print an error as one line on standard error.

    Where the user's code raised it, its traceback comes before that line.

    Args:
        where: the place in the user's script that the error came out of.
    """
    if error.trace:
        print(visible_lines(error.trace), file=sys.stderr)
    place = f" ({where})" if where else ""
    print(f"atoll: {visible(' '.join(str(error).split()))}{visible(place)}", file=sys.stderr, flush=True)


def print_interrupt_in_a_line(error: BaseException | None = None) -> None:
    """Let an uncaught Ctrl-C end the program with one line, in place of a traceback.

    The exit status stays Python's: the process ends by SIGINT, which a shell calls 130.

    Args:
        error: what ends a block; nothing is done unless it is an interrupt.
    """
    if (error is None or isinstance(error, KeyboardInterrupt)) and sys.excepthook is sys.__excepthook__:
        _end_with_one_line()


def _end_with_one_line() -> None:
    """Let an uncaught error of Atoll end the program with one line and its `exit_code`, not a traceback and 1."""
    global _hook_before
    interactive = hasattr(sys, "ps1") or sys.flags.interactive  # there an error must not end the session
    if _hook_before is None and not interactive:
        _hook_before, sys.excepthook = sys.excepthook, _print_and_exit


def _print_and_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    assert _hook_before is not None
    is_ours = _hook_before is sys.__excepthook__  # a hook that was there before prints as it likes
    if isinstance(error, KeyboardInterrupt) and is_ours:
        print("atoll: interrupted", file=sys.stderr, flush=True)
        return
    if isinstance(error, AtollError) and is_ours:
        print_error(error, _place(trace))
    else:
        _hook_before(kind, error, trace)
    if isinstance(error, AtollError):
        raise SystemExit(error.exit_code)


_PACKAGES = {"site-packages", "dist-packages"}
"""Folders of installed packages: torch's frames lie between the script and a hook of its optimizer."""


def _place(trace: TracebackType | None) -> str:
    """Return the last line of the traceback that is of neither Atoll nor another package, as `train.py, line 7`."""
    inside = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(inside)]
    frames = [each for each in frames if _PACKAGES.isdisjoint(Path(each.filename).parts)] or frames
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
