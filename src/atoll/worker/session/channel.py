"""The calls of a worker to its run, whatever carries them."""

from __future__ import annotations

from typing import Protocol

from atoll.protocol import messages
from atoll.protocol.values import VersionRef
from atoll.transport.http_client import Counters, Watch


class Channel(Protocol):
    """Thread-safe, blocking calls without retries: the caller knows what a failure means.

    Attributes:
        server: the other side, for messages.
        lease: fences every call once the worker has joined.
        counters: bytes and retries so far.
        watch: ends calls that a silent network would hold up.
    """

    server: str
    lease: str
    counters: Counters
    watch: Watch

    def run(self) -> messages.RunInfo:
        """Return what the run is."""

    def schema(self) -> messages.SchemaMessage:
        """Return the tensors of the run's model."""

    def join(self, message: messages.Join) -> messages.Joined:
        """Take part."""

    def heartbeat(self, message: messages.Heartbeat, timeout_s: float) -> messages.HeartbeatReply:
        """Tell that this worker lives, and how far it is."""

    def health(self, timeout_s: float) -> None:
        """Return once the other side has answered."""

    def next_ticket(self, fragment: int, wait_s: float, tasks: bool) -> messages.TicketReply:
        """Ask for the ticket of the next round, for at most `wait_s` seconds.

        Args:
            tasks: whether this process answers tasks, too.
        """

    def ticket(self, ticket: int) -> messages.TicketState:
        """Return what became of a ticket, and which parts of its update arrived; one that is forgotten has expired."""

    def manifest(self, fragment: int, number: int) -> messages.Manifest:
        """Return the parts of a version.

        Raises:
            Gone: it is no longer kept.
        """

    def head(self, fragment: int) -> VersionRef:
        """Return the newest version.

        Raises:
            Gone: another one became the head at this moment; ask again.
        """

    def complete(self, ticket: int, update: messages.Complete, timeout_s: float) -> messages.Receipt:
        """Say that all parts of an update have been sent.

        Raises:
            TicketClosed, Gone: the round went on. UpdateRefused: it cannot count. Conflict: parts are not what it says.
        """

    def leave(self, error: str | None, timeout_s: float) -> None:
        """Deregister; with the error that ended training."""

    def close(self) -> None:
        """Close what carries the calls."""
