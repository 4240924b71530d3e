"""A simulated site in one round: the third `RoundBackend`, without a connection and without files of base and outbox.

Its base is the server's file of the version. Its update is written to the server's spool; each part is checked as it
is written, like a part that arrives at the server. Filters, error feedback and local state work as in every worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.aggregation.check_arriving_parts import Inspection, PartStats
from atoll.algorithms.base import LocalRule
from atoll.algorithms.resolve import local_rule
from atoll.posix import Descriptor, write_at
from atoll.protocol import messages
from atoll.protocol.messages import Ticket, VersionRef
from atoll.protocol.values import Next, Open, UpdateInfo
from atoll.simulate.job_messages import SiteRound
from atoll.tensors.arrays import Arrays
from atoll.tensors.layout import Layout
from atoll.tensors.module_tensors import Tensors
from atoll.tensors.schema import Schema
from atoll.transport.http_client import Counters
from atoll.worker.exchange import apply_version
from atoll.worker.exchange.base_and_outbox import TensorFile
from atoll.worker.exchange.encode_update import Finish, Layouts, LocalFragment, Losses
from atoll.worker.training.round_backends import matching


@dataclass(frozen=True)
class Shared:
    """The objects that all simulated sites of a process share; created once.

    Attributes:
        info: the description of the run.
        schema: the schema of the model.
        layouts: layouts of version and update, and the codec.
        inspection: checks the parts of an update.
        losses: warns about updates that are zero or become zero when encoded.
        rule: the algorithm's rule for local training; None if it has none.
    """

    info: messages.RunInfo
    schema: Schema
    layouts: Layouts
    inspection: Inspection
    losses: Losses
    rule: LocalRule | None

    @classmethod
    def of(cls, info: messages.RunInfo, message: messages.SchemaMessage) -> Shared:
        """Create the shared objects from the description of a run, and the schema as the server sends it."""
        schema = message.to_split().schema
        layouts = Layouts.of(info, schema)
        inspection, losses = Inspection(layouts.update, layouts.codecs), Losses("", layouts.codec, schema)
        rule = local_rule(info.algorithm, info.local, info.local_package)
        return cls(info, schema.model, layouts, inspection, losses, rule)


_path = lru_cache(8)(Path)
"""Cached `Path` objects of names that all sites share: creating one takes longer than reading a tensor."""


class Spool:
    """The server's spool of an update, to write to.

    Args:
        layout: the layout of the update.
        fd: a file descriptor of the spool; the caller closes it.
        inspection: checks each part.

    Attributes:
        stats: the statistics of each complete part, in order.
    """

    def __init__(self, layout: Layout, fd: int, inspection: Inspection) -> None:
        self.layout, self._fd, self._inspection = layout, fd, inspection
        self.stats: list[PartStats] = []

    def write(self, offset: int, data: memoryview) -> None:
        """Write the next bytes of the update, and check each part that they complete."""
        write_at(self._fd, data, offset)
        for part in self.layout.parts[len(self.stats) :]:
            if part.stop > offset + len(data):
                break
            self.stats.append(self._inspection.look(part, self._fd))


class SimulatedSite:
    """One simulated site in one round. Implements `RoundBackend`.

    Args:
        shared: the objects that all sites of the process share.
        job: the site and its round.
        base_fd: file descriptor of the version to train from; this object closes it.
        spool_fd: file descriptor of the ticket's spool; the caller closes it.
        folder: the folder of the site's local state; created only if the site has local state.

    Attributes:
        update: the message with which the site submitted; None before that.
        stats: the statistics of each part of the update, with the digests that the site computed from the parts.

    Raises:
        ConfigError: the site's local state is missing.
    """

    has_left = False

    def __init__(self, shared: Shared, job: SiteRound, base_fd: int, spool_fd: int, folder: Path) -> None:
        layouts, self._ticket, self._spool_fd = shared.layouts, job.ticket, spool_fd
        self.site, self.schema, self._inspection = job.site, shared.schema, shared.inspection
        self.counters, self.stats = Counters(), tuple[PartStats, ...]()
        self.update: messages.Complete | None = None
        self._outcomes = {outcome.ticket: outcome for outcome in job.outcomes}
        self._has_begun = self._has_pulled = False
        base = TensorFile(_path(f"version {job.ticket.base_version}"), Descriptor(base_fd), layouts.version.nbytes)
        base.layout = layouts.version
        self._opened = ExitStack()
        self._opened.callback(base.close)
        shared.losses.site = job.site
        self.local = LocalFragment(job.site, shared.info, layouts, base, self._outcome_of, shared.losses, shared.rule)
        self.global_state, self.own_state = self.local.global_state, self.local.own_state
        try:
            self._open_state(folder, job.counts)
        except BaseException:
            self.close()
            raise

    def _open_state(self, folder: Path, counts: bool) -> None:
        """Open the local state, which has to be there if an update of this site counts. Settle its pending update."""
        local = self.local
        if (local.rule is not None and local.rule.keeps) or local.layouts.codec.feedback:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        local.open_state(folder, self._opened)
        if local.kept is not None:
            if counts:
                local.kept.require_kept()
            local.kept.begin_at_zero()
        local.state.settle()

    def _outcome_of(self, ticket: int) -> messages.Outcome:
        """Return the outcome of a ticket, as it came with the job; "expired" for a ticket without one."""
        return self._outcomes.get(ticket) or messages.Outcome(
            ticket=ticket, state="expired", base_version=0, reason="the run does not know it"
        )

    def close(self) -> None:
        """Close all files. Idempotent."""
        self._opened.close()

    def tensors_of(self, model: nn.Module | Arrays) -> dict[str, Tensor]:
        """Compare the model with the schema of the run."""
        return matching(self.schema, self.site, model)

    def next_round(self, wait_s: float | None) -> Next | None:
        """Return the round of the job; None in later calls."""
        has_begun, self._has_begun = self._has_begun, True
        return None if has_begun else Open(self._ticket.base, ticket=self._ticket)

    def pull(self, ticket: Ticket, into: Tensors) -> Ticket:
        """Read the version from the server's file."""
        apply_version.load_(into, self.local.base)
        self.counters.add(down=self.local.base.nbytes)
        self._has_pulled = True
        return ticket

    def load_newest(self, into: Tensors, keep: VersionRef | None) -> None:
        """Load the version of this round: the simulation goes on only when all sites have returned."""
        self.pull(self._ticket, into)

    def has_base(self, ticket: Ticket) -> bool:
        """Return whether the script has loaded the version."""
        return self._has_pulled

    def submit(
        self, ticket: Ticket, tensors: Tensors, info: UpdateInfo, finish: Finish | None, optimizers: Sequence[Optimizer]
    ) -> None:
        """Write the update to the spool. The job's answer takes `update` and `stats` to the simulation."""
        filtered = self.local.filtered(ticket, tensors, info)
        spool = Spool(self.local.layouts.update, self._spool_fd, self._inspection)
        formed = self.local.form(spool, ticket, tensors, filtered=filtered, finish=finish)
        self.local.warnings_about(formed, info.steps)
        digests = zip(spool.stats, formed.part_digests, strict=True)
        self.stats = tuple(replace(each, digest=digest) for each, digest in digests)
        self.update = messages.Complete(
            digest=formed.digest,
            base_digest=ticket.base.digest,
            weight=info.weight,
            steps=info.steps,
            metrics=dict(info.metrics),
        )
        self.counters.add(up=spool.layout.nbytes)

    def leave(self, error: BaseException | None) -> None:
        """Do nothing: the site stays in the run for its next round."""
