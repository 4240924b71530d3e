"""The exchange of one fragment with the server: pull versions, form updates, send them, resume after interruptions.

The fragment is the whole model unless the run streams. Every step can be interrupted: an update that was formed stays
in the outbox, and this process or the next one sends it (`upload_update`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.errors import TRANSIENT, Gone, TicketClosed, UpdateRefused
from atoll.protocol import messages
from atoll.protocol.messages import Ticket, VersionRef
from atoll.protocol.values import (
    Accepted,
    Delivered,
    Lost,
    Next,
    Open,
    Pull,
    Pulled,
    Refused,
    TooLate,
    UpdateInfo,
    VersionGone,
    require,
)
from atoll.runtime import failpoint
from atoll.tensors.chunks import AnyTensors
from atoll.tensors.fsdp_shards import Shards
from atoll.tensors.layout import Part
from atoll.tensors.module_tensors import Tensors
from atoll.transport.part_transfer import HttpTransfer
from atoll.worker.exchange import apply_version, encode_update
from atoll.worker.exchange.base_and_outbox import BaseNote, DiskFiles, OutboxNote
from atoll.worker.exchange.encode_update import Filtered, Finish, LocalFragment
from atoll.worker.exchange.pull_version import WAITS, Patience, Puller
from atoll.worker.exchange.upload_update import Outlet, UpdateUpload, resend_note
from atoll.worker.log_lines import LOG, Progress, size
from atoll.worker.session.session import OF_THE_OPTIMIZER, Session

MAX_REFUSALS = 5
"""Refused updates in a row after which a worker gives up."""

MOMENTS_NAMED = 3


@dataclass(eq=False)
class Exchange:
    """The exchange of one fragment at one worker: base, outbox and ticket. Use it from one thread at a time.

    Attributes:
        session: the worker's lease, heartbeats and calls.
        transfer: the connections that parts are sent and pulled over.
        files: the fragment's files at this site.
        local: the fragment at this site: its base, local state and filters; forms updates.
        outlet: in a swarm: serves this worker's updates, and finds versions at other workers.
        shards: gives this rank's shards of the model; None: the model is not sharded.
        puller: pulls versions into the base.
        upload: uploads the update in the outbox.
        base: the file of the version that the worker trains from.
        outbox: the file of the update that was formed last.
        refusals: number of updates of this process that were refused in a row.
        settled: ticket of the outbox's update, once the progress since the base no longer includes that update.
    """

    session: Session
    transfer: HttpTransfer
    files: DiskFiles
    local: LocalFragment
    outlet: Outlet | None = None
    shards: Callable[[], Shards] | None = None
    refusals: int = 0
    settled: int = 0
    _warned_of_optimizer: bool = False

    def __post_init__(self) -> None:
        self.site, number = self.session.site, self.local.number
        self.fragment = number or 0
        self.base, self.outbox = self.files.base, self.files.outbox
        self.puller = Puller(self.session, self.transfer, self.files, self.local.layouts.downlink, number, self.outlet)
        self.upload = UpdateUpload(self.session, self.transfer, self.outbox, number, self.outlet)

    # -- what comes next

    def ask(self, wait_s: float | None = None, *, retries: int | None = None) -> Next | Lost:
        """Ask for the next ticket, as `Session.next_ticket` does.

        The reply with a ticket names the site's last counted update. Make the algorithm's state after that update
        current.

        Raises:
            ConfigError: the site has lost the algorithm's state (`AlgorithmState.follow`).
        """
        reply = self.session.next_ticket(self.fragment, wait_s=wait_s, retries=retries)
        if isinstance(reply, Open) and reply.counted is not None and self.local.kept is not None:
            self.local.kept.follow(reply.counted)
        return reply

    def ask_and_resend(self, wait_s: float | None = None, *, retries: int | None = None) -> Next | Lost:
        """Ask for the next ticket. While the outbox's update may be sent under that ticket, send it, and ask again.

        A server that lost power falls back to its durable version. Updates that it acknowledged after that version are
        expired or unknown there; sending them again saves their training.
        """
        while True:
            reply = self.ask(wait_s, retries=retries)
            self.session.require_here()
            if not isinstance(reply, Open):
                return reply
            sent = self._resubmit(reply.ticket, reply.previous)
            if isinstance(sent, Lost):
                return sent
            if not sent:
                self.local.state.settle()
                return reply

    def is_over(self, ticket: Ticket, retries: int | None = None) -> bool | Lost:
        """Return whether the server lost power since it gave this ticket, and continues from an older version.

        If so, the outbox must not be rewritten: its update has to be sent again. If the outbox is empty, or a version
        after its update's base is durable, nothing has to be sent again: return False without asking the server.
        """

        def needed() -> bool:
            note, durable = self.outbox.note, self.session.durable_versions.get(self.fragment)
            return note is not None and (durable is None or durable <= note.base_version)

        if not self.session.ranks.from_rank0(needed):
            return False
        outcome = self.session.outcome(ticket.id, retries)
        if isinstance(outcome, Lost):
            return outcome
        return outcome.state == "expired" or outcome.base_version != ticket.base.number

    def _resubmit(self, ticket: Ticket, previous: messages.Outcome | None) -> bool | Lost:
        """If `resend_note` allows it, send the outbox's update under this ticket. Return whether it is allowed."""
        note = self._agreed_note()
        again = resend_note(note, ticket, previous, self.session.info, self.session.require_outcome)
        if again is None:
            return False
        told = "%s: the server fell back to version %d; submitting again"
        if self.outlet is not None:
            told = "%s: the updates for version %d are collected again; submitting again"
        LOG.info(told, self.site, ticket.base.number)
        if not self._takes(again, check=False):
            self.outbox.clear()
            return True
        delivered = self.deliver()
        if isinstance(delivered, Lost):
            return delivered
        if not isinstance(delivered, Accepted):
            LOG.warning("%s: %s", self.site, delivered.error)
            self.outbox.clear()
        return True

    def _takes(self, note: OutboxNote, *, check: bool) -> bool:
        """Move the update in every rank's outbox to the ticket of `note`. Return whether every outbox has the update.

        Args:
            note: the update's note with the new ticket.
            check: whether to check the outbox's bytes. After a power loss a note may be on disk without all of the
                file's bytes.
        """

        def takes() -> bool:
            held = self.outbox.note
            if held is None or held.digest != note.digest:
                LOG.warning(
                    "%s does not have the update of round %d: training this round again", self.outbox.path, note.round
                )
                return False
            if check and self.outbox.is_damaged():
                LOG.warning("%s is damaged: its update is not sent. Check the disk.", self.outbox.path)
                return False
            if held != note:
                self.local.state.moves_to(note.ticket, note.base_version, held.ticket)
                self.outbox.seal(note)
            return True

        return all(self.session.ranks.gather(takes))

    def _agreed_note(self) -> OutboxNote | None:
        """Return the note of rank 0's outbox, at every rank."""
        note: OutboxNote | None = self.session.ranks.from_rank0(lambda: self.outbox.note, OutboxNote | None)
        return note

    # -- versions

    def pull(
        self, version: VersionRef, into: Tensors | None, patience: Patience = WAITS, *, beside: bool = False
    ) -> Pull:
        """Pull a version into the base file, and into the tensors.

        Args:
            version: the version to pull.
            into: the tensors to load; None: only the file is written.
            patience: the number of retries.
            beside: whether to write the file beside the base instead of the base.

        Returns:
            `Pulled`; `VersionGone` if the server no longer keeps the version; `Lost` after the last retry. Without
            `Pulled`, the tensors may hold a part of the version.
        """
        try:
            if self.shards is None:
                self.puller.pull(version, into, patience, beside=beside)
            elif (lost := self._pull_shares(version, beside, into is not None, patience.before)) is not None:
                return lost
        except Gone as error:
            return VersionGone(error)
        except TRANSIENT as error:
            return Lost(error)
        return Pulled(version)

    def _pull_shares(self, version: VersionRef, beside: bool, load: bool, retries: int | None) -> Lost | None:
        """Have every rank pull its parts, and load the shards if `load`. Return `Lost` if the network was lost.

        `retries` limits only the first request. After that request, the ranks wait for the server for as long as
        ATOLL_GIVE_UP_S says, since all ranks have to continue from the same version.
        """
        session = self.session
        ask, what = partial(session.channel.manifest, self.fragment, version.number), f"pull version {version.number}"
        manifest = session.call(ask, what, retries=retries, kind=messages.Manifest)
        if isinstance(manifest, Lost):
            return manifest
        lost = session.move(partial(self.puller.pull, version, None, WAITS, beside=beside), what)
        if lost is None and load and self.shards is not None:
            shards = self.shards()
            session.ranks.gather(lambda: apply_version.load_(shards, self.files.beside() if beside else self.base))
            shards.scatter_(session.ranks.swap, session.ranks.from_rank)
        return lost

    def pull_newest(
        self, version: VersionRef, into: Tensors | None, patience: Patience = WAITS, *, beside: bool = False
    ) -> Pulled | Lost:
        """Pull a version, or the head if the server no longer keeps the version."""
        newer: Next | None = None
        while True:
            pull = self.pull(version, into, patience, beside=beside)
            if not isinstance(pull, VersionGone):
                return pull if isinstance(pull, Lost) else Pulled(version, newer)
            patience = Patience(patience.into(into).within, patience.within)  # the model may have a part of a version
            reply = self.ask(0.0, retries=patience.before)
            if isinstance(reply, Lost):
                return reply
            newer, version = reply, reply.head

    def pull_head(self, into: Tensors, *, keep: VersionRef | None = None) -> None:
        """Pull the newest version, without asking for a ticket.

        Args:
            into: the tensors to load.
            keep: a version that has to stay in the base. If the head is another version, it is pulled into the file
                beside the base.
        """
        while True:
            try:
                ask = partial(self.session.channel.head, self.fragment)
                head = require(self.session.call(ask, "look up the newest version", kind=VersionRef))
            except Gone:  # another version became the head meanwhile
                continue
            kept = keep is not None and head.digest != keep.digest
            pull = require(self.pull(head, None if kept else into, beside=kept))
            if isinstance(pull, Pulled):
                if kept:
                    apply_version.load_(into, self.files.beside())
                    self.files.drop_beside()
                return

    def is_beside(self, version: VersionRef) -> bool:
        """Return whether this or an earlier process began to pull the version into the file beside the base."""
        return self.files.is_beside(self.session.info.run, version.digest)

    def break_off(self) -> None:
        """End all running transfers, of any fragment, at once."""
        self.transfer.break_off()

    def rebase(self, version: VersionRef, tensors: Tensors, *, retries: int | None = None) -> Pulled | Lost:
        """Carry the local progress since the base over to another version. That version becomes the base.

        If the server no longer keeps the version, use the head instead.
        """
        pull = self.pull_newest(version, None, Patience(retries), beside=True)
        if isinstance(pull, Lost):
            self.files.drop_beside()
            return pull
        shards = self.shards() if self.shards is not None else None
        if shards is not None:
            shards.gather_(self.session.ranks.swap)
        held: AnyTensors = tensors if shards is None else shards
        apply_version.rebase_(held, self.base, self.files.beside())
        self.files.move_up()
        if shards is not None:
            shards.scatter_(self.session.ranks.swap, self.session.ranks.from_rank)
        return pull

    # -- updates

    def submit(
        self,
        ticket: Ticket,
        tensors: Tensors,
        info: UpdateInfo,
        *,
        finish: Finish | None = None,
        retries: int | None = None,
    ) -> Delivered:
        """Form the update of this ticket and send it. Parts are sent while later parts are formed.

        Args:
            ticket: the ticket of the update.
            tensors: the model's own tensors, by name.
            info: weight, steps and metrics of the update.
            finish: gives the update's groups beside the model; None: no such groups.
            retries: retries after a network error; None: as long as ATOLL_GIVE_UP_S says.
        """
        if self.outlet is not None or len(self.outbox.layout.all_parts) == 1:
            self.form(ticket, tensors, info, finish=finish)
            return self.deliver(retries)
        with self.upload.progress(ticket.round) as bar:
            with self.upload.pushing(ticket, bar) as pushing:
                self.form(ticket, tensors, info, finish=finish, on_part=pushing.add)
            return self._deliver(bar, pushing.sent, pushing.error, retries)

    def form(
        self,
        ticket: Ticket,
        tensors: Tensors,
        info: UpdateInfo,
        *,
        finish: Finish | None = None,
        on_part: Callable[[Part, bytes], None] | None = None,
    ) -> encode_update.Formed:
        """Write the update of this ticket into the outbox. Afterwards the update survives this process.

        Args:
            ticket: the ticket of the update.
            tensors: the model's own tensors, by name.
            info: weight, steps and metrics of the update.
            finish: gives the update's groups beside the model; None: no such groups.
            on_part: called with each part and its BLAKE3 as soon as the part is in the outbox.
        """
        if self.shards is None:
            filtered = self.local.filtered(ticket, tensors, info)
            formed = self._write(ticket, tensors, on_part, finish, filtered)
        else:
            formed = self._form_shares(ticket, self.shards(), on_part)
        self.session.warn(self.fragment, self.local.warnings_about(formed, info.steps))
        self.outbox.seal(
            OutboxNote(
                run=self.session.info.run,
                ticket=ticket.id,
                fragment=ticket.fragment,
                base_version=ticket.base.number,
                base_digest=ticket.base.digest,
                layout_digest=ticket.layout_digest,
                digest=formed.digest,
                part_digests=[digest.hex() for digest in formed.part_digests],
                weight=info.weight,
                steps=info.steps,
                metrics=dict(info.metrics),
                round=ticket.round,
                site=self.site,
            )
        )
        return formed

    def _form_shares(
        self, ticket: Ticket, shards: Shards, on_part: Callable[[Part, bytes], None] | None
    ) -> encode_update.Formed:
        """Have every rank form its parts. Return the digests of the parts of all ranks."""
        ranks, layout = self.session.ranks, self.outbox.layout
        shards.gather_(ranks.swap)

        def own() -> dict[str, Any]:
            formed = self._write(ticket, shards, on_part, None, None)
            digests = [digest.hex() for digest in formed.part_digests]
            return {"digests": digests, "indices": [each.index for each in layout.parts], "is_zero": formed.is_zero}

        said = ranks.gather(own)
        digests = {index: text for each in said for index, text in zip(each["indices"], each["digests"], strict=True)}
        every = [bytes.fromhex(digests[part.index]) for part in layout.all_parts]
        return encode_update.Formed(every, layout.blob_id(every), all(each["is_zero"] for each in said))

    def _write(
        self,
        ticket: Ticket,
        tensors: AnyTensors,
        on_part: Callable[[Part, bytes], None] | None,
        finish: Finish | None,
        filtered: Filtered | None,
    ) -> encode_update.Formed:
        """Write the update's bytes into the outbox, but not its note."""
        self.upload.retract()
        self.outbox.begin(ticket.layout_digest)
        return self.local.form(self.outbox, ticket, tensors, filtered=filtered, finish=finish, on_part=on_part)

    def deliver(self, retries: int | None = None) -> Delivered:
        """Send the outbox's update: the parts that the server lacks, then the message that the update is complete."""
        assert self.outbox.note is not None
        with self.upload.progress(self.outbox.note.round) as bar:
            return self._deliver(bar, None if self.upload.resuming else set(), None, retries)

    def _deliver(
        self, bar: Progress, sent: Collection[int] | None, failure: BaseException | None, retries: int | None
    ) -> Delivered:
        """Send the parts that are still missing, and the message that the update is complete.

        Args:
            bar: the progress of the transfer.
            sent: indices of the parts that were sent already; None: the server is asked which parts it has.
            failure: the error that ended the first attempt, if one was made; it counts as an attempt.
            retries: retries after a network error; None: as long as ATOLL_GIVE_UP_S says.
        """
        note = self.outbox.note
        assert note is not None
        try:
            answer = self.upload.send(note, bar, sent, failure, retries)
        except UpdateRefused as error:
            return Refused(error)
        except (TicketClosed, Gone) as error:
            return TooLate(error)
        if isinstance(answer, Lost):
            bar.failed = True
            return answer
        self.session.require_here()
        self.outbox.mark_sent()
        self.upload.resuming, self.refusals = False, 0
        if self._warned_of_optimizer and not broken_moments(self.session.optimizers):
            self._warned_of_optimizer = False
            self.session.warn(OF_THE_OPTIMIZER, [])
        failpoint("worker.acknowledged")
        nbytes = size(self.outbox.layout.own_nbytes)
        LOG.debug("%s: submitted%s, %s for round %d", self.site, self.upload.in_words, nbytes, note.round)
        return Accepted(answer.digest)

    def refused(self, refusal: Refused) -> None:
        """Log that an update was refused, and clear the outbox.

        Raises:
            UpdateRefused: `MAX_REFUSALS` updates in a row were refused.
        """
        self.outbox.clear()  # else `ask_and_resend` would send the update again
        self.refusals += 1
        LOG.warning("%s: %s", self.site, refusal.error)
        if self.refusals == 1 and (text := broken_moments(self.session.optimizers)):
            LOG.warning("%s: %s", self.site, text)
            self.session.warn(OF_THE_OPTIMIZER, [text])
            self._warned_of_optimizer = True
        if self.refusals >= MAX_REFUSALS:
            raise refusal.error

    # -- updates that an interrupted synchronisation or an earlier process left in the outbox: docs/decisions/0005

    def recover(self) -> bool:
        """Send the update that an earlier process of this worker left in the outbox.

        Returns:
            Whether the server has accepted it; False if the outbox is empty or damaged.

        Raises:
            TRANSIENT: the server could not be reached.
        """
        note = self._agreed_note()
        if note is None or note.run != self.session.info.run or not self._takes(note, check=True):
            self.outbox.clear()
            return False
        self.upload.resuming = True
        delivered = self.deliver()
        self.upload.resuming = False
        match delivered:
            case Accepted():
                LOG.info(
                    "%s: the update of round %d, which an earlier process left, is accepted", self.site, note.round
                )
                return True
            case TooLate(error):  # keep the update: if the server falls back, it may count under another ticket
                LOG.info("%s: an earlier process left an update, but it is too late: %s", self.site, error)
            case Refused(error):
                LOG.info("%s: an earlier process left an update, but it cannot count: %s", self.site, error)
                self.outbox.clear()
            case Lost(error):
                raise error
        return False

    @property
    def unsettled(self) -> OutboxNote | None:
        """The outbox's note if the local progress since the base still includes the outbox's update; else None."""
        note: OutboxNote | None = self.outbox.note
        base: BaseNote | None = self.base.note
        if note is None or base is None or note.ticket == self.settled or note.base_digest != base.digest:
            return None
        return note

    def counted_step(self, base_step: int) -> int:
        """Return the last local step that is part of an update that the server has, as far as this worker knows.

        Args:
            base_step: the local step at which the progress since the base began.
        """
        note = self.unsettled
        return base_step + note.steps if note is not None and note.sent else base_step

    def settle(self, retries: int | None = None) -> int | Lost | None:
        """Ask the server for the outcome of the `unsettled` update.

        If the server has the update, the base advances by it: only later training is local progress. If not, the
        outbox is cleared, and the next update includes the same progress.

        Returns:
            Number of local steps that are no longer local progress; None if no update is unsettled.
        """
        note = self.session.ranks.from_rank0(lambda: self.unsettled, OutboxNote | None)
        if note is None:
            return None
        outcome = self.session.outcome(note.ticket, retries)
        if isinstance(outcome, Lost):
            return outcome
        if not outcome.is_in:
            self.outbox.clear()
            return 0
        LOG.info("%s: the update of round %d was accepted after all", self.site, note.round)
        self.advance_base()
        self.settled = note.ticket
        return note.steps

    def advance_base(self) -> None:
        """Set base ← base − dec(update), so that progress which the server already has is not sent twice.

        dec(update) is the outbox's update as the server decodes it. The update's encoding error then is part of the
        local progress, so the residual goes back to its value before the update.
        """
        if self.local.residuals is not None and self.outbox.note is not None:
            self.local.residuals.take_back(self.outbox.note.ticket)
        self.base.begin_local()
        apply_version.advance_base_(self.base, self.outbox, self.local.layouts.codecs)

    def make_base_of(self, tensors: Tensors) -> None:
        """Copy the tensors into the base file. From here on, local progress is the change since this moment."""
        self.base.begin_local()
        apply_version.store_(self.base, tensors)

    def forget_outbox_progress(self) -> None:
        """Record that the local progress no longer contains the outbox's update. Call it after a version was loaded.

        The outbox keeps the update, since a server that falls back may need it again.
        """
        if self.outbox.note is not None:
            self.settled = self.outbox.note.ticket


# -- NaN in the optimizer's state after a refused update: it makes every later step NaN.


def broken_moments(optimizers: Iterable[Optimizer]) -> str:
    """Return a warning about NaN or Inf in the optimizers' state, with a remedy; empty if all values are finite."""
    broken = sorted(
        {
            str(key)
            for optimizer in optimizers
            for state in optimizer.state.values()
            for key, value in (state.items() if isinstance(state, dict) else ())
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all())
        }
    )
    if not broken:
        return ""
    names = ", ".join(broken[:MOMENTS_NAMED])
    return (
        f"the optimizer's state ({names}) contains NaN or Inf, so every further update will be refused. Clear "
        "the state with optimizer.state.clear(), or start the script again. To avoid this, lower the "
        "learning rate or clip the gradients."
    )
