"""DiLoCo at a worker: `with atoll.DiLoCo(model, optimizer, server=..., sync_every=H): any training loop`.

DiLoCo: Distributed Low-Communication Training of Language Models (Douillard et al., arXiv 2311.08105), Algorithm 1:
every worker takes H inner steps from θ(t−1); the outer gradient is the mean of θ(t−1) − θ_i(t).

Hooks of the optimizer count the steps. After every H steps, the last hook submits the pseudo-gradient (the
change of the parameters since the last synchronisation), waits for the next version of the global model, and loads that
version into the parameters. The inner optimizer keeps its state. If the server cannot be reached, the synchronisation
is skipped, and training continues. The next pseudo-gradient then contains all local steps since the last
synchronisation.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.algorithms.copies_in_optimizers import parameters_copied
from atoll.algorithms.optimizer_hooks import (
    Given,
    Steps,
    held_by,
    layers_in,
    require_holds_all,
    require_trains,
)
from atoll.algorithms.weight_copies import WeightCopies
from atoll.config.round_config import RoundConfig
from atoll.errors import UsageError, print_interrupt_in_a_line, public_api
from atoll.filters.base import Filter
from atoll.format_text import number_of, of_fragment
from atoll.protocol.messages import Report, VersionRef
from atoll.runtime import ensure_lines
from atoll.tensors.arrays import require_model
from atoll.tensors.buffer_rules import run_schema
from atoll.tensors.fsdp_shards import Shards
from atoll.tensors.module_tensors import (
    Tensors,
    is_sharded,
    memory_of,
    named_parameters,
    named_tensors,
    schema_of,
    without_ddp,
)
from atoll.tensors.schema import Schema
from atoll.transport.http_client import server_of
from atoll.worker.arguments import (
    finite_metrics,
    require_accepted,
    require_counts,
    require_joined,
    site_of,
    sync_retries,
    weight_of,
)
from atoll.worker.exchange.encode_update import LocalFragment
from atoll.worker.exchange.participation import LoopTerms, Participation, take_part
from atoll.worker.log_lines import ALONE, ALONE_ENDED, LOG, in_words, size
from atoll.worker.session.leave_at_exit import last_words, what_ends
from atoll.worker.session.ranks import ALONE as ONE_RANK
from atoll.worker.session.ranks import RankGroup
from atoll.worker.session.session import OF_LOST_STEPS, OF_THE_ALGORITHM, OF_WEIGHT_COPIES
from atoll.worker.tasks.answer_tasks import say_evaluation_follows
from atoll.worker.training.federated_loop import require_real
from atoll.worker.training.fragment_order import SyncRules
from atoll.worker.training.frozen_parameters import say_frozen
from atoll.worker.training.metrics import GlobalModelMetrics, MetricsFunction, Reports
from atoll.worker.training.round_backends import require_finite
from atoll.worker.training.synchroniser import Synchroniser
from atoll.worker.training.update_report import ReportClock

T = TypeVar("T")

SYNC_EVERY = 500
"""Default of H, if neither the script nor the run sets it."""
OTHER_THREAD_S = 3.0
"""Seconds within which another thread has to begin the training of a loop that this thread has started."""
BEAT_GAP_S = 0.05
"""Least seconds between two steps that are noted for the next heartbeat: noting takes longer than the other hooks."""


_OTHER_ALGORITHM = (
    "the run's algorithm is {}, so its outer step and codec are not those of DiLoCo. For DiLoCo, start a new "
    'run with algorithm.name = "diloco" (atoll new --algorithm diloco).'
)


@dataclass(frozen=True)
class SyncProgress:
    """What rank 0 sends to the other ranks of the worker about the synchronisations.

    Attributes:
        sync_every: local steps between two synchronisations, H.
        next_step: the next local step after which an update may be due or a received result may have to be merged.
        finished: whether the run is over.
        lost: whether the worker has given up, because the server has not answered for too long.
        kept: names of the buffers that the site keeps for itself. They may change their shapes, and each rank has its
            own.
        first: names of the buffers with the rule `first`, which may change their shapes before the run's first update.
        config: what the run tells this site for the newest round.
        version: the version of the global model that the model has.
        step_offset: the difference between the global step and this worker's own step.
    """

    sync_every: int
    next_step: int
    finished: bool
    lost: bool
    kept: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    step_offset: int = 0


_active: weakref.WeakKeyDictionary[object, list[object]] = weakref.WeakKeyDictionary()
"""Loop → the optimizers and parameters that the loop claims. These references keep their ids from being reused."""
_claiming = threading.Lock()


def claim(loop: object, optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Reserve optimizers and parameters for one DiLoCo loop: two loops that share them would wait for each other.

    Args:
        loop: the loop.
        optimizers: the loop's optimizers.
        parameters: the parameters of the loop's model, by name. Frozen ones are reserved only if an optimizer has them.

    Raises:
        UsageError: another active loop has reserved one of them.
    """
    held = held_by(optimizers)
    names = {id(each): name for name, each in parameters.items() if each.requires_grad or id(each) in held}
    with _claiming:
        taken = {id(each) for other, claimed in _active.items() if other is not loop for each in claimed}
        if any(id(each) in taken for each in optimizers) or not taken.isdisjoint(names):
            which = next((f"parameter {names[each]!r}" for each in names if each in taken), "the optimizer")
            raise UsageError(
                f"Another active DiLoCo object in this process already trains {which}.",
                "End the other one first: leave its `with` block, or call its stop(). For several optimizers "
                "of one model, give one DiLoCo a list of them.",
            )
        _active[loop] = [*optimizers, *(each for each in parameters.values() if id(each) in names)]


