"""The calls of a worker to its run: the port, and over HTTP."""

from __future__ import annotations

from typing import Protocol

from atoll.errors import Gone
from atoll.protocol import messages, routes
from atoll.protocol.messages import VersionRef
from atoll.protocol.status_messages import Status
from atoll.transport.http_client import Counters, Http, Watch

POLL_MARGIN_S = 10.0
"""Added to the longest wait of a long poll before its call is given up."""


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


class HttpChannel:
    """A `Channel` over connections to a server.

    Args:
        http: the connections; they carry the other calls of a worker, too.
    """

    def __init__(self, http: Http) -> None:
        self.http = http
        self.server, self.counters, self.watch = http.server, http.counters, http.watch

    @property
    def lease(self) -> str:
        """The lease that every request carries in a header; empty, and left out, before the worker has joined."""
        return self.http.lease

    @lease.setter
    def lease(self, lease: str) -> None:
        self.http.lease = lease

    def run(self) -> messages.RunInfo:
        """GET the description of the run, and refuse an answer that comes from no Atoll server."""
        return self.http.get(routes.RUN, messages.RunInfo)

    def schema(self) -> messages.SchemaMessage:
        """GET the schema in one message, with the names of tied tensors and the fragment of each."""
        return self.http.get(routes.SCHEMA, messages.SchemaMessage)

    def join(self, message: messages.Join) -> messages.Joined:
        """POST the message; the caller takes `lease` from the answer."""
        return self.http.post(routes.WORKERS, message, messages.Joined)

    def heartbeat(self, message: messages.Heartbeat, timeout_s: float) -> messages.HeartbeatReply:
        """POST the message; a network error drops the idle connections, so that the next call connects anew."""
        return self.http.post(routes.HEARTBEAT, message, messages.HeartbeatReply, timeout_s=timeout_s)

    def health(self, timeout_s: float) -> None:
        """GET its route, whatever the body says; a network error drops the idle connections, as in `heartbeat`."""
        self.http.reach(routes.HEALTH, timeout_s=timeout_s)

    def next_ticket(self, fragment: int, wait_s: float, tasks: bool) -> messages.TicketReply:
        """POST a long poll, which times out `POLL_MARGIN_S` after the server's longest, whatever `wait_s`."""
        request = messages.TicketRequest(fragment=fragment, wait_s=wait_s, tasks=tasks)
        timeout_s = routes.LONG_POLL_S + POLL_MARGIN_S
        return self.http.post(routes.TICKETS, request, messages.TicketReply, timeout_s=timeout_s)

    def ticket(self, ticket: int) -> messages.TicketState:
        """GET its state; a ticket that the server does not know any more is returned as expired, without parts."""
        try:
            return self.http.get(routes.TICKET.format(ticket=ticket), messages.TicketState)
        except Gone as error:
            outcome = messages.Outcome(ticket=ticket, state="expired", base_version=0, reason=str(error))
            return messages.TicketState(outcome=outcome, parts=[], part_digests=[])

    def manifest(self, fragment: int, number: int) -> messages.Manifest:
        """GET the manifest by the version's number within the fragment."""
        return self.http.get(routes.MANIFEST.format(fragment=fragment, version=number), messages.Manifest)

    def head(self, fragment: int) -> VersionRef:
        """GET the newest version's number from the run's status, then its digest from its manifest."""
        number = self.http.get(routes.STATUS, Status).fragments[fragment].version
        return VersionRef(fragment, number, self.manifest(fragment, number).digest)

    def complete(self, ticket: int, update: messages.Complete, timeout_s: float = 30.0) -> messages.Receipt:
        """POST the update's description, with a timeout of 30 s unless the caller gives another one."""
        return self.http.post(routes.COMPLETE.format(ticket=ticket), update, messages.Receipt, timeout_s=timeout_s)

    def leave(self, error: str | None, timeout_s: float) -> None:
        """POST the error or None; the answer has no body."""
        self.http.send(routes.LEAVE, messages.Leave(error=error), timeout_s=timeout_s)

    def close(self) -> None:
        """Close `http`, which other calls of the worker use, too."""
        self.http.close()
