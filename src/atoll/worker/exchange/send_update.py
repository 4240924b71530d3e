"""What is in an outbox, on its way: the parts that the server lacks, then the word that it is complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial

from atoll.errors import Conflict
from atoll.protocol import messages, routes
from atoll.transport.resumable_transfer import Parts
from atoll.worker.exchange.base_and_outbox import Outbox, OutboxNote
from atoll.worker.log_lines import LOG, Progress
from atoll.worker.peer.serve_peers import Outlet
from atoll.worker.session.connection import Connection

AGAIN_S = 1.0
"""Before an update is offered anew that another worker could not pull."""
MAX_CONFLICTS = 3
"""In one submission: an attempt at a part that was given up may arrive late, and undo the one that took its place."""


class Sending:
    """One submission of what the outbox holds.

    Args:
        bar: told of the bytes.
        sent: indices of the parts that were sent already; None: the server is asked which it has.
        failure: what ended an attempt that has begun already.
    """

    def __init__(
        self,
        connection: Connection,
        parts: Parts,
        outbox: Outbox,
        bar: Progress,
        sent: Collection[int] | None,
        failure: BaseException | None = None,
    ) -> None:
        assert outbox.note is not None
        self._connection, self._parts, self._outbox, self._bar = connection, parts, outbox, bar
        self._note, self._sent, self._failure = outbox.note, sent, failure

    def push(self) -> None:
        """One attempt to send the parts that are ours."""
        has, self._sent = self._sent, None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        note = self._note
        digests = {index: bytes.fromhex(text) for index, text in enumerate(note.part_digests)}
        if has is None:
            has = self._connection.parts_at_server(note.ticket, digests)
        self._bar.resume()
        self._parts.push(
            routes.parts_of(note.ticket),
            self._outbox.fd,
            [part for part in self._outbox.layout.parts if part.index not in has],
            digests,
            on_bytes=self._bar.add,
            recorded=partial(self._connection.parts_at_server, note.ticket),
        )


def completed(
    connection: Connection, note: OutboxNote, push: Callable[[], object], max_retries: int | None
) -> messages.Receipt:
    """Push what this note is about, and say that all is there, until the server has it.

    Args:
        push: one attempt to send what the server lacks.
    """
    message = _complete(note)

    def submit() -> messages.Receipt:
        push()
        return connection.http.post(routes.COMPLETE.format(ticket=note.ticket), message, messages.Receipt)

    for conflicts in range(MAX_CONFLICTS + 1):
        try:
            receipt = connection.patiently(submit, max_retries, "submit")
            break
        except Conflict as error:  # by then nothing is taken for sent: what the server lacks is asked and sent
            if conflicts == MAX_CONFLICTS:
                raise
            LOG.debug("%s: %s", connection.site, error)
    connection.require_here()
    return receipt


def offered(
    connection: Connection, outlet: Outlet, fragment: int, outbox: Outbox, bar: Progress, max_retries: int | None
) -> messages.Receipt:
    """In a swarm: say that what the outbox holds is complete and where it is, until another worker has pulled it.

    Raises:
        UpdateRefused: that worker has looked at it, and it cannot count. TicketClosed: the round went on without it.
    """
    note = outbox.note
    assert note is not None
    message = _complete(note).model_copy(update={"source": str(outlet.offer(fragment, outbox, bar.add))})
    path = routes.COMPLETE.format(ticket=note.ticket)

    def submit() -> messages.Receipt:
        return connection.http.post(path, message, messages.Receipt, timeout_s=routes.LONG_POLL_S + 10.0)

    while not (receipt := connection.patiently(submit, max_retries, "submit")).accepted:
        connection.on_wait()  # an answer has waited for some time, at the server
        if receipt.unpulled:
            time.sleep(AGAIN_S)
            outlet.retract(fragment)
            message = message.model_copy(update={"source": str(outlet.offer(fragment, outbox, bar.add))})
    connection.require_here()
    return receipt


def note_of(
    connection: Connection,
    ticket: messages.Ticket,
    digest: str,
    part_digests: list[str],
    weight: float,
    steps: int,
    metrics: dict[str, float],
) -> OutboxNote:
    """What the outbox says of an update that was formed for a ticket."""
    return OutboxNote(
        run=connection.info.run,
        ticket=ticket.ticket,
        fragment=ticket.fragment,
        base_version=ticket.base_version,
        base_digest=ticket.base_digest,
        layout_digest=ticket.layout_digest,
        digest=digest,
        part_digests=part_digests,
        weight=weight,
        steps=steps,
        metrics=metrics,
        round=ticket.round,
        site=connection.site,
    )


def _complete(note: OutboxNote) -> messages.Complete:
    return messages.Complete(
        digest=note.digest,
        base_digest=note.base_digest,
        weight=note.weight,
        steps=note.steps,
        metrics=note.metrics,
    )
