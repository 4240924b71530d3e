"""DiLoCo at a worker: `with atoll.DiLoCo(model, optimizer, server=..., sync_every=H): any training loop`.

DiLoCo: Distributed Low-Communication Training of Language Models (Douillard et al., arXiv 2311.08105), Algorithm 1:
every worker takes H inner steps from θ(t−1); the outer gradient is the mean of θ(t−1) − θ_i(t).

An optimizer post-step hook counts the steps; every H of them it synchronises: form the pseudo-gradient, submit it,
wait for the next version, pull it into the parameters. The inner optimizer keeps its state. A server that cannot be
reached costs a synchronisation, never local progress: training goes on, and the next pseudo-gradient holds it all.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.algorithms.optimizer_hooks import (
    Given,
    Steps,
    held_by,
    optimizers_in,
    require_trains,
    warn_of_what_none_trains,
)
from atoll.errors import UsageError, print_interrupt_in_a_line, public_api
from atoll.filters.base import Filter
from atoll.protocol.messages import VersionRef
from atoll.protocol.values import UpdateInfo
from atoll.tensors.arrays import require_model
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
from atoll.worker.arguments import default_site, finite_metrics, positive, require_site, sync_retries
from atoll.worker.exchange.exchange import OF_THE_OPTIMIZER
from atoll.worker.exchange.participation import LoopTerms, Participation, take_part
from atoll.worker.log_lines import ALONE, ALONE_ENDED, LOG, ensure_lines, in_words, size
from atoll.worker.metrics import Measured, Metrics, Reports
from atoll.worker.session.leave_at_exit import last_words
from atoll.worker.session.ranks import ALONE as ONE_RANK
from atoll.worker.session.ranks import RankGroup
from atoll.worker.tasks.answer_tasks import say_evaluation_follows
from atoll.worker.training.checkpoint import checkpoint_of, require_agrees, require_checkpoint
from atoll.worker.training.federated_loop import require_real
from atoll.worker.training.fragment_order import SyncRules
from atoll.worker.training.synchroniser import Synchroniser

T = TypeVar("T")

SYNC_EVERY = 500
"""H where neither the script nor the run has one."""


_OTHER_ALGORITHM = (
    "the run's algorithm is {}, not diloco: its outer step and codec are not DiLoCo's. If you want DiLoCo, begin a new "
    'run with algorithm.name = "diloco" (atoll new --algorithm diloco).'
)
_OF_THE_ALGORITHM = OF_THE_OPTIMIZER - 1
"""Under this number, in place of a fragment's, a worker warns of the run's algorithm."""


@dataclass(frozen=True)
class SyncProgress:
    """What every rank knows of the synchronisations.

    Attributes:
        sync_every: H.
        next_step: the first step after which something may have to be done.
        finished: whether the run is over.
        lost: whether the server is given up.
    """

    sync_every: int
    next_step: int
    finished: bool
    lost: bool


_active: weakref.WeakKeyDictionary[object, list[object]] = weakref.WeakKeyDictionary()
"""Loop → the optimizers and parameters that it claims; held, so that no other object gets the id of one."""
_claiming = threading.Lock()


def claim(loop: object, optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Claim optimizers and the parameters that are trained for a loop: two would wait for each other, for ever.

    Args:
        parameters: of its model, by name; frozen ones may have several loops.

    Raises:
        UsageError: another loop that is active has one of them.
    """
    held = held_by(optimizers)
    names = {id(each): name for name, each in parameters.items() if each.requires_grad or id(each) in held}
    with _claiming:
        taken = {id(each) for other, claimed in _active.items() if other is not loop for each in claimed}
        if any(id(each) in taken for each in optimizers) or not taken.isdisjoint(names):
            which = next((f"parameter {names[each]!r}" for each in names if each in taken), "the optimizer")
            raise UsageError(
                f"Another DiLoCo of this process is active, and trains {which}, too.",
                "Leave its `with` block, or call its stop(), before this one starts. One DiLoCo takes several "
                "optimizers of a model, as a list.",
            )
        _active[loop] = [*optimizers, *(each for each in parameters.values() if id(each) in names)]


def release(loop: object) -> None:
    """Let other loops have what this one has claimed. Idempotent."""
    with _claiming:
        _active.pop(loop, None)


_REMEDY = (
    "Copy values into the tensors that are there, as load_state_dict(state) does without assign=True; or change the "
    "model before atoll.DiLoCo starts, and build the optimizer over the new parameters."
)


