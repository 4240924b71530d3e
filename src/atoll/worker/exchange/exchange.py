"""What a worker has of one fragment, the whole model unless it streams: base file, outbox, tickets.

Everything here can be interrupted; what was formed is in the outbox, and is sent by this process or by the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atoll.algorithms.base import Moved, Runs
from atoll.codecs.encoded_layout import codecs_of, encoded_layout
from atoll.errors import Conflict, Gone, TicketClosed, UpdateRefused
from atoll.failpoints import failpoint
from atoll.filters.base import About, Filter, require_filters
from atoll.protocol import messages, routes
from atoll.tensors.byte_runs import RunTable
from atoll.tensors.chunks import CHUNK_ELEMENTS, Held
from atoll.tensors.layout import Part, version_layout
from atoll.tensors.module_tensors import Tensors
from atoll.tensors.schema import Schema
from atoll.transport.resumable_transfer import HttpTransfer, Pushing
from atoll.worker.broken_off import NetworkLost
from atoll.worker.exchange import encode_update
from atoll.worker.exchange.base_and_outbox import BaseFile, BaseNote, Outbox, OutboxNote
from atoll.worker.exchange.encode_update import Filtered, Losses
from atoll.worker.exchange.local_state import Owner, Residuals, Together
from atoll.worker.exchange.optimizer_moments import say_accepted, say_refused
from atoll.worker.exchange.pull_version import Puller
from atoll.worker.json_notes import name_of, read_note
from atoll.worker.log_lines import LOG, Progress, progress, size
from atoll.worker.peer.peer_transfers import PeerServer
from atoll.worker.session.connection import Connection

if TYPE_CHECKING:
    from atoll.worker.exchange.algorithm_state import AlgorithmState


# -- What is sent again: a server that lost power falls back, and what it had acknowledged since is still in outboxes.


def sent_again(
    note: OutboxNote | None,
    ticket: messages.Ticket,
    previous: messages.Outcome | None,
    info: messages.RunInfo,
    outcome_of: Callable[[int], messages.Outcome],
) -> OutboxNote | None:
    """The note under which what the outbox holds serves this ticket; None where it does not.

    In a synchronous run it was formed from the very version that the ticket is for: the same bits alone are no reason,
    a round may have left them as they were. In an asynchronous one its base may be behind the head as any other's may
    be: an acknowledged update that has expired is sent as if it had started from there.

    Args:
        previous: what became of the site's ticket before.
    """
    fell_back = previous is not None and previous.state == "expired"
    if note is None or note.run != info.run or note.layout_digest != ticket.layout_digest:
        return None
    again = replace(
        note, ticket=ticket.ticket, base_version=ticket.base_version, base_digest=ticket.base_digest, sent=False
    )
    same = note.base_digest == ticket.base_digest
    if same and note.base_version == ticket.base_version:
        return again
    if not fell_back or outcome_of(note.ticket).state != "expired":  # it counts already: the head has its base's bits
        return None
    if same:
        return replace(again, base_version=note.base_version)
    return again if info.mode == "async" and note.sent else None


# -- What is in an outbox, on its way: the parts that the server lacks, then the word that it is complete.


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
        parts: HttpTransfer,
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
    connection: Connection,
    peer_server: PeerServer,
    fragment: int,
    outbox: Outbox,
    bar: Progress,
    max_retries: int | None,
) -> messages.Receipt:
    """In a swarm: say that what the outbox holds is complete and where it is, until another worker has pulled it.

    Raises:
        UpdateRefused: that worker has looked at it, and it cannot count. TicketClosed: the round went on without it.
    """
    note = outbox.note
    assert note is not None
    message = _complete(note).model_copy(update={"source": str(peer_server.offer(fragment, outbox, bar.add))})
    path = routes.COMPLETE.format(ticket=note.ticket)

    def submit() -> messages.Receipt:
        return connection.http.post(path, message, messages.Receipt, timeout_s=routes.LONG_POLL_S + 10.0)

    while not (receipt := connection.patiently(submit, max_retries, "submit")).accepted:
        connection.on_wait()  # an answer has waited for some time, at the server
        if receipt.unpulled:
            time.sleep(AGAIN_S)
            peer_server.retract(fragment)
            message = message.model_copy(update={"source": str(peer_server.offer(fragment, outbox, bar.add))})
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


Finish = Callable[[Moved], Mapping[str, Runs]]
"""How the model has moved → what its update carries beside it, group by group; sets what the site keeps."""

MAX_REFUSALS = 5
"""In a row, after which a worker gives up: it would train and be refused for ever."""


class Exchange:
    """The files and tickets of one fragment; by one thread at a time.

    Args:
        connection: of the worker.
        parts: over which connections.
        folder: of the site in the run; locked by the caller.
        fragment: its number; None: the run has one.
        schema: of the fragment.
        filters: that its updates pass through before they leave.
        cleanup: closes the files.
        rank: of a sharded worker, whose parts alone are sent and pulled here.

    Attributes:
        refusals: updates of this process that were refused in a row.
        resuming: whether the outbox was filled by an earlier process, so that the server may hold parts of it already.
        settled: the ticket of the outbox's update, once nothing of it is local progress any more (`settle`).
    """

    schema: Schema

    def __init__(
        self,
        connection: Connection,
        parts: HttpTransfer,
        folder: Path,
        fragment: int | None,
        schema: Schema,
        filters: Sequence[Filter],
        cleanup: ExitStack,
        rank: int | None = None,
    ) -> None:
        self.connection, self.site, self.parts = connection, connection.site, parts
        self.folder, self.schema = folder, schema
        self.fragment = fragment or 0
        self._named = "" if fragment is None else f" fragment {fragment}"
        self.refusals, self.resuming, self.settled = 0, False, 0
        info = connection.info
        self.layout = version_layout(schema, info.part_bytes, info.ranks)
        self.codecs = codecs_of(info.codec, info.codec_options, sent=True)
        layout = encoded_layout(schema, info.codec, self.codecs, info.part_bytes, info.ranks)
        if rank is not None:
            self.layout, layout = self.layout.of_rank(rank), layout.of_rank(rank)
        self.base = BaseFile(folder, self.layout, name_of("base", fragment))
        cleanup.callback(self.base.close)
        self._following = name_of("base-next", fragment)
        self._puller = Puller(connection, parts, folder, self.layout, fragment)
        self.owner = Owner(self.site, info.run)
        self.outbox = Outbox(folder, layout, name_of("outbox", fragment), self.site)
        cleanup.callback(self.outbox.close)
        self._runs = RunTable(self.outbox.layout, CHUNK_ELEMENTS)
        self._losses = Losses(self.site, self.codecs[info.codec], schema)
        self._turns = Together(connection.outcome)
        cleanup.callback(self._turns.close)
        self.residuals: Residuals | None = None
        if self.codecs[info.codec].feedback:
            sparse = rank is not None
            residuals = Residuals(folder, schema, name_of("residual", fragment), owner=self.owner, sparse=sparse)
            self.residuals = self._turns.add(residuals)
        self.kept: AlgorithmState | None = None
        self.filters = require_filters(filters)

    def following(self) -> BaseFile:
        """A file for a version that is to take the place of the base; the caller closes it."""
        return BaseFile(self.folder, self.layout, self._following)

    def is_following(self, digest: str) -> bool:
        """Whether a pull of this version into that file has begun, by whichever process."""
        note: BaseNote | None = read_note(self.folder / f"{self._following}.json", BaseNote)
        return note is not None and (note.run, note.digest) == (self.connection.info.run, digest)

    def pull(
        self,
        version: int,
        digest: str,
        into: Tensors | None,
        base: BaseFile | None = None,
        *,
        max_retries: int | None = None,
        waits: bool = True,
    ) -> None:
        """As `Puller.pull`, from the base file here, and by default into it."""
        self._puller.pull(version, digest, into, base or self.base, self.base, max_retries, waits=waits)

    def rebase(self, version: int, digest: str, tensors: Tensors, *, max_retries: int | None = None) -> None:
        """Go on from another version, with what was trained since the base."""
        moved = self.following()
        try:
            self.pull(version, digest, None, moved, max_retries=max_retries)
            encode_update.rebase_(tensors, self.base, moved)
            self.base.replace_with(moved)
        finally:
            moved.close()

    def submit(
        self,
        ticket: messages.Ticket,
        tensors: Tensors,
        *,
        weight: float,
        steps: int,
        metrics: dict[str, float],
        finish: Finish | None = None,
        max_retries: int | None = None,
    ) -> encode_update.Formed:
        """Form the update of this ticket and send it; its parts are on their way while the later ones are formed.

        Raises:
            TicketClosed, UpdateRefused: as `send`.
        """
        how: dict[str, Any] = {"weight": weight, "steps": steps, "metrics": metrics}
        how["finish"] = finish
        if self.connection.peer_server is not None or len(self.outbox.layout.parts) == 1:
            formed = self.form(ticket, tensors, **how)
            self.send(max_retries)
            return formed
        self._tell_submitting(ticket.round)
        with progress(f"{self.site}: submitting{self._named}", self.outbox.layout.own_nbytes) as bar:
            with self._pushing(ticket, bar) as pushing:
                formed = self.form(ticket, tensors, on_part=pushing.add, **how)
            self._complete(bar, pushing.sent, pushing.error, max_retries)
        return formed

    def _pushing(self, ticket: messages.Ticket, bar: Progress) -> AbstractContextManager[Pushing]:
        """Sends parts of the outbox that are ours, while later ones are formed."""
        return self.parts.pushing(routes.parts_of(ticket.ticket), self.outbox.fd, on_bytes=bar.add)

    def form(
        self,
        ticket: messages.Ticket,
        tensors: Tensors,
        *,
        weight: float,
        steps: int,
        metrics: dict[str, float],
        finish: Finish | None = None,
        on_part: Callable[[Part, bytes], None] | None = None,
    ) -> encode_update.Formed:
        """Write the update of this ticket into the outbox; from here on it survives this process."""
        about = About(self.site, ticket.round, ticket.base_version, weight, steps, metrics, fragment=self.fragment)
        model = [spec.name for spec in self.connection.schema.model.tensors] if self._named else ()
        filtered = Filtered(self.filters, self.base, tensors, about, model) if self.filters else None
        formed = self._write(ticket, tensors, on_part, finish, filtered)
        digests = [digest.hex() for digest in formed.part_digests]
        self._formed(formed.is_zero, steps)
        self.outbox.seal(note_of(self.connection, ticket, formed.digest, digests, weight, steps, metrics))
        return formed

    def _write(
        self,
        ticket: messages.Ticket,
        tensors: Held,
        on_part: Callable[[Part, bytes], None] | None,
        finish: Finish | None = None,
        filtered: Filtered | None = None,
    ) -> encode_update.Formed:
        """Fill the outbox, which has no note yet."""
        if self.connection.peer_server is not None:
            self.connection.peer_server.retract(self.fragment)
        self.outbox.begin(ticket.layout_digest)
        self._turns.begin(ticket.ticket)
        if self.residuals is not None:
            self.residuals.follow(ticket.base_version, self.site)
        moved = filtered.moved if filtered is not None else partial(encode_update.change_of, self.base, tensors)
        with torch.no_grad():
            beside = finish(moved) if finish is not None else {}
        formed = encode_update.form_update(
            self.outbox,
            self.base,
            tensors,
            self.codecs,
            on_part,
            self._runs,
            beside,
            filtered,
            self.residuals,
            self._losses,
        )
        whole = self.outbox.layout.rank is None
        self._turns.belongs_to(ticket.ticket, ticket.base_version, formed.digest if whole else "")
        return formed

    def _formed(self, is_zero: bool, steps: int) -> None:
        self._losses.end(is_zero, steps, bool(self.filters))
        self.connection.warn(self.fragment, self._losses.warnings)

    def send(self, max_retries: int | None = None) -> messages.Receipt:
        """Send what is in the outbox: the parts that the server lacks, then the word that it is complete.

        Raises:
            TicketClosed: the round went on without this update.
            UpdateRefused: the server looked at it, and it cannot count.
        """
        note = self.outbox.note
        assert note is not None
        self._tell_submitting(note.round)
        with progress(f"{self.site}: submitting{self._named}", self.outbox.layout.own_nbytes) as bar:
            return self._complete(bar, None if self.resuming else set(), None, max_retries)

    def _complete(
        self, bar: Progress, sent: Collection[int] | None, failure: BaseException | None, max_retries: int | None
    ) -> messages.Receipt:
        """As `completed`; then the outbox says so, too."""
        assert self.outbox.note is not None
        if self.connection.peer_server is not None:
            receipt = offered(
                self.connection, self.connection.peer_server, self.fragment, self.outbox, bar, max_retries
            )
        else:
            sending = Sending(self.connection, self.parts, self.outbox, bar, sent, failure)
            receipt = completed(self.connection, self.outbox.note, sending.push, max_retries)
        self._acknowledged()
        return receipt

    def _acknowledged(self) -> None:
        note = self.outbox.note
        assert note is not None
        self.outbox.mark_sent()
        self.resuming = False
        say_accepted(self.connection)
        failpoint("worker.acknowledged")
        LOG.debug(
            "%s: submitted%s, %s for version %d",
            self.site,
            self._named,
            size(self.outbox.layout.own_nbytes),
            note.base_version,
        )

    def _tell_submitting(self, number: int) -> None:
        self.connection.tell(state=f"submitting to round {number}")

    def advance_base(self) -> None:
        """What is in the outbox counts: the base becomes what was submitted, so that it is local progress only once.

        What encoding has lost of it is then part of the local progress, and must not be added to it once more.
        """
        note, sent = self.base.note, self.outbox.note
        assert note is not None
        assert sent is not None
        if self.residuals is not None:
            self.residuals.take_back(sent.ticket)
        self.base.begin_local(note)
        encode_update.advance_base_(self.base, self.outbox, self.codecs)

    def begin_from(self, tensors: Tensors) -> None:
        """The base becomes the model as it is: from here on what changes of it is local progress, and nothing else."""
        note = self.base.note
        assert note is not None
        self.base.begin_local(note)
        encode_update.store_(self.base, tensors)

    def refused(self, error: UpdateRefused) -> None:
        """Say that an update was refused; one that is refused again and again ends this worker.

        Raises:
            UpdateRefused: the fifth in a row.
        """
        self.refusals += 1
        say_refused(self.connection, error, first=self.refusals == 1)
        if self.refusals >= MAX_REFUSALS:
            raise error

    def resume_outbox(self) -> messages.Receipt | None:
        """Send what an earlier process of this worker left; None where there is nothing that can still count."""
        note = self.outbox.note
        if note is None or note.run != self.connection.info.run:
            self.outbox.clear()
            return None
        if self.outbox.is_damaged():
            LOG.warning(
                "%s: %s is damaged: the update in it is not sent. Look at the disk.", self.site, self.outbox.path
            )
            self.outbox.clear()
            return None
        self.resuming = True
        try:
            receipt = self.send()
            LOG.info("%s: the update of an earlier process is in: round %d", self.site, note.round)
            return receipt
        except (TicketClosed, Gone) as error:  # kept: after a fall back it may count under another ticket
            LOG.info("%s: the update of an earlier process is too late: %s", self.site, error)
            return None
        except UpdateRefused as error:
            LOG.info("%s: the update of an earlier process cannot count: %s", self.site, error)
            self.outbox.clear()
            return None
        finally:
            self.resuming = False

    def is_over(self, ticket: messages.Ticket, max_retries: int | None = None) -> bool:
        """Whether the outbox must not be rewritten for this ticket: the server fell back since it gave it.

        What the outbox holds is then needed once more. Nothing is asked where it is not: it holds nothing, or a version
        that came after its base is durable.
        """
        note = self.outbox.note
        durable = self.connection.durable_versions.get(self.fragment)
        if note is None or (durable is not None and durable > note.base_version):
            return False
        outcome = self.connection.outcome(ticket.ticket, max_retries)
        return outcome.state == "expired" or outcome.base_version != ticket.base_version

    def next_round(self, *, wait_s: float | None = None, max_retries: int | None = None) -> messages.TicketReply:
        """As `next_ticket`; but a round that the outbox can still serve is served from it, and not trained again.

        A server that lost power falls back to its durable version: what was acknowledged since has expired there or was
        never heard of; it is sent again.
        """
        while True:
            reply = self.connection.next_ticket(self.fragment, wait_s=wait_s, max_retries=max_retries)
            self.connection.require_here()
            if reply.ticket is None or not self._resubmit(reply.ticket, reply.previous):
                if reply.ticket is not None:
                    self._turns.settle()
                return reply

    def _resubmit(self, ticket: messages.Ticket, previous: messages.Outcome | None) -> bool:
        """Send what was formed from the same base under this ticket; False where the outbox holds nothing for it.

        The same bits alone are no reason: a round may have left them as they were.
        """
        note = self.outbox.note
        again = sent_again(note, ticket, previous, self.connection.info, self.connection.outcome)
        if note is None or again is None:
            return False
        told = "%s: the server fell back to version %d; submitting again"
        if self.connection.peer_server is not None:
            told = "%s: the updates from version %d are collected again; submitting again"
        LOG.info(told, self.site, ticket.base_version)
        self._turns.moves_to(ticket.ticket, ticket.base_version, note.ticket)
        self.outbox.seal(again)
        try:
            self.send()
        except (TicketClosed, Gone, UpdateRefused) as error:
            LOG.warning("%s: %s", self.site, error)
            self.outbox.clear()
        return True


# -- What a synchronisation that broke off has left, and how it is taken up again: docs/decisions/0005.
#
# An update was formed, and nobody has heard yet whether it counts; the head moved on while it was pulled; the run ended
# while this worker was at it. Whole models and fragments alike.


BROKE_OFF = (*NetworkLost, TicketClosed, Gone)
"""What a synchronisation is skipped for, and training goes on."""


def unsettled(exchange: Exchange) -> OutboxNote | None:
    """The update that was formed from the base, where it is not known yet what became of it."""
    note: OutboxNote | None = exchange.outbox.note
    base = exchange.base.note
    if note is None or base is None or note.ticket == exchange.settled or note.base_digest != base.digest:
        return None
    return note


def counted_step(exchange: Exchange, base_step: int) -> int:
    """The last local step whose progress is in an update that the server has, as far as this worker knows.

    Args:
        base_step: after which what is local now began.
    """
    note = unsettled(exchange)
    return base_step + note.steps if note is not None and note.sent else base_step


def settle(exchange: Exchange, note: OutboxNote, max_retries: int) -> int:
    """Find out what became of an update that is `unsettled`.

    If it is in, only what was trained since is local progress: the base advances to what was submitted. If it is not,
    the next update holds all of it.

    Returns:
        Local steps that are local progress no more.
    """
    outcome = exchange.connection.outcome(note.ticket, max_retries)
    if not outcome.is_in:
        exchange.outbox.clear()
        return 0
    LOG.info("%s: the update of round %d is in after all", exchange.site, note.round)
    exchange.advance_base()
    exchange.settled = note.ticket
    return note.steps


def begin_from_base(exchange: Exchange) -> None:
    """The base is a version that was pulled: whatever the outbox holds, nothing of it is local progress.

    It is kept: until a later version is durable the server may fall back, and need it again.
    """
    if exchange.outbox.note is not None:
        exchange.settled = exchange.outbox.note.ticket


def pull_newest(
    exchange: Exchange,
    version: int,
    digest: str,
    into: Tensors | None,
    base: BaseFile | None = None,
    *,
    max_retries: int | None,
    waits: bool = True,
) -> messages.TicketReply | None:
    """Pull a version, or the head where it is gone: with `waits`, a pull that has begun ends with a whole version.

    Args:
        into, base, max_retries, waits: as `Puller.pull`.

    Returns:
        What the server said of the head that was pulled instead; None where it was the version.
    """
    newer: messages.TicketReply | None = None
    while True:
        try:
            exchange.pull(version, digest, into, base, max_retries=max_retries, waits=waits)
            return newer
        except Gone:
            max_retries = None if into is not None and waits else max_retries  # from now on
            newer = exchange.connection.next_ticket(exchange.fragment, wait_s=0.0, max_retries=max_retries)
            version, digest = newer.head_version, newer.head_digest


def ended_without_us(exchange: Exchange, take: Callable[[messages.TicketReply], None]) -> bool:
    """Whether a ticket was over because the run is, and its result is here: an asynchronous one ends without some.

    It is no skipped synchronisation then. Where the network is lost on the way, a later turn finds out.

    Args:
        take: makes the head the model.
    """
    try:
        reply = exchange.connection.next_ticket(exchange.fragment, wait_s=0.0, max_retries=0)
        if reply.status == "finished":
            take(reply)
    except NetworkLost:
        return False
    return reply.status == "finished"
