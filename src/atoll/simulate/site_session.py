"""A worker's session in a simulation: no connection, no files of its own but what lasts between its rounds.

Its base is the file of the version that the server has; its outbox is the spool that the server gave it, written and
looked at in one go, as the server looks at what arrives. Forming an update, error feedback, kept state and filters
are those of every worker.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from atoll.aggregation.check_arriving_parts import Inspection, PartInspector, PartStats
from atoll.algorithms.base import LocalRule
from atoll.algorithms.resolve import local_rule
from atoll.codecs.base import Codec
from atoll.codecs.encoded_layout import codecs_of, encoded_layout
from atoll.errors import UsageError
from atoll.filters.base import Filter, require_filters
from atoll.posix import Descriptor, write_at
from atoll.protocol import messages
from atoll.tensors.byte_runs import RunTable
from atoll.tensors.chunks import CHUNK_ELEMENTS
from atoll.tensors.fragments import Split
from atoll.tensors.layout import Layout, Part, version_layout
from atoll.tensors.module_tensors import Tensors
from atoll.transport.http_client import Counters
from atoll.worker.exchange import encode_update
from atoll.worker.exchange.algorithm_state import AlgorithmState
from atoll.worker.exchange.base_and_outbox import BaseFile, BaseNote, Outbox, OutboxNote
from atoll.worker.exchange.encode_update import Losses
from atoll.worker.exchange.exchange import Finish
from atoll.worker.exchange.local_state import Owner, Residuals, Together
from atoll.worker.session.session import Session
from atoll.worker.training.alone import Model
from atoll.worker.training.federated_loop import FederatedRound, Worker
from atoll.worker.training.match_model import matching


@dataclass(frozen=True)
class Shared:
    """What every virtual worker of a process has in common: made once."""

    info: messages.RunInfo
    split: Split
    version: Layout
    update: Layout
    codecs: dict[str, Codec]
    runs: RunTable
    inspection: Inspection
    losses: Losses
    rule: LocalRule | None

    @classmethod
    def of(cls, info: messages.RunInfo, split: Split) -> Shared:
        """For a run, as its server describes it."""
        schema = split.schema
        codecs = codecs_of(info.codec, info.codec_options, sent=True)
        version = version_layout(schema, info.part_bytes, info.ranks)
        layout = encoded_layout(schema, info.codec, codecs, info.part_bytes, info.ranks)
        return cls(
            info,
            split,
            version,
            layout,
            codecs,
            RunTable(layout, CHUNK_ELEMENTS),
            Inspection(layout, codecs),
            Losses("", codecs[info.codec], schema),
            local_rule(info.algorithm, info.local, info.local_package),
        )


_path = lru_cache(8)(Path)
"""Of files that are everybody's: made for every virtual worker, a path would take longer than a tensor is read in."""


class SharedBase(BaseFile):
    """A version's file, as the server has it: read only.

    Attributes:
        pulled: whether the worker has asked for it, without which nothing can be submitted.
    """

    def __init__(self, layout: Layout, fd: int, note: BaseNote) -> None:
        self.layout, self.name, self.nbytes, self.path = layout, "base", layout.nbytes, _path(f"version {note.version}")
        self._descriptor, self._one_writes = Descriptor(fd), threading.Lock()
        self.is_new, self.pulled, self.note = False, False, note

    def holds(self, run: str, digest: str) -> bool:
        return self.pulled and self.note is not None and self.note.digest == digest


class SpoolOutbox(Outbox):
    """The update, in the server's spool.

    Attributes:
        stats: of each part that is there; their digests are those that it was formed with.
    """

    def __init__(self, layout: Layout, fd: int, inspection: Inspection) -> None:
        self.layout, self.nbytes, self.path = layout, layout.nbytes, _path("spool")
        self.note: OutboxNote | None = None
        self.stats: list[PartStats] = []
        self._fd, self._inspection = fd, inspection
        self._inspector: PartInspector | None = None

    def write(self, offset: int, data: memoryview) -> None:
        """Take the bytes that follow; parts are formed one after the other."""
        done = 0

        def fill(room: memoryview) -> int:
            nonlocal done
            count = min(len(room), len(data) - done)
            room[:count] = data[done : done + count]
            done += count
            return count

        while done < len(data):
            inspector = self._inspector or self._begin(self.layout.parts[len(self.stats)])
            done += inspector.take_from(data[done:])
            if not inspector.complete:
                inspector.take(fill)
            if inspector.complete:
                self.stats.append(inspector.stats())
                self._end()

    def _begin(self, part: Part) -> PartInspector:
        written = part.start

        def put(data: memoryview) -> None:
            nonlocal written
            write_at(self._fd, data, written)
            written += len(data)

        self._inspector = self._inspection.begin(part, put, hashed=False)
        return self._inspector

    def _end(self) -> None:
        if self._inspector is not None:
            self._inspector.__exit__()
            self._inspector = None

    def seal(self, note: OutboxNote) -> None:
        self.note = note

    def clear(self) -> None:
        self.note = None
        self.stats.clear()
        self._end()

    def close(self) -> None:
        self._end()