def loops_of(run: str) -> list[DiLoCo]:
    """Return the active loops of this process that take part in a run.

    Args:
        run: the run's id.
    """
    with _claiming:
        loops = [each for each in _active if isinstance(each, DiLoCo)]
    return [each for each in loops if each._joined is not None and each._joined.session.info.run == run]


def release(loop: object) -> None:
    """End the reservations that `claim` made for a loop. A second call does nothing."""
    with _claiming:
        _active.pop(loop, None)


_REMEDY = (
    "Copy new values into the existing tensors, as load_state_dict(state) does without assign=True. Or "
    "change the model before atoll.DiLoCo starts, and build the optimizer with the new parameters."
)


def replaced(model: nn.Module, before: Tensors, optimizers: Sequence[Optimizer], kept: Collection[str] = ()) -> Tensors:
    """Return the model's current tensors by name; `before` itself if no tensor was replaced.

    Args:
        model: the model.
        before: the model's tensors at the start of training, by name.
        optimizers: the optimizers that train the model.
        kept: names of the buffers that the site keeps for itself, which may change in any way.

    Raises:
        UsageError: a tensor was added, removed, or replaced by one of another dtype or shape, or no optimizer trains a
            new parameter. The message names the tensor.
    """
    now = named_tensors(model)[0]
    for name in [*before, *now]:
        if name in kept:
            continue
        if name not in now or name not in before:
            raise UsageError(
                f"The model has {'lost the' if name in before else 'a new'} tensor {name!r} since training began.",
                _REMEDY,
            )
    moved = [name for name, tensor in now.items() if name not in before or not _is_same(tensor, before[name])]
    if not moved:
        return before
    held, parameters = held_by(optimizers), named_parameters(model)
    for name in (each for each in moved if each not in kept):
        was, has_become = before[name], now[name]
        if (was.dtype, was.shape) != (has_become.dtype, has_become.shape):
            raise UsageError(
                f"The model's tensor {name!r} has changed from {_form(was)} to {_form(has_become)} since "
                "training began.",
                _REMEDY,
            )
        parameter = parameters.get(name)
        if parameter is not None and parameter.requires_grad and id(parameter) not in held:
            raise UsageError(
                f"The model's parameter {name!r} was replaced since training began, and no optimizer trains the new "
                "one.",
                _REMEDY,
            )
    return now


def _is_same(tensor: Tensor, before: Tensor) -> bool:
    return memory_of(tensor) == memory_of(before) or (
        tensor.numel() == 0 and (tensor.dtype, tensor.shape) == (before.dtype, before.shape)
    )


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


