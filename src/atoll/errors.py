"""The classes of all errors that Atoll raises, and how a public function shows an error to the user.

    AtollError                 1   any error of Atoll
    ├── ConfigError            2   a wrong run file, flag or ATOLL_ variable
    ├── UsageError             2   a wrong call of a public function
    │   ├── NotSimulated           a training loop that simulations do not support
    │   └── NotTold                a name in `fl_round.config` that the run does not set; also a KeyError
    ├── SchemaMismatch         6   the server and a worker have different models
    ├── UpdateRefused          6   an update that is too large, contains NaN or Inf, or has a wrong weight
    ├── PeerError              6   an error that the server or another worker reports
    │   ├── VersionSkew            different protocol versions
    │   ├── AuthError          8   a missing or wrong token, secret or Host header
    │   │   └── Forbidden              a request of another kind of caller, such as a site's with a reader's token
    │   ├── ServerFailed    10   the run has failed at the server, which has ended or is about to
    │   ├── LeaseLost              the server declared the worker dead or does not know it: join again
    │   ├── Superseded             a newer process joined under the same site name
    │   ├── TicketClosed           the round for which the worker has a ticket is over
    │   ├── Conflict               a ticket or id was already used for other bytes
    │   ├── PartCorrupt            bytes changed during a transfer
    │   ├── Gone                   the requested data is no longer kept
    │   ├── Busy               ↻   the server asks to try again later
    │   └── BadRequest             the server did not understand the request
    ├── TransferError          5   a network error
    │   ├── ServerUnreachable  ↻   no server answers
    │   ├── ServerLost             no answer or no success for too long, or another run is at the server's address
    │   ├── TransferStalled    ↻   no byte moved within the idle timeout
    │   └── TransferAborted        the calling program aborted the transfer
    ├── StoreError             7   a disk error on this machine
    │   ├── DiskFull           ↻   no space left
    │   ├── StateLocked        4   another process owns the directory
    │   ├── StateCorrupt           a file does not match its digest
    │   └── SyncFailed             fsync failed: what was written may be lost
    ├── PortInUse              3   none of the wanted ports can be bound
    └── RunFailed              9   the run cannot continue

The numbers are exit codes. A lease is the right of one process to act for its site; it lasts as long as the process
sends requests, at least heartbeats. A ticket permits a worker to submit one update. Each message names the process at
fault, the wrong value and the remedy. `code` is the error's name in network messages and logs. Errors with ↻ can be
temporary (`is_transient`): Atoll repeats the failed call after a pause.

In commands, scripts and simulations, users see an error of Atoll as one line on standard error. The decorator
`public_api` marks the functions that users call; it logs the traceback inside Atoll to the logger `atoll` at DEBUG. A
script that does not catch the error ends with the error's exit code, after one line that includes the place in the
script.
"""

from __future__ import annotations

import errno
import functools
import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from atoll.format_text import json_line, logs_json, shown, visible, visible_lines, without_leases

LOG = logging.getLogger("atoll")

STOPS = (".", "?", "!", ":", "…")
"""If a message ends with one of these, no full stop is added before the remedy."""


MOST_CHARS = 4000
"""Maximum length of a message and of a remedy. A longer one quotes a value of another process, and is cut."""


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}…"


class Terminated(BaseException):
    """The exception that SIGTERM raises after `raise_on_sigterm`. `except Exception` does not catch it."""


class AtollError(Exception):
    """Base of every error that Atoll raises on purpose.

    Args:
        message: the process at fault and the wrong value, in one sentence.
        remedy: what to do, in one sentence; may be empty.
        trace: traceback of user code, if user code raised; commands print it.

    Attributes:
        retry_after_s: seconds until a retry may help, as the other process says; None if it does not.
        is_damaged: whether the answer may have been damaged on the way, so that a few retries may help.
        is_final: whether a server that ends with this error will probably end with it again after a restart, until a
            person has mended the cause. If so, its sites are told, and end, too.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    retry_after_s: float | None = None
    is_damaged: bool = False
    is_final: bool = True

    def __init__(self, message: str, remedy: str = "", trace: str = "") -> None:
        message, remedy = _cut(message), _cut(remedy)
        if message.endswith("..") and not message.endswith("..."):  # it ends with a quoted cause that has a full stop
            message = message[:-1]
        self.message = without_leases(message)  # it may quote what another program has sent
        super().__init__(self.message)
        self.remedy = remedy
        self.trace = trace

    def __str__(self) -> str:
        if not self.remedy:
            return self.message
        stop = "" if self.message.rstrip().endswith(STOPS) else "."  # quoted causes may have no full stop
        return f"{self.message.rstrip()}{stop} {self.remedy}"


class ConfigError(AtollError):
    """The run file, a flag or an ATOLL_ variable is wrong, or settings of server and worker contradict each other."""

    code, exit_code = "config", 2


class UsageError(AtollError):
    """A program calls Atoll wrongly, or user code returns an unusable value."""

    code, exit_code = "usage", 2


class NotSimulated(UsageError):
    """A script uses a training loop that simulations do not support."""

    code = "not_simulated"


class NotTold(UsageError, KeyError):
    """A script reads a name in a round's configuration that the run does not set."""

    code = "not_told"


