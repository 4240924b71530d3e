"""Upload of an update from the outbox, and how an interrupted upload is resumed.

Parts are sent while later parts are still being formed. If the connection breaks, or if an earlier process has left
the update, this worker asks the server which parts it has, and sends only the others (`UpdateUpload.send`).
`transport/part_transfer` moves the bytes. In a swarm, an update does not go to the server: other workers pull it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from atoll.errors import Conflict
from atoll.protocol import messages, routes
from atoll.protocol.messages import Ticket
from atoll.protocol.values import Lost
from atoll.transport.part_transfer import HttpTransfer, Pushing
from atoll.worker.exchange.base_and_outbox import Outbox, OutboxNote
from atoll.worker.exchange.pull_version import Sources
from atoll.worker.log_lines import LOG, Progress, progress
from atoll.worker.session.session import Session

AGAIN_S = 1.0
"""In a swarm: seconds until an update that another worker could not pull is offered again."""
MAX_CONFLICTS = 3
"""Number of times that an upload is resumed because the server has other parts than the update's digests say. A part of
an abandoned attempt may arrive late and replace a newer one."""


class Outlet(Sources, Protocol):
    """In a swarm: the server inside this worker from which other workers pull its updates."""

    def offer(self, fragment: int, outbox: Any, on_bytes: Callable[[int], None]) -> object:
        """Serve the update in an outbox, and return a reference to the update.

        Args:
            fragment: the fragment's number.
            outbox: the fragment's outbox.
            on_bytes: called each time another worker has pulled some bytes, with their number.
        """

    def retract(self, fragment: int) -> None:
        """Stop serving the fragment's update."""


