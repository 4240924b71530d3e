"""Carries versions and updates between a worker and the server, and resumes an interrupted upload.

An update of one part is one request, with the message that it is complete after the bytes. Of a larger update, this
message is a request of its own: the last part would otherwise have to wait, alone, until all others have arrived.
Parts are sent while later parts are still being formed. If the connection breaks, or if an earlier process formed the
update in the outbox, the worker asks which parts the server has, and sends only the missing ones
(`ServerCarrier.send`). `transport/part_transfer` moves the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from atoll.errors import Conflict
from atoll.protocol import messages, routes
from atoll.protocol.values import Lost
from atoll.tensors.layout import Layout
from atoll.transport.object_server import PartSource
from atoll.transport.part_transfer import HttpTransfer, Pushing
from atoll.worker.exchange.carrier import SendEarly, Upload
from atoll.worker.exchange.worker_processes import WorkerProcesses
from atoll.worker.log_lines import LOG
from atoll.worker.session.session import Session

MAX_CONFLICTS = 3
"""How often an upload is resumed after a conflict: the server has parts that do not match the update's digests. For
example, a part of an abandoned attempt may arrive late and replace a newer one."""


class ServerCarrier:
    """The `Carrier` between a worker and the server.

    Args:
        session: the worker's session, which makes calls to the server.
        transfer: the connections that parts are sent and downloaded over.
        processes: the worker's processes; each sends its own parts.
    """

    resend_line = "%s: the server fell back to version %d; submitting this site's update again"

    def __init__(self, session: Session, transfer: HttpTransfer, processes: WorkerProcesses) -> None:
        self._session, self._transfer, self._processes = session, transfer, processes

    def fetch(self, fragment: int, version: int, path: str, pull: Callable[[PartSource, str], None]) -> None:
        """Download the bytes at `path` from the server."""
        pull(self._transfer, path)

    def send_early(self, layout: Layout) -> SendEarly | None:
        """Return the function that sends parts while later ones are formed; None if the update is a single part."""
        return self._pushing if len(layout.all_parts) > 1 else None

    def _pushing(self, ticket: int, fd: int, on_bytes: Callable[[int], None]) -> AbstractContextManager[Pushing]:
        return self._transfer.pushing(routes.parts_of(ticket), fd, on_bytes=on_bytes)

    def send(self, upload: Upload) -> messages.Receipt | Lost:
        """Send the parts that the server lacks, then the message that the update is complete. Repeat after errors.

        Raises:
            UpdateRefused: the server refuses the update.
            TicketClosed, Gone: the update came too late.
            Conflict: after `MAX_CONFLICTS` repetitions, the server still has parts that do not match the note's
                digests.
        """
        outbox, note, bar = upload.outbox, upload.note, upload.bar
        attempts = [(upload.sent, upload.failure)]  # the first one is that which sent parts early
        digests = {index: bytes.fromhex(text) for index, text in enumerate(note.part_digests)}
        session, transfer, path_of = self._session, self._transfer, routes.parts_of(note.ticket)
        is_whole = len(outbox.layout.all_parts) == 1 and outbox.layout.rank is None
        receipts: list[messages.Receipt] = []

        def push() -> None:
            has, failed = attempts.pop() if attempts else (None, None)
            if failed is not None:
                raise failed
            if has is None:
                has = session.parts_at_server(note.ticket, digests, note.digest)
            bar.resume()
            missing = [part for part in outbox.layout.parts if part.index not in has]
            if not is_whole or not missing:
                transfer.push(path_of, outbox.fd, missing, digests, on_bytes=bar.add)
                return
            answer = transfer.push_whole(
                path_of(0),
                outbox.fd,
                missing[0],
                digests[0],
                note.complete(),
                has_arrived=lambda: 0 in session.parts_at_server(note.ticket, digests, note.digest),
                on_bytes=bar.add,
            )
            if answer is not None:
                receipts.append(session.http.message_in(answer, messages.Receipt))

        def complete() -> messages.Receipt:
            return receipts.pop() if receipts else session.complete(note.ticket, note.complete())

        for conflicts in range(MAX_CONFLICTS + 1):
            try:
                return self._processes.upload(push, complete, upload.retries)
            except Conflict as error:  # the next attempt asks the server which parts it lacks
                if conflicts == MAX_CONFLICTS:
                    raise
                LOG.debug("%s: %s", self._session.site, error)
        raise AssertionError("the last conflict is raised")

    def retract(self, fragment: int) -> None:
        """Do nothing: the server has a copy of what it was sent."""

    def break_off(self) -> None:
        """End all running transfers at once, including those of other fragments. Any thread may call this."""
        self._transfer.break_off()
