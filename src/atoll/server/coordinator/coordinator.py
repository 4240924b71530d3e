"""The coordinator of a run: an event changes the state and the journal, and then its effects are carried out.

Only the `Ledger` changes the run's state, when an event is recorded in it, with the rows of the event, such as a new
version. Work on tensors and files, and user code, run in threads. The operations of clients are in files of their own,
which record the events: `site_operations`, `ticket_operations`, `update_operations`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import operator
from collections.abc import Coroutine
from typing import Any

from atoll.errors import DiskFull
from atoll.protocol import run_events, status_messages
from atoll.rounds import events
from atoll.server.coordinator.background_writes import BackgroundWriter, until_passed, wait_for_end
from atoll.server.coordinator.extension import Extensions
from atoll.server.coordinator.ledger import snapshot_of
from atoll.server.coordinator.ports import Evaluation, RoundPlace
from atoll.server.coordinator.round_history import RoundHistory
from atoll.server.coordinator.run_core import RunCore
from atoll.server.coordinator.run_warnings import RunWarnings

LOG = logging.getLogger("atoll.server")


class Coordinator:
    """Carries out what follows from the events of a run: new versions, files, the end.

    Args:
        run: the run.
        place: where closed rounds become versions.
        history: the rounds that have ended.
        background: writes the files after each round.
        evaluation: evaluates versions by the user's function.
        extensions: guests with a tick.
        warnings: what is probably wrong at present.
    """

    def __init__(
        self,
        run: RunCore,
        place: RoundPlace,
        history: RoundHistory,
        background: BackgroundWriter,
        evaluation: Evaluation,
        extensions: Extensions,
        warnings: RunWarnings,
    ) -> None:
        self._run, self._place, self._history, self._background = run, place, history, background
        self._evaluation, self._extensions, self._warnings = evaluation, extensions, warnings
        self._saving_best: asyncio.Task[None] | None = None
        self._last_write: asyncio.Task[None] | None = None  # background writes of the newest version; they end last
        run.events.subscribe("the coordinator", self._on_event, lambda error: run.fail_by(error, "The server"))

    # -- beginning and end

    def start(self, address: str = "", moved_from: str = "") -> None:
        """Start the run: resume the work that the journal records. Call this on the server's event loop.

        Args:
            address: URL of the server.
            moved_from: the earlier URL, at which sites do not find this server; empty if they do.

        Raises:
            ConfigError, RunFailed: the aggregator that the settings name cannot be started.
        """
        run = self._run
        run.address, run.moved_from = address, moved_from
        snapshot = snapshot_of(run.store, self._history.progress())
        self._place.start(run.fail)
        self._warnings.say_advice()
        self._warnings.say_own_code()
        run.ledger.restore(snapshot, self._act)
        run.events.publish()  # what recovery has written
        self._warnings.say_moved()
        if snapshot.finished and not run.state.finished:
            run.store.run_log.finish(False)  # rounds.total is larger than when the run finished
        if run.state.progress.best is not None:  # the server may have been killed before writing it
            self._saving_best = run.spawn(self._background.save_best(run.state.progress.best))
        for fragment, round_ in enumerate(snapshot.fragments):
            if not self._place.is_here:  # the aggregating worker reports again what it has collected
                run.ledger.record(events.AggregatorLost(fragment, "the server was restarted"))
            elif round_.frozen and run.state.rounds[fragment].phase == "closing":
                LOG.info("the round from version %d was closed before the restart: aggregating it again", round_.head)
                run.spawn(self._next_version(events.RoundClosed(fragment, round_.head, round_.frozen)))
        run.spawn(self._tick())
        self._background.complete_metrics()
        self._resume_evaluation()
        if run.state.finished:
            if not run.has_workflows:
                how = "run `atoll resume`" if run.state.stopping else "raise rounds.total"
                LOG.info("this run has ended. To train further, %s; for a new run, use another folder", how)
            if snapshot.finished:  # else the ledger has found so now, which has begun `_finish`
                run.spawn(self._finish())
        else:
            if self._place.is_here and address:  # a simulation has no admin
                self._warnings.say_versions_kept()
            self._background.save_initial()

    async def stop(self, *, begins_again: bool = False) -> None:
        """End all tasks, and close the store. The next start continues from the files on disk.

        Args:
            begins_again: whether this server goes on with the run, so that its followers stay.
        """
        self._place.cancel()
        await self._run.end_tasks()
        await self._background.end_pauses()
        self._evaluation.stop()
        await (self._extensions.rest() if begins_again else self._extensions.close())
        self._place.close()
        self._background.persistor.close()  # before the store, because the persistor reads from it
        self._run.store.close()

    # -- events

    def _act(self, effect: events.Effect) -> None:
        """Carry out an effect of an event: for example, aggregate a closed round.

        If the effect is a decision, the journal has recorded it already.
        """
        self._history.act(effect)
        match effect:
            case events.RoundClosed():
                self._run.spawn(self._next_version(effect))
            case events.GenerationBegun():
                LOG.warning("%s", self._run.store.run_log.generation.reason)
            case events.BestFound(measured):
                self._saving_best = self._run.spawn(self._background.save_best(measured))
            case events.RoundOpened(fragment) if not self._run.plan.fits(self._run.state.rounds[fragment].number):
                self._run.begins_again.set()  # with files for the codec of this round
            case events.RunFinished():
                self._resume_evaluation()  # if this event makes the newest version the last one
                self._run.spawn(self._finish())
        if isinstance(effect, events.Woken | events.RoundOpened | events.RunFinished | events.LeaseEnded):
            self._run.wake()

    def _resume_evaluation(self) -> None:
        if (resumed := self._evaluation.resume()) is not None:
            self._last_write = self._run.spawn(self._written_after(resumed[1], resumed[0], ""))

    def _on_event(self, event: run_events.Happened) -> None:
        self._place.on_event(event)
        if isinstance(event, run_events.RoundEnded):
            self._history.ended(event.summary)
            self._last_write = self._run.spawn(self._written(event.summary, event.at))

    def _written(self, summary: status_messages.RoundSummary, at: str) -> Coroutine[Any, Any, None]:
        """Return the work on the files of a round that ended at the time `at`."""
        if summary.version is None:
            return self._background.write_metrics(summary, at)
        self._run.trouble.pop(summary.fragment, None)
        heads, state = self._run.store.versions.heads(), self._run.state
        last = summary.round == min(round_.done for round_ in state.rounds)
        evaluating = self._evaluation.begin(summary, heads) if last else None
        metrics_at = at if evaluating is None else None
        written = self._background.after_commit(summary, metrics_at, heads=heads, last=last, finished=state.finished)
        return written if evaluating is None else self._written_after(evaluating, summary, at, written)

    async def _written_after(
        self,
        evaluating: asyncio.Task[None],
        summary: status_messages.RoundSummary,
        at: str,
        written: Coroutine[Any, Any, None] | None = None,
    ) -> None:
        """Write the metrics of a round when its version has been evaluated, and other files meanwhile.

        Args:
            evaluating: the evaluation.
            summary: summary of the round.
            at: time of the end of the round.
            written: work on the other files.
        """
        if written is not None:
            await written
        await wait_for_end(evaluating)
        await self._background.write_metrics(self._history.newest(summary), at)

    # -- rounds

    async def _next_version(self, closed: events.RoundClosed) -> None:
        """Make and commit the version of a closed round. Retry while the disk is full; other errors end the server."""
        if self._run.failed is not None or self._run.begins_again.is_set():  # the next start makes this version
            return
        # the next commit may remove the version that is being saved; its evaluation may end the run
        await wait_for_end(self._evaluation.task)
        await wait_for_end(self._saving_best)
        number = self._run.state.rounds[closed.fragment].number
        try:
            await until_passed(
                lambda: self._make_version(closed, number),
                f"the version of round {number} cannot be written",
                functools.partial(operator.setitem, self._run.trouble, closed.fragment),
            )
        except Exception as error:
            self._run.fail_by(error, f"Round {number}", "Start the run again to repeat this step.")

    async def _make_version(self, closed: events.RoundClosed, number: int) -> None:
        """Make and commit the version of a closed round. If the round is open again, do nothing."""
        made = await self._place.aggregate(closed, number)
        if made is None:
            return
        if self._run.begins_again.is_set():  # the next start makes this version, or goes back before it
            made.draft.abandon()
            return
        fragment, value = closed.fragment, self._history.value(made.summary)
        happened = run_events.RoundEnded(fragment=fragment, round=number, summary=made.summary, at=made.row.created_at)
        try:
            committed = events.VersionCommitted(fragment, made.draft.version, value)
            self._run.ledger.record(committed, lambda: made.commit(self._run.store), happened)
        finally:
            made.draft.abandon()  # without effect after the commit

    async def _finish(self) -> None:
        run = self._run
        path = await self._background.save_result()
        await wait_for_end(self._last_write)
        await self._background.make_durable()
        await wait_for_end(self._saving_best)  # the last version's evaluation may have begun this
        await self._background.save_metrics()
        await asyncio.wrap_future(self._background.persistor.idle())
        why_finished = run.state.why_ended
        number = min(run.store.versions.heads())
        what = "the run" if not run.has_workflows else "training"
        reason = f", {why_finished}" if why_finished else ""
        LOG.info("%s is finished at version %d%s: %s", what, number, reason, path)
        (run.finished if not run.has_workflows else run.trained).set()
        run.wake()

    async def _tick(self) -> None:
        """Every second, and at each deadline, do what is due."""
        while True:
            deadline_s = self._run.state.next_deadline_s
            pause_s = 1.0 if deadline_s is None else min(1.0, max(0.01, deadline_s - self._run.clock()))
            await asyncio.sleep(pause_s)
            self.tick()

    def tick(self) -> None:
        """Do what is due now: handle timeouts of workers and rounds, and tell new warnings."""
        run = self._run
        self._extensions.tick(run.clock())
        with contextlib.suppress(DiskFull):
            run.ledger.record(events.TimePassed())
            self._place.tick()
            if run.no_space:  # check here, because it may take long until a site tries again
                run.require_space()
        self._warnings.tick()
