"""Upload an update from the outbox file, and resume an interrupted upload.

Parts are sent while later parts are still being formed. If the connection breaks, or if an earlier process formed the
update in the outbox, the worker asks which parts the server has, and sends only the missing ones (`UpdateUpload.send`).
`transport/part_transfer` moves the bytes. In a swarm, an update does not go to the server: other workers download it
from this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from atoll.blobs.manifest import Manifest
from atoll.errors import Conflict
from atoll.protocol import messages, routes
from atoll.protocol.messages import Ticket
from atoll.protocol.values import Lost
from atoll.transport.part_transfer import HttpTransfer, Pushing
from atoll.worker.exchange.base_and_outbox import Outbox, OutboxNote
from atoll.worker.exchange.pull_version import Sources
from atoll.worker.log_lines import LOG, TransferProgress, progress
from atoll.worker.session.ranks import keep_ranks_waiting
from atoll.worker.session.session import Repeats, Session

AGAIN_S = 1.0
"""In a swarm: seconds to wait after another worker could not pull an update, before the update is offered again."""
MAX_CONFLICTS = 3
"""How often an upload is resumed after a conflict: the server has parts that do not match the update's digests. For
example, a part of an abandoned attempt may arrive late and replace a newer one."""


class UpdateServer(Sources, Protocol):
    """In a swarm: the server inside this worker from which other workers download its updates."""

    def offer(self, fragment: int, fd: int, manifest: Manifest, on_bytes: Callable[[int], None]) -> object:
        """Let other workers download the file of an update. Return a reference to the update, for the server.

        Args:
            fragment: the fragment's number.
            fd: descriptor of the update's file.
            manifest: the parts and digests of the update.
            on_bytes: called with the number of bytes each time another worker has downloaded some.
        """

    def retract(self, fragment: int) -> None:
        """Stop serving the fragment's update."""


@dataclass(eq=False)
class UpdateUpload:
    """Uploads the updates of one fragment of the model.

    Attributes:
        session: the worker's session, which sends heartbeats and makes calls to the server.
        transfer: the connections that parts are sent over.
        outbox: the file of the update that was formed last.
        number: the fragment's number; None: the run has one fragment.
        peer_server: in a swarm: serves this worker's updates to other workers; else None.
    """

    session: Session
    transfer: HttpTransfer
    outbox: Outbox
    number: int | None = None
    peer_server: UpdateServer | None = None

    def __post_init__(self) -> None:
        self.fragment = self.number or 0
        self.in_words = "" if self.number is None else f" fragment {self.number}"

    def progress(self, number: int) -> AbstractContextManager[TransferProgress]:
        """Report that the update of round `number` is being sent. Return what `log_lines.progress` returns."""
        self.session.tell(state=f"submitting to round {number}")
        rank = f": rank {self.session.ranks.rank}" if self.session.ranks.is_distributed else ""
        return progress(f"{self.session.site}{rank}: submitting{self.in_words}", self.outbox.layout.own_nbytes)

    def pushing(self, ticket: Ticket, bar: TransferProgress) -> AbstractContextManager[Pushing]:
        """Send parts in the background while the `with` block forms them. Pass each formed part to `Pushing.add`."""
        return self.transfer.pushing(routes.parts_of(ticket.id), self.outbox.fd, on_bytes=bar.add)

    def retract(self) -> None:
        """In a swarm: stop serving the update. Call this before the outbox is overwritten."""
        if self.peer_server is not None:
            self.peer_server.retract(self.fragment)

    def send(
        self,
        note: OutboxNote,
        bar: TransferProgress,
        sent: Collection[int] | None,
        failure: BaseException | None,
        retries: int | None,
    ) -> messages.Receipt | Lost:
        """Send the update to the server; in a swarm, wait until another worker has downloaded it.

        First send the parts that the server lacks, then the message that the update is complete. Repeat both after
        errors.

        Args:
            note: the update's note.
            bar: the progress of the transfer.
            sent: indices of the parts that were sent already; None: not known, so ask the server.
            failure: the error that ended an earlier attempt to send parts. The failed attempt then counts as the first
                attempt of this method. None: no attempt has failed.
            retries: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.

        Raises:
            UpdateRefused: the server refuses the update.
            TicketClosed, Gone: the update came too late.
            Conflict: after `MAX_CONFLICTS` repetitions, the server still has parts that do not match the note's
                digests.
        """
        if self.peer_server is not None:
            return self._offer(self.peer_server, note, bar, retries)
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
            if not self.session.ranks.is_distributed:
                push()
            return self._complete(note.ticket, _message(note))

        for conflicts in range(MAX_CONFLICTS + 1):
            if self.session.ranks.is_distributed:
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

    def _complete(self, ticket: int, message: messages.Complete) -> messages.Receipt:
        path = routes.COMPLETE.format(ticket=ticket)
        return self.session.http.post(path, message, messages.Receipt)

    def _offer(
        self, server: UpdateServer, note: OutboxNote, bar: TransferProgress, retries: int | None
    ) -> messages.Receipt | Lost:
        """In a swarm: tell the server where to download the update. Repeat this until a worker has downloaded it."""
        manifest = Manifest.of_layout(self.outbox.layout, [bytes.fromhex(text) for text in note.part_digests])

        def offered() -> messages.Complete:
            return _message(note, source=str(server.offer(self.fragment, self.outbox.fd, manifest, bar.add)))

        message, early = offered(), Repeats(self.session)
        while True:
            asked_s = time.monotonic()
            ask = partial(self._complete, note.ticket, message)
            receipt = self.session.call(ask, "submit", retries=retries, kind=messages.Receipt)
            if isinstance(receipt, Lost) or receipt.accepted:
                return receipt
            keep_ranks_waiting()  # the call was a long poll
            if time.monotonic() - asked_s < routes.LONG_POLL_S / 2:
                early.again()
            if receipt.unpulled:
                time.sleep(AGAIN_S)
                server.retract(self.fragment)
                message = offered()


def resend_note(
    note: OutboxNote | None,
    ticket: Ticket,
    previous: messages.Outcome | None,
    info: messages.RunInfo,
    outcome_of: Callable[[int], messages.Outcome],
) -> OutboxNote | None:
    """Return the outbox's note, with the new ticket, if the outbox's update may be sent under this ticket; else None.

    Usually the ticket must name the version that the update was formed from: the same number and the same bits. If the
    server fell back to an older version and so lost the update, there are two exceptions. The version may have the same
    bits under another number. And in an asynchronous run, an update that the server had acknowledged may be sent under
    any ticket, since such a run accepts updates from older versions.

    Args:
        note: the outbox's note; None: the outbox is empty.
        ticket: the new ticket.
        previous: the state of the site's previous ticket.
        info: the run's description.
        outcome_of: returns the state of a ticket's update.
    """
    fell_back = previous is not None and previous.state == "expired"
    if note is None or note.run != info.run or note.layout_digest != ticket.layout_digest:
        return None
    if note.generation != ticket.generation:  # it was formed with a state that begins at zero again
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


def _message(note: OutboxNote, source: str | None = None) -> messages.Complete:
    facts = dict(note.report)
    return messages.Complete(
        **facts, digest=note.digest, base_digest=note.base_digest, generation=note.generation, source=source
    )