class VirtualSession(Session):
    """A virtual worker's place in one round.

    Args:
        shared: of its process.
        site: its name.
        ticket: for the round.
        base_fd: of the version to train from; belongs to the session from now on.
        spool_fd: of the ticket's spool; stays the caller's.
        folder: where the site keeps what lasts between its rounds; made where that is needed.
        outcomes: what became of the updates that its files may speak of.
        counts: whether an update of it counts in the run already.

    Raises:
        ConfigError: what it has kept is lost.

    Attributes:
        formed: what was submitted; None while nothing was.
        stats: of its parts.
    """

    def __init__(
        self,
        shared: Shared,
        site: str,
        ticket: messages.Ticket,
        base_fd: int,
        spool_fd: int,
        folder: Path,
        outcomes: Mapping[int, messages.Outcome],
        counts: bool,
    ) -> None:
        self.site, self.ticket, self.folder = site, ticket, folder
        self.info, self.split, self.schema, self.due = shared.info, shared.split, shared.split.schema, 0
        self._heartbeat, self._news = messages.Heartbeat(), threading.Event()
        self._counters = Counters()
        self.connection, self.fragment, self._named = self, 0, ""
        self.fragments = (self,)
        self.refusals, self.resuming, self.settled = 0, False, 0
        self.layout, self.codecs = shared.version, shared.codecs
        self._runs, self._losses = shared.runs, shared.losses
        self._losses.site = site
        self._cleanup = contextlib.ExitStack()
        digest = ticket.base_digest
        note = BaseNote(shared.info.run, 0, ticket.base_version, digest, [], complete=True)
        self.base = self._version = SharedBase(shared.version, base_fd, note)
        self._cleanup.callback(self.base.close)
        self.outbox = self._spool = SpoolOutbox(shared.update, spool_fd, shared.inspection)
        self._cleanup.callback(self.outbox.close)
        self.filters: tuple[Filter, ...] = ()
        self.residuals, self.kept, self.rule = None, None, shared.rule
        self.formed: messages.Complete | None = None
        self.stats: tuple[PartStats, ...] = ()
        self._open_what_lasts(outcomes, counts)

    def _open_what_lasts(self, outcomes: Mapping[int, messages.Outcome], counts: bool) -> None:
        self._turns = Together(lambda ticket: outcomes.get(ticket) or _expired(ticket))
        self._cleanup.callback(self._turns.close)
        owner = Owner(self.site, self.info.run)
        try:
            keeps = self.rule.keeps if self.rule is not None else ()
            if keeps or self.codecs[self.info.codec].feedback:
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.codecs[self.info.codec].feedback:
                self.residuals = self._turns.add(Residuals(self.folder, self.schema, owner=owner))
            if keeps:
                self.kept = self._turns.add(AlgorithmState(self.folder, self.schema, keeps, owner))
                if counts:
                    self.kept.require_kept()
                self.kept.begin_at_zero()
            self._turns.settle()
        except BaseException:
            self._cleanup.close()
            raise

    # -- what a connection would do

    @property
    def counters(self) -> Counters:
        return self._counters

    def tell(self, **changes: Any) -> None:
        """Nobody asks how far it is."""

    def warn(self, fragment: int, warnings: list[str]) -> None:
        """They are logged when they are found."""

    def require_here(self) -> None:
        """It is."""

    def is_over(self, ticket: messages.Ticket, max_retries: int | None = None) -> bool:
        return False

    def resume_outbox(self) -> None:
        """What a process left that was killed is not there: the round is trained again."""

    def leave(self, error: str | None = None) -> None:
        """The round is over for it; idempotent."""

    def close(self) -> None:
        """Give every file back. Idempotent."""
        self._cleanup.close()

    # -- tensors

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
        """Load the version of the round, which is there already."""
        self._version.pulled = True
        if into is not None:
            encode_update.load_(into, self._version)
            self._counters.add(down=self.layout.nbytes)

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
        """Form the update of the ticket, in its spool; the server refuses what cannot count."""
        formed = self.form(ticket, tensors, weight=weight, steps=steps, metrics=metrics, finish=finish)
        self.stats = tuple(
            replace(stats, digest=digest) for stats, digest in zip(self._spool.stats, formed.part_digests, strict=True)
        )
        self._counters.add(up=self.outbox.layout.nbytes)
        self.formed = messages.Complete(
            digest=formed.digest, base_digest=ticket.base_digest, weight=weight, steps=steps, metrics=metrics
        )
        return formed


def _expired(ticket: int) -> messages.Outcome:
    return messages.Outcome(ticket=ticket, state="expired", base_version=0, reason="nobody knows of it")


class VirtualWorker(Worker):
    """What the user's code iterates over: the one round that its site takes part in."""

    _session: VirtualSession

    @property
    def info(self) -> messages.RunInfo:
        """Of the run that is simulated."""
        return self._session.info

    def with_filters(self, filters: Sequence[Filter]) -> VirtualWorker:
        """This one, whose updates pass through filters: what `atoll.join` gives here."""
        self._session.filters = require_filters(filters)
        return self

    def leave(self, error: BaseException | None = None) -> None:
        """The site stays; what is raised beyond here ends its part in the run."""

    def load_into(self, model: Model) -> Model:
        """Load the version that this round starts from: the newest there is while it is trained."""
        ticket = self._session.ticket
        self._session.pull(ticket.base_version, ticket.base_digest, matching(self._session, model))
        return model

    def _rounds(self) -> Iterator[FederatedRound]:
        if self._round is not None:
            return
        round_ = self._round = FederatedRound(self._session, self._session.ticket)
        yield round_
        if not round_.done:
            raise UsageError(
                f"Round {round_.number} ended without an update from {self.site}.",
                "Call fl_round.submit(model) once in every round.",
            )
