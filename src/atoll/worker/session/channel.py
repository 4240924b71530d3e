"""The calls of a worker to the server."""

from __future__ import annotations

from atoll.errors import Gone
from atoll.protocol import messages, routes
from atoll.protocol.messages import VersionRef
from atoll.protocol.status_messages import Status
from atoll.transport.http_client import Http

POLL_MARGIN_S = 10.0
"""Seconds by which the timeout of a long poll exceeds the longest wait at the server."""


class Channel:
    """The calls of a worker to the server, over HTTP. Each call blocks, is tried once, and is thread-safe.

    Args:
        http: the connections to the server. Other calls of the worker use them, too.
    """

    def __init__(self, http: Http) -> None:
        self.http = http
        self.server, self.counters, self.watch = http.server, http.counters, http.watch

    @property
    def lease(self) -> str:
        """The lease that every request carries in a header. Before the worker has joined, it is empty and not sent."""
        return self.http.lease

    @lease.setter
    def lease(self, lease: str) -> None:
        self.http.lease = lease

    def run(self) -> messages.RunInfo:
        """GET the description of the run. An answer that does not come from an Atoll server is an error."""
        return self.http.get(routes.RUN, messages.RunInfo)

    def schema(self) -> messages.SchemaMessage:
        """GET the schema with the ties and the fragment of each tensor, in one message."""
        return self.http.get(routes.SCHEMA, messages.SchemaMessage)

    def join(self, message: messages.Join) -> messages.Joined:
        """POST the join. The caller sets `lease` from the answer."""
        return self.http.post(routes.WORKERS, message, messages.Joined)

    def heartbeat(self, message: messages.Heartbeat, timeout_s: float) -> messages.HeartbeatReply:
        """POST the heartbeat. A network error drops the idle connections, so that the next call connects anew."""
        return self.http.post(routes.HEARTBEAT, message, messages.HeartbeatReply, timeout_s=timeout_s)

    def health(self, timeout_s: float) -> None:
        """GET the health route; any answer is enough. A network error drops the idle connections, as in `heartbeat`."""
        self.http.reach(routes.HEALTH, timeout_s=timeout_s)

    def next_ticket(self, fragment: int, wait_s: float, tasks: bool) -> messages.TicketReply:
        """Ask for the next ticket by a long poll. The timeout is the server's longest wait plus `POLL_MARGIN_S`."""
        request = messages.TicketRequest(fragment=fragment, wait_s=wait_s, tasks=tasks)
        timeout_s = routes.LONG_POLL_S + POLL_MARGIN_S
        return self.http.post(routes.TICKETS, request, messages.TicketReply, timeout_s=timeout_s)

    def ticket(self, ticket: int) -> messages.TicketState:
        """GET a ticket's state. If the server no longer knows the ticket, return it as expired, without parts."""
        try:
            return self.http.get(routes.TICKET.format(ticket=ticket), messages.TicketState)
        except Gone as error:
            outcome = messages.Outcome(ticket=ticket, state="expired", base_version=0, reason=str(error))
            return messages.TicketState(outcome=outcome, parts=[], part_digests=[])

    def manifest(self, fragment: int, number: int) -> messages.Manifest:
        """GET the manifest of the fragment's version with this number."""
        return self.http.get(routes.MANIFEST.format(fragment=fragment, version=number), messages.Manifest)

    def head(self, fragment: int) -> VersionRef:
        """GET the head's number from the run's status, then its digest from its manifest."""
        number = self.http.get(routes.STATUS, Status).fragments[fragment].version
        return VersionRef(fragment, number, self.manifest(fragment, number).digest)

    def complete(self, ticket: int, update: messages.Complete, timeout_s: float = 30.0) -> messages.Receipt:
        """Tell the server that all parts of the ticket's update were sent. Return the receipt."""
        return self.http.post(routes.COMPLETE.format(ticket=ticket), update, messages.Receipt, timeout_s=timeout_s)

    def leave(self, error: str | None, timeout_s: float) -> None:
        """Tell the server that this worker ends, and which error ended it; None if it ended well."""
        self.http.send(routes.LEAVE, messages.Leave(error=error), timeout_s=timeout_s)

    def close(self) -> None:
        """Close `http`. This also ends the other calls of the worker."""
        self.http.close()
