"""Train simulated sites in a process: one site at a time, for one round at a time.

A `SimulatedSite` takes the place of a worker's connection to a server: it reads the global model from the server's
file, and writes the update into the file in which the server would store it. Each part of the update is checked as on
arrival at a server. Filters, error feedback and local state work as in every worker.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll import registry
from atoll.aggregation.check_arriving_parts import Inspection, PartStats
from atoll.algorithms.base import LocalRule
from atoll.algorithms.resolve import local_rule
from atoll.errors import AtollError, NotSimulated, StoreError, causes
from atoll.format_text import Seldom, VisibleLines
from atoll.posix import FULL, Descriptor, own_folder, usable, write_at
from atoll.protocol import messages
from atoll.protocol.messages import Report, Ticket, VersionRef
from atoll.protocol.values import Next, Open
from atoll.simulate.engine import Beginning, JobResult, SiteRound
from atoll.simulate.script import Script
from atoll.simulate.site_surroundings import SiteSeeds, environment_of
from atoll.tensors.arrays import Arrays
from atoll.tensors.layout import Layout
from atoll.tensors.module_tensors import Tensors
from atoll.tensors.schema import Schema
from atoll.transport.http_client import Counters
from atoll.worker.exchange import apply_version
from atoll.worker.exchange.base_and_outbox import TensorFile
from atoll.worker.exchange.encode_update import Finish, Layouts, LocalFragment, UpdateWarnings
from atoll.worker.training.federated_loop import Worker, joined_as, seeded_by
from atoll.worker.training.functional_loop import forget
from atoll.worker.training.round_backends import Into, matching

LAST_WORDS_CHARS = 2000
FOLDERS = 1000
"""Number of sites' folders with a cached `Path` object: creating one takes as long as reading a tensor."""


@dataclass(frozen=True)
class Shared:
    """The objects that all simulated sites of a process share; created once per process.

    Attributes:
        info: the description of the run.
        schema: the schema of the model.
        layouts: the file layouts of versions and updates, and the codec.
        inspection: checks that the values in the parts of an update are finite.
        warnings: warns about updates that are zero, or become zero when encoded.
        rule: the algorithm's correction of local training; None: no correction.
    """

    info: messages.RunInfo
    schema: Schema
    layouts: Layouts
    inspection: Inspection
    warnings: UpdateWarnings
    rule: LocalRule | None

    @classmethod
    def of(cls, info: messages.RunInfo, message: messages.SchemaMessage) -> Shared:
        """Create the shared objects from the description of a run and from the schema, as a server sends them."""
        schema = message.to_split().schema
        layouts = Layouts.of(info, schema)
        inspection, warnings = Inspection(layouts.update, layouts.codecs), UpdateWarnings("", layouts.codec, schema)
        rule = local_rule(info.algorithm, info.local, info.local_package)
        return cls(info, schema.model, layouts, inspection, warnings, rule)


_path = lru_cache(8)(Path)
"""`Path` with a cache, for names that all sites share."""


class SpoolWriter:
    """Writes an update into the server's file for this update (spool), and checks each part as soon as it is complete.

    Args:
        layout: the layout of the update.
        fd: a file descriptor of the spool; the caller closes it.
        inspection: checks each part.

    Attributes:
        stats: digest and norm of each complete part, in order.
    """

    def __init__(self, layout: Layout, fd: int, inspection: Inspection) -> None:
        self.layout, self._fd, self._inspection = layout, fd, inspection
        self.stats: list[PartStats] = []

    def write(self, offset: int, data: memoryview) -> None:
        """Write the next bytes of the update, and check the parts that are now complete."""
        write_at(self._fd, data, offset)
        for part in self.layout.parts[len(self.stats) :]:
            if part.stop > offset + len(data):
                break
            self.stats.append(self._inspection.check(part, self._fd))