class SchemaMismatch(AtollError):
    """The models of server and worker differ in names, dtypes or shapes of tensors, or in which tensors are tied."""

    code, exit_code = "schema_mismatch", 6


class UpdateRefused(AtollError):
    """The server has refused an update. The round continues with the other updates, or waits for a new update."""

    code, exit_code = "update_refused", 6


class PeerError(AtollError):
    """The server or another worker reports an error, or a program that is not Atoll answers a request."""

    code, exit_code = "peer", 6


class VersionSkew(PeerError):
    """Two processes have different protocol versions, or one cannot read the other's message. Upgrade the older one."""

    code = "version_skew"


class AuthError(PeerError):
    """A request has no valid token or secret, or has a Host header that the server does not accept."""

    code, exit_code = "auth", 8


class Forbidden(AuthError):
    """A request has a valid token or secret, but is for other callers: for example, only for the admin."""

    code = "forbidden"


class ServerFailed(PeerError):
    """The run has failed at the server, which has ended or is about to. The worker stops, since waiting cannot help.

    Examples of causes: a workflow or a reducer has raised an error, or an evaluation has measured nothing.
    """

    code, exit_code = "server_failed", 10


class LeaseLost(PeerError):
    """The server has ended the lease of a worker process (the right to act for its site), or does not know it.

    The usual cause is missing heartbeats. The worker must join again.
    """

    code = "lease_lost"


class Superseded(PeerError):
    """A newer process has joined the run under the name of this site. The older process must stop."""

    code = "superseded"


class TicketClosed(PeerError):
    """The ticket (permission to submit one update) or the task has ended, or belongs to another site.

    The worker then asks the server for its next ticket or task.
    """

    code = "ticket_closed"


class Conflict(PeerError):
    """A request does not fit earlier ones: parts are missing, or its ticket or id was already used for other bytes."""

    code = "conflict"


class PartCorrupt(PeerError):
    """The received bytes of a part do not match its BLAKE3 digest. The part must be transferred again."""

    code = "part_corrupt"


class Gone(PeerError):
    """The requested version, outer optimizer state, ticket or object does not exist, or was deleted."""

    code = "gone"


class Busy(PeerError):
    """The other process cannot serve the request now. `retry_after_s`: seconds until a retry; None if unknown."""

    code = "busy"


class BadRequest(PeerError):
    """A request, a payload or an object is malformed. Sending the same bytes again fails again."""

    code = "bad_request"


class TransferError(AtollError):
    """A network error: bytes do not reach the other process."""

    code, exit_code, is_final = "transfer", 5, False


class ServerUnreachable(TransferError):
    """No server answers at the address. If `is_other`, a program answers, but has no TLS or a wrong certificate."""

    code = "unreachable"
    is_other = False


class ServerLost(TransferError):
    """The worker gave up: no answer or no success for ATOLL_GIVE_UP_S seconds, or another run at the address."""

    code = "server_lost"


class TransferStalled(TransferError):
    """No byte moved on a connection within the timeout of the call or transfer."""

    code = "stalled"


class TransferAborted(TransferError):
    """The calling program aborted a transfer."""

    code = "aborted"


class StoreError(AtollError):
    """A disk or file error on this machine. If the server has this error, its workers raise `Busy` or `DiskFull`."""

    code, exit_code, is_final = "store", 7, False


class DiskFull(StoreError):
    """The disk or quota is full, or has less than `disk.min_free_bytes` left. Acknowledged data is not lost."""

    code = "disk_full"


class StateLocked(StoreError):
    """Another process holds the lock of a server's state directory or of a site's folder."""

    code, exit_code = "state_locked", 4


class StateCorrupt(StoreError):
    """Files on this machine are damaged, cut off, missing or from different times. Atoll does not use them."""

    code = "state_corrupt"


class SyncFailed(StoreError):
    """An fsync failed, so the last writes may be lost. Atoll does not repeat the fsync, and the server must end."""

    code = "sync_failed"


class PortInUse(AtollError):
    """None of the wanted ports can be bound: other processes use them, or this user has no permission."""

    code, exit_code, is_final = "port_in_use", 3, False


