"""The calls of a worker over HTTP."""

from __future__ import annotations

from atoll.errors import Gone
from atoll.protocol import messages, routes
from atoll.protocol.status_messages import Status
from atoll.protocol.values import VersionRef
from atoll.transport.http_client import Http

POLL_MARGIN_S = 10.0
"""Added to the longest wait of a long poll before its call is given up."""


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
