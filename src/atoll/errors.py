"""Every error that Atoll raises, as one tree.

    AtollError
    ├── ConfigError            the person who wrote the run file, a flag or ATOLL_*
    ├── UsageError             the program that called a public function
    ├── SchemaMismatch         two sides hold different models
    ├── UpdateRefused          a worker's update: not finite, too large, a wrong weight
    ├── PeerError              the other side of a connection
    │   ├── VersionSkew        it speaks another protocol version
    │   ├── AuthError          it does not accept who we are
    │   ├── LeaseLost          it has declared us dead, or does not know us: join again
    │   ├── Superseded         a newer process has joined under our name
    │   ├── TicketClosed       the round of this ticket is over
    │   ├── Conflict           the same ticket was used for other bytes
    │   ├── PartCorrupt        bytes changed on the way
    │   ├── Gone               what was asked for is no longer kept
    │   ├── Busy               it asks to come back later
    │   └── BadRequest         it did not understand what we said
    ├── TransferError          the network between the two
    │   ├── ServerUnreachable  nobody answers
    │   ├── ServerLost         nobody has answered for so long that nobody is waited for any more
    │   ├── TransferStalled    no byte moved for the idle timeout
    │   └── TransferAborted    whoever started it told it to stop
    ├── StoreError             this machine's disk
    │   ├── DiskFull
    │   ├── StateLocked        another process owns the directory
    │   ├── StateCorrupt       a file is not what its digest says
    │   └── SyncFailed         fsync failed: what was written may be lost
    ├── PortInUse
    └── RunFailed              a run that cannot go on

Each names who erred, the value and the remedy. `code` is what travels on the wire and into logs;
`exit_code` is what a command ends with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

STOPS = (".", "?", "!", ":", "…")
"""What a cause may end with before the remedy begins."""


class AtollError(Exception):
    """Base of every error that Atoll raises on purpose.

    Args:
        message: who erred and with which value, in one sentence.
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
    code, exit_code = "config", 2


class UsageError(AtollError):
    code, exit_code = "usage", 2


class SchemaMismatch(AtollError):
    code, exit_code = "schema_mismatch", 6


class UpdateRefused(AtollError):
    code, exit_code = "update_refused", 6


class PeerError(AtollError):
    code, exit_code = "peer", 6


class VersionSkew(PeerError):
    code = "version_skew"


class AuthError(PeerError):
    code, exit_code = "auth", 8


class LeaseLost(PeerError):
    code = "lease_lost"


class Superseded(PeerError):
    code = "superseded"


class TicketClosed(PeerError):
    code = "ticket_closed"


class Conflict(PeerError):
    code = "conflict"


class PartCorrupt(PeerError):
    code = "part_corrupt"


class Gone(PeerError):
    code = "gone"


class Busy(PeerError):
    code = "busy"


class BadRequest(PeerError):
    code = "bad_request"


class TransferError(AtollError):
    code, exit_code = "transfer", 5


class ServerUnreachable(TransferError):
    """Nothing answers at the address; or, where `is_other`, something that is not the server, or cannot prove it."""

    code = "unreachable"
    is_other = False


class ServerLost(TransferError):
    code = "server_lost"


class TransferStalled(TransferError):
    code = "stalled"


class TransferAborted(TransferError):
    code = "aborted"


class StoreError(AtollError):
    code, exit_code = "store", 7


class DiskFull(StoreError):
    code = "disk_full"


class StateLocked(StoreError):
    code, exit_code = "state_locked", 4


class StateCorrupt(StoreError):
    code = "state_corrupt"


class SyncFailed(StoreError):
    code = "sync_failed"


class PortInUse(AtollError):
    code, exit_code = "port_in_use", 3


class RunFailed(AtollError):
    code, exit_code = "run_failed", 9


def _tree(root: type[AtollError]) -> dict[str, type[AtollError]]:
    return {root.code: root} | {code: kind for sub in root.__subclasses__() for code, kind in _tree(sub).items()}


BY_CODE: dict[str, type[AtollError]] = _tree(AtollError)
"""Wire code → exception class; what a client raises when a server answers with that code."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on; each once, for one may be a cause of its own."""
    told = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in told:
        told.add(id(cause))
        yield cause
        cause = cause.__cause__
