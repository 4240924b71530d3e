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
        return self.http.lease

    @lease.setter
    def lease(self, lease: str) -> None:
        self.http.lease = lease

    def run(self) -> messages.RunInfo:
        return self.http.get(routes.RUN, messages.RunInfo)

    def schema(self) -> messages.SchemaMessage:
        return self.http.get(routes.SCHEMA, messages.SchemaMessage)

    def join(self, message: messages.Join) -> messages.Joined:
        return self.http.post(routes.WORKERS, message, messages.Joined)

    def heartbeat(self, message: messages.Heartbeat, timeout_s: float) -> messages.HeartbeatReply:
        return self.http.post(routes.HEARTBEAT, message, messages.HeartbeatReply, timeout_s=timeout_s)

    def health(self, timeout_s: float) -> None:
        self.http.reach(routes.HEALTH, timeout_s=timeout_s)

    def next_ticket(self, fragment: int, wait_s: float, tasks: bool) -> messages.TicketReply:
        request = messages.TicketRequest(fragment=fragment, wait_s=wait_s, tasks=tasks)
        timeout_s = routes.LONG_POLL_S + POLL_MARGIN_S
        return self.http.post(routes.TICKETS, request, messages.TicketReply, timeout_s=timeout_s)

    def ticket(self, ticket: int) -> messages.TicketState:
        try:
            return self.http.get(routes.TICKET.format(ticket=ticket), messages.TicketState)
        except Gone as error:
            outcome = messages.Outcome(ticket=ticket, state="expired", base_version=0, reason=str(error))
            return messages.TicketState(outcome=outcome, parts=[], part_digests=[])

    def manifest(self, fragment: int, number: int) -> messages.Manifest:
        return self.http.get(routes.MANIFEST.format(fragment=fragment, version=number), messages.Manifest)

    def head(self, fragment: int) -> VersionRef:
        number = self.http.get(routes.STATUS, Status).fragments[fragment].version
        return VersionRef(fragment, number, self.manifest(fragment, number).digest)

    def complete(self, ticket: int, update: messages.Complete, timeout_s: float = 30.0) -> messages.Receipt:
        return self.http.post(routes.COMPLETE.format(ticket=ticket), update, messages.Receipt, timeout_s=timeout_s)

    def leave(self, error: str | None, timeout_s: float) -> None:
        self.http.send(routes.LEAVE, messages.Leave(error=error), timeout_s=timeout_s)

    def close(self) -> None:
        self.http.close()