class RunFailed(AtollError):
    """A run, a workflow or a simulation cannot continue."""

    code, exit_code = "run_failed", 9


def _tree(root: type[AtollError]) -> dict[str, type[AtollError]]:
    return {root.code: root} | {code: kind for sub in root.__subclasses__() for code, kind in _tree(sub).items()}


BY_CODE: dict[str, type[AtollError]] = _tree(AtollError)
"""Code in network messages (`AtollError.code`) → error class."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then its `__cause__`, and so on. Stop at a cycle of causes."""
    seen = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


# -- Temporary errors

RETRY_S = 2.0
"""Seconds until the retry of a write that failed because the disk was full or too many files were open."""
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)


def no_more_files(error: BaseException) -> bool:
    """Return whether the error means that a file could not be opened, because too many files are already open."""
    for cause in causes(error):
        if isinstance(cause, SyncFailed):
            return False
        if isinstance(cause, OSError) and cause.errno in _NO_MORE_FILES:
            return True
    return False


def transient_reason(error: BaseException) -> str | None:
    """Return text that names an error's temporary cause (full disk, too many open files); None for other causes."""
    if isinstance(error, DiskFull):
        return f"the disk is full: {error}"
    if no_more_files(error):
        return "too many files are open; raise the server's limit (ulimit -n)."
    return None


def out_of_memory(error: BaseException | None) -> RunFailed | None:
    """If memory or threads ran out, return a `RunFailed` that ends the server. For other errors, return None."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    no_thread = text == "can't start new thread"
    no_tensor = "DefaultCPUAllocator: can't allocate memory" in text  # torch raises no MemoryError
    if not no_thread and not no_tensor and not isinstance(error, MemoryError):
        return None
    failed = RunFailed(
        "The server has run out of memory.",
        "Give it more memory, or lower disk.max_pinned_versions or run.threads; then start it again. "
        "Acknowledged updates are not lost.",
    )
    failed.is_final = False
    return failed


TRANSIENT = (ServerUnreachable, TransferStalled, Busy, DiskFull)
"""Errors that can be temporary: Atoll repeats the same call after a pause."""

UNPULLED = (*TRANSIENT, Gone, PartCorrupt, BadRequest)
"""If a pull from a peer ends with one of these errors, the worker tries another peer that may have the same bytes."""


def is_transient(error: BaseException) -> bool:
    """Return whether an error can be temporary, so that the same call may succeed later."""
    return isinstance(error, TRANSIENT)


# -- public functions

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_is_public_api"
_ENTRIES = ("__init__", "__call__", "__enter__", "__getitem__")
"""Special methods that users call."""

_hook_before: Callable[[type[BaseException], BaseException, TracebackType | None], Any] | None = None


def public_api(target: F) -> F:
    """Decorate a public function: the errors that it raises no longer show frames and causes inside Atoll.

    Args:
        target: a function or a class. In a class, the constructor, public methods and properties are decorated, but
            not generator methods: their errors come later, during the iteration.
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
    """Return whether a function is decorated with `public_api`."""
    return _MARK in vars(function)


def _public_function(function: Any) -> Any:
    if is_public_api(function):
        return function

    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    checks_itself = function.__module__.startswith(_CHECKS_ITSELF)
    kinds = {} if checks_itself else _kinds_of(function.__annotations__)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if kinds:
                _require_kinds(kinds, {**dict(zip(names, args, strict=False)), **kwargs})
            return function(*args, **kwargs)
        except AtollError as error:
            LOG.debug("%s", error, exc_info=True)
            end_with_one_line()
            cause = error.__cause__ if isinstance(error, RunFailed) else None  # the user's own error, if there is one
            raise error.with_traceback(None) from cause
        except KeyboardInterrupt:
            print_interrupt_in_a_line()
            raise

    vars(call)[_MARK] = True
    return call


def require_arguments(annotations: Mapping[str, Any], given: Mapping[str, object]) -> None:
    """Check that arguments are of the kinds that their annotations say: text, paths, numbers, booleans, functions.

    An argument of which the annotation names another type is not checked.

    Args:
        annotations: name → annotation, as text.
        given: name → value.

    Raises:
        UsageError: an argument is of another kind, such as text for a boolean, which would count as true.
    """
    _require_kinds(_kinds_of(annotations), given)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("True or False", lambda value: type(value).__name__ in ("bool", "bool_")),  # also NumPy's
    "str": ("text", lambda value: isinstance(value, str)),
    "Path": ("a path", lambda value: isinstance(value, str | os.PathLike)),
    "int": ("a whole number", lambda value: hasattr(value, "__index__") and not isinstance(value, bool)),
    "float": ("a number", lambda value: hasattr(value, "__float__") and not isinstance(value, bool)),
    "Callable": ("a function", callable),
    "Mapping": ("a dict", lambda value: isinstance(value, Mapping)),
    "Settings": ("settings", lambda value: type(value).__name__ == "Settings"),
    "None": ("None", lambda value: value is None),
}
"""Word of an annotation → what an argument must be, and a function that checks it."""

