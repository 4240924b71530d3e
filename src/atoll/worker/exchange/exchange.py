"""What a worker has of one fragment, the whole model unless it streams: base file, outbox, tickets.

Everything here can be interrupted; what was formed is in the outbox, and is sent by this process or by the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from atoll.codecs.encoded_layout import codecs_of, encoded_layout
from atoll.errors import Gone, TicketClosed, UpdateRefused
from atoll.failpoints import failpoint
from atoll.filters.base import About, Filter, require_filters
from atoll.protocol import messages, routes
from atoll.tensors.chunks import Held
from atoll.tensors.layout import Part, version_layout
from atoll.tensors.module_tensors import Tensors
from atoll.tensors.schema import Schema
from atoll.transport.resumable_transfer import Parts, Pushing
from atoll.worker.exchange import encode_update
from atoll.worker.exchange.base_and_outbox import BaseFile, BaseNote, Outbox
from atoll.worker.exchange.filtering import Filtered
from atoll.worker.exchange.local_state import Owner, Together
from atoll.worker.exchange.optimizer_moments import say_accepted, say_refused
from atoll.worker.exchange.pull_version import Puller
from atoll.worker.exchange.resend_note import sent_again
from atoll.worker.exchange.residuals import Residuals
from atoll.worker.exchange.send_update import Sending, completed, note_of, offered
from atoll.worker.exchange.update_runs import Stretches
from atoll.worker.exchange.zero_updates import Losses
from atoll.worker.json_notes import name_of, read_note
from atoll.worker.log_lines import LOG, Progress, progress, size
from atoll.worker.session.connection import Connection

if TYPE_CHECKING:
    from atoll.worker.correction.control_variates import Controls

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
        settled: the ticket of the outbox's update, once nothing of it is local progress any more (`settling.py`).
    """

    schema: Schema

    def __init__(
        self,
        connection: Connection,
        parts: Parts,
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
        self._stretches = Stretches(self.outbox.layout, self.layout, self.codecs)
        self._losses = Losses(self.site, self.codecs[info.codec], schema)
        self._turns = Together(connection.outcome)
        cleanup.callback(self._turns.close)
        self.residuals: Residuals | None = None
        if self.codecs[info.codec].feedback:
            sparse = rank is not None
            residuals = Residuals(folder, schema, name_of("residual", fragment), owner=self.owner, sparse=sparse)
            self.residuals = self._turns.add(residuals)
        self.controls: Controls | None = None
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
        control_difference: encode_update.Runs | None = None,
        max_retries: int | None = None,
    ) -> encode_update.Formed:
        """Form the update of this ticket and send it; its parts are on their way while the later ones are formed.

        Raises:
            TicketClosed, UpdateRefused: as `send`.
        """
        how: dict[str, Any] = {"weight": weight, "steps": steps, "metrics": metrics}
        how["control_difference"] = control_difference
        if self.connection.outlet is not None or len(self.outbox.layout.parts) == 1:
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
        return self.parts.pushing(
            routes.parts_of(ticket.ticket),
            self.outbox.fd,
            len(self.outbox.layout.parts),
            partial(self.connection.parts_at_server, ticket.ticket),
            on_bytes=bar.add,
        )

    def form(
        self,
        ticket: messages.Ticket,
        tensors: Tensors,
        *,
        weight: float,
        steps: int,
        metrics: dict[str, float],
        control_difference: encode_update.Runs | None = None,
        on_part: Callable[[Part, bytes], None] | None = None,
    ) -> encode_update.Formed:
        """Write the update of this ticket into the outbox; from here on it survives this process."""
        about = About(self.site, ticket.round, ticket.base_version, weight, steps, metrics, fragment=self.fragment)
        model = [spec.name for spec in self.connection.schema.model.tensors] if self._named else ()
        filtered = Filtered(self.filters, self.base, tensors, about, model) if self.filters else None
        if filtered is not None and control_difference is not None:
            # with filters a round takes no other
            control_difference = cast(encode_update.Difference, control_difference).behind(filtered)
        formed = self._write(ticket, tensors, on_part, control_difference, filtered)
        digests = [digest.hex() for digest in formed.part_digests]
        self._formed(formed.is_zero, steps)
        self.outbox.seal(note_of(self.connection, ticket, formed.digest, digests, weight, steps, metrics))
        return formed

    def _write(
        self,
        ticket: messages.Ticket,
        tensors: Held,
        on_part: Callable[[Part, bytes], None] | None,
        control_difference: encode_update.Runs | None = None,
        filtered: Filtered | None = None,
    ) -> encode_update.Formed:
        """Fill the outbox, which has no note yet."""
        if self.connection.outlet is not None:
            self.connection.outlet.retract(self.fragment)
        self.outbox.begin(ticket.layout_digest)
        self._turns.begin(ticket.ticket)
        if self.residuals is not None:
            self.residuals.follow(ticket.base_version, self.site)
        formed = encode_update.form_update(
            self.outbox,
            self.base,
            tensors,
            self.codecs,
            on_part,
            self._stretches,
            control_difference,
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
        if self.connection.outlet is not None:
            receipt = offered(self.connection, self.connection.outlet, self.fragment, self.outbox, bar, max_retries)
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
        if self.connection.outlet is not None:
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
