"""The worker of a simulated site: without a connection, and without files other than the site's local state.

Its base is the server's file of the version. Its outbox is the server's spool; each part is checked as it is written,
like a part that arrives at the server. Updates, error feedback, local state and filters work as in every worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import cast

from atoll.aggregation.check_arriving_parts import Inspection, PartStats
from atoll.algorithms.base import LocalRule
from atoll.algorithms.resolve import local_rule
from atoll.errors import UsageError
from atoll.posix import Descriptor, read_at, write_at
from atoll.protocol import messages
from atoll.protocol.messages import VersionRef
from atoll.simulate.job_messages import SiteRound
from atoll.tensors.fragments import Split
from atoll.tensors.layout import Layout
from atoll.tensors.module_tensors import Tensors
from atoll.transport.http_client import Counters, Watch
from atoll.worker.exchange import apply_version
from atoll.worker.exchange.base_and_outbox import BaseNote, OutboxNote, TensorFile
from atoll.worker.exchange.encode_update import Losses
from atoll.worker.exchange.exchange import Exchange, Layouts
from atoll.worker.exchange.participation import Participation, open_kept
from atoll.worker.exchange.pull_version import Patience
from atoll.worker.session.channel import Channel
from atoll.worker.session.session import Session
from atoll.worker.training.federated_loop import Model, Round, Worker, matching


@dataclass(frozen=True)
class Shared:
    """The objects that all simulated sites of a process share; created once.

    Attributes:
        info: the description of the run.
        message: the schema of the run, as the server sends it.
        split: the model's schema and its fragments.
        layouts: layouts of version and update, and the codec.
        inspection: checks the parts of an update.
        losses: warns about updates that are zero or become zero when encoded.
        watch: passed to each site's session.
        rule: the algorithm's rule for local training; None if it has none.
    """

    info: messages.RunInfo
    message: messages.SchemaMessage
    split: Split
    layouts: Layouts
    inspection: Inspection
    losses: Losses
    watch: Watch
    rule: LocalRule | None

    @classmethod
    def of(cls, info: messages.RunInfo, message: messages.SchemaMessage) -> Shared:
        """Create the shared objects from the description of a run."""
        split = message.to_split()
        layouts = Layouts.of(info, split.schema)
        inspection = Inspection(layouts.update, layouts.codecs)
        rule = local_rule(info.algorithm, info.local, info.local_package)
        return cls(info, message, split, layouts, inspection, Losses("", layouts.codec, split.schema), Watch(), rule)


_path = lru_cache(8)(Path)
"""Cached `Path` objects of names that all sites share: creating one takes longer than reading a tensor."""


class JobBase(TensorFile):
    """The base of a simulated site: the server's file of the version, read-only. Has the interface of `VersionFile`.

    Args:
        layout: the layout of the version.
        fd: a file descriptor of the file; this object closes it.
        note: the note of the version.

    Attributes:
        pulled: whether the script has pulled the version. Before that, it cannot submit.
    """

    def __init__(self, layout: Layout, fd: int, note: BaseNote) -> None:
        super().__init__(_path(f"version {note.version}"), Descriptor(fd), layout.nbytes)
        self.layout, self.pulled = layout, False
        self.note: BaseNote | None = note

    def holds(self, run: str, digest: str) -> bool:
        """Return whether the script has pulled and the base has this digest. The run is always the same one."""
        return self.pulled and self.note is not None and self.note.digest == digest

    def begin_local(self) -> None:
        """Fail: the server's file must not change."""
        raise AssertionError("the base of a simulated site is a version")

    def write(self, offset: int, data: memoryview) -> None:
        """Fail: the server's file must not change."""
        raise AssertionError("the base of a simulated site is a version")


class JobOutbox:
    """The outbox of a simulated site: the server's spool. Has the interface of `OutboxFile`.

    Args:
        layout: the layout of the update.
        fd: a file descriptor of the spool; the caller closes it.
        inspection: checks each part.

    Attributes:
        stats: the statistics of each complete part, in order.
    """

    def __init__(self, layout: Layout, fd: int, inspection: Inspection) -> None:
        self.layout, self.nbytes, self.path = layout, layout.nbytes, _path("spool")
        self.note: OutboxNote | None = None
        self.stats: list[PartStats] = []
        self.fd, self._inspection = fd, inspection

    def write(self, offset: int, data: memoryview) -> None:
        """Write the next bytes of the update, and check each part that they complete. Parts are written in order."""
        write_at(self.fd, data, offset)
        for part in self.layout.parts[len(self.stats) :]:
            if part.stop > offset + len(data):
                break
            self.stats.append(self._inspection.look(part, self.fd))

    def read_into(self, offset: int, target: memoryview) -> None:
        """Read bytes of the update from `offset` on into `target`."""
        read_at(self.fd, target, offset)

    def begin(self, layout_digest: str) -> None:
        """Start a new update: forget the note and the statistics. All updates of the run have the same layout."""
        self.clear()

    def seal(self, note: OutboxNote) -> None:
        """Keep the note in memory only: if this process ends, another process trains the round again."""
        self.note = note

    def mark_sent(self) -> None:
        """Do nothing: the update is already at the server."""

    def is_damaged(self) -> bool:
        """Return False: an update of an earlier process is never used."""
        return False

    def clear(self) -> None:
        """Forget the note and the statistics; the bytes in the spool stay until they are overwritten."""
        self.note = None
        self.stats.clear()

    def close(self) -> None:
        """Do nothing: the caller closes the spool."""


