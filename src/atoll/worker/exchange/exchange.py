"""The exchange of one fragment of the model with the server: download versions, form updates, and send them.

The fragment is the whole model, unless the run synchronises the model in several fragments. Every step can be
interrupted: an update that was formed stays in the outbox file, and this process or the next one sends it.
An `Exchange` is given a `Carrier`, which moves the bytes, and the `WorkerProcesses` that exchange together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.errors import TRANSIENT, Gone, TicketClosed, UpdateRefused
from atoll.protocol import messages, routes
from atoll.protocol.messages import Report, Ticket, VersionRef
from atoll.protocol.values import (
    Accepted,
    Delivered,
    Lost,
    Next,
    Open,
    Pull,
    Pulled,
    Refused,
    SatOut,
    TooLate,
    VersionGone,
    require,
)
from atoll.runtime import failpoint
from atoll.tensors.layout import Part
from atoll.tensors.module_tensors import Tensors
from atoll.transport.way_out import ClearedUpdate
from atoll.worker.exchange import apply_version, encode_update
from atoll.worker.exchange.base_and_outbox import BaseNote, DiskFiles, OutboxNote
from atoll.worker.exchange.carrier import Carrier, Upload
from atoll.worker.exchange.dry_run import DryRunOver, write_update
from atoll.worker.exchange.encode_update import Finish, LocalFragment
from atoll.worker.exchange.pull_version import WAITS, Patience, Puller
from atoll.worker.exchange.worker_processes import WorkerProcesses
from atoll.worker.log_lines import LOG, TransferProgress, progress, size
from atoll.worker.session.session import OF_THE_OPTIMIZER, Repeats, Session

MAX_REFUSALS = 5
"""A worker gives up after this many refused updates in a row."""

MOMENTS_NAMED = 3


@dataclass(eq=False)
class Exchange:
    """Exchanges one fragment of the model with the server, for one worker. Use it from one thread at a time.

    Attributes:
        session: the worker's session, which sends heartbeats and makes calls to the server.
        carrier: moves the bytes of versions and updates.
        processes: the processes of this worker that exchange the fragment together.
        files: the fragment's files at this site.
        local: the fragment at this site: its base, local state and filters; forms updates.
        puller: downloads versions into the base file.
        base: the file of the version that the worker trains from.
        outbox: the file of the update that was formed last.
        refusals: number of updates of this process that were refused in a row.
        settled_ticket: the ticket of the outbox's update, if this update is no longer part of the local progress: the
            base includes it, or a new version was loaded. Else 0.
    """

    session: Session
    carrier: Carrier
    processes: WorkerProcesses
    files: DiskFiles
    local: LocalFragment
    refusals: int = 0
    settled_ticket: int = 0
    _warned_of_optimizer: bool = False

    def __post_init__(self) -> None:
        self.site, self.fragment = self.session.site, self.local.number or 0
        self._in_words = "" if self.local.number is None else f" fragment {self.fragment}"
        self._gone = Repeats(self.session, "pull a version")
        self._use_files()

    def _use_files(self) -> None:
        self.base, self.outbox, number = self.files.base, self.files.outbox, self.local.number
        self.puller = Puller(self.session, self.carrier, self.files, self.local.layouts.downlink, number)

    # -- what comes next

    def ask(
        self,
        wait_s: float | None = None,
        *,
        retries: int | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> Next | Lost:
        """Ask for the next ticket, as `Session.next_ticket` does, and bring the algorithm's local state up to date.

        If the run has other shapes of buffers by now, use its new schema.

        The reply names the site's last update that the server has counted. The local state after that update becomes
        the current one.

        Raises:
            ConfigError: the site has lost this state (see `AlgorithmState.follow`).
            SchemaMismatch: the run cannot have the given shapes.
        """
        while True:
            holds = self.base.digest_of(self.session.info.run) if self.processes.has_whole_model else None
            reply = self.session.next_ticket(self.fragment, wait_s=wait_s, retries=retries, shapes=shapes, holds=holds)
            if isinstance(reply, Next) and reply.previous is not None:
                self.session.way_out.receipt(reply.previous.receipt)
            if not isinstance(reply, Open):
                return reply
            self.session.way_out.require_round(self.session.info.run, self.fragment, reply.ticket.round)
            if reply.ticket.layout_digest != self.outbox.layout.digest:
                self._change_layouts()
            if self.local.follow(reply.ticket, reply.counted):
                return reply

    def _change_layouts(self) -> None:
        """Read the run's description again, and use its layouts. If the schema has changed, the base loses its version.

        The run's first update may have given shapes to buffers, or updates have another codec from this round on.
        """
        self.session.read_run()
        schemas, info = self.session.split.schemas, self.session.info
        layouts = encode_update.Layouts.of(info, schemas[self.fragment])
        if layouts.update == self.local.layouts.update or not self.processes.has_whole_model:
            return  # the ticket's layout differs for another reason, which `Outbox.begin` reports
        was = {spec.name: spec.shape for spec in self.local.layouts.schema.tensors}
        self.local.decided |= {spec.name for spec in layouts.schema.tensors if spec.shape != was.get(spec.name)}
        self.local.use_layouts(info, layouts)
        self.files.change_layouts(layouts.version, layouts.update)
        self.local.base = self.files.base
        self._use_files()

    def agree_on_shapes(self, ticket: Ticket, tensors: Tensors, retries: int | None = None) -> Ticket | TooLate | Lost:
        """Return a ticket for an update of these tensors. The run's first update may give new shapes to buffers.

        The server takes over the shapes of the run's first update. Then the ticket and the layouts change, and the
        base file gets version 0 in its new layout.

        Args:
            ticket: the ticket that the site has.
            tensors: the model's own tensors, by name.
            retries: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.

        Returns:
            The ticket; `TooLate` if the round is over; `Lost` if the server cannot be reached.

        Raises:
            SchemaMismatch: a buffer has another shape than in the run's first update. Nothing was sent.
        """
        changed = self.local.changed_shapes(tensors) if self.processes.has_whole_model else {}
        if not changed:
            return ticket
        reply = self.ask(retries=retries, shapes=changed)
        if isinstance(reply, Lost):
            return reply
        if not isinstance(reply, Open) or reply.ticket.base.number != ticket.base.number:
            return TooLate(TicketClosed("The round closed before the shapes of this site's buffers were known."))
        pulled = self.pull(reply.ticket.base, None, Patience(retries))
        if isinstance(pulled, VersionGone):
            return TooLate(TicketClosed(pulled.error.message))
        return pulled if isinstance(pulled, Lost) else reply.ticket

    def ask_and_resend(self, wait_s: float | None = None, *, retries: int | None = None) -> Next | Lost:
        """Ask for the next ticket. If the outbox's update may be sent under this ticket, send it and ask again.

        For example, a server that lost power continues from its last version that is safe on disk. It no longer has the
        updates that it received after that version. If the sites send these updates again, no training is lost.
        """
        repeats = Repeats(self.session, "submit its update again")
        while True:
            reply = self.ask(wait_s, retries=retries)
            self.session.require_here()
            if not isinstance(reply, Open):
                return reply
            sent = self._resubmit(reply.ticket, reply.previous)
            if isinstance(sent, Lost):
                return sent
            if not sent:
                self.local.state.adopt_if_counted()
                return reply
            repeats.again("it asks for the same update again.")

    def is_over(self, ticket: Ticket, retries: int | None = None) -> bool | Lost:
        """Return whether the worker has to ask for a ticket again before it overwrites the outbox.

        If a server that lost power continues from an older version, it needs the update in the outbox again, under a
        new ticket. The old `ticket` is then useless: it has expired. Or it was issued again for another version, if the
        server's directory was restored from a backup. A ticket also expires when its round closes. If the outbox is
        empty, or a version that includes its update is safe on the server's disk, the update is not needed again:
        return False without asking the server.
        """

        def needed() -> bool:
            note, durable = self.outbox.note, self.session.durable_versions.get(self.fragment)
            return note is not None and (durable is None or durable <= note.base_version)

        if not self.processes.from_first(needed):
            return False
        outcome = self.session.outcome(ticket.id, retries)
        if isinstance(outcome, Lost):
            return outcome
        return outcome.state == "expired" or outcome.base_version != ticket.base.number

    def _resubmit(self, ticket: Ticket, previous: messages.Outcome | None) -> bool | Lost:
        """Send the outbox's update under this ticket if `resend_note` allows it.

        Return whether `resend_note` allows it, even if the update was then not accepted; `Lost` if the server cannot be
        reached.
        """
        note = self._agreed_note()
        again = resend_note(note, ticket, previous, self.session.info, self.session.require_outcome)
        if again is None:
            return False
        LOG.info(self.carrier.resend_line, self.site, ticket.base.number)
        if not self._takes(again, check=False):
            self.outbox.clear()
            return True
        delivered = self.deliver()
        if isinstance(delivered, Lost):
            return delivered
        if not isinstance(delivered, Accepted):
            LOG.warning("%s: the update that was submitted again does not count: %s", self.site, delivered.error)
            self.outbox.clear()
        return True

    def _takes(self, note: OutboxNote, *, check: bool) -> bool:
        """Assign the update in every process's outbox to the ticket of `note`. Return whether all have this update.

        Args:
            note: the update's note with the new ticket.
            check: whether to check the outbox's bytes, too: after a power loss, some bytes may be missing although the
                note is on disk.
        """

        def takes() -> bool:
            held = self.outbox.note
            if held is None or held.digest != note.digest:
                LOG.warning(
                    "%s lacks the update of round %d, so this round is trained again", self.outbox.path, note.round
                )
                return False
            if held.policy != self.session.way_out.digest:
                LOG.warning(
                    "%s: the update of round %d was formed under another policy of this site, so it is not sent",
                    self.site,
                    note.round,
                )
                return False
            if check and self.outbox.is_damaged():
                LOG.warning("%s is damaged, so the update in it is not sent. Check the disk.", self.outbox.path)
                return False
            if held != note:
                self.local.state.moves_to(note.ticket, note.base_version, held.ticket)
                self.outbox.seal(note)
            self._clear(note)
            return True

        return all(self.processes.from_all(takes))

    def _clear(self, note: OutboxNote) -> None:
        """Let the outbox's update leave: the filters of the site's policy were applied to it."""
        way, nbytes = self.session.way_out, self.outbox.layout.nbytes
        way.clear(map(bytes.fromhex, note.part_digests))
        update = ClearedUpdate(
            note.run, self.site, note.ticket, note.fragment, note.round, nbytes, note.norm, note.filters
        )
        way.clear_update(note.digest, update)

    def _agreed_note(self) -> OutboxNote | None:
        """Return the note of the first process's outbox, in every process."""
        note: OutboxNote | None = self.processes.from_first(lambda: self.outbox.note, OutboxNote | None)
        return note

    # -- versions

    def pull(
        self, version: VersionRef, into: Tensors | None, patience: Patience = WAITS, *, to_next: bool = False
    ) -> Pull:
        """Download a version of the global model into the base file, and load it into the tensors.

        Args:
            version: the version to download.
            into: the tensors to load; None: only the file is written.
            patience: the number of retries.
            to_next: whether to write the file `base-next` instead of the base file.

        Returns:
            `Pulled` after success, `VersionGone` if the server no longer keeps the version, `Lost` if the last retry
            failed. In the last two cases, some of the tensors may already have the version's values.
        """
        try:
            self.processes.pull(self.puller, version, into, patience, to_next=to_next)
        except Gone as error:
            self._gone.again(error.message)  # a server could announce a version again and again that it does not have
            return VersionGone(error)
        except TRANSIENT as error:
            return Lost(error)
        self._gone.reset()
        self.session.progress.made("version", self.fragment, version.digest)
        return Pulled(version)

    def pull_newest(
        self,
        version: VersionRef,
        fill: Callable[[int], Tensors] | None,
        patience: Patience = WAITS,
        *,
        to_next: bool = False,
    ) -> Pulled | Lost:
        """Download a version, or the newest one if the server no longer keeps it.

        The arguments are those of `pull`, but `fill` takes the version's number, and returns the tensors to load.
        """
        newer: Next | None = None
        while True:
            into = fill(version.number) if fill is not None else None
            pull = self.pull(version, into, patience, to_next=to_next)
            if not isinstance(pull, VersionGone):
                return pull if isinstance(pull, Lost) else Pulled(version, newer)
            patience = Patience(patience.into(into).within, patience.within)  # the model may have a part of a version
            reply = self.ask(0.0, retries=patience.before)
            if isinstance(reply, Lost):
                return reply
            newer, version = reply, reply.head

    def pull_head(self, into: Tensors, *, keep: VersionRef | None = None) -> None:
        """Download the newest version of the global model, without asking for a ticket.

        Args:
            into: the tensors to load.
            keep: a version that has to stay in the base file. If it is not the newest version, the newest one is
                downloaded into the file `base-next`.
        """
        while True:
            try:
                ask = partial(self.session.head, self.fragment)
                head = require(self.session.call(ask, "look up the newest version", kind=VersionRef))
            except Gone as error:  # another version became the head meanwhile
                self._gone.again(error.message)
                continue
            kept = keep is not None and head.digest != keep.digest
            pull = require(self.pull(head, None if kept else into, to_next=kept))
            if isinstance(pull, Pulled):
                if kept:
                    apply_version.load_(into, self.files.next_base())
                    self.files.close_next_base()
                return

    def is_next_base(self, version: VersionRef) -> bool:
        """Return whether this or an earlier process began to download the version into the file `base-next`."""
        return self.files.is_next_base(self.session.info.run, version.digest)

    def break_off(self) -> None:
        """End all running transfers at once, including those of other fragments."""
        self.carrier.break_off()

    def rebase(self, version: VersionRef, tensors: Tensors, *, retries: int | None = None) -> Pulled | Lost:
        """Replace the base with another version, and keep the local progress: model ← new base + (model − old base).

        If the server no longer keeps the version, use the newest one instead.
        """
        pull = self.pull_newest(version, None, Patience(retries), to_next=True)
        if isinstance(pull, Lost):
            self.files.close_next_base()
            return pull
        apply_version.rebase_(self.processes.own(tensors), self.base, self.files.next_base())
        self.files.move_up()
        self.processes.share()
        return pull

    # -- updates

    def submit(
        self,
        ticket: Ticket,
        tensors: Tensors,
        report: Report,
        *,
        finish: Finish | None = None,
        retries: int | None = None,
    ) -> Delivered:
        """Form the update for this ticket, and send it. Finished parts are sent while later parts are being formed.

        Args:
            ticket: the ticket under which the update is submitted.
            tensors: the model's own tensors, by name.
            report: what the site reports of the update.
            finish: computes the groups of tensors that the algorithm sends in addition to the model; None: no such
                groups.
            retries: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.
        """
        agreed = self.agree_on_shapes(ticket, tensors, retries)
        if not isinstance(agreed, Ticket):
            return agreed
        ticket = agreed
        is_dry = self.session.way_out.dry_run is not None
        send_early = None if is_dry else self.carrier.send_early(self.outbox.layout)
        if send_early is None:
            self.form(ticket, tensors, report, finish=finish)
            return self.deliver(retries)
        with self._progress(ticket.round) as bar:
            with send_early(ticket.id, self.outbox.fd, bar.add) as pushing:
                self.form(ticket, tensors, report, finish=finish, on_part=pushing.add)
            return self._deliver(bar, pushing.sent, pushing.error, retries)

    def form(
        self,
        ticket: Ticket,
        tensors: Tensors,
        report: Report,
        *,
        finish: Finish | None = None,
        on_part: Callable[[Part, bytes], None] | None = None,
    ) -> encode_update.Formed:
        """Write the update for this ticket into the outbox, with its note. A restarted process can then send it.

        Args:
            ticket: the ticket under which the update is submitted.
            tensors: the model's own tensors, by name.
            report: what the site reports of the update.
            finish: computes the groups of tensors that the algorithm sends in addition to the model; None: no such
                groups.
            on_part: called with each part and its BLAKE3 digest as soon as the part is in the outbox.
        """
        way = self.session.way_out
        report = report.model_copy(update={"metrics": way.metrics(report.metrics)})
        own = self.processes.own(tensors)
        filtered = self.local.filtered(ticket, own, report)

        def on_written(part: Part, digest: bytes) -> None:
            way.clear([digest])
            if on_part is not None:
                on_part(part, digest)

        def write() -> encode_update.Formed:  # without a note, which would mark the update as complete
            self.carrier.retract(self.fragment)
            self.outbox.begin(ticket.layout_digest)
            return self.local.form(self.outbox, ticket, own, filtered=filtered, finish=finish, on_part=on_written)

        formed = self.processes.form(write, self.outbox.layout)
        self.session.warn(self.fragment, self.local.warnings_about(formed, report.steps))
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
                report=report,
                round=ticket.round,
                site=self.site,
                generation=ticket.generation,
                policy=way.digest,
                norm=formed.norm,
                filters=tuple(map(repr, self.local.filters)),
            )
        )
        assert self.outbox.note is not None
        self._clear(self.outbox.note)
        if way.dry_run is not None:
            self._end_dry_run(way.dry_run, self.outbox.note)
        return formed

    def _end_dry_run(self, folder: Path, note: OutboxNote) -> None:
        self.outbox.clear()  # no later process sends it
        write_update(folder, self.outbox, note, note.complete(), self.local.layouts.codecs)
        LOG.info(
            "%s: dry run: what would leave in round %d is in %s; nothing of it was sent", self.site, note.round, folder
        )
        raise DryRunOver

    def sit_out(self, ticket: Ticket, report: Report, retries: int | None = None) -> SatOut | Refused | TooLate | Lost:
        """Tell the server that this site sits out the round of a ticket. Nothing is formed, and no tensor is sent.

        The outbox and the state that the site keeps between rounds stay as they are.

        Args:
            ticket: the ticket of the round.
            report: its metrics are recorded.
            retries: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.
        """
        path, message = routes.SIT_OUT.format(ticket=ticket.id), messages.SitOut(metrics=dict(report.metrics))

        def ask() -> bool:
            self.session.http.send(path, message)
            return True

        try:
            answer = self.session.call(ask, "sit out the round", retries=retries, kind=bool)
        except UpdateRefused as error:
            return Refused(error)
        except (TicketClosed, Gone) as error:
            return TooLate(error)
        if isinstance(answer, Lost):
            return answer
        self.session.require_here()
        self.session.progress.made("ticket", ticket.id)
        LOG.info("%s: sits out round %d: its weight is 0", self.site, ticket.round)
        self.session.tell(state=f"sat out round {ticket.round}")
        return SatOut()

    def deliver(self, retries: int | None = None, *, resuming: bool = False) -> Delivered:
        """Send the outbox's update: its parts, then the message that the update is complete.

        Args:
            retries: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.
            resuming: whether an earlier process formed the update, so that the server may already have some of its
                parts; only the others are sent.
        """
        assert self.outbox.note is not None
        with self._progress(self.outbox.note.round) as bar:
            return self._deliver(bar, None if resuming else set(), None, retries)

    def _progress(self, number: int) -> AbstractContextManager[TransferProgress]:
        """Report that the update of round `number` is being sent. Return what `log_lines.progress` returns."""
        self.session.tell(state=f"submitting to round {number}")
        what = f"{self.site}{self.processes.label}: submitting{self._in_words}"
        return progress(what, self.outbox.layout.own_nbytes)

    def _deliver(
        self, bar: TransferProgress, sent: Collection[int] | None, failure: BaseException | None, retries: int | None
    ) -> Delivered:
        """Send the parts that are still missing, and the message that the update is complete.

        Args:
            bar: the progress of the transfer.
            sent: indices of the parts that were sent already; None: not known, so ask the server.
            failure: the error that ended an earlier attempt to send parts. The failed attempt then counts as the first
                attempt of this method. None: no attempt has failed.
            retries: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.
        """
        note = self.outbox.note
        assert note is not None
        try:
            answer = self.carrier.send(Upload(self.outbox, note, bar, sent, failure, retries))
        except UpdateRefused as error:
            return Refused(error)
        except (TicketClosed, Gone) as error:
            return TooLate(error)
        if isinstance(answer, Lost):
            bar.failed = True
            return answer
        self.session.require_here()
        self.session.progress.made("ticket", note.ticket)
        self.session.way_out.receipt(answer.receipt)
        self.outbox.mark_sent()
        self.refusals = 0
        if self._warned_of_optimizer and not broken_moments(self.session.optimizers):
            self._warned_of_optimizer = False
            self.session.warn(OF_THE_OPTIMIZER, [])
        failpoint("worker.acknowledged")
        nbytes = size(self.outbox.layout.own_nbytes)
        LOG.debug("%s: submitted%s, %s for round %d", self.site, self._in_words, nbytes, note.round)
        return Accepted(answer.digest)

    def refused(self, refusal: Refused) -> None:
        """Log that the server refused the outbox's update, and clear the outbox.

        Raises:
            UpdateRefused: `MAX_REFUSALS` updates in a row were refused.
        """
        self.outbox.clear()  # else `ask_and_resend` would send the update again
        self.refusals += 1
        LOG.warning("%s: this update does not count: %s", self.site, refusal.error)
        if self.refusals == 1 and (text := broken_moments(self.session.optimizers)):
            LOG.warning("%s: check the optimizer: %s", self.site, text)
            self.session.warn(OF_THE_OPTIMIZER, [text])
            self._warned_of_optimizer = True
        if self.refusals >= MAX_REFUSALS:
            raise refusal.error

    # -- updates that an interrupted synchronisation or an earlier process left in the outbox: docs/decisions/0005

    def recover(self) -> bool:
        """Send the update that an earlier process of this worker left in the outbox.

        Returns:
            Whether the server has accepted the update. False if the outbox is damaged or has no update of this run, or
            if the update is refused or comes too late.

        Raises:
            TRANSIENT: the server could not be reached.
        """
        note = self._agreed_note()
        if note is None or note.run != self.session.info.run or not self._takes(note, check=True):
            self.outbox.clear()
            return False
        match self.deliver(resuming=True):
            case Accepted():
                done = "has the update of round %d that an earlier process sent"
                if not note.sent:
                    done = "accepted the update of round %d that an earlier process left"
                LOG.info(f"%s: the server {done}", self.site, note.round)
                return True
            case TooLate(error):  # keep the update: if the server falls back, it may count under another ticket
                LOG.info(
                    "%s: the update that an earlier process left is too late for its round: %s It is kept, in case the "
                    "server needs it again",
                    self.site,
                    error.message,
                )
            case Refused(error):
                LOG.info("%s: the server refused the update that an earlier process left: %s", self.site, error)
                self.outbox.clear()
            case Lost(error):
                raise error
        return False

    @property
    def unsettled_update(self) -> OutboxNote | None:
        """The note of the outbox's update while that update is part of the local progress (model − base); else None.

        An update is part of the local progress from the time when it is formed until a new version is loaded, or until
        `settle_update` has moved the base past the update.
        """
        note: OutboxNote | None = self.outbox.note
        base: BaseNote | None = self.base.note
        if note is None or base is None or note.ticket == self.settled_ticket or note.base_digest != base.digest:
            return None
        return note

    def counted_step(self, base_step: int) -> int:
        """Return the last local step that is included in an update at the server, as far as this worker knows.

        Args:
            base_step: the last local step that the current base includes.
        """
        note = self.unsettled_update
        return base_step + note.report.steps if note is not None and note.sent else base_step

    def settle_update(self, retries: int | None = None) -> int | Lost | None:
        """Ask the server for the state of the `unsettled_update`.

        If the server has the update, move the base past it (`advance_base`), so that only later training counts as
        local progress. If not, clear the outbox: the next update then includes the same local steps.

        Returns:
            Number of local steps that no longer count as local progress; None if no update is unsettled; `Lost` if the
            server cannot be reached.
        """
        note = self.processes.from_first(lambda: self.unsettled_update, OutboxNote | None)
        if note is None:
            return None
        outcome = self.session.outcome(note.ticket, retries)
        if isinstance(outcome, Lost):
            return outcome
        if not outcome.is_in:
            self.outbox.clear()
            return 0
        LOG.info("%s: the server had accepted the update of round %d", self.site, note.round)
        self.advance_base()
        self.settled_ticket = note.ticket
        return note.report.steps

    def advance_base(self) -> None:
        """Set base ← base − dec(update), so that the local steps in this update are not sent twice.

        Here dec(update) is the outbox's update as the server decodes it. Afterwards, model − base still contains the
        encoding error of this update. The residual contains the same error, so it is set back to its values before this
        update. Otherwise the next update would send the error twice.
        """
        if self.local.residuals is not None and self.outbox.note is not None:
            self.local.residuals.take_back(self.outbox.note.ticket)
        self.base.begin_local()
        apply_version.advance_base_(self.base, self.outbox, self.local.layouts.codecs)

    def make_base_of(self, tensors: Tensors) -> None:
        """Copy the tensors into the base file, so that only later changes of the model count as local progress."""
        self.base.begin_local()
        apply_version.store_(self.base, tensors)

    def forget_outbox_progress(self) -> None:
        """Record that the outbox's update is no longer part of the local progress, because a version was just loaded.

        The update stays in the outbox: a server that falls back to an older version may need it again.
        """
        if self.outbox.note is not None:
            self.settled_ticket = self.outbox.note.ticket


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