@dataclass(eq=False)
class UpdateUpload:
    """The upload of one fragment's updates.

    Attributes:
        session: the worker's lease, heartbeats and calls.
        transfer: the connections that parts are sent over.
        outbox: the file of the update that was formed last.
        number: the fragment's number; None: the run has one fragment.
        outlet: in a swarm: serves this worker's updates to other workers.
        resuming: whether an earlier process filled the outbox, so that the server may have some parts already.
    """

    session: Session
    transfer: HttpTransfer
    outbox: Outbox
    number: int | None = None
    outlet: Outlet | None = None
    resuming: bool = False

    def __post_init__(self) -> None:
        self.fragment = self.number or 0
        self.in_words = "" if self.number is None else f" fragment {self.number}"

    def progress(self, number: int) -> AbstractContextManager[Progress]:
        """Show in the status that the update of round `number` is sent. Return the transfer's progress, for the log."""
        self.session.tell(state=f"submitting to round {number}")
        rank = f": rank {self.session.ranks.rank}" if self.session.ranks.together else ""
        return progress(f"{self.session.site}{rank}: submitting{self.in_words}", self.outbox.layout.own_nbytes)

    def pushing(self, ticket: Ticket, bar: Progress) -> AbstractContextManager[Pushing]:
        """Send parts while the block forms them. The block passes each formed part to `Pushing.add`."""
        return self.transfer.pushing(routes.parts_of(ticket.id), self.outbox.fd, on_bytes=bar.add)

    def retract(self) -> None:
        """In a swarm: stop serving the update, before the outbox is written."""
        if self.outlet is not None:
            self.outlet.retract(self.fragment)

    def send(
        self,
        note: OutboxNote,
        bar: Progress,
        sent: Collection[int] | None,
        failure: BaseException | None,
        retries: int | None,
    ) -> messages.Receipt | Lost:
        """Send the update to the server; in a swarm, serve it until another worker has pulled it.

        Send the parts that the server lacks, then the message that the update is complete. Repeat after errors.

        Args:
            note: the update's note.
            bar: the progress of the transfer.
            sent: indices of the parts that were sent already; None: the server is asked which parts it has.
            failure: the error that ended the first attempt, if one was made; it counts as an attempt.
            retries: retries after a network error; None: as long as ATOLL_GIVE_UP_S says.

        Raises:
            UpdateRefused: the server refuses the update.
            TicketClosed, Gone: the update came too late.
            Conflict: after `MAX_CONFLICTS` repetitions, the server still has other parts than the note's digests say.
        """
        if self.outlet is not None:
            return self._offer(self.outlet, note, bar, retries)
        attempts = [(sent, failure)]
        digests = {index: bytes.fromhex(text) for index, text in enumerate(note.part_digests)}

        def push() -> None:
            has, failed = attempts.pop() if attempts else (None, None)
            if failed is not None:
                raise failed
            if has is None:
                has = self.session.parts_at_server(note.ticket, digests)
            bar.resume()
            self.transfer.push(
                routes.parts_of(note.ticket),
                self.outbox.fd,
                [part for part in self.outbox.layout.parts if part.index not in has],
                digests,
                on_bytes=bar.add,
            )

        def complete() -> messages.Receipt:
            if not self.session.ranks.together:
                push()
            return self.session.channel.complete(note.ticket, _complete(note), 30.0)

        for conflicts in range(MAX_CONFLICTS + 1):
            if self.session.ranks.together:
                lost = self.session.move(push, "submit", retries=retries)
                if lost is not None:
                    return lost
            try:
                return self.session.call(complete, "submit", retries=retries, kind=messages.Receipt)
            except Conflict as error:  # the next attempt asks the server which parts it lacks
                if conflicts == MAX_CONFLICTS:
                    raise
                LOG.debug("%s: %s", self.session.site, error)
        raise AssertionError("the last conflict is raised")

    def _offer(self, outlet: Outlet, note: OutboxNote, bar: Progress, retries: int | None) -> messages.Receipt | Lost:
        """In a swarm: serve the update, and report its address to the server, until a worker has pulled the update."""
        message = _complete(note).model_copy(update={"source": str(outlet.offer(self.fragment, self.outbox, bar.add))})
        while True:
            timeout_s = routes.LONG_POLL_S + 10.0
            ask = partial(self.session.channel.complete, note.ticket, message, timeout_s)
            receipt = self.session.call(ask, "submit", retries=retries, kind=messages.Receipt)
            if isinstance(receipt, Lost) or receipt.accepted:
                return receipt
            self.session.on_wait()  # the call was a long poll
            if receipt.unpulled:
                time.sleep(AGAIN_S)
                outlet.retract(self.fragment)
                source = str(outlet.offer(self.fragment, self.outbox, bar.add))
                message = message.model_copy(update={"source": source})


def resend_note(
    note: OutboxNote | None,
    ticket: Ticket,
    previous: messages.Outcome | None,
    info: messages.RunInfo,
    outcome_of: Callable[[int], messages.Outcome],
) -> OutboxNote | None:
    """Return the outbox's note with this ticket if the outbox's update may be sent under the ticket; else None.

    The update may be sent under a ticket for the version that it was formed from: same number and same bits. If the
    server fell back and the update has expired, the version may have the same bits under another number. In an
    asynchronous run, an acknowledged update that expired may be sent under any ticket, since its base may be behind the
    head anyway.

    Args:
        note: the outbox's note; None: the outbox is empty.
        ticket: the new ticket.
        previous: outcome of the site's previous ticket.
        info: the run's description.
        outcome_of: gives the outcome of a ticket.
    """
    fell_back = previous is not None and previous.state == "expired"
    if note is None or note.run != info.run or note.layout_digest != ticket.layout_digest:
        return None
    base = ticket.base
    again = replace(note, ticket=ticket.id, base_version=base.number, base_digest=base.digest, sent=False)
    same = note.base_digest == base.digest
    if same and note.base_version == base.number:
        return again
    if not fell_back or outcome_of(note.ticket).state != "expired":  # the update was not lost
        return None
    if same:
        return replace(again, base_version=note.base_version)
    return again if info.mode == "async" and note.sent else None


def _complete(note: OutboxNote) -> messages.Complete:
    return messages.Complete(
        digest=note.digest,
        base_digest=note.base_digest,
        weight=note.weight,
        steps=note.steps,
        metrics=note.metrics,
    )