@public_api
class DiLoCo:
    """DiLoCo, low-communication training, for any training loop. A hook on `optimizer.step()` synchronises the model.

    Args:
        model: the model, trained in place; at the start, the global model is loaded into it.
        optimizer: the inner optimizer of the parameters; or a list of several, in any order. A local step is over when
            each of them has stepped.
        server: address of the server, `http://host:8512`; by default `ATOLL_SERVER`. If neither is given, the script
            trains alone.
        sync_every: local steps between two synchronisations, H; by default the run's number. The server refuses a value
            that differs from the run's.
        num_fragments: number of fragments, K, into which the model is divided, to synchronise one at a time; by default
            the run's number. The server refuses a value that differs from the run's.
        site: this worker's name; by default `ATOLL_SITE`, else made from host and process; "alone" without a server.
        weight: this worker's weight in the mean: a number, or a function that is called at every synchronisation. With
            0, this worker sits out the round: it sends nothing, and takes the next version in place of its own steps.
        metrics: a function that returns finite numbers by name. It is called at the start and after every
            synchronisation, while `model` has the weights of the global model. The server averages the numbers over the
            workers and records them for this version of the global model.
        on_sync: a function that is called with this object at the start, after every synchronisation, and at the end
            of the run, while `model` has the weights of the global model; for example, to evaluate or save it, or to
            set a learning rate by `global_step`. With several ranks, it is called at rank 0, as `metrics` is.
        folder: the folder for Atoll's files of this site, each about as large as the model; by default `ATOLL_DIR`,
            else `.atoll`.
        labels: labels of this worker, shown in the server's status.
        filters: filters that are applied to every update of this site, in this order, before it is sent.
        max_sync_retries: how often to try again to reach a lost server before a synchronisation is skipped; by default
            `ATOLL_MAX_SYNC_RETRIES`, else 6. If the network silently drops packets, there is only one attempt, of about
            15 s.
        require_server: whether to raise an error if no server is configured, instead of training alone.
        swarm: whether this site may take part in a swarm, in which other sites connect to it and it connects to them;
            `ATOLL_SWARM` and `ATOLL_PEER_*` can allow it, too.
        allow_partial: whether the optimizers may hold only a part of the trainable parameters. The others are
            synchronised, too, but steps of an optimizer that is not in the list are not noticed.
    """

    @public_api
    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        model: nn.Module,
        optimizer: Given,
        *,
        server: str | None = None,
        sync_every: int | None = None,
        num_fragments: int | None = None,
        site: str | None = None,
        weight: float | Callable[[], float] = 1.0,
        metrics: Callable[[], dict[str, float]] | None = None,
        on_sync: Callable[[DiLoCo], object] | None = None,
        folder: str | Path | None = None,
        labels: dict[str, str] | None = None,
        filters: Sequence[Filter] = (),
        max_sync_retries: int | None = None,
        require_server: bool = False,
        swarm: bool = False,
        allow_partial: bool = False,
    ) -> None:
        require_counts(sync_every=sync_every, num_fragments=num_fragments)
        require_model(model, mapping=False)
        model = without_ddp(model)
        self.model, self.optimizer = model, optimizer
        self._set_optimizers(optimizer)
        self._allow_partial = allow_partial
        self._ranks = RankGroup.of_process(model)
        self._server = server_of(server, require_server=require_server)
        self._site = site
        self._given_sync_every, self._given_fragments = sync_every, num_fragments
        self._weight = weight if callable(weight) else weight_of(weight)
        told = None if on_sync is None else partial(self._tell, on_sync)
        self._measured = GlobalModelMetrics(metrics, lambda: self._named, told)
        self.local_metrics: MetricsFunction | None = None  # called when an update is formed; set by integrations
        self._folder, self._labels, self._filters = Path(folder) if folder else None, labels, filters
        self._swarm = swarm
        self._max_retries = sync_retries(max_sync_retries)
        self._copies = WeightCopies(self._report_copies)
        self._tensors: Tensors = {}
        self._schema = Schema(())
        self._shards: Shards | None = None
        self._checkpoint: dict[str, Any] = {}
        self._joined: Participation | None = None  # at ranks other than 0, set only if the model is sharded
        self._sync: Synchroniser | None = None
        self._steps: Steps | None = None
        self.step = 0
        self._clock = ReportClock()
        self._progress: SyncProgress | None = None  # None before the start
        self._started = self._stopped = self._skips = False
        self._process = os.getpid()  # a fork has not joined, so it does not leave
        self._thread = 0  # the thread that started, and later the one that makes the steps
        self._has_stepped = threading.Event()
        self.sync_every = sync_every or 0
        self._reports = Reports()
        self._not_finite: set[str] = set()  # metrics with a warning that they are not finite
        self._pace = (0, time.monotonic())
        self._noted_s = 0.0  # time when the step was last noted for the next heartbeat
        self._unstarted = weakref.finalize(self, _warn_never_started, os.getpid()) if self._ranks.is_first else None

    # -- start and end

    def __enter__(self) -> DiLoCo:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        print_interrupt_in_a_line(error)
        self.stop(error)

    @public_api
    def start(self) -> DiLoCo:
        """Join the run, load the global model into the parameters, and hook the optimizer.

        Raises:
            ServerLost: the server did not answer within ATOLL_GIVE_UP_S, by default a day.
            PeerError: a web server that is not Atoll answers at the server's address.
            ServerUnreachable: the server's certificate is not accepted; or the address is https but it has no TLS.
            SchemaMismatch: the run trains a model with other tensors.
            UsageError: this object was started before; another `DiLoCo` trains the same parameters; the loaded
                checkpoint is of another run or site, or newer than the site's folder; or this process is part of a
                simulation.
        """
        if self._unstarted is not None:
            self._unstarted.detach()
        ensure_lines()
        require_real("atoll.DiLoCo")
        if self._started:
            raise UsageError(
                "This DiLoCo object has already been used for a run.",
                "Create a new atoll.DiLoCo(model, optimizer, ...) for each `with` block or start().",
            )
        self._process, self._thread = os.getpid(), threading.get_ident()
        if not self._server:
            self._site = site_of(self._site)
        self._require_trains()
        self._find_tensors()
        if not self._server:
            if not any(map(is_sharded, self.model.parameters())):
                self._schema = run_schema(self.model, {})
            require_finite(self._tensors, self._schema, self._named, is_initial=True)
            LOG.info("%s", ALONE)
            self._hook()  # counts the steps
            self._started = True
            return self
        try:
            site = self._ranks.from_rank0(lambda: site_of(self._site, self._server))
            for layers in self._layers:
                self._copies.watch(layers[0])
            with self._copies.loading(self.model, self._tensors):
                self._learn(self._over_ranks(lambda: self._join(site), SyncProgress))
            self._hook()
        except BaseException as error:
            self._take_back(error)
            raise
        self._started = True
        return self

    def _take_back(self, error: BaseException) -> None:
        """Undo a call of `start` that failed with this error: remove the hook and leave the run.

        `start` can be called again.
        """
        self._unhook()
        joined, self._joined, self._sync, self._progress = self._joined, None, None, None
        if joined is not None:
            joined.leave(last_words(error))

    def _join(self, site: str) -> SyncProgress:
        assert self._server
        sharded = self._shards is not None
        joined = self._joined = take_part(
            self._server,
            site,
            folder=self._folder,
            labels=self._labels,
            filters=self._filters,
            loop=LoopTerms(
                self._schema,
                self._given_sync_every,
                self._given_fragments,
                self._ranks if sharded else ONE_RANK,
                self._own_shards if sharded else None,
            ),
            swarm=self._swarm,
        )
        session, info = joined.session, joined.session.info
        session.optimizers = self._optimizers
        _require_uncorrected(joined)
        require_agrees(self._checkpoint, joined)
        if not callable(self._weight):
            require_accepted(self._weight, None, info)
        self.sync_every = self._given_sync_every or info.sync_every or SYNC_EVERY
        self._sync = Synchroniser(
            session,
            joined.exchanges,
            self._tensors_now,
            SyncRules.of(info, self.sync_every),
            self._report,
            self._measured,
            max_retries=self._max_retries,
        )
        self._sync.put_first_ = self._put_first_
        self._sync.start([partial(each.local.load_kept_, self.model) for each in joined.exchanges])
        if self._ranks.is_first:
            terms = in_words(info, self.sync_every)
            LOG.info("%s: joined run %s (%s) at %s; %s", site, info.name, info.algorithm, session.http.server, terms)
            if not info.sync_every:  # 0: the run's algorithm does not count local steps
                text = _OTHER_ALGORITHM.format(info.algorithm)
                LOG.warning("%s: this run does not use DiLoCo: %s", site, text)
                session.warn(OF_THE_ALGORITHM, [text])
        say_evaluation_follows(session)
        return self._progress_now()

    def _put_first_(self, local: LocalFragment, loaded: Tensors) -> None:
        """Give the model the loaded buffers with the rule `first`.

        Raises:
            UsageError: a buffer would have to get another shape at every rank.
        """
        if self._shards is not None:
            return
        if self._ranks.is_distributed and (changed := local.changed_shapes(self._tensors_now())):
            raise UsageError(
                f"The buffer {min(changed)!r} has another shape in the run than at this worker, which has several "
                "ranks.",
                "Call the model once, on one sample, before you start DiLoCo: then all ranks have the buffer.",
            )
        local.put_first_(self.model, loaded)

    def _own_shards(self) -> Shards:
        assert self._shards is not None
        return self._shards

    def _over_ranks(self, work: Callable[[], T], kind: object) -> T:
        """Call `work` at every rank if the model is sharded, else only at rank 0; return its result at every rank.

        Args:
            work: a function that communicates with the server.
            kind: the type of its result, needed to send the result from rank 0 to the other ranks.
        """
        return work() if self._shards is not None else self._ranks.from_rank0(work, kind)

    def _progress_now(self) -> SyncProgress:
        assert self._joined is not None
        assert self._sync is not None
        session, sync = self._joined.session, self._sync
        lost = session.ranks.from_rank0(lambda: session.silence.is_too_long)
        kept = tuple(spec.name for spec in session.schema.tensors if spec.is_kept and spec.is_buffer)
        first = tuple(session.schema.first)
        return SyncProgress(sync.sync_every, sync.next_step, sync.finished, lost, kept, first, *self._place)

    def _learn(self, progress: SyncProgress) -> None:
        """Store the progress that rank 0 has sent. Unless the model is sharded, copy rank 0's model, too."""
        self._progress, self.sync_every = progress, progress.sync_every
        self._spread()

    def _spread(self) -> None:
        """Copy the model of rank 0 into that of every rank, unless the model is sharded."""
        if self._shards is None and self._progress is not None:
            kept = self._progress.kept
            self._ranks.spread_(tensor for name, tensor in self._tensors.items() if name not in kept)

    def stop(self, error: BaseException | None = None) -> None:
        """Remove the hook and leave the run. Local steps since the last synchronisation are not undone.

        In a forked child of the process that joined, do not leave the run.

        Args:
            error: the error that ended training, if any.

        Raises:
            UpdateRefused: without a server, the model contains NaN or Inf at the end.
        """
        self._unhook()
        joined, sync = self._joined, self._sync
        if self._stopped or self._process != os.getpid():
            return
        if joined is None or sync is None:
            self._stopped = not self._server or self._progress is not None
            if not self._server and error is None:
                require_finite(self._tensors, self._schema, self._named)
                LOG.info("%s", ALONE_ENDED)
        else:
            self._stopped = True
            self._note_step(time.monotonic())
        with self._copies.loading(self.model, self._tensors, refuses=False):
            if joined is not None and sync is not None:
                self._end(joined, sync, error)
            if error is None and self._progress is not None:
                self._spread()  # rank 0 may have merged a result meanwhile
        if joined is None or sync is None:
            return
        joined.leave(last_words(error))
        counters = joined.session.counters
        LOG.info(
            "%s: %s, %s%s, %d skipped, %s, %s; sent %s, received %s, waited %.1f s",
            joined.site,
            number_of(self.step, "step"),
            number_of(sync.rounds, "round"),
            sync.merges_in_words,
            sync.skipped,
            number_of(counters.retries, "retry"),
            number_of(joined.session.reconnections, "reconnection"),
            size(counters.bytes_up),
            size(counters.bytes_down),
            self._clock.waited_s,
        )

    def _end(self, joined: Participation, sync: Synchroniser, error: BaseException | None) -> None:
        try:
            if error is None:
                sync.drain()
            else:
                sync.abandon()
        except BaseException as worse:
            sync.abandon()
            joined.leave(last_words(worse))
            raise
        if self.step == 0 and error is None:
            joined.session.report(
                OF_LOST_STEPS, "nothing was trained: DiLoCo's optimizer made no step. Pass the loop's optimizer."
            )
        elif not sync.finished:
            if self.lost:
                LOG.warning("%s: the server was lost: %s", joined.site, joined.session.silence.error())
            self._say_unsent_steps(joined, sync, has_failed=error is not None)

    def _say_unsent_steps(self, joined: Participation, sync: Synchroniser, *, has_failed: bool) -> None:
        """Log how many local steps were not sent to the run.

        Make the line a warning if the server was lost, if a synchronisation was skipped or failed, or if the training,
        although it ended without an error, had too few steps for the first synchronisation.
        """
        counted = sync.counted_step
        steps, turn = self.step - counted, self.sync_every // joined.session.info.fragments
        if not steps:
            return
        if self.lost or steps > self.step - sync.newest_step or (sync.skipped and steps >= turn):
            joined.session.report(
                OF_LOST_STEPS,
                f"the {steps} local steps after step {counted} were not sent; only this script's model contains them",
            )
        elif not has_failed and not sync.newest_step and self.step < sync.steps_between:
            fragments = joined.session.info.fragments
            of = f", {fragments} fragments" if fragments > 1 else ""
            joined.session.report(
                OF_LOST_STEPS,
                f"this worker never synchronised: it made {self.step} of the {sync.steps_between} local steps before "
                f"the first synchronisation (diloco.sync_every = {self.sync_every}{of}). Train longer, or start a new "
                "run with a smaller diloco.sync_every.",
            )
        else:
            LOG.info(
                "%s: only the local model has the last %s, made after the last synchronisation",
                joined.site,
                number_of(steps, "step"),
            )

    @public_api
    def state_dict(self) -> dict[str, Any]:
        """Return Atoll's entry for a checkpoint: run, site, versions that the site trains from, and `global_step`.

        They are plain JSON values. In a process that has joined no run, return the entry that `load_state_dict` has
        loaded; empty if there is none.

        The script or framework itself must save parameters, optimizer and schedule. The state of the run is at the
        server: after a restart, the object's `version` and `global_step` say where the run is, and the entry says where
        the checkpoint was written.
        """
        if self._joined is None:
            return dict(self._checkpoint)
        return checkpoint_of(self._joined) | {"global_step": self.global_step}

    @public_api
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load Atoll's entry from a checkpoint. `start` then checks it against the run and against the site's folder.

        Raises:
            UsageError: this object has already been started, or `state` was not returned by `state_dict`.
        """
        if self._started:
            raise UsageError(
                "This DiLoCo object has already started, so it is too late to load a checkpoint.",
                "Call load_state_dict before start() or before the `with` block.",
            )
        self._checkpoint = require_checkpoint(state)

    @public_api
    def follow(self, optimizer: Given) -> None:
        """Hook another optimizer in place of the current one, and look up the model's parameters again.

        Call this before the first step of an optimizer that replaces another one. Integrations call it when a framework
        creates a new optimizer or moves the parameters.

        Args:
            optimizer: the new optimizer; or a list of all optimizers, if there are several.

        Raises:
            UsageError: the optimizers do not hold the model's trainable parameters.
        """
        self._set_optimizers(optimizer)
        self.optimizer = optimizer
        self._require_trains()
        for layers in self._layers:
            self._copies.watch(layers[0])
        if self._joined is not None:
            self._joined.session.optimizers = self._optimizers
        if self._steps is not None:
            self._unhook()
            self._find_tensors()
            self._hook()

    @public_api
    def report(self, **metrics: float) -> None:
        """Report metrics of this worker. The server's status shows them, and the next update includes them.

        The server averages the metrics of the updates of a round. Each reported value goes into one update only.

        Args:
            metrics: finite numbers by name.
        """
        self._reports.add(finite_metrics(metrics, self._named, self._not_finite), metrics)
        if self._joined is not None:
            self._joined.session.tell(metrics=dict(self._reports.newest))

    @public_api
    def skip(self) -> None:
        """Sit out a round now, for example because this site has no data for it: take the next version without a step.

        Wait for the version that the other sites make, and load it in place of local steps since the last
        synchronisation. The status names this site among those that sat out. In a run with several fragments, the round
        is that of the fragment that is due next. Without a server, and after the run, do nothing. With several ranks,
        call it at each of them.

        Raises:
            UsageError: this object was not started, or was stopped.
        """
        if not self._started or self._stopped:
            raise UsageError("This DiLoCo object does not take part in a run now.", "Call skip in its `with` block.")
        if self._joined is None and not self._ranks.is_distributed:
            return
        if self.over:
            return
        require_joined(False, self._named, "atoll.DiLoCo", self._process)
        self._require_own_thread(is_due=True)
        with self._clock.waiting(), self._copies.loading(self.model, self._tensors_now()):
            self._learn(self._over_ranks(self._sit_out, SyncProgress))
        self._pace = (self.step, time.monotonic())

    def _tell(self, on_sync: Callable[[DiLoCo], object]) -> None:
        assert self._sync is not None
        self.sync_every = self._sync.sync_every
        on_sync(self)

    def _sit_out(self) -> SyncProgress:
        assert self._sync is not None
        self._skips = True
        try:
            self._sync.sync_now(self.step)
        finally:
            self._skips = False
        return self._progress_now()

    def credit(self, metrics: dict[str, float]) -> bool:
        """Record metrics that a framework has just measured, if the model has the weights of the global model.

        The model has these weights from a synchronisation to the next step. With Streaming DiLoCo, nothing is recorded.
        Integrations call this method, because a framework itself decides when to evaluate.

        Returns:
            Whether the metrics were recorded.
        """
        joined, sync = self._joined, self._sync
        if joined is None or sync is None or joined.session.info.streams or self.step != sync.base_step:
            return False
        base = joined.exchange.base.note
        if base is None or not base.digest:
            return False
        self._measured.credit(metrics, base.digest)
        return True

    @property
    def finished(self) -> bool:
        """Whether the training loop may end, because the run is over or the server is lost.

        A loop that continues after the run trains only its local model. A loop that continues without the server tries
        to reach it again at every synchronisation.
        """
        return self.over or self.lost

    @property
    def config(self) -> dict[str, Any]:
        """What the run tells this site for the newest round: names and plain values, from the setting `rounds.config`.

        It may change with each synchronisation. Empty without a server, and before the start. A missing name raises
        `NotTold`, a `KeyError`.
        """
        is_alone = self._sync is None and self._progress is None
        return RoundConfig(copy.deepcopy(self._place[0]), is_alone=is_alone)

    @property
    def version(self) -> int:
        """The number of the version of the global model that this worker trains from; 0 without a server.

        With several fragments, it is the oldest of their versions.
        """
        return self._place[1]

    @property
    def global_step(self) -> int:
        """The number of local steps of the model that is trained here: those behind its version, and those since then.

        The steps behind a version are those that the sites have reported, along one site. So a worker that joins late
        or starts again knows its place in a schedule of the whole run. Without a server, it is `step`.
        """
        return self.step + self._place[2]

    @property
    def _place(self) -> tuple[dict[str, Any], int, int]:
        place = self._sync if self._sync is not None else self._progress  # at other ranks, what rank 0 has sent last
        return ({}, 0, 0) if place is None else (place.config, place.version, place.step_offset)

    @property
    def over(self) -> bool:
        """Whether the run is over."""
        return self._progress is not None and self._progress.finished

    @property
    def lost(self) -> bool:
        """Whether the worker has given up, because the server has not answered for `ATOLL_GIVE_UP_S`."""
        return self._progress is not None and self._progress.lost

    @property
    def rounds(self) -> int:
        """Number of this worker's updates that went into a new version; 0 at ranks other than 0."""
        return self._sync.rounds if self._sync is not None else 0

    @property
    def skipped(self) -> int:
        """Number of skipped synchronisations; 0 at ranks other than 0."""
        return self._sync.skipped if self._sync is not None else 0

    @property
    def _named(self) -> str:
        return self._joined.site if self._joined is not None else self._site or "worker"

    @property
    def sync_metrics(self) -> dict[str, float]:
        """Counters so far: rounds, skipped synchronisations, retries, reconnections, bytes and seconds waited.

        Also the staleness of the last counted update: how many versions were made between its base and the version that
        includes it. In Streaming DiLoCo, also `merges_waited`, the number of new versions for which training had to
        wait, and `merges_late`, the number of new versions that were late (asynchronous runs only). If the model is
        sharded, the bytes are those of this rank.
        """
        session, sync = self._joined.session if self._joined is not None else None, self._sync
        merges = {}
        if sync is not None and session is not None and session.info.streams:
            merges = {"merges_waited": sync.merges_waited, "merges_late": sync.merges_late}
        return {
            "rounds": self.rounds,
            "skipped": self.skipped,
            "staleness": sync.staleness if sync else 0,
            "retries": session.counters.retries if session else 0,
            "reconnections": session.reconnections if session else 0,
            "bytes_up": session.counters.bytes_up if session else 0,
            "bytes_down": session.counters.bytes_down if session else 0,
            "seconds_waited": self._clock.waited_s,
            **merges,
        }

    # -- the hook

    def _set_optimizers(self, optimizer: Given) -> None:
        self._layers = layers_in(optimizer)
        self._optimizers = tuple(layers[-1] for layers in self._layers)

    def _require_trains(self) -> None:
        parameters = named_parameters(self.model)
        copied = {each: parameters_copied(each, parameters.values()) for each in self._optimizers}
        require_trains([each for each in self._optimizers if not copied[each]], parameters)
        if not self._allow_partial:
            require_holds_all(held_by(self._optimizers).union(*copied.values()), parameters)

    def _find_tensors(self) -> None:
        """Look up the model's tensors or shards in this process, and reserve them for this loop.

        Raises:
            UsageError: another loop has reserved them, or filters are given although the model is sharded.
        """
        claim(self, self._optimizers, named_parameters(self.model))
        self._shards = None
        if not any(map(is_sharded, self.model.parameters())):
            self._schema, self._tensors = schema_of(self.model), named_tensors(self.model)[0]
            return
        if self._filters:
            raise UsageError(
                "filters are given, but filters need whole tensors, and this model is sharded over ranks (FSDP2).",
                "Leave filters out, or train with DistributedDataParallel.",
            )
        self._schema, shards = Shards.of(self.model, self._ranks.rank, self._ranks.size)
        self._tensors = shards.locals
        self._shards = shards if self._ranks.is_distributed else None

    def _tensors_now(self) -> Tensors:
        """Look up the model's tensors again, since a script may have replaced buffers or moved parameters.

        Raises:
            UsageError: a tensor was added, removed, or replaced by one of another dtype or shape; or no optimizer
                trains a new parameter.
        """
        if not any(map(is_sharded, self.model.parameters())):
            free = (*self._progress.kept, *self._progress.first) if self._progress is not None else ()
            if self._joined is not None:
                free = (*free, *self._joined.session.schema.first)
            self._tensors = replaced(self.model, self._tensors, self._optimizers, free)
        return self._tensors

    def _hook(self) -> None:
        self._steps = Steps(self._layers, self._copies.before_step, self._after_step)
        if self._progress is not None:
            self._steps.refuse_others(self.model, self._refuse_step, is_partial=self._allow_partial)

    @public_api
    def _refuse_step(self, optimizer: Optimizer, name: str) -> None:
        if self.over or self._stopped:
            return
        raise UsageError(
            f"The optimizer {type(optimizer).__name__}, which DiLoCo does not follow, is about to train the model; for "
            f"example, {name!r}. Its steps would not be counted, so the model would not be synchronised with the run.",
            "If it replaces another optimizer, call follow(optimizer) of the DiLoCo object before its first step. If "
            "both train the model, pass them as a list. To train other parameters without Atoll on purpose, pass "
            "allow_partial=True.",
        )

    def _unhook(self) -> None:
        release(self)
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    @public_api
    def _after_step(self, steps: int) -> None:
        self.step += steps
        progress = self._progress
        if progress is None or self._stopped:
            return
        begin = time.monotonic()
        if not self._has_stepped.is_set():
            self._require_own_thread(is_due=False)
            self._has_stepped.set()
        if begin - self._noted_s >= BEAT_GAP_S:
            self._note_step(begin)
        if progress.finished or (self._ranks.is_distributed and self.step < progress.next_step):
            return
        if self._sync is not None and not self._ranks.is_distributed and not self._sync.begins(self.step):
            return
        require_joined(False, self._named, "atoll.DiLoCo", self._process)
        self._require_own_thread(is_due=True)
        self._note_step(begin)
        with self._clock.waiting(), self._copies.loading(self.model, self._tensors_now()):
            now = self._over_ranks(self._act, SyncProgress | None)
            if now is None:
                return
            self._learn(now)
        self._pace = (self.step, time.monotonic())

    def _require_own_thread(self, *, is_due: bool) -> None:
        """Check that no other loop of the run has to train in this thread while this loop waits for it.

        If updates are sent while training continues (τ > 0), loops may take turns in one thread.

        Args:
            is_due: whether this loop is about to wait, so that a loop that has not begun would never begin.

        Raises:
            UsageError: there is such a loop. The message names both sites.
        """
        self._thread, joined = threading.get_ident(), self._joined
        if joined is None or not (joined.session.info.barrier or joined.session.info.sync_rounds_first):
            return
        for other in loops_of(joined.session.info.run):
            if other is self or other._thread != self._thread:
                continue
            begun = other._has_stepped.wait(OTHER_THREAD_S if is_due else 0)  # its own thread may begin just now
            if other._thread == self._thread and (not begun if is_due else begun and not joined.session.info.tau):
                raise UsageError(
                    f"Sites {other._named!r} and {self._named!r} of one run train in the same thread, so each would "
                    "wait for the other's update for ever.",
                    "Train each in a thread or process of its own. To train two models as one site, put them into an "
                    "nn.ModuleDict, and give it to one DiLoCo.",
                )

    def _act(self) -> SyncProgress | None:
        """After a step, merge received results, and submit the fragment that is due.

        Return the new progress; None if nothing was merged or due.
        """
        assert self._sync is not None
        return self._progress_now() if self._sync.after_step(self.step) else None

    def _report(self, base: VersionRef, steps: int) -> Report:
        """Return weight, steps and metrics of the update that is about to be formed; every rank gets those of rank 0.

        Args:
            base: the version that the update was trained from.
            steps: number of local steps in the update.
        """
        joined = self._joined
        assert joined is not None
        is_lost = joined.exchanges[base.fragment].outbox.note is None

        def own() -> Report:
            say_frozen(joined.session, self.model)
            reported = self._reports.take(base.fragment, is_lost=is_lost)
            local = finite_metrics(self.local_metrics() if self.local_metrics else {}, self._named, self._not_finite)
            weight = 0.0 if self._skips else weight_of(self._weight() if callable(self._weight) else self._weight)
            require_accepted(weight, steps, joined.session.info)
            metrics = reported | local | self._measured.of(base.digest)
            return self._clock.report(weight, steps, metrics, base.fragment)

        return joined.session.ranks.from_rank0(own, Report)

    def _report_copies(self, text: str) -> None:
        if self._joined is None:
            LOG.warning("%s: %s", self._named, text)
        else:
            self._joined.session.report(OF_WEIGHT_COPIES, text)

    def _note_step(self, now_s: float) -> None:
        """Write the number of steps and their rate into the next heartbeat."""
        self._noted_s = now_s
        if self._joined is None or self._sync is None:
            return
        step, since_s = self._pace
        rate = (self.step - step) / max(now_s - since_s, 1e-9)
        state = {} if self._sync.in_flight else {"state": "training"}  # else the synchroniser reports the state
        self._joined.session.tell(step=self.step, steps_per_s=rate, **state)