def replaced(model: nn.Module, before: Tensors, optimizers: Sequence[Optimizer]) -> Tensors:
    """The model's tensors as they are now: `before` itself where none was replaced.

    Args:
        before: as they were.
        optimizers: that train the model.

    Raises:
        UsageError: one has come, gone, or is of another dtype or shape; or the optimizers train another one. It is
            named.
    """
    now = named_tensors(model)[0]
    for name in [*before, *now]:
        if name not in now or name not in before:
            raise UsageError(
                f"The model has {'lost its' if name in before else 'a new'} tensor {name!r} since training began.",
                _REMEDY,
            )
    moved = [name for name, tensor in now.items() if not _is_same(tensor, before[name])]
    if not moved:
        return before
    held, parameters = held_by(optimizers), named_parameters(model)
    for name in moved:
        was, has_become = before[name], now[name]
        if (was.dtype, was.shape) != (has_become.dtype, has_become.shape):
            raise UsageError(
                f"The model's tensor {name!r} was {_form(was)} when training began, and is {_form(has_become)} now.",
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
    """Low-communication training around any loop; `optimizer.step()` is all that it needs to see.

    Args:
        model: trained in place; its parameters become the global model's on entry.
        optimizer: the inner optimizer over its parameters; or several, in the order in which they step. A step is
            counted, and synchronised, behind the last one.
        server: address, `http://host:8512`; by default `ATOLL_SERVER`. Without either, plain local training.
        sync_every: H, local steps between two synchronisations; by default the run's. Another value than the run's
            is refused when joining.
        num_fragments: K, parts of the model that are synchronised in turn; likewise.
        site: this worker's name; by default `ATOLL_SITE`, else made of host and process.
        weight: this worker's share in the mean: a number, or a function asked at every synchronisation.
        metrics: asked after every synchronisation, while the model is the global version, and at the start; finite
            numbers by name, averaged over the workers and credited to that version.
        folder: where the base and outbox files lie; by default `ATOLL_DIR`, else `.atoll`.
        labels: anything to be shown in status.
        filters: that every update of this site passes through, in this order, before any byte of it leaves.
        max_sync_retries: attempts before a synchronisation with a lost server is skipped; by default
            `ATOLL_MAX_SYNC_RETRIES`, else 6. Where the network drops packets without a word, there is one attempt,
            of about 15 s.
        require_server: refuse to train alone where no server is configured.
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
        metrics: Metrics | None = None,
        folder: str | Path | None = None,
        labels: dict[str, str] | None = None,
        filters: Sequence[Filter] = (),
        max_sync_retries: int | None = None,
        require_server: bool = False,
    ) -> None:
        if sync_every is not None and sync_every < 1:
            raise UsageError(
                f"sync_every is {sync_every}.", "Give the number of local steps between two synchronisations."
            )
        require_model(model, mapping=False)
        model = without_ddp(model)
        self.model, self.optimizer = model, optimizer
        self._optimizers = optimizers_in(optimizer)
        self._ranks = RankGroup.here(model)
        self._server = server_of(server, require_server=require_server)
        self._site = site
        self._given_sync_every, self._given_fragments = sync_every, num_fragments
        self._weight, self._measured = weight, Measured(metrics, lambda: self._named)
        self.local_metrics: Metrics | None = None  # asked when an update is formed; of frameworks that keep some
        self._folder, self._labels, self._filters = Path(folder) if folder else None, labels, filters
        self._max_retries = sync_retries(max_sync_retries)
        self._tensors: Tensors = {}
        self._schema = Schema(())
        self._shards: Shards | None = None
        self._checkpoint: dict[str, Any] = {}
        self._place: Participation | None = None  # at other ranks than 0 where the model is sharded alone
        self._sync: Synchroniser | None = None
        self._steps: Steps | None = None
        self.step = 0
        self.seconds_waited = 0.0
        self._progress: SyncProgress | None = None  # None before the start
        self._started = self._stopped = False
        self.sync_every = sync_every or 0
        self._reports = Reports()
        self._not_finite: set[str] = set()  # metrics of which that was said
        self._pace = (0, time.monotonic())

    # -- life

    def __enter__(self) -> DiLoCo:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        print_interrupt_in_a_line(error)
        self.stop(error)

    @public_api
    def start(self) -> DiLoCo:
        """Join the run, pull the global model into the parameters, and hook the optimizer.

        Raises:
            ServerLost: the server did not answer for as long as ATOLL_GIVE_UP_S says; a day by default.
            ServerUnreachable: something else answers at its address.
            SchemaMismatch: the run trains another model.
            UsageError: it is a simulation, was started before, another DiLoCo trains the same parameters, or the
                checkpoint that was loaded disagrees with the site's folder.
        """
        ensure_lines()
        require_real("atoll.DiLoCo")
        if self._started:
            raise UsageError(
                "This DiLoCo object was started before, and takes part in a run once.",
                "Make a new one, atoll.DiLoCo(model, optimizer, ...), for each `with` block or start().",
            )
        if not self._server:
            LOG.info("%s", ALONE)
            self._started = True
            return self
        self._require_trains()
        self._find_tensors()
        try:
            site = self._ranks.from_rank0(lambda: require_site(self._site or default_site()))
            self._learn(self._over_ranks(lambda: self._join(site), SyncProgress))
            self._hook()
        except BaseException as error:
            self._take_back(error)
            raise
        self._started = True
        return self

    def _take_back(self, error: BaseException) -> None:
        """The start failed, maybe after the join: leave nothing that looks alive, so that it can be tried again."""
        self._unhook()
        place, self._place, self._sync, self._progress = self._place, None, None, None
        if place is not None:
            place.leave(last_words(error))

    def _join(self, site: str) -> SyncProgress:
        assert self._server
        sharded = self._shards is not None
        place = self._place = take_part(
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
        )
        session, info = place.session, place.session.info
        session.on_wait, session.optimizers = self._ranks.tick, self._optimizers
        try:
            _require_uncorrected(place)
            require_agrees(self._checkpoint, place)
            self.sync_every = self._given_sync_every or info.sync_every or SYNC_EVERY
            self._sync = Synchroniser(
                session,
                place.exchanges,
                self._tensors_now,
                SyncRules.of(info, self.sync_every),
                self._info,
                self._measured,
                max_retries=self._max_retries,
            )
            self._sync.start()
        except BaseException as error:
            place.leave(str(error))
            raise
        if self._ranks.is_first:
            told = in_words(info, self.sync_every)
            LOG.info("%s: joined run %s (%s) at %s; %s", site, info.name, info.algorithm, session.channel.server, told)
            if not info.sync_every:  # only algorithms that count local steps have it
                text = _OTHER_ALGORITHM.format(info.algorithm)
                LOG.warning("%s: %s", site, text)
                session.warn(_OF_THE_ALGORITHM, [text])
        say_evaluation_follows(session)
        return self._now()

    def _own_shards(self) -> Shards:
        assert self._shards is not None
        return self._shards

    def _over_ranks(self, work: Callable[[], T], kind: object) -> T:
        """Do what needs the network: at every rank where the model is sharded, else at rank 0 for all of them."""
        return work() if self._shards is not None else self._ranks.from_rank0(work, kind)

    def _now(self) -> SyncProgress:
        assert self._place is not None
        assert self._sync is not None
        session, sync = self._place.session, self._sync
        lost = session.ranks.from_rank0(lambda: session.silence.is_too_long)
        return SyncProgress(self.sync_every, sync.next_step, sync.finished, lost)

    def _learn(self, progress: SyncProgress) -> None:
        """Be where rank 0 is: its model, and when something is to be done next."""
        self._progress, self.sync_every = progress, progress.sync_every
        self._spread()

    def _spread(self) -> None:
        """Give every rank the whole model of rank 0, where every rank has one."""
        if self._shards is None:
            self._ranks.spread_(self._tensors.values())

    def stop(self, error: BaseException | None = None) -> None:
        """Remove the hook and deregister. Steps since the last synchronisation stay in the model, and are reported."""
        self._unhook()
        place, sync = self._place, self._sync
        if self._stopped:
            return
        if place is None or sync is None:
            self._stopped = not self._server or self._progress is not None
            if not self._server and error is None:
                LOG.info("%s", ALONE_ENDED)
        else:
            self._stopped = True
            self._end(place, sync, error)
        if error is None and self._progress is not None:
            self._spread()  # what was merged while the loop ended is every rank's
        if place is None or sync is None:
            return
        place.leave(last_words(error))
        counters = place.session.counters
        LOG.info(
            "%s: %d steps, %d rounds%s, %d skipped, %d retries, %d reconnections; sent %s, received %s, waited %.1f s",
            place.site,
            self.step,
            sync.rounds,
            sync.merges_in_words,
            sync.skipped,
            counters.retries,
            place.session.reconnections,
            size(counters.bytes_up),
            size(counters.bytes_down),
            self.seconds_waited,
        )

    def _end(self, place: Participation, sync: Synchroniser, error: BaseException | None) -> None:
        try:
            if error is None:
                sync.drain()
            else:
                sync.abandon()
        except BaseException as worse:
            sync.abandon()
            place.leave(last_words(worse))
            raise
        if self.step == 0 and error is None:
            LOG.warning(
                "%s: no optimizer step was seen. Call step() of the optimizer that DiLoCo was given.", place.site
            )
        elif not sync.finished:
            if self.lost:
                LOG.warning("%s: %s", place.site, place.session.silence.error())
            self._say_what_stays(place, sync)

    def _say_what_stays(self, place: Participation, sync: Synchroniser) -> None:
        """Log how many local steps have not reached the run."""
        counted = sync.counted_step
        steps, turn = self.step - counted, self.sync_every // place.session.info.fragments
        if not steps:
            return
        if self.lost or steps > self.step - sync.newest_step or (sync.skipped and steps >= turn):
            LOG.warning(
                "%s: %d steps since step %d were not sent: what was trained since is in this script's model alone",
                place.site,
                steps,
                counted,
            )
        else:
            LOG.info("%s: %d steps after the last synchronisation stay local", place.site, steps)

    @public_api
    def state_dict(self) -> dict[str, Any]:
        """Return what a trainer's checkpoint should hold: the run, the site and its versions; empty without a run.

        Parameters, optimizer and schedule are the trainer's to save.
        """
        return checkpoint_of(self._place) if self._place is not None else dict(self._checkpoint)

    @public_api
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let `start` refuse to resume where the checkpoint disagrees with the site's folder.

        Raises:
            UsageError: it has started already, or this is no `state_dict`.
        """
        if self._started:
            raise UsageError("This DiLoCo has started.", "Call load_state_dict before start() or the `with` block.")
        self._checkpoint = require_checkpoint(state)

    @public_api
    def follow(self, optimizer: Given) -> None:
        """Go on with another optimizer over the model's parameters, wherever they are now: frameworks make new ones."""
        self._optimizers, self.optimizer = optimizers_in(optimizer), optimizer
        self._require_trains()
        if self._place is not None:
            self._place.session.optimizers = self._optimizers
        if self._steps is not None:
            self._unhook()
            self._find_tensors()
            self._hook()

    @public_api
    def report(self, **metrics: float) -> None:
        """Numbers of this worker to be shown in status, and averaged over the workers at the next synchronisation.

        They count once: a later synchronisation has only what was reported since.
        """
        self._reports.add(finite_metrics(metrics, self._named, self._not_finite), metrics)
        if self._place is not None:
            self._place.session.tell(metrics=dict(self._reports.newest))

    def credit(self, metrics: dict[str, float]) -> bool:
        """Take numbers that were measured just now for those of the global version; False where the model is none.

        It is one after a synchronisation, until the next step. For frameworks, which measure when they do.
        """
        place, sync = self._place, self._sync
        if place is None or sync is None or place.session.streams or self.step != sync.base_step:
            return False
        base = place.exchange.base.note
        if base is None or not base.digest:
            return False
        self._measured.credit(metrics, base.digest)
        return True

    @property
    def finished(self) -> bool:
        """Whether a loop that trains as long as there is a run may end: the run is over, or its server is lost.

        A loop that goes on nevertheless trains, and asks for the server at every turn; it may come back.
        """
        return self.over or self.lost

    @property
    def over(self) -> bool:
        """Whether the run is over."""
        return self._progress is not None and self._progress.finished

    @property
    def lost(self) -> bool:
        """Whether the server is given up."""
        return self._progress is not None and self._progress.lost

    @property
    def rounds(self) -> int:
        """Results that this worker went on from; 0 at other ranks than the first."""
        return self._sync.rounds if self._sync is not None else 0

    @property
    def skipped(self) -> int:
        """Synchronisations that broke off; 0 at other ranks than the first."""
        return self._sync.skipped if self._sync is not None else 0

    @property
    def _named(self) -> str:
        return self._place.site if self._place is not None else self._site or "worker"

    @property
    def sync_metrics(self) -> dict[str, float]:
        """Rounds, retries, reconnections, bytes and seconds waited so far; staleness of the last that counted.

        The bytes of a sharded model are those of this rank.
        """
        session, sync = self._place.session if self._place is not None else None, self._sync
        merges = {}
        if sync is not None and session is not None and session.streams:
            merges = {"merges_waited": sync.merges_waited, "merges_late": sync.merges_late}
        return {
            "rounds": self.rounds,
            "skipped": self.skipped,
            "staleness": sync.staleness if sync else 0,
            "retries": session.counters.retries if session else 0,
            "reconnections": session.reconnections if session else 0,
            "bytes_up": session.counters.bytes_up if session else 0,
            "bytes_down": session.counters.bytes_down if session else 0,
            "seconds_waited": self.seconds_waited,
            **merges,
        }

    # -- the hook

    def _require_trains(self) -> None:
        parameters = named_parameters(self.model)
        require_trains(self._optimizers, parameters)
        if self._ranks.is_first:
            warn_of_what_none_trains(self._optimizers, parameters, self._named)

    def _find_tensors(self) -> None:
        """Find what there is of the model in this process; no other loop may have it.

        Raises:
            UsageError: another one has.
        """
        claim(self, self._optimizers, named_parameters(self.model))
        self._shards = None
        if not any(map(is_sharded, self.model.parameters())):
            self._schema, self._tensors = schema_of(self.model), named_tensors(self.model)[0]
            return
        if self._filters:
            raise UsageError(
                "filters see whole tensors, and this model is sharded over ranks (FSDP2).",
                "Leave filters out, or train with DistributedDataParallel.",
            )
        self._schema, shards = Shards.of(self.model, self._ranks.rank, self._ranks.size)
        self._tensors = shards.locals
        self._shards = shards if self._ranks.together else None

    def _tensors_now(self) -> Tensors:
        """Return the tensors that the model has now: scripts replace buffers, and move parameters.

        Raises:
            UsageError: the model, or what the optimizers train, is another one than that of the run.
        """
        if not any(map(is_sharded, self.model.parameters())):
            self._tensors = replaced(self.model, self._tensors, self._optimizers)
        return self._tensors

    def _hook(self) -> None:
        self._steps = Steps(self._optimizers, self._after_step, self._named)

    def _unhook(self) -> None:
        release(self)
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    @public_api
    def _after_step(self) -> None:
        self.step += 1
        progress = self._progress
        if progress is None or self._stopped:
            return
        self._beat()
        if progress.finished or (self._ranks.together and self.step < progress.next_step):
            return
        begin = time.monotonic()
        now = self._over_ranks(self._act, SyncProgress | None)
        if now is None:
            return
        if self._place is None:
            self._tensors_now()
        self._learn(now)
        self.seconds_waited += time.monotonic() - begin
        self._pace = (self.step, time.monotonic())

    def _act(self) -> SyncProgress | None:
        """Do what is due; None where nothing was."""
        assert self._sync is not None
        return self._now() if self._sync.after_step(self.step) else None

    def _info(self, base: VersionRef, steps: int) -> UpdateInfo:
        """Return what an update from this version says, after so many steps: what rank 0 reports."""
        place = self._place
        assert place is not None
        is_lost = place.exchanges[base.fragment].outbox.note is None

        def own() -> UpdateInfo:
            reported = self._reports.take(base.fragment, is_lost=is_lost)
            local = finite_metrics(self.local_metrics() if self.local_metrics else {}, self._named, self._not_finite)
            weight = positive(self._weight() if callable(self._weight) else self._weight)
            return UpdateInfo(weight, steps, reported | local | self._measured.of(base.digest))

        return place.session.ranks.from_rank0(own, UpdateInfo)

    def _beat(self) -> None:
        if self._place is None or self._sync is None:
            return
        step, since = self._pace
        rate = (self.step - step) / max(time.monotonic() - since, 1e-9)
        state = {} if self._sync.under_way else {"state": "training"}  # else it says itself what it does
        self._place.session.tell(step=self.step, steps_per_s=rate, **state)


def _require_uncorrected(place: Participation) -> None:
    """Refuse a run with an algorithm that corrects local steps, or takes more than parameters and buffers.

    Raises:
        UsageError: it would train without the correction, or send updates that lack a part.
    """
    info, beside = place.session.info, [spec.group for spec in place.session.schema.tensors if spec.is_beside]
    if all(each.rule is None for each in place.exchanges) and not beside:
        return
    what = f"takes {beside[0]!r} beside the model in each update" if beside else "corrects local steps"
    raise UsageError(
        f"The algorithm {info.algorithm!r} of run {info.name!r} {what}, and atoll.DiLoCo does not.",
        'Train with atoll.join and fl_round.correct(model, optimizer), or begin a run with algorithm.name = "diloco".',
    )
