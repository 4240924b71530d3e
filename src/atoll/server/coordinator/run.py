"""A run that is being served: events in, journal, effects out.

`apply` is the only way in which anything changes: the pure machine decides, what it decided is journalled in one
transaction, and only then is anybody told. All of it happens on one event loop; passes over tensors run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from atoll.aggregation.plan import Plan
from atoll.errors import AtollError, Busy, DiskFull, RunFailed, StoreError
from atoll.protocol.status_messages import WorkflowStatus
from atoll.protocol.task_messages import Evaluation
from atoll.rounds import events as ev
from atoll.rounds import events as fx
from atoll.rounds import machine
from atoll.runtime import stay_single_threaded
from atoll.server.coordinator.accept_update import Judge
from atoll.server.coordinator.aggregate_round import close_round, frozen_round, in_words
from atoll.server.coordinator.background_writes import Behind, measured_of, missing, over, value_of
from atoll.server.coordinator.build_status import TimeLeft, keep_status
from atoll.server.coordinator.ledger_rows import write
from atoll.server.coordinator.long_polls import Turnstile
from atoll.server.coordinator.persistor import Persistor
from atoll.server.coordinator.roster import Attendance, Lease, Stale, forged, lease_refused, roster_of
from atoll.server.coordinator.user_aggregator_process import Aggregator
from atoll.server.coordinator.worker_pace import Pace
from atoll.server.filter_table import SiteFilters
from atoll.server.restore import snapshot_of
from atoll.server.settings_advice import advice
from atoll.server.swarm.assignments import Reopened, Swarm
from atoll.server.tasks.task_queue import TaskQueue
from atoll.server.tasks.user_code import UserThreads
from atoll.server.transient_errors import RETRY_S, directory_gone, passing
from atoll.server.update_filters import Filtering
from atoll.store.journal_tables import Recovered, TicketRow
from atoll.store.kept_objects import ObjectStore
from atoll.store.store import Store

LOG = logging.getLogger("atoll.server")

FACTS = (ev.UpdateAccepted, ev.UpdateRefused, ev.VersionCommitted)
"""Events that report a row which is in the journal: they must reach the machine, sooner or later."""


class Workflows(Protocol):
    """What a run asks its workflows.

    Attributes:
        evaluated: returns the last matrix of a cross-site evaluation, as far as it is filled; None if there is none.
    """

    evaluated: Callable[[], Evaluation] | None

    @property
    def keeps_local(self) -> bool:
        """Whether sites are asked later for what they have submitted."""

    def will_evaluate(self, site: str) -> bool:
        """Whether a cross-site evaluation that is still to come asks a site for measurements."""

    def status(self) -> list[WorkflowStatus]:
        """Return what the status shows, in order."""


class Run:
    """One run: its store, its round machine, and who waits for what."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        recovered: Recovered,
        persistor: Persistor | None,
        filters: SiteFilters,
        workflows: Workflows | None = None,
    ) -> None:
        self.plan, self.store, self.settings = plan, store, plan.settings
        self.roster = roster_of(
            recovered.members, [store.tickets.newest_bases(fragment) for fragment in range(len(plan.fragments))]
        )
        self.pace, self.stale, self.advice = Pace(plan, self.roster), Stale(plan), advice(plan)
        self.left = TimeLeft(self.settings.rounds, len(plan.fragments))
        self.workflows, self.finished, self.trained = workflows, asyncio.Event(), asyncio.Event()
        self.failed: AtollError | None = None
        self.ended, self.address = asyncio.Event(), ""
        self.trouble: dict[int, str] = {}
        totals = store.run_log.totals()
        asked = {row.fragment: row.expected for row in store.run_log.rounds()}
        self.attendance, self.refused = Attendance(self.roster, totals.deaths, asked), totals.refused
        self.bytes_up = self.bytes_down = 0
        self.started_s = time.monotonic()
        self.watched_s: float | None = None  # when its status was asked for last, over the network
        self.io = ThreadPoolExecutor(max(8, 2 * plan.threads), "atoll-io", stay_single_threaded)
        self.objects = ObjectStore(
            self.settings.state_dir / "objects",
            max_bytes=self.settings.objects_max_bytes,
            max_expires_s=self.settings.objects_expire_s,
            idle_timeout_s=self.settings.idle_timeout_s,
        )
        self.task_queue = TaskQueue(self.objects, self.wake, self._alive)
        self.behind, self.user_threads = Behind(plan, store, self.io, persistor), UserThreads()
        self.filtering = Filtering(filters, plan, store, self.user_threads)
        self.aggregator: Aggregator | None = None
        self.judge = Judge(self)
        self.swarm = Swarm(plan, store, self) if plan.is_swarm else None
        self._changed, self._ending = Turnstile(), False
        self._cancelled = threading.Event()
        self._said_missing = False
        self._untold: list[ev.Event] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.state: machine.State
        self._saving_best: asyncio.Task[None] | None = None
        self._behind_last: asyncio.Task[None] | None = None  # of the newest version; it ends as the last of them
        self._rules = machine.Rules.from_settings(
            self.settings, len(plan.fragments), held=workflows is not None, needs_all=plan.algorithm.needs_all
        )
        tracking = self._rules.tracking
        history = store.run_log.history(None, 0) if tracking.metric else []
        self._recovered = snapshot_of(recovered, tracking.follow_all(measured_of(history, tracking.metric)))
        if recovered.fell_back:
            LOG.warning("%s", recovered.fell_back)
        for warning in recovered.warnings:
            LOG.warning("%s", warning)

    # -- beginning and end

    def start(self, address: str = "") -> None:
        """Take up what the journal says is to be done; called on the event loop that serves the run at an address.

        Raises:
            ConfigError, RunFailed: the aggregator that the settings name cannot be started.
        """
        self.address = address
        if self.settings.aggregator:
            loop = asyncio.get_running_loop()
            self.aggregator = Aggregator(
                self.plan, lambda error: loop.call_soon_threadsafe(self.fail, error), self.filtering
            )
            self.aggregator.start()
        if self.filtering.filters:
            LOG.info("what sites send passes through filters: %s", self.filtering.filters)
        self.state, effects = machine.restore(self._rules, self._recovered, time.monotonic())
        self.store.versions.wanted = lambda fragment: self.pace.wanted(fragment, self.state)
        for told in self.advice:
            LOG.warning("%s", told)
        if self._recovered.finished and not self.state.finished:
            self.store.run_log.finish(False)  # more rounds were asked for
        self._carry_out(effects)
        if self.state.progress.best is not None:  # a kill may have come before it was written
            self._saving_best = self._spawn(self.behind.save_best(self.state.progress.best))
        for fragment, round_ in enumerate(self._recovered.fragments):
            if self.swarm is not None:  # what was collected is known again once its worker reports
                self.apply(ev.AggregatorLost(fragment, "the server was started again"))
            elif round_.frozen is not None and self.state.rounds[fragment].phase == "closing":
                LOG.info("the round from version %d was closed before the restart: reducing it again", round_.head)
                self._spawn(self._close(fragment, round_.frozen.base_version, round_.frozen.tickets))
        self._spawn(self._tick())
        keep_status(self)
        self.behind.exports.rewrite_metrics()
        if self.state.finished:
            self._spawn(self._finish())
        else:
            self.behind.save_initial()

    def send_away(self) -> None:
        """The server is about to end: whoever waits in `changed` is answered now, and need not be waited for."""
        self._ending = True
        self.wake()

    async def stop(self) -> None:
        """End every task; what is on disk is where a next start goes on."""
        self._cancelled.set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.io.shutdown(wait=True)
        self.objects.close()
        if self.aggregator is not None:
            self.aggregator.close()
        self.filtering.close()
        self.behind.close()
        self.store.close()

    def fail(self, error: AtollError) -> None:
        """The run cannot go on: the server ends and says why."""
        if self.failed is None:
            error = directory_gone(self.settings.state_dir) or error
            LOG.error("%s", error)
            self.failed = error
            self.ended.set()

    # -- events

    def apply(self, event: ev.Event) -> tuple[fx.Effect, ...]:
        """Let the machine decide about an event, journal what it decided, then act on it.

        Where the disk was full, the machine is told later what the journal has as a fact already, and decides nothing
        before it knows: it would give out an accepted ticket again. It only goes on to hear that workers live.

        Raises:
            DiskFull: the journal could not be written; nothing has changed.
        """
        try:
            if not isinstance(event, ev.WorkerSeen):
                while self._untold:
                    self._step(self._untold[0])
                    del self._untold[0]
            return self._step(event)
        except DiskFull as error:
            if not isinstance(event, FACTS):
                raise
            LOG.error("%s Trying again.", error)
            self._untold.append(event)
            return ()

    def _step(self, event: ev.Event) -> tuple[fx.Effect, ...]:
        state, effects = machine.step(self.state, event, time.monotonic())
        before, self.state = self.state, state
        try:
            self._carry_out(effects)
        except StoreError as error:
            self.state = before
            if passing(error) is None:
                self.fail(error)
            raise
        return effects

    def _carry_out(self, effects: tuple[fx.Effect, ...]) -> None:
        journalled = [effect for effect in effects if fx.for_journal(effect)]
        if journalled:
            with self.store.journal.transaction():
                for each in journalled:
                    write(each, self.store, self.roster, keep_weights=self.plan.needs_population)
        for effect in effects:
            self._act(effect)

    def _act(self, effect: fx.Effect) -> None:
        match effect:
            case fx.LeaseEnded():
                self.attendance.ended(effect, self.state)
            case fx.RoundOpened() | fx.ExpectedChanged():
                self.attendance.asks(effect, self.state)
            case fx.RoundClosed(fragment, base_version, tickets):
                self._spawn(self._close(fragment, base_version, tickets))
            case fx.BestFound(measured):
                self._saving_best = self._spawn(self.behind.save_best(measured))
            case fx.RunFinished():
                self._spawn(self._finish())
        if isinstance(effect, fx.Woken | fx.RoundOpened | fx.RunFinished | fx.LeaseEnded):
            self.wake()

    def wake(self) -> None:
        """Let whoever waits in `changed` look again."""
        self._changed.open()

    def _alive(self) -> list[str]:
        return sorted(site for site, member in self.state.members.items() if member.alive)

    async def changed(self, timeout_s: float) -> None:
        """Return when something has changed that a waiting worker should know, or after the time.

        Raises:
            Busy: the server ends.
        """
        await self._changed.wait(0 if self._ending else timeout_s)
        if self._ending:
            raise Busy("The server is ending.", "Ask again when it was started again.")

    # -- leases

    def require_lease(self, sent: Lease | str | None) -> Lease:
        """The lease of a request that may speak for its site; also a sign of life.

        Raises:
            LeaseLost: it has to join again. Superseded: another process has taken its place.
        """
        lease = sent if isinstance(sent, Lease) else Lease.parse(sent)
        presence, member = self.roster.get(lease.site), self.state.members.get(lease.site)
        if member is not None and (refused := forged(lease, member.lease, presence)):
            self.refuse_lease(lease, refused)
        for effect in self.apply(ev.WorkerSeen(lease.site, lease.number)):
            if isinstance(effect, fx.LeaseRefused):
                self.refuse_lease(lease, effect)
        if presence is not None:
            presence.heard, presence.heard_s = True, time.monotonic()
        return lease

    def refuse_lease(self, lease: Lease, effect: fx.LeaseRefused) -> None:
        """Raise what the holder of a void lease is told."""
        raise lease_refused(lease, effect, self.roster.get(lease.site))

    # -- rounds

    def local_steps(self, site: str) -> int:
        """Local steps between two synchronisations of a site under DyLU; 0 where all take the run's."""
        return self.pace.local_steps(site, self.state)

    def offer(self, ticket: TicketRow) -> None:
        """An update is in the journal: an aggregator that takes them as they arrive gets it."""
        if self.aggregator is not None:
            self.aggregator.offer(self.store, ticket, self.state.rounds[ticket.fragment].number)

    async def _close(self, fragment: int, base_version: int, tickets: tuple[int, ...]) -> None:
        """Run the pass until it is committed; a full disk is waited for, everything else ends the server."""
        await over(self._saving_best)  # a commit later, and the version may be gone
        number = self.state.rounds[fragment].number
        while True:
            try:
                if self.swarm is not None:
                    row, summary = await self.swarm.close(fragment, base_version, tickets, number)
                    break
                await self.filtering.prepare_accepted([self.store.tickets.get(ticket) for ticket in tickets], number)
                row, summary = await asyncio.get_running_loop().run_in_executor(
                    self.io,
                    close_round,
                    self.plan,
                    self.store,
                    frozen_round(self.plan, self.store, fragment, base_version, tickets, number),
                    self._cancelled,
                    self.filtering,
                    self.aggregator,
                )
                break
            except Reopened:
                return
            except Exception as error:
                reason = passing(error)
                if reason is None:
                    self._fail_round(number, error)
                    return
                self.trouble[fragment] = reason
                LOG.error("round %d cannot be written: %s Trying again in %g s.", number, reason, RETRY_S)
                await asyncio.sleep(RETRY_S)
        self.trouble.pop(fragment, None)
        self.filtering.sweep()
        self.filtering.filters.warn_of_strangers(self.roster)
        for site in summary.workers:
            if site in self.roster:
                self.roster[site].rounds += 1
        self.stale.look_at(summary)
        self.attendance.closed(summary)
        value = value_of(summary, tracking.metric) if (tracking := self._rules.tracking).metric else None
        if tracking.metric and value is None and not self._said_missing:
            self._said_missing = True
            LOG.warning("%s", missing(summary, tracking))
        self.left.committed(self.state.rounds[fragment].opened_s, time.monotonic())
        self.apply(ev.VersionCommitted(fragment, row.version, value))
        LOG.info("%s", in_words(summary, row, self.left.of(self.state, time.monotonic()), streams=self.plan.streams))
        heads, done = self.store.versions.heads(), min(round_.done for round_ in self.state.rounds)
        last = summary.round == done
        if last and done == self.settings.sync_rounds_first and not self.state.finished:
            LOG.info("round %d was the last synchronous one: from now on nobody waits for anybody", done)
        behind = self.behind.after_commit(row, summary, heads=heads, last=last, finished=self.state.finished)
        self._behind_last = self._spawn(behind)

    def _fail_round(self, number: int, error: Exception) -> None:
        error = directory_gone(self.settings.state_dir) or error
        if not isinstance(error, AtollError):
            LOG.error("round %d failed", number, exc_info=error)
            error = RunFailed(f"Round {number} failed: {error!r}.", "Restarting the server runs it again.")
        self.fail(error)

    async def _finish(self) -> None:
        path = await self.behind.save_result()
        await over(self._saving_best, self._behind_last)
        await self.behind.handed()
        keep_status(self)
        why = self._rules.tracking.why(self.state.progress)
        number = min(self.store.versions.heads())
        what = "the run" if self.workflows is None else "training"
        LOG.info("%s is finished at version %d%s: %s", what, number, f", {why}" if why else "", path)
        (self.finished if self.workflows is None else self.trained).set()
        self.wake()

    async def _tick(self) -> None:
        """Tell the machine that time has passed, whenever that may matter."""
        while True:
            deadline_s = machine.next_deadline_s(self.state)
            pause_s = 1.0 if deadline_s is None else min(1.0, max(0.01, deadline_s - time.monotonic()))
            await asyncio.sleep(pause_s)
            self.objects.sweep()
            with contextlib.suppress(DiskFull):
                self.apply(ev.TimePassed())
                if self.swarm is not None:
                    self.swarm.look()

    def _spawn(self, coroutine: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        error = directory_gone(self.settings.state_dir) or error
        if not isinstance(error, AtollError):
            LOG.error("a task of the server failed", exc_info=error)
            error = RunFailed(f"The server failed: {error!r}.")
        self.fail(error)