def _warn_never_started(process: int) -> None:
    """Warn about an object that was dropped without a start, unless an error ends the process or this is a fork.

    Args:
        process: the id of the process that made the object.
    """
    if process == os.getpid() and what_ends() is None:
        ensure_lines()
        LOG.warning("atoll.DiLoCo was never started: write `with diloco:` around the training loop, or call start().")


def _require_uncorrected(joined: Participation) -> None:
    """Refuse a run with an algorithm that `DiLoCo` does not support.

    Raises:
        UsageError: the algorithm corrects local steps, or it needs further tensors in the updates besides the model.
    """
    info, extra = joined.session.info, [spec.group for spec in joined.session.schema.tensors if spec.is_extra]
    if all(each.local.rule is None for each in joined.exchanges) and not extra:
        return
    what = f"needs {extra[0]!r} in each update, besides the model" if extra else "corrects local steps"
    raise UsageError(
        f"The algorithm {info.algorithm!r} of run {info.name!r} {what}; atoll.DiLoCo does not support this.",
        'Train with atoll.join and fl_round.correct(model, optimizer), or start a run with algorithm.name = "diloco".',
    )


# -- Atoll's entry in a trainer's checkpoint, and the check that the entry still agrees with the site's folder.


KEYS = {"run", "site", "versions"}
ALSO = {"global_step"}
"""Keys that an entry may have, too: for the script, not for Atoll."""

