"""DiLoCo at a worker: `with atoll.DiLoCo(model, optimizer, server=..., sync_every=H): any training loop`.

DiLoCo: Distributed Low-Communication Training of Language Models (Douillard et al., arXiv 2311.08105), Algorithm 1:
every worker takes H inner steps from θ(t−1); the outer gradient is the mean of θ(t−1) − θ_i(t).

An optimizer post-step hook counts the steps; every H of them it synchronises: form the pseudo-gradient, submit it,
wait for the next version, pull it into the parameters. The inner optimizer keeps its state. A server that cannot be
reached costs a synchronisation, never local progress: training goes on, and the next pseudo-gradient holds it all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from atoll.algorithms.optimizer_hooks import Given, Steps, optimizers_in, require_trains, warn_of_what_none_trains
from atoll.border import border, bordered, say_interrupt_in_a_line
from atoll.errors import UsageError
from atoll.filters.base import Filter
from atoll.protocol.values import UpdateInfo, VersionRef
from atoll.tensors.module_tensors import named_parameters, without_ddp
from atoll.transport.http_client import server_of
from atoll.worker.arguments import finite_metrics, positive, sync_retries
from atoll.worker.exchange.participation import Participation
from atoll.worker.log_lines import LOG, ensure_lines, in_words, size
from atoll.worker.metrics import Measured, Metrics, Reports
from atoll.worker.session.leave_at_exit import last_words
from atoll.worker.session.ranks import RankGroup
from atoll.worker.session.session import Session
from atoll.worker.site_name import default_site, require_site
from atoll.worker.tasks.answer_tasks import say_evaluation_follows
from atoll.worker.training.alone import ALONE, ALONE_ENDED
from atoll.worker.training.over_ranks import OverRanks
from atoll.worker.training.simulated_seat import require_real

if TYPE_CHECKING:
    from atoll.worker.training.streaming import Streaming


@bordered
class DiLoCo(OverRanks):
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

    @border
    def __init__(
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
        super().__init__()
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
        self._place: Participation | None = None
        self._steps: Steps | None = None
        self.step = 0
        self.lost = False
        self.seconds_waited = 0.0
        self._started = self._stopped = False
        self.sync_every = sync_every or 0
        self._streaming: Streaming | None = None
        self._reports = Reports()
        self._not_finite: set[str] = set()  # metrics of which that was said
        self._pace = (0, time.monotonic())

    # -- life

    def __enter__(self) -> DiLoCo:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        say_interrupt_in_a_line(error)
        self.stop(error)

    @border
    def start(self) -> DiLoCo:
        """Join the run, pull the global model into the parameters, and hook the optimizer.

        Raises:
            ServerLost: the server did not answer for as long as ATOLL_GIVE_UP_S says; a day by default.
            ServerUnreachable: something else answers at its address.
            SchemaMismatch: the run trains another model.
            UsageError: it is a simulation, was started before, or another DiLoCo trains the same parameters.
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
            self._told = self._over_ranks(lambda: self._join(site))
            self._learn()
            self._hook()
        except BaseException as error:
            self._take_back(error)
            raise
        self._started = True
        return self

    def _take_back(self, error: BaseException) -> None:
        """The start failed, maybe after the join: leave nothing that looks alive, so that it can be tried again."""
        self._unhook()
        place, self._place, self._streaming, self._told = self._place, None, None, None
        if place is not None:
            place.leave(last_words(error))

    def _join(self, site: str) -> dict[str, Any]:
        place = self._place = self._open(site)
        session, exchange = place.session, place.exchange
        session.optimizers = self._optimizers
        try:
            self.sync_every = self._given_sync_every or session.info.sync_every or 500
            if session.streams:
                self._stream(place)
            else:
                lost = self._pull_head(exchange, None, is_in=exchange.recover() is not None)
                if lost is not None:
                    raise lost.error
        except BaseException as error:
            place.leave(str(error))
            raise
        info = session.info
        LOG.info(
            "%s: joined run %s at %s; %s", site, info.name, session.channel.server, in_words(info, self.sync_every)
        )
        say_evaluation_follows(session)
        return self._now()

    def _now(self) -> dict[str, Any]:
        """What the other ranks have to know of this one."""
        assert self._place is not None
        session = self._place.session
        info = session.info
        return {
            "sync_every": self.sync_every,
            "local_steps": self._local_steps,
            "finished": self.over,
            "lost": session.ranks.from_rank0(lambda: session.silence.is_too_long),
            "acts": {"every": self.sync_every // info.fragments, "tau": info.tau, "waits": info.mode == "sync"}
            if self._streaming is not None
            else None,
        }

    def _stream(self, place: Participation) -> None:
        from atoll.worker.training.streaming import Streaming

        self._streaming = Streaming(
            place,
            lambda: self._tensors,
            self._info,
            self._measured,
            sync_every=self.sync_every,
            max_retries=self._max_retries,
        )
        self._streaming.begin()
        self.over = self._streaming.finished

    def stop(self, error: BaseException | None = None) -> None:
        """Remove the hook and deregister. Steps since the last synchronisation stay in the model, and are reported."""
        self._unhook()
        place = self._place
        if self._stopped:
            return
        if place is None:
            self._stopped = not self._server or self._told is not None
            if not self._server and error is None:
                LOG.info("%s", ALONE_ENDED)
            self._spread_the_end(error)
            return
        session, self._stopped = place.session, True
        if self._streaming is not None:
            self._end_streaming(self._streaming, place, error)
        if self.step == 0 and error is None:
            LOG.warning(
                "%s: no optimizer step was seen. Call step() of the optimizer that DiLoCo was given.",
                session.site,
            )
        elif not self.over:
            if self.lost:
                LOG.warning("%s: %s", session.site, session.silence.error())
            self._say_what_stays(place.exchange, self._streaming.counted_step if self._streaming is not None else None)
        self._spread_the_end(error)
        said = last_words(error)
        place.leave(said)
        merges = f" ({self._streaming.merges_in_words})" if self._streaming is not None else ""
        LOG.info(
            "%s: %d steps, %d rounds%s, %d skipped, %d retries, %d reconnections; sent %s, received %s, waited %.1f s",
            session.site,
            self.step,
            self.rounds,
            merges,
            self.skipped,
            session.counters.retries,
            session.reconnections,
            size(session.counters.bytes_up),
            size(session.counters.bytes_down),
            self.seconds_waited,
        )

    def _end_streaming(self, streaming: Streaming, place: Participation, error: BaseException | None) -> None:
        try:
            if error is None:
                streaming.drain()
                self._take_over(streaming)
            else:
                streaming.abandon()
        except BaseException as worse:
            streaming.abandon()
            place.leave(last_words(worse))
            raise

    @border
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

    @border
    def report(self, **metrics: float) -> None:
        """Numbers of this worker to be shown in status, and averaged over the workers at the next synchronisation.

        They count once: a later synchronisation has only what was reported since.
        """
        self._reports.add(finite_metrics(metrics, self._named, self._not_finite), metrics)
        if self._place is not None:
            self._place.session.tell(metrics=dict(self._reports.newest))

    @property
    def finished(self) -> bool:
        """Whether a loop that trains as long as there is a run may end: the run is over, or its server is lost.

        A loop that goes on nevertheless trains, and asks for the server at every turn; it may come back.
        """
        return self.over or self.lost

    @property
    def _named(self) -> str:
        return self._place.site if self._place is not None else self._site or "worker"

    @property
    def sync_metrics(self) -> dict[str, float]:
        """Rounds, retries, reconnections, bytes and seconds waited so far; staleness of the last that counted.

        The bytes of a sharded model are those of this rank.
        """
        session = self._place.session if self._place is not None else None
        streaming = self._streaming
        merges = {"merges_waited": streaming.merges_waited, "merges_late": streaming.merges_late} if streaming else {}
        return {
            "rounds": self.rounds,
            "skipped": self.skipped,
            "staleness": self._staleness,
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

    def _hook(self) -> None:
        self._steps = Steps(self._optimizers, self._after_step, self._named)

    def _unhook(self) -> None:
        self._let_go()
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    @border
    def _after_step(self) -> None:
        self.step += 1
        self._since_sync += 1
        if self._told is None or self._stopped:
            return
        if self._place is not None:
            self._beat(self._place.session)
        if self.over or not self._may_act():
            return
        begin = time.monotonic()
        self._find_replaced_tensors()
        told = self._over_ranks(self._act)
        if told is None:
            return
        self._told, self.lost = told, told["lost"]
        self._learn()
        if self._place is None:
            self._since_sync = 0
        self.seconds_waited += time.monotonic() - begin
        self._pace = (self.step, time.monotonic())

    def _may_act(self) -> bool:
        """Whether something may be due after this step; every rank comes to the same answer."""
        acts = self._told["acts"]
        if acts is None:
            return self._since_sync >= (self._local_steps or self.sync_every)
        waits, every = acts["waits"] and self._ranks.together, acts["every"]
        return not waits or self.step % every == 0 or (self.step - acts["tau"]) % every == 0

    def _act(self) -> dict[str, Any] | None:
        """Do what is due; None where nothing was."""
        assert self._place is not None
        if self._streaming is None:
            self._synchronise(self._place.exchange)
        elif self._streaming.after_step(self.step):
            self._take_over(self._streaming)
        else:
            return None
        return self._now()

    def _take_over(self, streaming: Streaming) -> None:
        self.rounds, self.skipped, self.over = streaming.rounds, streaming.skipped, streaming.finished
        self._since_sync = self.step - streaming.newest_step

    def _info(self, base: VersionRef, steps: int) -> UpdateInfo:
        assert self._place is not None
        is_lost = self._place.exchanges[base.fragment].outbox.note is None
        return self._place.session.ranks.from_rank0(lambda: self._own_info(base, steps, is_lost), UpdateInfo)

    def _own_info(self, base: VersionRef, steps: int, is_lost: bool) -> UpdateInfo:
        reported = self._reports.take(base.fragment, is_lost=is_lost)
        local = finite_metrics(self.local_metrics() if self.local_metrics else {}, self._named, self._not_finite)
        weight = positive(self._weight() if callable(self._weight) else self._weight)
        return UpdateInfo(weight, steps, reported | local | self._measured.of(base.digest))

    def _beat(self, session: Session) -> None:
        step, since = self._pace
        rate = (self.step - step) / max(time.monotonic() - since, 1e-9)
        under_way = self._streaming is not None and self._streaming.under_way  # it says itself what it does
        session.tell(step=self.step, steps_per_s=rate, **({} if under_way else {"state": "training"}))
