"""The coordinator of a run: the operations of the server's API, on one event loop and without HTTP.

Only the `Ledger` changes the run's state, when an event is recorded in it, with the rows of the event, such as a new
version. Work on tensors and files, and user code, run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, Protocol

from atoll.aggregation.check_arriving_parts import PartStats
from atoll.aggregation.plan import Plan
from atoll.algorithms.diloco import dynamic_local_steps
from atoll.errors import (
    AtollError,
    Busy,
    Conflict,
    DiskFull,
    Gone,
    LeaseLost,
    RunFailed,
    ServerFailed,
    Superseded,
    TicketClosed,
    out_of_memory,
)
from atoll.format_text import number_of, time_left, visible
from atoll.protocol import messages, run_events, status_messages, task_messages
from atoll.rounds import events
from atoll.rounds.closing_policy import listed
from atoll.rounds.state import Rules, State
from atoll.runtime import failpoint, stay_single_threaded
from atoll.server.coordinator.accept_update import UpdateAdmission, outcome_of
from atoll.server.coordinator.background_writes import (
    BackgroundWriter,
    measured_of,
    missing,
    until_passed,
    value_of,
    wait_for_end,
)
from atoll.server.coordinator.event_log import EventLog
from atoll.server.coordinator.extension import Extensions
from atoll.server.coordinator.filter_table import SiteFilters
from atoll.server.coordinator.first_shapes import NewShapes, new_shapes
from atoll.server.coordinator.joining import counted_of, require_fit, run_info, why_anew
from atoll.server.coordinator.ledger import Ledger, snapshot_of, write_change
from atoll.server.coordinator.long_polls import FairEvent
from atoll.server.coordinator.persistor import Persistor
from atoll.server.coordinator.ports import Guests
from atoll.server.coordinator.roster import (
    Attendance,
    Lease,
    Presence,
    StalenessCounter,
    TimeLeft,
    roster_of,
    why_silent,
)
from atoll.server.coordinator.settings_advice import advice
from atoll.server.coordinator.update_filters import Filtering
from atoll.server.coordinator.user_code import UserThreads
from atoll.store.journal_tables import PartRow, TicketRow, VersionRow
from atoll.store.kept_objects import ObjectStore
from atoll.store.store import Store, directory_gone
from atoll.store.tickets import why_closed
from atoll.store.update_spool import PartWriter
from atoll.tensors.layout import Layout

LOG = logging.getLogger("atoll.server")


class Workflows(Protocol):
    """Facts about a run's workflows (training, evaluations, functions of the user) that the coordinator needs.

    Attributes:
        evaluated: function that returns the results so far of the newest cross-site evaluation; None before the first.
    """

    evaluated: Callable[[], task_messages.Evaluation] | None

    @property
    def keeps_local(self) -> bool:
        """Whether sites must keep the models that they submit, because a cross-site evaluation needs them later."""

    def will_evaluate(self, site: str) -> bool:
        """Return whether a cross-site evaluation will still ask this site to evaluate models."""

    def status(self) -> list[status_messages.WorkflowStatus]:
        """Return the status of each workflow, in order."""


class Coordinator:
    """The server's side of a run.

    Its methods carry out the operations on rounds, leases and updates that `protocol/openapi.py` lists. Operations that
    transfer bytes are in `server/http`, operations on tasks in `server/tasks`.

    Args:
        plan: plan of the run.
        store: store of the run, which `stop` closes.
        lost: a sentence for each loss of data in a crash.
        persistor: the user's persistor.
        filters: the server's filters of what sites send.
        guests: makes what plugs into the coordinator: the place of the rounds, and the tasks.
        workflows: the run's workflows; None: the run only trains.
        clock: returns the time in seconds, as `time.monotonic` does: for leases, deadlines and estimates.
    """

    def __init__(  # noqa: PLR0913 (what a run is made of)
        self,
        plan: Plan,
        store: Store,
        lost: Iterable[str],
        persistor: Persistor,
        filters: SiteFilters,
        guests: Callable[[Coordinator], Guests],
        workflows: Workflows | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan, self.store, self.settings, self.clock = plan, store, plan.settings, clock
        self._info = run_info(plan, store.run_log.run_id)
        self.roster = roster_of(
            store.run_log.members(), [store.tickets.newest_bases(fragment) for fragment in range(len(plan.fragments))]
        )
        rules = Rules.from_settings(
            self.settings, len(plan.fragments), held=workflows is not None, needs_all=plan.algorithm.needs_all
        )
        self.events = EventLog(store)
        self.events.subscribe("the coordinator", self._on_event, lambda error: self.fail_by(error, "The server"))
        write = functools.partial(write_change, store, self.roster, self.events, keep_weights=plan.needs_population)
        self.extensions = Extensions(self)
        self.ledger = Ledger(rules, write, self._act, clock=clock, on_failure=self.fail, publish=self.events.publish)
        history = store.run_log.history(None, 0) if rules.tracking.metric else []
        progress = rules.tracking.follow_all(measured_of(history, rules.tracking.metric))
        self._snapshot = snapshot_of(store, progress)

        self.io = ThreadPoolExecutor(
            max(8, 2 * plan.threads), thread_name_prefix="atoll-io", initializer=stay_single_threaded
        )
        self.objects = ObjectStore(
            self.settings.disk.state_dir / "objects",
            max_bytes=self.settings.disk.objects_max_bytes,
            max_expires_s=self.settings.disk.objects_expire_s,
            idle_timeout_s=self.settings.network.idle_timeout_s,
        )
        self.workflows = workflows
        self.background, self.user_threads = BackgroundWriter(plan, store, self.io, persistor), UserThreads()
        self.filtering = Filtering(filters, plan, store, self.user_threads)
        self.admission = UpdateAdmission(plan, store, self.ledger, self.roster)
        self.place, self.task_queue = guests(self)

        totals = store.run_log.totals()
        asked = {row.fragment: row.expected for row in store.run_log.rounds()}
        self.attendance, self.admission.refused = Attendance(self.roster, totals.deaths, asked), totals.refused
        self.stale, self.advice = StalenessCounter(plan), advice(plan)
        summaries = [each.summary_json for each in store.run_log.summaries(status_messages.HISTORY)]
        self.history = deque(map(status_messages.RoundSummary.model_validate_json, summaries), status_messages.HISTORY)
        self.time_left = TimeLeft(self.settings.rounds.total, len(plan.fragments))
        self.trouble: dict[int, str] = {}  # fragment → why its new version cannot be written
        self.no_space = ""  # why uploads are refused: the disk has too little space; else empty
        self.bytes_up = self.bytes_down = 0
        self.started_s, self.address, self._moved_from = self.clock(), "", ""
        self.watched_s: float | None = None  # time of the last status request of a client that is no site

        self.failed: AtollError | None = None
        self.untold = set[str]()  # after a failure: the sites that take part, and do not know of it yet
        self.finished, self.trained, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.new_shapes: NewShapes | None = None
        self.begins_again = asyncio.Event()
        self._changed, self._ending = FairEvent(), False
        self._said_missing = False
        self._warned = frozenset[str]()
        self._tasks: set[asyncio.Task[None]] = set()
        self._saving_best: asyncio.Task[None] | None = None
        self._last_write: asyncio.Task[None] | None = None  # background writes of the newest version; they end last
        for sentence in lost:
            LOG.warning("%s", sentence)

    # -- beginning and end

    def start(self, address: str = "", moved_from: str = "") -> None:
        """Start the run: resume the work that the journal records. Call this on the server's event loop.

        Args:
            address: URL of the server.
            moved_from: the earlier URL, at which sites do not find this server; empty if they do.

        Raises:
            ConfigError, RunFailed: the aggregator that the settings name cannot be started.
        """
        self.address, self._moved_from = address, moved_from
        self.place.start(self.fail)
        if self.filtering.filters:
            LOG.info("filters for the updates and answers of sites: %s", self.filtering.filters)
        for text in self.advice:
            LOG.warning("%s", text)
        self._say_own_code()
        self.ledger.restore(self._snapshot)
        self._say_moved()
        self.store.versions.wanted = self._unpulled
        if self._snapshot.finished and not self.state.finished:
            self.store.run_log.finish(False)  # rounds.total is larger than when the run finished
        if self.state.progress.best is not None:  # the server may have been killed before writing it
            self._saving_best = self.spawn(self.background.save_best(self.state.progress.best))
        for fragment, round_ in enumerate(self._snapshot.fragments):
            if not self.place.is_here:  # the aggregating worker reports again what it has collected
                self.ledger.record(events.AggregatorLost(fragment, "the server was restarted"))
            elif round_.frozen and self.state.rounds[fragment].phase == "closing":
                LOG.info("the round from version %d was closed before the restart: aggregating it again", round_.head)
                self.spawn(self._next_version(events.RoundClosed(fragment, round_.head, round_.frozen)))
        self.spawn(self._tick())
        self.background.complete_metrics()
        if self.state.finished:
            if self.workflows is None:
                LOG.info("this run has ended. To train further, raise rounds.total; for a new run, use another folder")
            if self._snapshot.finished:  # else the ledger has found so now, which has begun `_finish`
                self.spawn(self._finish())
        else:
            self.background.save_initial()

    def _say_own_code(self) -> None:
        if self.attendance.simulated:
            return
        for kind, name, place in dict.fromkeys(self.plan.own_code):
            LOG.info(
                "sites look up %s by the name %r: register it in their scripts before they join, by "
                "atoll.register(%r, %r, …), or install it there with an entry point",
                place,
                name,
                kind,
                name,
            )

    def _say_moved(self) -> None:
        waiting = sorted(each.site for each in self.state.members.values() if each.state in ("alive", "dead"))
        if self._moved_from and waiting:
            LOG.warning(
                "the run was served at %s before; sites that wait there (%s) do not find this server, which listens on "
                "%s. Start them again with this address, or the server with the earlier one (network.host, "
                "network.port).",
                self._moved_from,
                listed(waiting),
                self.address,
            )

    def send_away(self) -> None:
        """Answer all waiting requests now with an error, because the server is about to end."""
        self._ending = True
        self.wake()
        self.events.end()

    @property
    def is_ending(self) -> bool:
        """Whether `send_away` was called."""
        return self._ending

    async def stop(self) -> None:
        """End all tasks, and close the store. The next start continues from the files on disk."""
        self.place.cancel()
        await self.extensions.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.io.shutdown(wait=True)
        self.objects.close()
        self.place.close()
        self.filtering.close()
        self.background.persistor.close()  # before the store, because the persistor reads from it
        self.store.close()

    def fail(self, error: AtollError) -> None:
        """Log an error after which the run cannot go on, and end the server.

        If the error is final, so that a restart does not help, answer all requests of sites with `ServerFailed`.
        """
        if self.failed is None:
            error = directory_gone(self.settings.disk.state_dir) or error
            LOG.error("%s", error)
            self.failed = error
            self.events.tell(run_events.RunFailed(reason=error.message))
            self.ended.set()
            if error.is_final:
                self.untold = set(self.alive())
                self.send_away()

    @property
    def shapes_to_take_over(self) -> NewShapes | None:
        """The shapes with which the run begins again after this server; None if it does not, or has failed."""
        return self.new_shapes if self.failed is None else None

    def failure_for(self, lease: Lease | None) -> ServerFailed | None:
        """If the run has failed with a final error, return the error that answers a site's request; else None.

        Record that the site is told.

        Args:
            lease: the lease in the site's request; None if it has none.
        """
        if self.failed is None or not self.failed.is_final:
            return None
        if lease is not None:
            with contextlib.suppress(AtollError):
                site = self.require_lease(lease).site
                self.untold.discard(site)
                self.roster[site].state = "ended"
        return failure_for_sites(self.settings.run.name, self.failed.message)

    @property
    def untold_alive(self) -> list[str]:
        """After a failure: the sites that take part and were not told of it yet."""
        return [site for site in self.alive() if site in self.untold]

    def stop_telling(self) -> list[str]:
        """After a failure, just before the server ends, return the sites that take part and were not told of it."""
        untold = self.untold_alive
        for site in untold:
            self.roster[site].state = "not told"
        return untold

    # -- events

    @property
    def state(self) -> State:
        """The run's state: its rounds, leases and tickets."""
        return self.ledger.state

    def _act(self, effect: events.Effect) -> None:
        """Carry out an effect of an event: for example, aggregate a closed round.

        If the effect is a decision, the journal has recorded it already.
        """
        match effect:
            case events.LeaseEnded():
                self.attendance.ended(effect, self.state)
            case events.RoundOpened() | events.ExpectedChanged():
                self.attendance.expects(effect, self.state)
            case events.RoundClosed():
                self.spawn(self._next_version(effect))
            case events.GenerationBegun():
                LOG.warning("%s", self.store.run_log.generation.reason)
            case events.RoundSatOut():
                self.attendance.all_sat_out(effect, self.state)
            case events.BestFound(measured):
                self._saving_best = self.spawn(self.background.save_best(measured))
            case events.RunFinished():
                self.spawn(self._finish())
        if isinstance(effect, events.Woken | events.RoundOpened | events.RunFinished | events.LeaseEnded):
            self.wake()

    def _on_event(self, event: run_events.Happened) -> None:
        match event:
            case run_events.UpdateAccepted(ticket=ticket, round=number):
                self.place.arrived(self.store.tickets.get(ticket), number)
            case run_events.RoundEnded(summary=summary, at=at):
                self.history.append(summary)
                if summary.version is None:
                    self._last_write = self.spawn(self.background.after_sat_out(summary, at))
                else:
                    self._follow_commit(summary, at)

    def wake(self) -> None:
        """Wake every request that waits in `changed`, because the run's state has changed."""
        self._changed.set()

    def alive(self) -> list[str]:
        """Return the sites that take part, sorted."""
        return sorted(site for site, member in self.state.members.items() if member.alive)

    async def changed(self, timeout_s: float) -> None:
        """Wait until `wake` is called, for at most `timeout_s` seconds.

        Raises:
            Busy: the server is stopping.
        """
        await self._changed.wait(0 if self._ending else timeout_s)
        if self._ending:
            raise Busy("The server is stopping.", "Try again after the server has restarted.")

    @property
    def warnings(self) -> list[str]:
        """What is probably wrong at present, for the status and the events."""
        present = [presence for _, presence in sorted(self.roster.items())]
        return [
            *filter(None, dict.fromkeys([*self.trouble.values(), self.no_space])),
            *self.background.unsaved.values(),
            *filter(None, [self.store.run_log.generation.reason]),
            *self.advice,
            *self.attendance.warnings(self.state),
            *self.stale.warnings,
            *self.admission.reports.warnings,
            *self.task_queue.warnings.values(),
            *self.events.problems.values(),
            *self.extensions.problems.values(),
            *(presence.rival for presence in present if presence.rival),
            *(f"{presence.site}: {text}" for presence in present for text in presence.beat.warnings),
        ]

    def require_space(self) -> None:
        """Raise an error if the disk has less than `disk.min_free_bytes` left.

        The first such error is logged, and so is the first call after it that finds enough space.

        Raises:
            DiskFull: the disk has too little space; the request can be repeated later.
        """
        folder = self.settings.disk.state_dir
        try:
            self.store.require_space(self.settings.disk.min_free_bytes)
        except DiskFull as error:
            if not self.no_space:
                LOG.warning("uploads to %s are refused: %s", folder, error)
                self.events.tell(run_events.Warned(text=str(error)))
            self.no_space = str(error)
            raise
        if self.no_space:
            self.no_space = ""
            LOG.warning("uploads to %s are accepted again", folder)

    # -- descriptions of the run

    async def get_run(self) -> messages.RunInfo:
        """Return the description of the run, which a worker reads before it joins."""
        queue, workflows = self.task_queue, self.workflows
        return self._info.model_copy(
            update={
                "trains": queue.trains,
                "sends_tasks": queue.active,
                "keeps_local": workflows is not None and workflows.keeps_local,
            }
        )

    async def get_schema(self) -> messages.SchemaMessage:
        """Return the name, dtype, shape and fragment of each tensor of the model."""
        return messages.SchemaMessage.of(self.plan.split)

    async def get_evaluation(self) -> task_messages.Evaluation:
        """Return the results so far of the newest cross-site evaluation, as a matrix of sites and models.

        Raises:
            Gone: the run has had no cross-site evaluation.
        """
        workflows = self.workflows
        if workflows is None or workflows.evaluated is None:
            raise Gone(
                "This server has no results of a cross-site evaluation.",
                'Add {kind = "cross_site_evaluation"} to the workflows of the run, or use atoll evaluate RUN.TOML.',
            )
        return workflows.evaluated()

    # -- which sites take part

    async def join(self, message: messages.Join) -> messages.Joined:
        """Let a worker process take part: give it a new lease, the right to act for its site.

        An older process of the same site loses its lease.

        Raises:
            VersionSkew, ServerLost, SchemaMismatch, ConfigError: the worker does not fit the run, for example because
                it has another model. In a swarm, ConfigError also if the server or other workers cannot reach it.
        """
        require_fit(message, self.plan, self.store)
        await self.place.admit(message)
        previous = self.roster.get(message.site)
        self.roster[message.site], secret = Presence.joining(message, previous)
        try:
            self.ledger.record(events.WorkerJoined(message.site))
        except BaseException:  # the previous process keeps its lease
            if previous is None:
                del self.roster[message.site]
            else:
                self.roster[message.site] = previous
            raise
        LOG.info("%s joined%s", message.site, " again" if previous else "")
        if previous is None and (surplus := self.attendance.why_surplus(message.site, self.settings.rounds.sites)):
            LOG.warning("%s", surplus)
        return messages.Joined(
            lease=Lease(message.site, self.state.members[message.site].lease, message.process, secret).header,
            due=self.state.due(message.site),
            evaluates=self.workflows is not None and self.workflows.will_evaluate(message.site),
            displaces=self.roster[message.site].displaced.get(previous.process) if previous is not None else None,
        )

    async def leave(self, lease: Lease, message: messages.Leave) -> None:
        """End a site's lease, so that no round waits for the site. If training failed, the message has the error."""
        self.ledger.record(events.WorkerLeft(lease.site, lease.number, message.error or ""))

    async def heartbeat(self, lease: Lease, message: messages.Heartbeat) -> messages.HeartbeatReply:
        """Record the progress that a worker reports, and whether it will submit no more updates.

        `require_lease` has already recorded the time of the request.
        """
        presence = self.roster.get(lease.site)
        if presence is not None:
            presence.note(message)
        if message.ends and lease.site not in self.state.ending:
            self.ledger.record(events.WorkerEnds(lease.site, lease.number))
        return messages.HeartbeatReply(
            durable_versions=[self.store.versions.durable(index) for index in range(len(self.state.rounds))],
            finished=self.state.finished,
        )

    def require_lease(self, lease: Lease) -> Lease:
        """Return the lease of a request if it is valid, and record that the site is alive.

        Raises:
            LeaseLost: the process has to join again.
            Superseded: another process has joined under the site's name.
        """
        presence, member = self.roster.get(lease.site), self.state.members.get(lease.site)
        # after a crash of the server's host, leases of two processes may have the same number, but not the same secret
        if member is not None and lease.number == member.lease and not (presence and lease.opens(presence)):
            reason = f"lease {lease.number} of {lease.site!r} is unknown to this server"
            self._refuse_lease(lease, events.LeaseRefused(lease.site, reason, superseded=True))
        for effect in self.ledger.record(events.WorkerSeen(lease.site, lease.number)):
            if isinstance(effect, events.LeaseRefused):
                self._refuse_lease(lease, effect)
        if presence is not None:
            presence.heard, presence.heard_s = True, self.clock()
        return lease

    def _refuse_lease(self, lease: Lease, effect: events.LeaseRefused) -> None:
        holder = self.roster.get(lease.site)
        if effect.superseded and holder is not None and holder.process and holder.process != lease.process:
            holder.meets(lease.process)
            raise Superseded(
                f"Another process on {holder.host or 'an unnamed host'} has joined as {lease.site!r}, so this "
                "process no longer takes part.",
                "Use a different site name for each worker.",
            )
        reason = f"{effect.reason[:1].upper()}{effect.reason[1:]}."
        raise LeaseLost(reason, "Join again. The site then gets its open ticket again.")

    # -- tickets

    def _require_shapes(self, site: str, message: messages.TicketRequest) -> None:
        """Check the shapes of a site's buffers. If the run takes them over, begin again with them.

        Raises:
            SchemaMismatch: the run cannot have these shapes.
            Busy: it takes them over, and the site has to ask again.
        """
        if not message.shapes:
            return
        asked = NewShapes(site, message.fragment, {name: tuple(shape) for name, shape in message.shapes.items()})
        has_workflows = self.workflows is not None
        found = new_shapes(self.plan, self.store, self.state, asked, has_workflows=has_workflows)
        if found is None:
            return
        if self.new_shapes is None:
            LOG.info("%s has the first update, which decides the shapes of buffers: %s", site, found)
            self.new_shapes = found
            self.begins_again.set()
        raise _takes_over_shapes()

    async def request_ticket(self, lease: Lease, message: messages.TicketRequest) -> messages.TicketReply:
        """Return the site's ticket for a fragment's open round. Wait up to `wait_s` seconds for a round to open.

        If there is no ticket by then, or the run is finished, the reply says why.

        Raises:
            LeaseLost, Superseded: the lease is not valid.
            Gone: there is no such fragment.
            Busy: the server is stopping.
            ConfigError: the run has no rounds.
            SchemaMismatch: the site's buffers have shapes that the run cannot have.
        """
        if message.fragment >= len(self.state.rounds):
            raise Gone(
                f"Fragment {message.fragment} does not exist.",
                f"The run has {number_of(len(self.plan.fragments), 'fragment')}, numbered from 0.",
            )
        self.task_queue.require_rounds()
        self._require_shapes(lease.site, message)
        until_s = self.clock() + message.wait_s
        previous = self.store.tickets.last_of(lease.site, message.fragment)
        while True:
            if message.tasks and self.task_queue.rounds == "to come":
                return self._wait_reply(message.fragment, "tasks come before the rounds", previous)
            if reason := self.place.why_withheld(lease.site, message.fragment):
                if self.clock() >= until_s:
                    return self._wait_reply(message.fragment, reason, previous)
                await self.changed(min(1.0, until_s - self.clock()))
                continue
            self.begin_anew_if_needed(lease, message)
            effects = self.ledger.record(events.TicketRequested(lease.site, lease.number, message.fragment))
            for effect in effects:
                match effect:
                    case events.LeaseRefused():
                        self._refuse_lease(lease, effect)
                    case events.TicketIssued(_, ticket, fragment, base_version, _):
                        head = self.store.versions.head(fragment)
                        return self._reply(
                            "ticket",
                            head,
                            None if previous is None or previous.ticket == ticket else previous,
                            ticket=self.ticket_message(lease.site, ticket, fragment, base_version, head.digest),
                            counted=counted_of(lease.site, self.store) if self.plan.algorithm.state_groups else None,
                        )
                    case events.TicketWithheld(_, fragment, reason):
                        # answer at once if the run is finished, or the site submits no more and there is a newer head
                        moved = previous is None or self.store.versions.head(fragment).version > previous.base_version
                        moved = moved or (previous is not None and previous.state == "sat out")
                        ended = reason == events.ENDS and moved
                        if reason == events.FINISHED or ended or self.clock() >= until_s:
                            return self._wait_reply(fragment, reason, previous, ended=ended)
            await self.changed(until_s - self.clock())

    def _reply(
        self,
        status: Literal["ticket", "wait", "finished", "ended"],
        head: VersionRow,
        previous: TicketRow | None,
        **more: Any,
    ) -> messages.TicketReply:
        return messages.TicketReply(
            status=status,
            previous=outcome_of(self.store, self.store.tickets.get(previous.ticket)) if previous else None,
            head_version=head.version,
            head_digest=head.digest,
            durable_version=self.store.versions.durable(head.fragment),
            round=self.state.rounds[head.fragment].number,
            **more,
        )

    def begin_anew_if_needed(self, lease: Lease, message: messages.SiteState) -> None:
        """Let the algorithm's state begin at zero, in the open round and at all sites, if a site's state requires it.

        Args:
            lease: the site's lease.
            message: what the site says of the state that the algorithm keeps at it.

        Raises:
            LeaseLost, Superseded: the lease is not valid.
        """
        algorithm = self.plan.algorithm
        if algorithm.state_groups and (why := why_anew(message, lease.site, self.store, algorithm.name)):
            self.require_lease(lease)
            self.ledger.record(events.StateLost(why))

    def ticket_message(self, site: str, ticket: int, fragment: int, base_version: int, digest: str) -> messages.Ticket:
        """Return an issued ticket as a message for its site. For the status, record the ticket's base version."""
        presence = self.roster.get(site)
        if presence is not None:
            presence.bases[fragment] = base_version
        generation = self.store.run_log.generation
        return messages.Ticket(
            id=ticket,
            fragment=fragment,
            round=self.state.rounds[fragment].number,
            base_version=base_version,
            base_digest=digest,
            layout_digest=self.plan.fragments[fragment].update.digest,
            local_steps=self.local_steps([site])[site],
            generation=generation.number,
            from_zero=generation.begins_at(base_version),
        )

    def local_steps(self, sites: Iterable[str]) -> dict[str, int]:
        """Return site → number of local steps between two synchronisations, computed from the site's speed (DyLU).

        If dynamic local steps are off, the number is 0 for each site, and the number in the settings applies.
        """
        diloco = self.settings.diloco
        if not diloco.dynamic_local_steps or not self.plan.algorithm.sync_every:
            return dict.fromkeys(sites, 0)
        speeds = {site: self.roster[site].beat.steps_per_s for site in self.alive() if site in self.roster}
        fastest = max(speeds.values(), default=0.0)
        return {
            site: dynamic_local_steps(speeds.get(site, 0.0), fastest, diloco.sync_every, diloco.num_fragments)
            for site in sites
        }

    def _unpulled(self, fragment: int) -> Collection[int]:
        """Return the versions that open tickets start from and that their sites have probably not downloaded yet.

        For a synchronous fragment, the result is empty: its tickets start from the newest version, which is kept.
        """
        if not self.state.is_async(fragment):
            return ()
        tickets = [ticket for ticket in self.state.rounds[fragment].tickets.values() if ticket.state == "open"]
        # site → version that it trains from; a heartbeat reports one version, so only for runs with one fragment
        has = {site: each.beat.version for site, each in self.roster.items()} if len(self.state.rounds) == 1 else {}
        return {
            ticket.base_version
            for ticket in tickets
            if ticket.site in self.state.seen_s and not has.get(ticket.site, 0) >= ticket.base_version > 0
        }

    def _wait_reply(
        self, fragment: int, reason: str, previous: TicketRow | None, *, ended: bool = False
    ) -> messages.TicketReply:
        head = self.store.versions.head(fragment)
        state, queue = self.state, self.task_queue
        if reason == events.FINISHED:
            text = state.rules.tracking.why(state.progress) or reason
        else:
            now_s = self.clock()
            rest, known = self.why(fragment, now_s), state.why(fragment, now_s)
            if reason.endswith(known):  # the reason already ends with this text
                text = reason + rest.removeprefix(known)
            else:
                text = rest if rest.startswith(reason) else f"{reason}; the round {rest}"
        return self._reply(
            "finished" if reason == events.FINISHED else "ended" if ended else "wait",
            head,
            previous,
            waiting_for=[site for site, _ in state.missing(fragment)],
            reason=text,
            tasks=queue.follows and not queue.finished if reason == events.FINISHED else queue.rounds == "to come",
            left_s=self.time_left.of(state, self.clock()),
        )

    def why(self, fragment: int, now_s: float) -> str:
        """Describe what a fragment's round waits for, and the known problems of the missing sites."""
        sites = [site for site, _ in self.state.missing(fragment)]
        trouble = self.place.trouble(fragment)
        silent = why_silent(sites, self.roster, self.state, self.settings.network, now_s, self._moved_from)
        return "; ".join(filter(None, [self.state.why(fragment, now_s), trouble, *silent]))

    async def get_ticket(self, ticket: int) -> messages.TicketState:
        """Return the state of a ticket. While the ticket is open or accepted, also return its parts on disk.

        Raises:
            Gone: this run has never issued the ticket.
        """
        row = self.store.tickets.get(ticket)
        parts = self.store.tickets.parts(ticket) if row.is_live else {}
        return messages.TicketState(
            outcome=outcome_of(self.store, row),
            parts=list(parts),
            part_digests=[part.digest.hex() for part in parts.values()],
        )

    # -- updates

    def require_open(self, lease: Lease, ticket: int) -> None:
        """Raise an error unless a site may still submit an update under this ticket.

        Raises:
            LeaseLost, Superseded: the lease is not valid.
            TicketClosed, UpdateRefused: the ticket is no longer open.
            Busy: the run takes over other shapes, and its tickets are about to end.
        """
        if self.new_shapes is not None:
            raise _takes_over_shapes()
        refusal = self.state.may_submit(lease.site, lease.number, ticket)
        if isinstance(refusal, events.LeaseRefused):
            self._refuse_lease(lease, refusal)
        elif refusal is not None:
            row = self.store.tickets.get(ticket)  # from the journal, because the round machine forgets ended tickets
            if row.state == "refused":
                raise why_closed(row)
            text = refusal if row.reason in refusal else f"Ticket {ticket} is over: {row.reason}."
            raise TicketClosed(text, "Ask for the next ticket.")

    def record_part(
        self, lease: Lease, ticket: int, part: int, stats: PartStats, writer: PartWriter | None = None
    ) -> None:
        """Record that a part of an update was checked and written to disk. If the check failed, refuse the update.

        Args:
            lease: lease of the site.
            ticket: number of the ticket.
            part: number of the part.
            stats: result of the check.
            writer: writer of the part's bytes.

        Raises:
            WriterCancelled: another request has begun to write the same part in the meantime.
            UpdateRefused: the check failed.
            LeaseLost, Superseded, TicketClosed: as for `require_open`.
        """
        self.require_open(lease, ticket)
        if stats.bad is not None:
            self.admission.refuse(lease.site, ticket, stats.bad)
        failpoint("part.received")
        self.store.tickets.record_part(ticket, part, stats.digest, stats.sumsq, writer)

    def _ticket_of(self, lease: Lease, ticket: int) -> TicketRow:
        """Return the row of a site's ticket, whatever its state.

        Raises:
            Gone: this run has never issued the ticket.
            TicketClosed: it belongs to another site.
        """
        row = self.store.tickets.get(ticket)
        if row.site != lease.site:
            raise TicketClosed(f"Ticket {ticket} was not issued to {lease.site!r}.", "Ask for a ticket.")
        return row

    async def complete(self, lease: Lease, ticket: int, message: messages.Complete) -> messages.Receipt:
        """Accept an update after all its parts arrived. A repeated request with the same digest gets the same receipt.

        In a swarm, wait until another worker has downloaded the update, for at most `routes.LONG_POLL_S` seconds.

        Raises:
            LeaseLost, Superseded: the lease is not valid.
            BadRequest: in a swarm, the message lacks the address from which other workers can download the update.
            TicketClosed: the ticket is over or belongs to another site. Or the update was trained from a version that
                differs from the run's version with this number.
            Conflict: parts are missing, or do not match the digest.
            UpdateRefused: the weight, the norm or the number of steps is implausible, a filter failed, or an earlier
                update for this ticket was refused.
        """
        row = self._ticket_of(lease, ticket)
        if row.is_in:
            return receipt_again(row, message.digest)
        self.require_open(lease, ticket)
        if message.generation != self.store.run_log.generation.number:
            raise TicketClosed(
                f"The update for ticket {ticket} was formed with another generation of the algorithm's state.",
                "The server's state was probably restored from a backup. Ask for the next ticket.",
            )
        if message.base_digest not in (None, self.store.run_log.version_digest(row.fragment, row.base_version)):
            raise TicketClosed(
                f"The update for ticket {ticket} was trained from a version {row.base_version} that differs "
                f"from the run's version {row.base_version}.",
                "The server's state was probably restored from a backup. Ask for the next ticket.",
            )
        message = self.admission.with_kept_weight(lease.site, message)
        if (receipt := await self.place.deliver(lease, row, message)) is not None:
            return receipt
        parts, layout = self.store.tickets.whole(row), self.plan.fragments[row.fragment].update
        digest = _digest(layout, parts)
        if digest != message.digest:
            raise Conflict(
                f"The digest of the update for ticket {ticket} does not match its parts.",
                "Send all parts again.",
            )
        norm = math.sqrt(sum(part.sumsq for part in parts.values()))
        self.admission.require_plausible(lease.site, ticket, message, norm)
        if self.filtering.has(lease.site):
            filtered = replace(row, digest=digest, report=message.report)
            reason = await self.filtering.refusal(filtered, self.state.rounds[row.fragment].number)
            if self.store.tickets.get(ticket).is_in:  # a repeated request was accepted meanwhile
                return await self.complete(lease, ticket, message)
            self.require_open(lease, ticket)
            if _digest(layout, self.store.tickets.whole(row)) != digest:
                raise Conflict(f"A part of the update for ticket {ticket} was replaced.", "Submit the update again.")
            if reason:
                self.admission.refuse(lease.site, ticket, reason, "check the filter at the server.")
        self.admission.accept(lease.site, ticket, message, norm)
        return messages.Receipt(digest=digest)

    async def sit_out(self, lease: Lease, ticket: int, message: messages.SitOut) -> None:
        """Record that a site sits out the round of its ticket, so that the round does not wait for it.

        A repeated request changes nothing.

        Raises:
            LeaseLost, Superseded: the lease is not valid.
            TicketClosed, UpdateRefused: the ticket is over, has an update, or belongs to another site.
        """
        row = self._ticket_of(lease, ticket)
        if row.state == "sat out":
            return
        self.require_open(lease, ticket)
        self.admission.sit_out(lease.site, ticket, message.metrics)

    # -- rounds

    async def _next_version(self, closed: events.RoundClosed) -> None:
        """Make and commit the version of a closed round. Retry while the disk is full; other errors end the server."""
        if self.failed is not None or self.new_shapes is not None:  # the next start makes this version
            return
        self.admission.reports.compare()
        await wait_for_end(self._saving_best)  # the next commit may remove the version that is being saved
        number = self.state.rounds[closed.fragment].number
        try:
            await until_passed(
                lambda: self._make_version(closed, number),
                f"the version of round {number} cannot be written",
                functools.partial(operator.setitem, self.trouble, closed.fragment),
            )
        except Exception as error:
            self.fail_by(error, f"Round {number}", "Restart the server to repeat this step.")

    async def _make_version(self, closed: events.RoundClosed, number: int) -> None:
        """Make and commit the version of a closed round. If the round is open again, do nothing."""
        made = await self.place.aggregate(closed, number)
        if made is None:
            return
        metric, fragment = self.ledger.rules.tracking.metric, closed.fragment
        value = value_of(made.summary, metric) if metric else None
        happened = run_events.RoundEnded(fragment=fragment, round=number, summary=made.summary, at=made.row.created_at)
        try:
            committed = events.VersionCommitted(fragment, made.draft.version, value)
            self.ledger.record(committed, lambda: made.commit(self.store), happened)
        finally:
            made.draft.abandon()  # without effect after the commit

    def _follow_commit(self, summary: status_messages.RoundSummary, at: str) -> None:
        """After a version was committed, update counters, log its summary, and start the background writes.

        Args:
            summary: summary of the round.
            at: time at which the version was written.
        """
        tracking = self.ledger.rules.tracking
        self.trouble.pop(summary.fragment, None)
        self.filtering.sweep()
        self.filtering.filters.warn_of_strangers(self.roster)
        for each in summary.sites:
            if each.site in self.roster:
                self.roster[each.site].rounds += 1
        self.stale.note_round(summary)
        self.attendance.closed(summary)
        if tracking.metric and value_of(summary, tracking.metric) is None and not self._said_missing:
            self._said_missing = True
            LOG.warning("%s", missing(summary, tracking))
        self.time_left.committed(self.clock())
        left = f"; {told}" if (told := time_left(self.time_left.of(self.state, self.clock()))) else ""
        LOG.info("%s%s", summary.line(has_fragments=self.plan.has_fragments), left)
        heads, done = self.store.versions.heads(), min(round_.done for round_ in self.state.rounds)
        last = summary.round == done
        if last and done == self.settings.async_.sync_rounds_first and not self.state.finished:
            LOG.info("round %d was the last synchronous round: from now on, no site waits for another", done)
        writing = self.background.after_commit(summary, at, heads=heads, last=last, finished=self.state.finished)
        self._last_write = self.spawn(writing)

    async def _finish(self) -> None:
        path = await self.background.save_result()
        await wait_for_end(self._saving_best, self._last_write)
        await self.background.save_metrics()
        await asyncio.wrap_future(self.background.persistor.idle())
        why_finished = self.ledger.rules.tracking.why(self.state.progress)
        number = min(self.store.versions.heads())
        what = "the run" if self.workflows is None else "training"
        reason = f", {why_finished}" if why_finished else ""
        LOG.info("%s is finished at version %d%s: %s", what, number, reason, path)
        (self.finished if self.workflows is None else self.trained).set()
        self.wake()

    async def _tick(self) -> None:
        """Every second, and at each deadline, do what is due."""
        while True:
            deadline_s = self.state.next_deadline_s
            pause_s = 1.0 if deadline_s is None else min(1.0, max(0.01, deadline_s - self.clock()))
            await asyncio.sleep(pause_s)
            self.tick()

    def tick(self) -> None:
        """Do what is due now: remove expired objects, handle timeouts of workers and rounds, and tell new warnings."""
        self.objects.sweep()
        self.extensions.tick(self.clock())
        with contextlib.suppress(DiskFull):
            self.ledger.record(events.TimePassed())
            self.place.tick()
            if self.no_space:  # check here, because it may take long until a site tries again
                self.require_space()
        # `require_space` tells its own warning once: it has the free space, another number at each check
        warnings = [text for text in self.warnings if text != self.no_space]
        for text in warnings:
            if text not in self._warned:
                self.events.tell(run_events.Warned(text=text))
        self._warned = frozenset(warnings)

    # -- tasks of the event loop

    def spawn(self, coroutine: object) -> asyncio.Task[None]:
        """Run a coroutine as a task until the server ends. If the coroutine raises an error, the run fails with it."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail_by(error, "The server")

    def fail_by(self, error: BaseException, what: str, remedy: str = "") -> None:
        """End the server because of an error. If the error is not an `AtollError`, replace it by `RunFailed`."""
        error = directory_gone(self.settings.disk.state_dir) or error
        if not isinstance(error, AtollError):
            LOG.error("%s failed", what, exc_info=error)
            failed = out_of_memory(error) or RunFailed(f"{what} failed: {error!r}.", remedy)
            failed.is_final = failed.is_final and not isinstance(error, OSError)  # the machine may be mended
            failed.__cause__ = error
            error = failed
        self.fail(error)


def failure_for_sites(run: str, why: str) -> ServerFailed:
    """Return the error that the sites of a failed run get.

    Args:
        run: name of the run.
        why: message of the error that ended the run at the server.
    """
    most = messages.SHOWN_CHARS // 2
    return ServerFailed(
        f"The run {run} has failed at the server: {visible(' '.join(why.split()), most)}",
        "When the cause is mended there and the server runs again, start this site again: it continues from its files.",
    )


def _takes_over_shapes() -> Busy:
    busy = Busy("The server writes version 0 again, with the shapes of the first update.", "Ask again.")
    busy.retry_after_s = 0.2  # sites then log no warning
    return busy


def receipt_again(row: TicketRow, digest: str) -> messages.Receipt:
    """Return the receipt of an accepted update to a request that is repeated.

    Raises:
        Conflict: the request is for an update with another digest.
    """
    if row.digest != digest:
        raise Conflict(
            f"Ticket {row.ticket} of {row.site} already has the update with digest {str(row.digest)[:12]}, so an "
            f"update with digest {digest[:12]} is not accepted.",
            "Ask for the next ticket: each ticket is for one update.",
        )
    return messages.Receipt(digest=digest)


def _digest(layout: Layout, parts: Mapping[int, PartRow]) -> str:
    return layout.blob_id([parts[part.index].digest for part in layout.parts])