_CHECKED_LATER = {"return", "weight", "text"}
"""Arguments with a check of their own, of which the message says more."""
_CHECKS_ITSELF = "atoll.recipes"
"""The package that checks all arguments itself: its messages name the recipe."""


def _kinds_of(annotations: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Return the words of each annotation that has only words of `_KINDS`, by the name of the argument."""
    kinds = {}
    for name, annotation in annotations.items():
        text = getattr(annotation, "__forward_arg__", annotation)
        if isinstance(text, str) and name not in _CHECKED_LATER:
            while "[" in text:
                text = re.sub(r"\[[^\[\]]*\]", "", text)
            words = frozenset(word.strip() for word in text.split("|"))
            if words <= _KINDS.keys():
                kinds[name] = words
    return kinds


def _require_kinds(kinds: Mapping[str, frozenset[str]], given: Mapping[str, object]) -> None:
    for name, words in kinds.items():
        if name in given and not any(_KINDS[word][1](given[name]) for word in words):
            wanted = " or ".join(sorted({_KINDS[word][0] for word in words if word != "None"}))
            raise UsageError(
                f"{name} is {shown(given[name])}.",
                f"Give {wanted}" + (", or leave it out." if "None" in words else "."),
            )


def error_lines(error: AtollError, where: str = "") -> str:
    """Return the text to print for an error: first the traceback of user code, if there is one, then one line.

    Args:
        error: the error.
        where: place in the user's script that caused the error; empty if unknown.
    """
    trace = f"{visible_lines(error.trace)}\n" if error.trace else ""
    location = f" ({where})" if where else ""
    text = f"{trace}atoll: {visible(' '.join(str(error).split()))}{visible(location)}"
    return json_line("atoll", text, "ERROR") if logs_json() else text


def print_interrupt_in_a_line(error: BaseException | None = None) -> None:
    """Make an uncaught Ctrl-C end the program with one line instead of a traceback.

    The exit status stays Python's: the process ends by SIGINT, which a shell reports as 130.

    Args:
        error: the error that was raised. If it is not a KeyboardInterrupt, this function does nothing. None has the
            same effect as a KeyboardInterrupt.
    """
    if (error is None or isinstance(error, KeyboardInterrupt)) and sys.excepthook is sys.__excepthook__:
        end_with_one_line()


def end_with_one_line() -> None:
    """Make an uncaught error of Atoll end the program with one line and its `exit_code`, instead of a traceback.

    If log lines are JSON objects, every uncaught error is one, with its traceback.
    """
    global _hook_before
    interactive = hasattr(sys, "ps1") or sys.flags.interactive  # an error must not end an interactive session
    if _hook_before is None and not interactive:
        _hook_before, sys.excepthook = sys.excepthook, _print_and_exit


def _print_and_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    assert _hook_before is not None
    is_ours = _hook_before is sys.__excepthook__  # else an earlier custom hook prints the error
    if isinstance(error, KeyboardInterrupt) and is_ours:
        print("atoll: interrupted", file=sys.stderr, flush=True)
        return
    if isinstance(error, AtollError) and is_ours:
        print(error_lines(error, _last_place_of_user_code(trace)), file=sys.stderr, flush=True)
    elif logs_json() and is_ours:
        print(json_line("atoll", f"{kind.__name__}: {error}", "ERROR", error), file=sys.stderr, flush=True)
    else:
        _hook_before(kind, error, trace)
    if isinstance(error, AtollError):
        raise SystemExit(error.exit_code)


_PACKAGES, _LIBRARY = {"site-packages", "dist-packages"}, Path(traceback.__file__).parent
"""Folders of installed packages, and of Python's library. Frames in them, such as torch's between a script and a hook,
are skipped."""


def _last_place_of_user_code(trace: TracebackType | None) -> str:
    """Return the last place of a traceback that is outside Atoll, such as `train.py, line 7`; empty if there is none.

    Places in installed packages and in Python's library count only if there are no others.
    """
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(trace)]
    frames = [(path, line) for path, line in frames if not path.is_relative_to(Path(__file__).parent)]
    frames = [each for each in frames if "<frozen" not in str(each[0])]  # Python's own: it runs a module or a file
    own = [each for each in frames if _PACKAGES.isdisjoint(each[0].parts) and not each[0].is_relative_to(_LIBRARY)]
    return "{}, line {}".format(*(own or frames)[-1]) if frames else ""
