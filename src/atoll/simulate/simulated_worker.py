"""A simulated site's worker: it has no connection, and no files but those that last between its rounds.

Its base is the server's file of the version. Its outbox is the server's spool, written and inspected in one pass, as
the server inspects what arrives. Updates, error feedback, kept state and filters are those of every worker.
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
    """What every simulated site of a process has in common: made once."""

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
        """Return it for a run, as its server describes it."""
        split = message.to_split()
        layouts = Layouts.of(info, split.schema)
        inspection = Inspection(layouts.update, layouts.codecs)
        rule = local_rule(info.algorithm, info.local, info.local_package)
        return cls(info, message, split, layouts, inspection, Losses("", layouts.codec, split.schema), Watch(), rule)


_path = lru_cache(8)(Path)
"""Paths of files that all sites share: making one for each site takes longer than reading a tensor."""


class JobBase(TensorFile):
    """The file of a version, as the server has it: read only. A `VersionFile`.

    Attributes:
        pulled: whether the site has asked for it; without that nothing can be submitted.
    """

    def __init__(self, layout: Layout, fd: int, note: BaseNote) -> None:
        super().__init__(_path(f"version {note.version}"), Descriptor(fd), layout.nbytes)
        self.layout, self.pulled = layout, False
        self.note: BaseNote | None = note

    def holds(self, run: str, digest: str) -> bool:
        """Return False until the site has pulled; then compare the digest alone, as the process has one run."""
        return self.pulled and self.note is not None and self.note.digest == digest

    def begin_local(self) -> None:
        """Fail: the file is the server's, and stays a version."""
        raise AssertionError("the base of a simulated site is a version")

    def write(self, offset: int, data: memoryview) -> None:
        """Fail: the file is the server's, and stays a version."""
        raise AssertionError("the base of a simulated site is a version")


class JobOutbox:
    """The update, in the server's spool. An `OutboxFile`.

    Attributes:
        stats: of each part that is there; their digests are those that it was formed with.
    """

    def __init__(self, layout: Layout, fd: int, inspection: Inspection) -> None:
        self.layout, self.nbytes, self.path = layout, layout.nbytes, _path("spool")
        self.note: OutboxNote | None = None
        self.stats: list[PartStats] = []
        self.fd, self._inspection = fd, inspection

    def write(self, offset: int, data: memoryview) -> None:
        """Take the bytes that follow; parts are formed one after the other, and looked at once they are whole."""
        write_at(self.fd, data, offset)
        for part in self.layout.parts[len(self.stats) :]:
            if part.stop > offset + len(data):
                break
            self.stats.append(self._inspection.look(part, self.fd))

    def read_into(self, offset: int, target: memoryview) -> None:
        """Read back from the server's spool."""
        read_at(self.fd, target, offset)

    def begin(self, layout_digest: str) -> None:
        """Forget the note and the stats; the layout is that of every update of the run."""
        self.clear()

    def seal(self, note: OutboxNote) -> None:
        """Keep the note in memory alone: where the process dies, another one trains the round again."""
        self.note = note

    def mark_sent(self) -> None:
        """Do nothing: the server reads it where it is."""

    def is_damaged(self) -> bool:
        """Return False: the note never outlives the process that has formed the update."""
        return False

    def clear(self) -> None:
        """Forget the note and the stats; the spool's bytes stay until they are overwritten."""
        self.note = None
        self.stats.clear()

    def close(self) -> None:
        """The file is the server's."""


class JobFiles:
    """The base and the outbox of one round. `ExchangeFiles`."""

    def __init__(self, base: JobBase, outbox: JobOutbox) -> None:
        self.base, self.outbox = base, outbox

    def beside(self) -> JobBase:
        """The version of the round is the newest there is."""
        return self.base

    def is_beside(self, run: str, digest: str) -> bool:
        """Return False: nothing is ever pulled beside the base."""
        return False

    def drop_beside(self) -> None:
        """Do nothing: there is none."""

    def move_up(self) -> None:
        """Do nothing: there is none."""


class JobChannel:
    """The part of a `Channel` that one round calls: the simulation joins, asks for tickets and leaves for its sites.

    Args:
        shared: of its process.
        ticket: the ticket of this round.
        outcomes: ticket → what became of an earlier update of the site.

    Attributes:
        update: what was submitted; None while nothing was.
    """

    server, lease = "the simulation", ""

    def __init__(self, shared: Shared, ticket: messages.Ticket, outcomes: Mapping[int, messages.Outcome]) -> None:
        self._shared, self._ticket, self._outcomes = shared, ticket, outcomes
        self.counters, self.watch = Counters(), shared.watch
        self.update: messages.Complete | None = None

    def ticket(self, ticket: int) -> messages.TicketState:
        """Return the outcome that came with the job; any other ticket counts as expired."""
        outcome = self._outcomes.get(ticket) or messages.Outcome(
            ticket=ticket, state="expired", base_version=0, reason="the run does not know it"
        )
        return messages.TicketState(outcome=outcome, parts=[], part_digests=[])

    def head(self, fragment: int) -> VersionRef:
        """Return the base of the round's ticket, even where the run has moved on."""
        return VersionRef(fragment, self._ticket.base_version, self._ticket.base_digest)

    def complete(self, ticket: int, update: messages.Complete, timeout_s: float) -> messages.Receipt:
        """Keep the update in `update`, and count the bytes that would have travelled."""
        self.update = update
        self.counters.add(up=self._shared.layouts.update.nbytes)
        base = self._ticket.base_version
        return messages.Receipt(ticket=ticket, digest=update.digest, fragment=0, base_version=base)


class JobPuller:
    """Brings the version of the round into the tensors; it is there already."""

    def __init__(self, base: JobBase, counters: Counters) -> None:
        self._base, self._counters = base, counters

    def pull(self, version: VersionRef, into: Tensors | None, patience: Patience, *, beside: bool = False) -> None:
        """Let the base count as pulled, and load it into the tensors if there are any; ignore all other arguments."""
        self._base.pulled = True
        if into is not None:
            apply_version.load_(into, self._base)
            self._counters.add(down=self._base.nbytes)


class SimulatedWorker(Worker):
    """What the user's code iterates over: the one round that its site takes part in.

    Args:
        shared: of its process.
        job: what the site is told of the round.
        base_fd: of the version to train from; belongs to this object from now on.
        spool_fd: of the ticket's spool; stays the caller's.
        folder: where the site keeps what lasts between its rounds; made where that is needed.

    Raises:
        ConfigError: what it has kept is lost.
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
        """What was submitted; None while nothing was."""
        return self._channel.update

    @property
    def stats(self) -> tuple[PartStats, ...]:
        """What the parts of the update were found to be; their digests are those that they were formed with."""
        note = self._outbox.note
        digests = note.part_digests if note is not None else ()
        return tuple(
            replace(each, digest=bytes.fromhex(digest))
            for each, digest in zip(self._outbox.stats, digests, strict=True)
        )

    def close(self) -> None:
        """Give every file back. Idempotent."""
        self._session.cleanup.close()

    def leave(self, error: BaseException | None = None) -> None:
        """Do nothing: the site stays, unless its script raises."""

    def load_into(self, model: Model) -> Model:
        """Load the version that this round starts from: the newest there is while it is trained."""
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