class SimulatedSite:
    """One simulated site in one round. Implements `RoundBackend`, which a worker uses to get rounds and send updates.

    Args:
        shared: the objects that all sites of the process share.
        job: the site and its round.
        base_fd: file descriptor of the version to train from; this object closes it.
        spool_fd: file descriptor to which the update is written; the caller closes it.
        folder: the folder of the state that the site keeps between rounds; created only if there is such state.

    Attributes:
        update: the message with which the site submitted; None: not submitted yet, or sat out.
        sit_out_message: the message with which the site sat out the round; None: it did not.
        stats: digest and norm of each part of the update.

    Raises:
        ConfigError: the site's local state is missing, or does not fit the site's updates in the run.
    """

    has_left = False
    process: int | None = None

    def __init__(self, shared: Shared, job: SiteRound, base_fd: int, spool_fd: int, folder: Path) -> None:
        layouts, self._ticket, self._spool_fd = shared.layouts, job.ticket, spool_fd
        self.site, self.schema, self._inspection = job.site, shared.schema, shared.inspection
        self.counters, self.stats = Counters(), tuple[PartStats, ...]()
        self.update: messages.Complete | None = None
        self.sit_out_message: messages.SitOut | None = None
        self._has_begun = self._has_pulled = False
        base = TensorFile(_path(f"version {job.ticket.base_version}"), Descriptor(base_fd), layouts.version.nbytes)
        base.layout = layouts.version
        self._opened = ExitStack()
        self._opened.callback(base.close)
        shared.warnings.site = job.site
        outcome_of = partial(_outcome_among, {outcome.ticket: outcome for outcome in job.outcomes})
        self.local = LocalFragment(job.site, shared.info, layouts, base, outcome_of, shared.warnings, shared.rule)
        self.global_state, self.own_state = self.local.global_state, self.local.own_state
        self.to_fill = self.local.to_fill
        try:
            self._open_state(folder, job)
        except BaseException:
            self.close()
            raise

    def _open_state(self, folder: Path, job: SiteRound) -> None:
        """Open the site's local state. If the site's last update counted, make the values after this update current.

        Args:
            folder: the folder of the site's local state.
            job: what the run knows about the site's earlier updates. If one was accepted, the local state must exist.

        Raises:
            ConfigError: the algorithm's state of the site is lost, or belongs to another update than the last counted
                one.
        """
        local = self.local
        keeps = local.rule is not None and local.rule.state_groups
        if keeps or local.layouts.codec.feedback or local.layouts.schema.kept:
            with usable(folder.parent):
                own_folder(folder, folder.parents[1])
        local.open_state(folder, self._opened)
        if local.algorithm_state is not None:
            if job.counts and job.counted is not None and job.counted.base_version is not None:  # else it is zero
                local.algorithm_state.require_kept()
            local.algorithm_state.begin_at_zero()
        fits = local.follow(job.ticket, job.counted)
        if not fits and local.algorithm_state is not None:
            local.algorithm_state.lose()
        local.state.adopt_if_counted()

    def close(self) -> None:
        """Close all files. Idempotent."""
        self._opened.close()

    def tensors_of(self, model: nn.Module | Arrays) -> dict[str, Tensor]:
        """Return the model's own tensors by name. First check that they match the tensors of the run's model."""
        return matching(self.schema, self.site, model)

    def next_round(self, wait_s: float | None) -> Next | None:
        """Return the round that the process was asked to train; None in later calls."""
        has_begun, self._has_begun = self._has_begun, True
        return None if has_begun else Open(self._ticket.base, ticket=self._ticket)

    def pull(self, ticket: Ticket, into: Into) -> Ticket:
        """Load the version from the server's file."""
        self._load_(into(ticket.base.number))
        return ticket

    def _load_(self, into: Tensors) -> None:
        apply_version.load_(into, self.local.base)
        self.counters.add(down=self.local.base.nbytes)
        self._has_pulled = True

    def load_newest(self, into: Tensors, keep: VersionRef | None) -> None:
        """Load the version of this round: a simulated site gets a newer version only with its next round."""
        self._load_(into)

    def has_base(self, ticket: Ticket) -> bool:
        """Return whether the script has loaded the version that the ticket names."""
        return self._has_pulled

    def submit(
        self, ticket: Ticket, tensors: Tensors, report: Report, finish: Finish | None, optimizers: Sequence[Optimizer]
    ) -> None:
        """Write the update to the server's file, and set `update` and `stats`, which are sent to the simulation."""
        filtered = self.local.filtered(ticket, tensors, report)
        spool = SpoolWriter(self.local.layouts.update, self._spool_fd, self._inspection)
        formed = self.local.form(spool, ticket, tensors, filtered=filtered, finish=finish)
        self.local.warnings_about(formed, report.steps)
        digests = zip(spool.stats, formed.part_digests, strict=True)
        self.stats = tuple(replace(each, digest=digest) for each, digest in digests)
        self.update = messages.Complete(
            **dict(report), digest=formed.digest, base_digest=ticket.base.digest, generation=ticket.generation
        )
        self.counters.add(up=spool.layout.nbytes)

    def sit_out(self, ticket: Ticket, report: Report) -> None:
        """Set `sit_out_message`, which is sent to the simulation."""
        self.sit_out_message = messages.SitOut(metrics=dict(report.metrics))

    def leave(self, error: BaseException | None) -> None:
        """Do nothing: the site stays in the run for its next round."""


