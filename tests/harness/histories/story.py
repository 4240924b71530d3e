"""One history: what a seed decides, the server, its sites, and the faults.

    told = play(7)              # raises Violation
    print("\n".join(told.trace))

A seed decides all of it: the kind of run, the network, who is killed when, and how long everything takes. So each
history can be played again, to the same trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from atoll import runtime
from atoll.aggregation import make_version
from atoll.aggregation.plan import AggregationPlan, PlanValues
from atoll.config.settings import Settings
from atoll.errors import AtollError
from atoll.protocol import admin_messages, messages, run_events
from atoll.rounds.machine import STATE_BEGINS, STOPPED
from atoll.rounds.state import State
from atoll.server.assemble_run import UserCode, assemble
from atoll.server.coordinator import persistor as persistors
from atoll.server.coordinator import run_core
from atoll.server.coordinator.persistor import Persistor
from atoll.server.coordinator.served_run import ServedRun
from atoll.server.startup import open_run, settings_beside
from atoll.server.tasks.task_payloads import TaskFilters
from atoll.store import audit_log, journal, journal_tables
from atoll.tensors.fragments import Split
from atoll.tensors.schema import Schema
from atoll.transport import part_transfer
from atoll.worker.exchange import participation
from atoll.worker.exchange.encode_update import Layouts
from atoll.worker.exchange.exchange import Exchange
from atoll.worker.session import session
from atoll.worker.training import synchroniser
from harness.histories.checks import Checks, Violation
from harness.histories.disk import Disks, no_checksum, no_checksums, no_damage
from harness.histories.network import NETWORK, Faults, Network, Request, VirtualConnection, answer, http_to, route
from harness.histories.scenario import LR, MOMENTUM, SITE_FAULTS, TIMEOUT_S, Fault, Scenario
from harness.histories.virtual_loop import (
    GreenEvent,
    GreenExecutor,
    GreenThreading,
    InlineExecutor,
    Killed,
    VirtualLoop,
    current_green,
    run_jobs,
    wait_for_all,
)
from harness.histories.virtual_site import ADDRESS, Site, SiteProcess, form

END_S = 240.0
"""Virtual seconds within which a run without further faults makes a version, and within which it ends."""
SERVER_POINTS = ("accept.before", "accept.after", "head.before", "head.after", "journal.commit", "spool.write")
"""Failpoints at which the server is killed."""


class Crashed(BaseException):
    """The server was killed at this instruction."""


@dataclass
class Told:
    """What has happened in a history.

    Attributes:
        trace: a line for each request, fault and version.
        counts: how often what happened.
    """

    scenario: Scenario
    trace: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


# -- the history


class History:
    """A server and its sites, until the run has ended."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder, self.told = scenario, folder, Told(scenario)
        self.counts = self.told.counts
        self.chance = random.Random(f"history {scenario.seed}")
        slow = random.Random(f"threads {scenario.seed}")
        self.loop = VirtualLoop(lambda: slow.expovariate(50.0))
        self.network = Network(self.loop, random.Random(f"network {scenario.seed}"), replace(scenario.wire), self.serve)
        self.disks = Disks(power=scenario.power, loses=scenario.loses_power)
        self.model = scenario.model()
        self.sites = {name: Site(self, name) for name in scenario.sites}
        self.checks = Checks(
            quorum=scenario.quorum,
            sites=scenario.settings["rounds.sites"],
            rounds=scenario.settings["rounds.total"],
            is_async=scenario.is_async,
            most_behind=scenario.settings.get("async.max_staleness"),
            timeout_s=TIMEOUT_S,
            lr=LR,
            algorithm=scenario.settings["algorithm.name"],
            may_begin_anew=scenario.may_begin_anew,
            may_lose_residuals=scenario.may_lose_residuals,
            counts_steps=scenario.counts_steps,
            momentum=MOMENTUM,
        )
        if scenario.may_begin_anew:
            self.checks.may_expire.add(STATE_BEGINS)
        self.processes: list[SiteProcess] = []
        self.served: ServedRun | None = None
        self.failure: BaseException | None = None
        (folder / "boot_id").write_text("0")
        self.state_dir, self._starts = folder / "server-0", 0
        self._crash_in, self._crash_at, self._dying, self._full = 0, "", False, 0
        self._power_next = False
        self._finish_copy: Callable[[], None] = lambda: None
        self._before: State | None = None
        self._wake = asyncio.Event()

    @property
    def is_healed(self) -> bool:
        """Whether faults have stopped."""
        return self.loop.now_s >= self.scenario.heals_at_s

    def tell(self, text: str) -> None:
        self.told.trace.append(f"{self.loop.now_s:9.3f} {text}")

    # -- the server

    async def start_server(self) -> None:
        settings = self._settings()
        persistor, self._starts = Persistor(settings), self._starts + 1
        while True:
            try:
                opened = open_run(settings, dict(self.model), persistor)
                break
            except Crashed:  # during recovery
                self._copy_state(power_loss=False)
                self._dying = False
                self._finish_copy()
                settings = self._settings()
        served = assemble(opened, UserCode(persistor, TaskFilters(settings)), clock=self.clock)
        served.coordinator.start(ADDRESS)
        self.served = served
        self.checks.now_s = self.loop.now_s
        self.tell(f"the server starts with {served.run.store.versions.heads()}")
        if self.checks.excused and not served.run.state.finished:  # the server's log tells the operator to do so
            for site in self.sites.values():
                site.finished = False
        self.checks.started(served.run, self._before)
        self._before = None
        served.run.events.subscribe("the history", lambda event: self._on_event(served, event), self._fail)

    def _settings(self) -> Settings:
        """The settings of a server in the folder that the one before has left."""
        settings = shared(settings_beside, "Server", self.scenario.all_settings(Path("/state")))
        return settings.model_copy(update={"disk": settings.disk.model_copy(update={"state_dir": self.state_dir})})

    def clock(self) -> float:
        return self.loop.now_s

    def _on_event(self, served: ServedRun, event: run_events.Happened) -> None:
        if served is not self.served:
            return
        self.checks.now_s = self.loop.now_s
        self.checks.on_event(served.run, event)
        if isinstance(event, run_events.RoundEnded):
            if self.is_healed:
                self._wake.set()
            self.counts["versions" if event.summary.version is not None else "sat out"] += 1
            sites = ",".join(each.site for each in event.summary.sites)
            self.tell(f"version {event.summary.version} of fragment {event.fragment} from {sites}")
        elif not isinstance(event, run_events.TicketIssued | run_events.UpdateAccepted):
            self.counts[type(event).__name__] += 1

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._wake.set()

    async def serve(self, request: Request) -> tuple[int, bytes]:
        """Carry out a request at the server that is there when it arrives.

        Raises:
            ConnectionError: there is none, or it was killed meanwhile.
        """
        served = self.served
        if served is None:
            raise ConnectionRefusedError("no server")
        arrived_s = self.loop.now_s
        try:
            status, data = await answer(served, request)
        except Crashed:
            raise ConnectionResetError("the server was killed") from None
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:
            if served is not self.served:
                raise ConnectionResetError("the server was killed") from None
            self._fail(error)
            raise ConnectionResetError from None
        if served is not self.served:
            raise ConnectionResetError("the server was killed")
        self.checks.now_s = self.loop.now_s
        try:
            self._check_answer(served, request, arrived_s, status, data)
        except Exception as error:
            self._fail(error)
        self.tell(f"{request.site} {request.method} {request.path} {status}")
        return status, data

    def _check_answer(self, served: ServedRun, request: Request, arrived_s: float, status: int, data: bytes) -> None:
        site, method, path, headers, _ = request
        if self.scenario.kind == "scaffold":
            self.checks.began_anew(served.run)
        lease = headers.get("Atoll-Lease", "")
        if status >= 400:
            self.counts[f"status {status}"] += 1
            return
        if path.endswith("/workers"):
            self.checks.joined(site, messages.Joined.model_validate_json(data))
        elif route(method, path)[0].lease:  # another request does not count as a sign of life
            self.checks.asked(site, arrived_s)
        if (path.endswith("/complete") or (method == "PUT" and data)) and status == 200:
            ticket = int(path.split("/")[3])
            receipt = messages.Receipt.model_validate_json(data)
            self.counts["receipts"] += 1
            self.checks.receipted(served.run, lease, ticket, receipt.digest)

    def crash(self, *, power_loss: bool = False) -> None:
        """Kill the server now. What it does until its tasks have ended reaches neither its disk nor a site."""
        served, self.served = self.served, None
        if served is None:
            return
        self._crash_in, self._dying = 0, True
        self._copy_state(power_loss=power_loss)
        if served.begins_again and not self.checks.excused:  # the admin's wish is in the journal
            self.checks.excused = "rollback"
        self.loop.create_task(self._end(served, self._finish_copy))

    def _copy_state(self, *, power_loss: bool) -> None:
        before, self.state_dir = self.state_dir, self.folder / f"server-{self._starts}-{len(self.told.trace)}"
        if power_loss:
            self.checks.excused = "" if self.scenario.power else "power loss"
            (self.folder / "boot_id").write_text(f"{self._starts}")
            self._finish_copy = self.disks.copy_power_loss(before, self.state_dir, self.chance)
        else:
            self._finish_copy = self.disks.copy_killed(before, self.state_dir)

    async def _end(self, served: ServedRun, finish_copy: Callable[[], None]) -> None:
        served.run.send_away()
        with contextlib.suppress(Crashed, Exception):
            await served.coordinator.stop()
        finish_copy()
        await asyncio.sleep(0.05 + self.chance.expovariate(0.5))
        self._dying = False
        await self.start_server()

    async def restart(self, why: str) -> None:
        """Stop the server as SIGTERM does, and start it again."""
        served, self.served = self.served, None
        if served is None:
            return
        self._crash_in = 0
        served.run.send_away()
        await served.coordinator.stop(begins_again=False)
        self._before = served.run.state if why == "stop" else None
        self._copy_state(power_loss=False)
        self._finish_copy()
        if served.begins_again:  # as the admin wished
            self.checks.excused = "rollback"
        await asyncio.sleep(0.05)
        await self.start_server()

    def on_failpoint(self, name: str) -> None:
        green = current_green()
        if green is not None:
            self.sites[green.process.name].on_failpoint(name)
        elif self._dying:
            raise Crashed
        elif self._full and name in ("spool.write", "pass.write"):
            self._full -= 1
            raise OSError(28, "no space left on device")
        elif self._crash_in and name in (self._crash_at, ""):
            self._crash_in -= 1
            if not self._crash_in:
                self.tell(f"the server is killed at {name}")
                self.counts[f"server at {name}"] += 1
                power, self._power_next = self._power_next, False
                if self.served is not None:
                    self.crash(power_loss=power)
                else:
                    self._dying = True  # while it starts
                raise Crashed

    # -- faults

    async def happen(self, fault: Fault) -> None:
        """Let a fault happen."""
        self.tell(f"fault: {fault.what} {fault.site} {fault.number:.3f}")
        self.counts[fault.what] += 1
        if fault.what in SITE_FAULTS:
            self._happen_at_site(fault, self.sites[fault.site])
        elif fault.what == "pause":
            await self.admin("pause_run", admin_messages.PauseRun(paused=True))
            self.loop.call_later(fault.number * 10, self._resume)
        elif fault.what == "roll back":
            await self._roll_back(fault.number)
        elif fault.what == "stop server":
            await self.restart("stop")
        elif fault.what == "disk full":
            self._full = 1 + int(fault.number * 5)
        elif fault.what == "kill server at":
            self._crash_at = SERVER_POINTS[int(fault.number * 1000) % len(SERVER_POINTS)]
            self._crash_in, self._power_next = 1 + int(fault.number * 60) % 2, fault.loses_power
        elif self.served is not None:
            is_power_loss = fault.what == "power loss"
            self._before = self.served.run.state if self.scenario.power or not is_power_loss else None
            self.crash(power_loss=is_power_loss)

    def _happen_at_site(self, fault: Fault, site: Site) -> None:
        later_s = fault.number * 2.5 * TIMEOUT_S
        match fault.what:
            case "kill site" | "power loss of site":
                site.kill(power_loss=fault.what != "kill site")
            case "kill site at":
                site.kill_in = 1 + int(fault.number * 12)
            case "rival" if site.process is not None:
                site.rival()
            case "freeze" if site.process is not None:
                site.process.frozen = True
                self.loop.call_later(later_s, site.process.thaw)
            case "cut off":
                self.network.away.add(site.name)
                self.loop.call_later(later_s, self.network.away.discard, site.name)
            case "leave":
                site.leaves_next = True

    def _resume(self) -> None:
        self.loop.create_task(self.admin("pause_run", admin_messages.PauseRun(paused=False)))

    async def admin(self, operation: str, message: Any) -> bool:
        """Ask the server what only its admin may. Return whether it has agreed."""
        served = self.served
        if served is None:
            return False
        try:
            await getattr(served.admin, operation)(message)
        except (Crashed, AtollError) as error:
            self.tell(f"the admin is refused: {operation}: {type(error).__name__}")
            return False
        return True

    async def _roll_back(self, number: float) -> None:
        served = self.served
        if served is None:
            return
        kept = [row.version for row in served.run.store.versions.kept(0)]
        await self.admin("roll_back", admin_messages.RollBack(version=kept[int(number * len(kept))]))

    async def _keep(self) -> None:
        """Start again what has ended: a killed site, a server that begins again."""
        while True:
            await asyncio.sleep(0.5)
            served = self.served
            if served is not None and served.begins_again:
                self.tell("the run begins again")
                await self.restart("begins again")
            elif served is not None and served.run.failed is not None:
                raise Violation(f"the server failed: {served.run.failed!r}")
            for site in self.sites.values():
                if site.process is None and not site.finished and self.loop.now_s >= site.away_until_s:
                    site.start()

    # -- the whole

    async def play(self) -> None:
        keeping = self.loop.create_task(self._keep())
        keeping.add_done_callback(self._on_end)
        await self.start_server()
        for fault in self.scenario.faults:
            await self._until(fault.at_s)
            await self.happen(fault)
        await self._until(self.scenario.heals_at_s)
        self._heal()
        await self._progress()
        if self.served is not None:
            self.checks.look(self.served.run)
        if self.scenario.ends or self.is_finished:
            await self._stop()
        keeping.cancel()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _until(self, at_s: float) -> None:
        if at_s > self.loop.now_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(at_s - self.loop.now_s):
                    await self._wake.wait()
        self._wake.clear()
        self._require_sound()

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.served is not None and self.served.run.state.finished

    def _require_sound(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _heal(self) -> None:
        self.tell("faults stop")
        self.network.faults = Faults(delay_s=0.02)
        self.network.away.clear()
        self._crash_in = self._full = 0
        for site in self.sites.values():
            site.kill_in, site.leaves_next, site.away_until_s = 0, False, 0.0
            if site.process is not None and site.process.frozen:
                site.process.thaw()

    async def _progress(self) -> None:
        """Once faults have stopped and all sites are there, each fragment gets a new version in time."""
        await self._wait_for(lambda: self.served is not None, "a server")
        self._resume()
        begun = dict(self.checks.newest)
        await self._wait_for(
            lambda: self.is_finished or all(self.checks.newest[index] > before for index, before in begun.items()),
            f"a version after {begun}",
        )

    async def _stop(self) -> None:
        now = self.chance.random() < 0.3
        if now:
            self.checks.may_expire.add(STOPPED)
        while not self.is_finished and not await self.admin("stop_run", admin_messages.StopRun(now=now)):
            await self._until(self.loop.now_s + 1.0)
        await self._wait_for(lambda: bool(self.served and self.served.run.finished.is_set()), "the end of the run")
        await self._wait_for(lambda: all(site.finished for site in self.sites.values()), "the end of all sites")
        assert self.served is not None
        self.checks.look(self.served.run)
        served, self.served = self.served, None
        served.run.send_away()
        await served.coordinator.stop()

    async def end(self) -> None:
        """End all that is left, so that nothing of this history runs in a later one."""
        for process in self.processes:
            process.kill()
        while not all(process.ended for process in self.processes):
            await asyncio.sleep(0)
        for process in self.processes:
            process.close()
        served, self.served, self._dying = self.served, None, True
        if served is not None:
            with contextlib.suppress(Crashed, Exception):
                await served.coordinator.stop()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    async def _wait_for(self, holds: Callable[[], bool], what: str) -> None:
        until_s = self.loop.now_s + END_S
        while not holds():
            if self.loop.now_s > until_s:
                state = self.served.run.state if self.served else None
                why = (
                    [state.why(index, self.loop.now_s) for index in range(len(state.rounds))] if state else "no server"
                )
                raise Violation(f"after {END_S:g} s without faults there is not {what}: {why}")
            await self._until(self.loop.now_s + 1.0)


# -- play


_made: dict[str, Any] = {}
_plan_of_values, _layouts_of, _split_in = AggregationPlan.of_values, Layouts.of, messages.SchemaMessage.split_in


def shared(make: Callable[..., Any], *given: Any, key: object = None) -> Any:
    """Return `make(*given)`, a value that never changes, and that all histories with the same `key` share.

    Args:
        key: what the value depends on; None: its text is that of `given`.
    """
    text = repr((make, given if key is None else key))
    if text not in _made:
        _made[text] = make(*given)
    return _made[text]


def shared_plan(values: PlanValues, split: Split, threads: int = 0) -> AggregationPlan:
    """Return the plan that all histories with these values share."""
    plan: AggregationPlan = shared(
        _plan_of_values, values, split, threads, key=(values, split.schema.digest, split.places, threads)
    )
    return plan


def shared_layouts(info: messages.RunInfo, schema: Schema, rank: int | None = None) -> Layouts:
    """Return the layouts that all histories with this codec share."""
    key = schema.digest, info.codec, info.codec_options, info.downlink_codec, info.downlink_codec_options, rank
    layouts: Layouts = shared(_layouts_of, info, schema, rank, key=key)
    return layouts


def shared_split(body: bytes | bytearray) -> Split:
    """Return the schema that all histories with this answer share."""
    split: Split = shared(_split_in, bytes(body))
    return split


_SQLITE = {name: getattr(sqlite3, name) for name in dir(sqlite3) if not name.startswith("__")}


@contextlib.contextmanager
def virtual_world(history: History) -> Iterator[None]:
    """Let the server and the workers use the history's clock, network and disk."""
    chance, loop, disks = random.Random(f"ids {history.scenario.seed}"), history.loop, history.disks
    databases = SimpleNamespace(**_SQLITE | {"connect": disks.connect})

    class Everything:
        def __contains__(self, name: str) -> bool:
            history.on_failpoint(name)
            return False

    replaced: list[tuple[Any, str, Any]] = []
    try:
        for target, name, value in (
            (time, "monotonic", loop.time),
            (uuid, "uuid4", lambda: uuid.UUID(int=chance.getrandbits(128))),
            (runtime, "_actions", Everything()),
            (audit_log, "_BOOT_ID", history.folder / "boot_id"),
            (journal, "sqlite3", databases),
            (journal, "require_unchanged", no_damage),
            (journal_tables, "write_checksums", no_checksums),
            (journal_tables, "row_check", no_checksum),
            (journal.Journal, "checkpoint", lambda self, *_: disks.checkpoint(self.path)),
            (journal.os, "fsync", disks.fsync),
            (run_core, "ThreadPoolExecutor", InlineExecutor),
            (persistors, "ThreadPoolExecutor", InlineExecutor),
            (make_version, "run_jobs", run_jobs),
            (AggregationPlan, "of_values", shared_plan),
            (Layouts, "of", shared_layouts),
            (messages.SchemaMessage, "split_in", shared_split),
            (session, "threading", GreenThreading),
            (session, "Latch", GreenEvent),
            (session, "OWN_RANDOM", random.Random(f"pauses {history.scenario.seed}")),
            (session, "watch_exit", lambda joined: None),
            (session, "has_left", lambda joined: None),
            (session, "command_sees_end", lambda: False),
            (participation, "http_to", http_to),
            (synchroniser, "threading", GreenThreading),
            (synchroniser, "Latch", GreenEvent),
            (Exchange, "form", form),
            (part_transfer, "PartConnection", VirtualConnection),
            (part_transfer, "ThreadPoolExecutor", GreenExecutor),
            (part_transfer, "wait", wait_for_all),
        ):
            replaced.append((target, name, vars(target)[name]))
            setattr(target, name, value)
        os.environ["ATOLL_NEW_STATE"] = "1"  # only SCAFFOLD's sites read it
        NETWORK.append(history.network)
        yield
    finally:
        NETWORK.clear()
        os.environ.pop("ATOLL_NEW_STATE", None)
        for target, name, value in reversed(replaced):
            setattr(target, name, value)


def play(seed: int | Scenario) -> Told:
    """Play the history of a seed.

    Raises:
        Violation: an invariant does not hold.
    """
    scenario = seed if isinstance(seed, Scenario) else Scenario.of(seed)
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="history-", dir=base) as name:
        history = History(scenario, Path(name))
        try:
            with virtual_world(history):
                history.loop.set_exception_handler(lambda loop, context: on_error(history, context))
                try:
                    history.loop.run_until_complete(history.play())
                finally:
                    history.loop.run_until_complete(history.end())
        except BaseException as error:
            error.told = history.told  # type: ignore[attr-defined]
            raise
        finally:
            history.loop.close()
            history.disks.end()
    return history.told


def on_error(history: History, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if error is not None and not isinstance(error, Crashed | asyncio.CancelledError | Killed):
        history._fail(error)