class JobFiles:
    """The base and the outbox of one round. Has the interface of `ExchangeFiles`."""

    def __init__(self, base: JobBase, outbox: JobOutbox) -> None:
        self.base, self.outbox = base, outbox

    def beside(self) -> JobBase:
        """Return the base: in a simulation, there is no newer version beside the base."""
        return self.base

    def is_beside(self, run: str, digest: str) -> bool:
        """Return False: nothing is ever pulled beside the base."""
        return False

    def drop_beside(self) -> None:
        """Do nothing: there is no version beside the base."""

    def move_up(self) -> None:
        """Do nothing: there is no version beside the base."""


class JobChannel:
    """The methods of `Channel` that one round needs. The simulation itself joins, requests tickets and leaves.

    Args:
        shared: the objects that all sites of the process share.
        ticket: the ticket of this round.
        outcomes: ticket → outcome of an earlier update of the site.

    Attributes:
        update: the message with which the site submitted; None before that.
    """

    server, lease = "the simulation", ""

    def __init__(self, shared: Shared, ticket: messages.Ticket, outcomes: Mapping[int, messages.Outcome]) -> None:
        self._shared, self._ticket, self._outcomes = shared, ticket, outcomes
        self.counters, self.watch = Counters(), shared.watch
        self.update: messages.Complete | None = None

    def ticket(self, ticket: int) -> messages.TicketState:
        """Return the outcome of a ticket, as it came with the job; "expired" for a ticket without one."""
        outcome = self._outcomes.get(ticket) or messages.Outcome(
            ticket=ticket, state="expired", base_version=0, reason="the run does not know it"
        )
        return messages.TicketState(outcome=outcome, parts=[], part_digests=[])

    def head(self, fragment: int) -> VersionRef:
        """Return the base of this round's ticket, even if the run has a newer version."""
        return VersionRef(fragment, self._ticket.base_version, self._ticket.base_digest)

    def complete(self, ticket: int, update: messages.Complete, timeout_s: float) -> messages.Receipt:
        """Store the message in `update`, count the bytes that a worker would have sent, and return a receipt."""
        self.update = update
        self.counters.add(up=self._shared.layouts.update.nbytes)
        base = self._ticket.base_version
        return messages.Receipt(ticket=ticket, digest=update.digest, fragment=0, base_version=base)


class JobPuller:
    """Pulls the version of the round. Nothing is transferred, because the base is the version's file."""

    def __init__(self, base: JobBase, counters: Counters) -> None:
        self._base, self._counters = base, counters

    def pull(self, version: VersionRef, into: Tensors | None, patience: Patience, *, beside: bool = False) -> None:
        """Mark the base as pulled, and load it into the tensors `into`, if given. Ignore all other arguments."""
        self._base.pulled = True
        if into is not None:
            apply_version.load_(into, self._base)
            self._counters.add(down=self._base.nbytes)


class SimulatedWorker(Worker):
    """The worker that the user's code gets in a simulation. Its loop has one round.

    Args:
        shared: the objects that all sites of the process share.
        job: the site and its round.
        base_fd: file descriptor of the version to train from; this object closes it.
        spool_fd: file descriptor of the ticket's spool; the caller closes it.
        folder: the folder of the site's local state; created only if the site has local state.

    Raises:
        ConfigError: the site's local state is missing.
    """

    def __init__(self, shared: Shared, job: SiteRound, base_fd: int, spool_fd: int, folder: Path) -> None:
        info, layouts, ticket = shared.info, shared.layouts, job.ticket
        self._ticket = ticket
        self._channel = JobChannel(shared, ticket, {outcome.ticket: outcome for outcome in job.outcomes})
        session = Session(cast(Channel, self._channel), job.site, run=(info, shared.split))
        note = BaseNote(info.run, 0, ticket.base_version, ticket.base_digest, [], complete=True)
        base = JobBase(layouts.version, base_fd, note)
        self._outbox = JobOutbox(layouts.update, spool_fd, shared.inspection)
        session.cleanup.callback(base.close)
        session.cleanup.callback(self._outbox.close)
        shared.losses.site = job.site
        puller, files = JobPuller(base, session.counters), JobFiles(base, self._outbox)
        try:
            if (shared.rule is not None and shared.rule.keeps) or layouts.codec.feedback:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            residuals, kept = open_kept(session, folder, layouts, shared.rule)
            if kept is not None:
                if job.counts:
                    kept.require_kept()
                kept.begin_at_zero()
            exchange = Exchange(
                session, puller, None, layouts, files, shared.losses, residuals=residuals, kept=kept, rule=shared.rule
            )
            exchange.local.settle()
        except BaseException:
            session.cleanup.close()
            raise
        super().__init__(Participation(session, (exchange,), folder))

    @property
    def update(self) -> messages.Complete | None:
        """The message with which the site submitted; None before that."""
        return self._channel.update

    @property
    def stats(self) -> tuple[PartStats, ...]:
        """The statistics of each part of the update, with the digests that the worker computed from the parts."""
        note = self._outbox.note
        digests = note.part_digests if note is not None else ()
        return tuple(
            replace(each, digest=bytes.fromhex(digest))
            for each, digest in zip(self._outbox.stats, digests, strict=True)
        )

    def close(self) -> None:
        """Close all files. Idempotent."""
        self._session.cleanup.close()

    def leave(self, error: BaseException | None = None) -> None:
        """Do nothing: the site stays in the run for its next round."""

    def load_into(self, model: Model) -> Model:
        """Load the version of this round into the model, and return the model."""
        self._place.exchange.pull(self._ticket.base, matching(self._session, model))
        return model

    def _rounds(self) -> Iterator[Round]:
        if self._round is not None:
            return
        round_ = self._round = Round(self._place, self._ticket)
        yield round_
        if not round_.done:
            raise UsageError(
                f"Round {round_.number} ended without an update from {self.site}.",
                "Call fl_round.submit(model) once in every round.",
            )
