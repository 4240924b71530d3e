"""Run the rounds of a simulation: the simulated sites join and submit updates like workers, but without a network.

Each site is a `LocalSite` of the server, which records everything in the server's journal, a database. Since there are
thousands of calls, those of many sites share one transaction of the journal. If the process is killed before the
commit, these sites are trained again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from atoll.errors import (
    AtollError,
    ConfigError,
    LeaseLost,
    NotSimulated,
    RunFailed,
    StoreError,
    TicketClosed,
    UpdateRefused,
)
from atoll.protocol import run_events, status_messages
from atoll.rounds import events, leases
from atoll.server.coordinator.served_run import ServedRun
from atoll.server.local_site import LocalRound, LocalSite, VersionsInUse
from atoll.simulate.engine import ATTEMPTS, Engine, Job, JobResult, SiteRound
from atoll.worker.exchange.local_state import NEW, pending, state_in, wanted_anew
from atoll.worker.log_lines import error_text

LOG = logging.getLogger("atoll.simulate")
T = TypeVar("T")

TRACES = 3
"""Number of failures with a traceback in the log. For further failures, the log has only the error itself."""
PATIENCE = 2
"""While other sites wait, one site may occupy a process for this many times `rounds.deadline_s`."""
LEAST_PATIENCE_S = 10.0
GATHER_S = 0.004
"""Seconds to wait for further results, so that one transaction handles several. A transaction takes as long as handling
three results. Meanwhile, processes train the jobs that they got in advance."""
JOIN_AT_ONCE = 500
HOST = "simulated"


class SiteScheduler:
    """Runs the rounds of a simulation on the server's event loop.

    Args:
        served: the run.
        sites: names of all simulated sites.
        engine: the processes that train the sites.
        folder: the folder with the state that sites keep between rounds.
        on_round: called with the summary of every finished round.

    Attributes:
        worker_rounds: number of accepted updates.
        late: number of updates that came after their round had closed.
        refused: site → number of its refused updates.
        failed: site → the error that ended its participation.
        bytes_up: bytes of tensors that real sites would have sent.
        bytes_down: bytes of tensors that real sites would have received.
    """

    def __init__(
        self,
        served: ServedRun,
        sites: Sequence[str],
        engine: Engine,
        folder: Path,
        on_round: Callable[[status_messages.RoundSummary], object],
    ) -> None:
        self._run, self._engine, self._folder, self._on_round = served.run, engine, folder, on_round
        self._filters, self._configs = served.updates.filters, served.configs
        self._loop = asyncio.get_running_loop()
        self._news, self._rung = asyncio.Event(), False
        self._heard: deque[tuple[Job, JobResult]] = deque()
        self._lock = threading.Lock()  # guards `_rung`
        self._bases = VersionsInUse(served.run.store.versions)
        self._ended: list[status_messages.RoundSummary] = []  # rounds of which the watcher has not heard yet
        self._run.events.subscribe("the simulation", self._on_event)
        self._sites = {site: LocalSite(served, site, self._bases, HOST) for site in sites}
        self._jobs: dict[str, Job] = {}
        self._stuck = Counter[str]()  # site → how often it did not return since its last accepted update
        self._patience_s = max(LEAST_PATIENCE_S, PATIENCE * self._run.settings.rounds.deadline_s)
        self._engine_failed: Exception | None = None
        self.worker_rounds = self.late = self.bytes_up = self.bytes_down = 0
        self.failed: dict[str, str] = {}
        self.refused = Counter[str]()

    # -- results of the engine, called in its threads

    def job_done(self, job: Job, result: JobResult) -> None:
        """Queue a result, and wake the event loop, which handles it. Called in a thread of the engine."""
        self._heard.append((job, result))
        self._ring()

    def failed_to_go_on(self, error: Exception) -> None:
        """Keep an error, which `run_rounds` raises, and wake the event loop. Called in a thread of the engine."""
        self._engine_failed = error
        self._ring()

    def _ring(self) -> None:
        with self._lock:
            rung, self._rung = self._rung, True
        if not rung:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._news.set)

    # -- the loop

    async def run_rounds(self) -> None:
        """Run rounds until the run is finished.

        Raises:
            RunFailed: a round cannot end, because no site is left that could submit an update.
            AtollError: the run or the engine failed.
        """
        await self._join()
        watching = [self._run.spawn(each) for each in (self._watch(), self._free_processes())]
        try:
            while not self._run.finished.is_set():
                self._news.clear()
                with self._lock:
                    self._rung = False
                self._raise_what_failed()
                while self._heard and self._filters:  # filters wait for threads: no transaction around
                    await self._take(*self._heard.popleft())
                await self._configure()
                with self._one_transaction():
                    while self._heard and not self._filters:
                        now(self._take(*self._heard.popleft()))
                    self._give()
                self._tell_of_rounds()
                self._require_can_close()
                await self._news.wait()
                if len(self._heard) < len(self._jobs):  # else no site trains, so no further result comes
                    await asyncio.sleep(GATHER_S)
            self._tell_of_rounds()
            self._raise_what_failed()
        finally:
            for each in watching:
                each.cancel()
            self._release_all()

    async def _watch(self) -> None:
        """Wake the loop of `run_rounds` whenever the run has changed or ended."""
        ended = asyncio.ensure_future(self._run.has_failed.wait())
        ended.add_done_callback(lambda _: self._news.set())
        try:
            while True:
                await self._run.changed(3600.0)
                self._news.set()
        finally:
            ended.cancel()

    async def _free_processes(self) -> None:
        """While other sites wait, kill the process of a site that trains for too long.

        This is done only in runs with a quorum, where a round can end at its deadline without the updates of all sites.
        """
        while self._run.settings.rounds.quorum:
            await asyncio.sleep(self._patience_s / 4)
            self._engine.free(self._patience_s)

    @contextlib.contextmanager
    def _one_transaction(self) -> Iterator[None]:
        """Run the block as one transaction of the journal.

        If the transaction fails, nothing is stored, and the run fails.
        """
        try:
            with self._run.store.journal.transaction():
                yield
        except AtollError as error:
            self._run.fail(error)
            raise

    def _raise_what_failed(self) -> None:
        if self._run.failed is not None:
            raise self._run.failed
        if self._engine_failed is not None:
            raise self._engine_failed

    def _require_can_close(self) -> None:
        """Check that the open round can still end.

        Raises:
            RunFailed: the round waits for updates, but no site trains and no site can be asked to.
        """
        state = self._run.state
        if (
            self._jobs
            or self._heard
            or self._rung
            or self._run.failed
            or state.rounds[0].phase not in ("open", "gathering")
        ):
            return
        if state.next_deadline_s is not None:
            return
        why = state.why(0, 0.0)
        last = next(reversed(self.failed.items()), None)
        told_last = f"; the last site that failed is {last[0]}: {last[1].rstrip('.')}" if last else ""
        here, name = len(state.active_s), state.rules.floor_name
        lower = f"; or set {name} = {here} to continue without the failed sites" if 0 < here < state.rules.floor else ""
        raise RunFailed(
            f"Round {state.rounds[0].number} cannot end ({why}): no simulated site is left that could "
            f"submit an update{told_last}.",
            f"Correct the script, and start the same simulation again: it continues from here{lower}.",
        )

    def _on_event(self, event: run_events.Happened) -> None:
        if isinstance(event, run_events.RoundEnded):
            self._ended.append(event.summary)

    def _tell_of_rounds(self) -> None:
        ended, self._ended = self._ended, []
        for summary in ended:
            self._on_round(summary)

    # -- sites

    async def _join(self) -> None:
        """Let all sites join the run. Round 1 opens when the last site has joined.

        If the simulation was started before with other sites, the sites that no longer belong to it leave the run.

        Raises:
            ConfigError: the run has real workers, or the local state of a site is missing.
        """
        begun = bool(self._run.roster)
        real = next((site for site, presence in self._run.roster.items() if presence.host != HOST), None)
        if real is not None:
            raise ConfigError(
                f"The run in {self._run.settings.disk.state_dir} has real workers, for example {real}.",
                "Use a separate state directory for the simulation.",
            )
        if begun and self._run.plan.algorithm.state_groups and not wanted_anew():
            self._require_state()
        with self._one_transaction():
            for member in leases.alive(self._run.state.members):
                if member.site not in self._sites:
                    self._run.ledger.record(events.WorkerLeft(member.site, member.lease, ""))
        sites = list(self._sites.values())
        for first in range(0, len(sites), JOIN_AT_ONCE):
            with self._one_transaction():
                for number, site in enumerate(sites[first : first + JOIN_AT_ONCE], first):
                    now(site.join(f"{self._run.store.run_log.epoch}x{number}"))
            await asyncio.sleep(0)  # so that a large simulation can be stopped meanwhile

    def _require_state(self) -> None:
        for site in sorted(self._sites):
            if self._sites[site].has_counted and not (self._folder / site / "algorithm.json").is_file():
                raise ConfigError(
                    f"The local state of site {site} is missing in {self._folder}, although the run's model contains "
                    "updates that depend on it.",
                    f"Restore its folder from a backup. Without a backup, set {NEW}=1 to start from zero, or begin a "
                    "new simulation with another disk.state_dir.",
                )

    # -- jobs

    def _give(self) -> None:
        """Give the engine jobs for the sites that the round waits for, up to the engine's capacity."""
        state = self._run.state
        if state.rounds[0].phase != "open" or len(self._jobs) >= self._engine.capacity:
            return
        self._run.require_space()
        self._offer(site for site, _ in state.missing(0))
        if not self._jobs:  # ask for all sites: if the round needs a refused site, that site gets a new ticket
            self._offer(member.site for member in leases.alive(state.members))

    async def _configure(self) -> None:
        """Ask the user's function what to tell the sites of the open round. No transaction may be around it."""
        state = self._run.state
        if self._configs.has_function and state.rounds[0].phase == "open":
            sites = [site for site, _ in state.missing(0)] or [member.site for member in leases.alive(state.members)]
            await self._configs.prepare(sites, state.rounds[0].number)

    def _offer(self, sites: Iterable[str]) -> None:
        for site in sites:
            if len(self._jobs) >= self._engine.capacity:
                return
            if site in self._jobs:
                continue
            if not self._configs.are_ready(site, self._run.state.rounds[0].number):
                self._ring()  # a round that has just opened: `_configure` comes first
                return
            told = None
            if self._run.plan.algorithm.state_groups:
                head = self._run.store.versions.head().version
                told = state_in(self._folder / site, self._sites[site].counted(), head)
            if (opened := self._sites[site].open_round(told)) is not None:
                self._jobs[site] = job = self._job(self._sites[site], opened)
                self._run.store.journal.after_commit(partial(self._engine.put, job))

    def _job(self, site: LocalSite, opened: LocalRound) -> Job:
        has_state = bool(self._run.plan.algorithm.state_groups)
        return Job(
            SiteRound(
                site=site.site,
                ticket=opened.ticket,
                outcomes=site.outcomes(pending(self._folder / site.site)),
                counts=has_state and site.has_counted,
                counted=site.counted() if has_state else None,
            ),
            opened.base,
            opened.spool.fd,
            self._run.plan.fragments[0].update.nbytes,
            opened.release,
        )

    def _release_all(self) -> None:
        """Close the engine, and release the files and versions of all jobs, so that the store may reuse them."""
        self._engine.close()
        for job in self._jobs.values():
            job.release()
        self._jobs.clear()
        self._bases.release()

    async def _take(self, job: Job, result: JobResult) -> None:
        """Handle the result of a job: submit the update, sit out the round, or end the site's participation."""
        del self._jobs[job.site]
        job.release()
        site = self._sites[job.site]
        self.bytes_down += result.bytes_down
        self._run.bytes_down += result.bytes_down
        try:
            if result.disk:
                raise StoreError(
                    f"The disk failed while {job.site} was trained: {result.error}",
                    "Free disk space, or check the disk; then start the same simulation again: it continues from here.",
                )
            if result.remedy:
                raise NotSimulated(result.error, result.remedy)
            if result.stuck:
                await self._did_not_return(job, site)
                return
            if result.sit_out is not None:
                await site.sit_out(job.ticket, result.sit_out)
                self._stuck.pop(job.site, None)
                return
            if result.update is None:
                await self._end(site, result)
                return
            await site.submit(job.ticket, result.update, result.stats)
            del self._stuck[job.site]
        except TicketClosed:
            self.late += 1
            LOG.warning("%s: this site's update came too late for round %d", job.site, job.ticket.round)
        except UpdateRefused:  # the server has logged why
            self.refused[job.site] += 1
        except LeaseLost:
            self.failed[job.site] = self._run.roster[job.site].error
        else:
            nbytes = self._run.plan.fragments[0].update.nbytes
            self.worker_rounds += 1
            self.bytes_up += nbytes
            self._run.bytes_up += nbytes

    async def _did_not_return(self, job: Job, site: LocalSite) -> None:
        """Record that a site's script did not return in time. After `ATTEMPTS` times, end the site's participation."""
        self._stuck[job.site] += 1
        told_s = f"{self._patience_s:g} s"
        LOG.warning("%s did not return within %s while other sites waited; its process was stopped", job.site, told_s)
        if self._run.state.may_submit(job.site, site.lease.number, job.ticket.id) is not None:
            self.late += 1
        if self._stuck[job.site] == ATTEMPTS:
            why = (
                f"it did not return within {told_s}, {ATTEMPTS} times in a row; a longer rounds.deadline_s "
                "gives it more time"
            )
            await self._end(site, JobResult(error=why))

    async def _end(self, ended: LocalSite, result: JobResult) -> None:
        """End the participation of a site that failed or submitted nothing: log the reason, and let the site leave."""
        site = ended.site
        self.failed[site] = result.error or "its script returned without an update"
        if result.trace and len(self.failed) <= TRACES:
            LOG.error("%s raised an error and no longer takes part in the simulation:\n%s", site, result.trace.rstrip())
        else:
            LOG.error("%s no longer takes part in the simulation: %s", site, self.failed[site])
        await ended.leave(error_text(result.error) if result.error else None)


def now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end without the event loop, and return its result. The coroutine must not wait.

    Raises:
        RuntimeError: the coroutine has tried to wait.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError(f"{coroutine} waits in the middle of a transaction")