def _outcome_among(outcomes: Mapping[int, messages.Outcome], ticket: int) -> messages.Outcome:
    """Return the state of a ticket's update, from `outcomes`; "expired" if the ticket is not among them."""
    return outcomes.get(ticket) or messages.Outcome(
        ticket=ticket, state="expired", base_version=0, reason="the ticket is unknown in this run"
    )


class SiteTrainer:
    """Trains simulated sites in one process.

    Args:
        beginning: the script, the run's description, and the seed.
        function: the training code, if this process has it and need not load it.

    Raises:
        ConfigError: the script cannot be loaded.
    """

    def __init__(self, beginning: Beginning, function: Callable[..., Any] | None = None) -> None:
        sys.path[:] = [*beginning.path, *(each for each in sys.path if each not in beginning.path)]
        torch.set_num_threads(beginning.threads)
        _say_little()
        for kind, name, place in beginning.own:
            registry.register(kind, name, registry.load_attribute(registry.OwnName(place)))
        self._folder_of = lru_cache(FOLDERS)(Path(beginning.sites).joinpath)
        self._places = {name: number for number, name in enumerate(beginning.names, 1)}
        self._seeds = SiteSeeds(beginning.seed)
        self._seeds.begin()  # the script draws the same numbers in every process while it is loaded
        self._script = Script(beginning.script, beginning.arguments, function)  # it may register code of its own
        self._shared = Shared.of(beginning.info, beginning.schema_message)
        gc.freeze()  # otherwise each full garbage collection, and there are many, visits all objects of torch

    def train(self, job: SiteRound, base_fd: int, spool_fd: int) -> JobResult:
        """Train one round of one simulated site, and return its result.

        Args:
            job: the site and its round.
            base_fd: file descriptor of the version to train from; the caller closes it.
            spool_fd: file descriptor to which the update is written; the caller closes it.
        """
        try:
            site = SimulatedSite(self._shared, job, os.dup(base_fd), spool_fd, self._folder_of(job.site))
        except (AtollError, OSError) as error:  # the site's local state is lost or unreadable
            return result_of_error(error)
        try:
            self._seeds.begin(job.site)
            worker = Worker(site)
            with joined_as(worker), seeded_by(self._seeds.begin), environment_of(self._places, job.site):
                self._script.train(worker)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if not (isinstance(error, SystemExit) and not error.code):
                return result_of_error(error, site.counters.bytes_down)
        finally:
            site.close()
            forget()
        return JobResult(site.update, site.stats, bytes_down=site.counters.bytes_down, sit_out=site.sit_out_message)


def result_of_error(error: BaseException, bytes_down: int = 0) -> JobResult:
    """Return the result for a site that failed. Atoll's frames at the beginning of the traceback are left out."""
    if isinstance(error, NotSimulated):
        return JobResult(error=error.message, bytes_down=bytes_down, remedy=error.remedy)
    trace: TracebackType | None = error.__traceback__
    folder = os.path.dirname(__file__)
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(folder):
        trace = trace.tb_next  # skip Atoll's frames
    text = "".join(traceback.format_exception(type(error), error.with_traceback(None), trace))
    last = "".join(traceback.format_exception_only(error)).strip()
    if "in forked subprocess" in last:  # torch's words; its remedy is for programs that start processes themselves
        return JobResult(error=f"The fork of a program that has used a GPU cannot use it: {last}", remedy=_NO_FORK)
    words, disk = last[-LAST_WORDS_CHARS:] or type(error).__name__, _of_the_disk(error)
    return JobResult(error=disk or words, trace=text, bytes_down=bytes_down, disk=bool(disk))


_NO_FORK = (
    "Train with atoll.run, where sites are threads of this program; or put the function into a file, so that other "
    "processes can import it."
)


def _of_the_disk(error: BaseException) -> str:
    """Return the message of the disk error among an error's causes; empty if no cause is a disk error."""
    for cause in causes(error):
        if isinstance(cause, StoreError):
            return cause.message
        if isinstance(cause, OSError) and cause.errno in FULL:
            return f"{cause.filename or 'a file'}: {cause.strerror}."
    return ""


def _say_little() -> None:
    """Log only warnings and errors of simulated sites, on standard error. Log repeated warnings only now and then."""
    logger = logging.getLogger("atoll")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(VisibleLines("atoll: "))
    handler.addFilter(Seldom())
    logger.handlers[:] = [handler]
    logger.setLevel(logging.WARNING)
    logger.propagate = False
