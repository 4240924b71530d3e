"""The core of a run at its server: what all parts that serve the run share.

It has the run's plan, files, state and events, the requests that wait for a change, the tasks of the event loop, and
the failure after which the run cannot go on.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atoll.aggregation.plan import Plan
from atoll.errors import AtollError, Busy, DiskFull, RunFailed, out_of_memory
from atoll.protocol import run_events
from atoll.rounds.state import Rules, State
from atoll.runtime import stay_single_threaded
from atoll.server.coordinator.event_log import EventLog
from atoll.server.coordinator.ledger import Ledger, write_change
from atoll.server.coordinator.long_polls import FairEvent
from atoll.server.coordinator.roster import roster_of
from atoll.server.coordinator.user_code import UserThreads
from atoll.store.store import Store, directory_gone

LOG = logging.getLogger("atoll.server")


class RunCore:
    """What all parts that serve a run share. All methods run on the server's event loop.

    Args:
        plan: plan of the run.
        store: store of the run, which the coordinator closes.
        has_workflows: whether the run has workflows, of which training may be one; if not, it only trains.
        clock: returns the time in seconds, as `time.monotonic` does: for leases, deadlines and estimates.
        before: the events before the run has begun again within this server; None: the server starts now.

    Attributes:
        roster: site → what the server knows about its worker.
        events: what happens in the run, for its followers.
        ledger: the only place where the run's state changes.
        io: threads for work on files.
        user_threads: threads for the code of users.
        address: URL of the server.
        moved_from: the earlier URL, at which sites do not find this server; empty if they do.
        watched_s: time of the last status request of a client that is no site; None: there was none.
        trouble: fragment → why its new version cannot be written.
        no_space: why uploads are refused: the disk has too little space; else empty.
        failed: the error after which the run cannot go on.
        trained: set when the result of the rounds is saved.
        finished: set when the run is finished.
        has_failed: set when the run has failed.
        begins_again: set when the run begins again, with the shapes of a first update (`FirstShapes`) or another codec.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        *,
        has_workflows: bool = False,
        clock: Callable[[], float] = time.monotonic,
        before: EventLog | None = None,
    ) -> None:
        self.plan, self.store, self.settings, self.clock = plan, store, plan.settings, clock
        self.has_workflows = has_workflows
        self.roster = roster_of(
            store.run_log.members(), [store.tickets.newest_bases(fragment) for fragment in range(len(plan.fragments))]
        )
        self.events = EventLog(store, None if before is None else before.passed)
        rules = Rules.from_settings(
            self.settings, len(plan.fragments), held=has_workflows, needs_all=plan.algorithm.needs_all
        )
        write = functools.partial(write_change, store, self.roster, self.events, keep_weights=plan.needs_population)
        self.ledger = Ledger(rules, write, clock=clock, on_failure=self.fail, publish=self.events.publish)
        self.io = ThreadPoolExecutor(
            max(8, 2 * plan.threads), thread_name_prefix="atoll-io", initializer=stay_single_threaded
        )
        self.user_threads = UserThreads()

        self.started_s, self.address, self.moved_from = clock(), "", ""
        self.watched_s: float | None = None
        self.bytes_up = self.bytes_down = 0
        self.trouble: dict[int, str] = {}
        self.no_space = ""
        self.failed: AtollError | None = None
        self.finished, self.trained, self.has_failed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.begins_again = asyncio.Event()
        self._changed, self._ending = FairEvent(), False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> State:
        """The run's state: its rounds, leases and tickets."""
        return self.ledger.state

    def alive(self) -> list[str]:
        """Return the sites that take part, sorted."""
        return sorted(site for site, member in self.state.members.items() if member.alive)

    # -- requests that wait

    def wake(self) -> None:
        """Wake every request that waits in `changed`, because the run's state has changed."""
        self._changed.set()

    async def changed(self, timeout_s: float) -> None:
        """Wait until `wake` is called, for at most `timeout_s` seconds.

        Raises:
            Busy: the server is stopping.
        """
        await self._changed.wait(0 if self._ending else timeout_s)
        if self._ending:
            raise Busy("The server is stopping.", "Try again after the server has restarted.")

    def send_away(self) -> None:
        """Answer all waiting requests now with an error, because the server is about to end."""
        self._ending = True
        self.wake()
        self.events.end()

    @property
    def is_ending(self) -> bool:
        """Whether `send_away` was called."""
        return self._ending

    # -- space

    def require_space(self) -> None:
        """Raise an error if the disk has less than `disk.min_free_bytes` left.

        What is kept so that a workflow goes on after a restart makes room first. The first such error is logged, and so
        is the first call after it that finds enough space.

        Raises:
            DiskFull: the disk has too little space; the request can be repeated later.
        """
        folder = self.settings.disk.state_dir
        try:
            self.store.require_space(self.settings.disk.min_free_bytes)
        except DiskFull as error:
            if self.store.facts.make_room(error.message):
                self.require_space()
                return
            if not self.no_space:
                LOG.warning("uploads to %s are refused: %s", folder, error)
                self.events.tell(run_events.Warned(text=str(error)))
            self.no_space = str(error)
            raise
        if self.no_space:
            self.no_space = ""
            LOG.warning("uploads to %s are accepted again", folder)

    # -- tasks of the event loop, and failure

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task until the server ends. If the coroutine raises an error, the run fails with it."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def end_tasks(self) -> None:
        """End all tasks, and the work of the threads for files."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.io.shutdown(wait=True)

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

    def fail(self, error: AtollError) -> None:
        """Log an error after which the run cannot go on, and end the server.

        If the error is final, so that a restart does not help, answer all requests of sites with `ServerFailed`.
        """
        if self.failed is None:
            error = directory_gone(self.settings.disk.state_dir) or error
            LOG.error("%s", error)
            self.failed = error
            self.events.tell(run_events.RunFailed(reason=error.message))
            self.has_failed.set()
            if error.is_final:
                self.send_away()