WITHOUT = "To resume from the server's state instead, leave the checkpoint out."


def checkpoint_of(joined: Participation) -> dict[str, Any]:
    """Return Atoll's entry for a checkpoint, as JSON values.

    The entry holds the run's id, the site's name, and for each fragment the number of the version that the site trains
    from.

    Args:
        joined: the site's part in the run.
    """
    notes = [exchange.base.note for exchange in joined.exchanges]
    versions = [note.version if note is not None and note.complete else -1 for note in notes]
    return {"run": joined.session.info.run, "site": joined.site, "versions": versions}


def require_checkpoint(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `state`, which must be an entry that `checkpoint_of` returned, or empty.

    Raises:
        UsageError: `state` has other keys.
    """
    if state and state.keys() - ALSO != KEYS:
        raise UsageError(
            f"This state_dict was not written by Atoll: it has the keys {', '.join(map(repr, state))}.", WITHOUT
        )
    return dict(state)


def require_same_run(state: Mapping[str, Any], run: str, site: str) -> None:
    """Check that Atoll's entry of a checkpoint belongs to this run and site. An empty entry belongs to every run.

    Raises:
        UsageError: the checkpoint belongs to another run or site. The message names both.
    """
    if state and (state["run"], state["site"]) != (run, site):
        raise UsageError(
            f"The checkpoint belongs to site {state['site']!r} in run {state['run'][:8]}, not to site "
            f"{site!r} in run {run[:8]}.",
            WITHOUT,
        )


def require_agrees(state: Mapping[str, Any], joined: Participation) -> None:
    """Check that the site's folder is not older than a checkpoint. Call this before a new version is downloaded.

    A newer folder is accepted: the site trained on after the checkpoint was written, and now continues from the newest
    version.

    Args:
        state: Atoll's entry of the checkpoint, as `checkpoint_of` returns it.
        joined: the site's part in the run.

    Raises:
        UsageError: the checkpoint belongs to another run or site, or the folder has an older version.
    """
    if not state:
        return
    current = checkpoint_of(joined)
    require_same_run(state, current["run"], current["site"])
    for fragment, (then, now) in enumerate(zip(state["versions"], current["versions"], strict=False)):
        if now < then:
            has = f"version {now}" if now >= 0 else "no version"
            of = of_fragment(fragment if len(current["versions"]) > 1 else None)
            raise UsageError(
                f"The checkpoint was written when the site trained from version {then}{of}, but "
                f"the site's folder {str(joined.folder)!r} has {has}. So this is another folder, or one "
                "restored from an older backup.",
                f"Use the folder that the site had when the checkpoint was written. {WITHOUT}",
            )
