"""The calls of a worker to the server: one method for each request, over HTTP."""

from __future__ import annotations

from atoll.errors import Gone
from atoll.protocol import messages, routes
from atoll.protocol.messages import VersionRef
from atoll.protocol.status_messages import Status
from atoll.transport.http_client import Http

POLL_MARGIN_S = 10.0
"""Seconds by which the timeout of a long poll exceeds the longest wait at the server."""


class Channel:
    """The calls of a worker to the server, over HTTP. Each call blocks, is made without retries, and is thread-safe.

    Args:
        http: the connections to the server. The worker uses them for file transfers and tasks, too.
    """

    def __init__(self, http: Http) -> None:
        self.http = http
        self.server, self.counters, self.watch = http.server, http.counters, http.watch

    @property
    def lease(self) -> str:
        """The worker's lease: the token that the server gave it on joining. Each request has it in a header.

        It is empty, and not sent, until the worker has joined.
        """
        return self.http.lease

    @lease.setter
    def lease(self, lease: str) -> None:
        self.http.lease = lease

    def run(self) -> messages.RunInfo:
        """GET the description of the run. Raise an error if the answer does not come from an Atoll server."""
        return self.http.get(routes.RUN, messages.RunInfo)

    def schema(self) -> messages.SchemaMessage:
        """GET the schema of the model (names, shapes and dtypes), with tied tensors and the fragment of each tensor."""
        return self.http.get(routes.SCHEMA, messages.SchemaMessage)

    def join(self, message: messages.Join) -> messages.Joined:
        """POST the join. The caller sets `lease` from the answer."""
        return self.http.post(routes.WORKERS, message, messages.Joined)

    def heartbeat(self, message: messages.Heartbeat, timeout_s: float) -> messages.HeartbeatReply:
        """POST the heartbeat. After a network error, close idle connections, so that the next call opens a new one."""
        return self.http.post(routes.HEARTBEAT, message, messages.HeartbeatReply, timeout_s=timeout_s)

    def health(self, timeout_s: float) -> None:
        """GET the health route, to see whether the server answers. A network error closes the idle connections."""
        self.http.reach(routes.HEALTH, timeout_s=timeout_s)

    def next_ticket(self, fragment: int, wait_s: float, tasks: bool) -> messages.TicketReply:
        """Ask for the next ticket, the permission to submit an update to a round. The server answers when there is one.

        Args:
            fragment: the fragment's number.
            wait_s: the longest time after which the server answers even without a ticket, in seconds.
            tasks: whether the server should answer, too, when there is a task for this site.
        """
        request = messages.TicketRequest(fragment=fragment, wait_s=wait_s, tasks=tasks)
        timeout_s = routes.LONG_POLL_S + POLL_MARGIN_S
        return self.http.post(routes.TICKETS, request, messages.TicketReply, timeout_s=timeout_s)

    def ticket(self, ticket: int) -> messages.TicketState:
        """GET the state of a ticket. If the server no longer knows the ticket, return a state that says "expired"."""
        try:
            return self.http.get(routes.TICKET.format(ticket=ticket), messages.TicketState)
        except Gone as error:
            outcome = messages.Outcome(ticket=ticket, state="expired", base_version=0, reason=str(error))
            return messages.TicketState(outcome=outcome, parts=[], part_digests=[])

    def manifest(self, fragment: int, number: int) -> messages.Manifest:
        """GET the manifest (the parts and their digests) of the fragment's version with this number."""
        return self.http.get(routes.MANIFEST.format(fragment=fragment, version=number), messages.Manifest)

    def head(self, fragment: int) -> VersionRef:
        """Ask for the newest version of a fragment: GET its number from the run's status, then its digest."""
        number = self.http.get(routes.STATUS, Status).fragments[fragment].version
        return VersionRef(fragment, number, self.manifest(fragment, number).digest)

    def complete(self, ticket: int, update: messages.Complete, timeout_s: float = 30.0) -> messages.Receipt:
        """Tell the server that all parts of an update were sent. Return the receipt."""
        return self.http.post(routes.COMPLETE.format(ticket=ticket), update, messages.Receipt, timeout_s=timeout_s)

    def leave(self, error: str | None, timeout_s: float) -> None:
        """Tell the server that this worker leaves, and the error that ended it; None if it ended without an error."""
        self.http.send(routes.LEAVE, messages.Leave(error=error), timeout_s=timeout_s)

    def close(self) -> None:
        """Close the connections to the server. Calls that still wait for an answer end with an error."""
        self.http.close()
