"""One history: what a seed decides, the server, its sites, and the faults.

    told = play(7)              # raises Violation
    print("\n".join(told.trace))

A seed decides all of it: the kind of run, the network, who is killed when, and how long everything takes. So each
history can be played again, to the same trace.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from unittest import mock

import torch

from atoll import runtime
from atoll.aggregation import make_version
from atoll.errors import AtollError, Conflict, Gone, Superseded, UpdateRefused
from atoll.protocol import admin_messages, messages, run_events
from atoll.protocol.messages import Report
from atoll.protocol.values import Accepted, Finished, Lost, Open, Refused, TooLate, VersionGone, require
from atoll.rounds.machine import STOPPED
from atoll.rounds.state import State
from atoll.server.assemble_run import UserCode, assemble
from atoll.server.coordinator import persistor as persistors
from atoll.server.coordinator import run_core
from atoll.server.coordinator.persistor import Persistor
from atoll.server.coordinator.served_run import ServedRun
from atoll.server.startup import open_run, settings_beside
from atoll.server.tasks.task_payloads import TaskFilters
from atoll.store import audit_log, journal
from atoll.transport import part_transfer
from atoll.worker.exchange import participation
from atoll.worker.exchange.participation import LoopTerms, Participation, take_part
from atoll.worker.session import session
from atoll.worker.training.round_backends import ServerBackend
from harness.histories.checks import Checks, Formed, Violation, as_arrays
from harness.histories.disk import Disks, copy, lose_power_at_site
from harness.histories.network import NETWORK, Faults, Network, VirtualConnection, answer, http_to
from harness.histories.virtual_loop import (
    GreenEvent,
    GreenExecutor,
    GreenThreading,
    InlineExecutor,
    Killed,
    Process,
    VirtualLoop,
    current_green,
    run_jobs,
    sleep,
    wait_for_all,
)

ADDRESS = "http://127.0.0.1:8476"
LR, MOMENTUM = 0.7, 0.9
HEARTBEAT_S, TIMEOUT_S = 3.0, 9.0
END_S = 240.0
"""Virtual seconds within which a run without further faults makes a version, and within which it ends."""


class Crashed(BaseException):
    """The server was killed at this instruction."""


@dataclass(frozen=True)
class Fault:
    """Something that happens at a time: `what` to `site`; `number` says how."""

    at_s: float
    what: str
    site: str = ""
    number: float = 0.0


KINDS = ("barrier", "quorum", "async", "buffered", "fragments")
SERVER_POINTS = ("accept.before", "accept.after", "head.before", "head.after", "journal.commit", "spool.write")
SITE_FAULTS = ("kill site", "kill site at", "power loss of site", "freeze", "rival", "cut off", "leave")
SERVER_FAULTS = ("kill server", "kill server at", "power loss", "stop server", "disk full")
OF_THE_ADMIN = ("pause", "roll back")


@dataclass(frozen=True)
class Scenario:
    """What a seed decides before anything happens."""

    seed: int
    kind: str
    sites: tuple[str, ...]
    power: bool
    large: bool
    wire: Faults
    faults: tuple[Fault, ...]
    settings: dict[str, Any]
    heals_at_s: float
    ends: bool

    @classmethod
    def of(cls, seed: int) -> Scenario:
        chance = random.Random(f"scenario {seed}")
        kind = chance.choice(KINDS)
        sites = tuple("abcd"[: chance.choice((2, 2, 2, 3, 3, 4))])
        heals_at_s = chance.uniform(2.0, 9.0)
        wire = Faults(
            delay_s=chance.choice((0.01, 0.05, 0.4)),
            lost=chance.choice((0.0, 0.0, 0.02, 0.1)),
            twice=chance.choice((0.0, 0.05)),
            flipped=chance.choice((0.0, 0.05)),
        )
        quorum = chance.randint(1, len(sites))
        settings: dict[str, Any] = {
            "algorithm.name": "fedavg",
            "rounds.sites": chance.randint(1, len(sites)),
            "rounds.total": 0,
        }
        if kind == "quorum":
            settings |= {"rounds.quorum": quorum, "rounds.deadline_s": chance.uniform(2.0, 15.0)}
            settings["rounds.sites"] = max(settings["rounds.sites"], quorum)
        elif kind == "barrier":
            settings |= {"rounds.min_sites": min(quorum, settings["rounds.sites"])}
        elif kind in ("async", "buffered"):
            settings |= {
                "async.enabled": True,
                "async.staleness_weight": chance.choice(("constant", "inverse_sqrt")),
                "async.max_staleness": chance.choice((None, None, 1, 3)),
            }
            if kind == "buffered":
                settings |= {"async.buffer_size": 2, "async.grace_s": chance.choice((0.0, 3.0))}
        elif kind == "fragments":
            settings |= {"algorithm.name": "diloco", "diloco.num_fragments": 2, "diloco.sync_every": 4}
        power = chance.random() < 0.5
        faults = [
            Fault(
                round(chance.uniform(0.5, heals_at_s), 3),
                chance.choice(chance.choice((SITE_FAULTS, SITE_FAULTS, SERVER_FAULTS, SERVER_FAULTS, OF_THE_ADMIN))),
                chance.choice(sites),
                chance.random(),
            )
            for _ in range(chance.choice((1, 1, 2, 2, 3, 4)))
        ]
        return cls(
            seed,
            kind,
            sites,
            power,
            chance.random() < 0.05,
            wire,
            tuple(sorted(faults, key=lambda fault: fault.at_s)),
            settings,
            heals_at_s,
            ends=chance.random() < 0.3,
        )

    @property
    def is_async(self) -> bool:
        return self.kind in ("async", "buffered")

    @property
    def quorum(self) -> int:
        return int(self.settings.get("rounds.quorum") or self.settings.get("rounds.min_sites") or 1)

    def all_settings(self, folder: Path) -> dict[str, Any]:
        return self.settings | {
            "algorithm.outer_optimizer.name": "sgd",
            "algorithm.outer_optimizer.lr": LR,
            "algorithm.outer_optimizer.momentum": MOMENTUM,
            "algorithm.outer_optimizer.nesterov": False,
            "aggregation.upload_codec.name": "none",
            "aggregation.max_weight": 1000.0,
            "network.heartbeat_interval_s": HEARTBEAT_S,
            "network.heartbeat_timeout_s": TIMEOUT_S,
            "network.part_bytes": 2**16,
            "disk.min_free_bytes": 0,
            "disk.durability": "power" if self.power else "process",
            "disk.state_dir": folder,
            "run.threads": 1,
        }

    def model(self) -> dict[str, torch.Tensor]:
        count = 17_000 if self.large else 6  # in two parts, or in one
        return {"w": torch.arange(count, dtype=torch.float32) / 8, "b": torch.ones(3)}


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


# -- a site


class Site:
    """A site, through all its processes: its folder, and the process that takes part now."""

    def __init__(self, history: History, name: str) -> None:
        self.history, self.name, self.starts = history, name, 0
        self.chance = random.Random(f"site {name} {history.scenario.seed}")
        self.folder = history.folder / f"site-{name}-0"
        self.process: Process | None = None
        self.trained = 0
        # where a round needs all sites, one that sits out would hold it up for as long as it likes
        self.sits_out = name == history.scenario.sites[-1] and history.scenario.quorum < len(history.scenario.sites)
        self.kill_in = 0  # failpoints until this site is killed
        self.leaves_next = False
        self.finished = False

    def start(self) -> None:
        """Begin a process of the site, in its folder."""
        self.starts += 1
        history, process = self.history, Process(self.name, self.history.loop)
        folder = self.folder
        self.process = process
        history.processes.append(process)
        self.leaves_next = False
        history.tell(f"{self.name} starts")
        process.spawn(lambda: self._live(process, folder))

    def kill(self, *, power_loss: bool = False) -> None:
        """End the process as SIGKILL does, or a loss of power: only its folder stays."""
        if self.process is None or self.process.ended:
            return
        before, self.folder = self.folder, self.history.folder / f"site-{self.name}-{self.starts}"
        if before.exists():
            copy(before, self.folder)
            if power_loss:
                lose_power_at_site(self.folder, self.chance)
        self.process.kill()
        self.process = None

    def rival(self) -> None:
        """Another process takes part under this name, from a folder of its own. The older one has to end."""
        self.folder = self.history.folder / f"site-{self.name}-{self.starts}"
        self.start()

    def on_failpoint(self, name: str) -> None:
        green = current_green()
        assert green is not None
        if name == "outbox.sealed":
            self._note_formed(green.process)
        if green.process is self.process and self.kill_in and not name.startswith(("worker.write",)):
            self.kill_in -= 1
            if not self.kill_in:
                self.history.tell(f"{self.name} is killed at {name}")
                self.history.told.counts[f"site at {name}"] += 1
                self.kill()
                raise Killed

    def _note_formed(self, process: Process) -> None:
        for exchange in process.part.exchanges:  # type: ignore[attr-defined]
            if (note := exchange.outbox.note) is not None and process.forming is not None:
                self.history.checks.formed.setdefault((self.name, note.digest), process.forming)

    # -- in its process

    def _live(self, process: Process, folder: Path) -> None:
        history, why = self.history, "ended"
        part: Participation | None = None
        try:
            is_loop = history.scenario.kind == "fragments"
            part = take_part(ADDRESS, self.name, folder=folder, loop=LoopTerms() if is_loop else None)
            process.part, process.forming = part, None  # type: ignore[attr-defined]
            (self._train_fragments if is_loop else self._train)(part)
            self.finished = part.session.finished
            part.leave()
        except Superseded:
            why = "was superseded"
        except UpdateRefused:
            why = "was refused too often"
        except AtollError as error:
            why = f"failed: {type(error).__name__}: {error}"
            raise Violation(f"site {self.name} {why}") from error
        finally:
            if not process.killed:
                if part is not None and why != "ended":
                    with contextlib.suppress(AtollError):
                        part.leave(why)
                history.tell(f"{self.name} {why}{' with the run' if self.finished else ''}")
                if self.process is process:
                    self.process = None

    def _train(self, part: Participation) -> None:
        backend = ServerBackend(part)
        tensors = {name: torch.zeros_like(value) for name, value in self.history.model.items()}
        while not self.leaves_next:
            reply = backend.next_round(None)
            if isinstance(reply, Finished):
                part.session.finished = True
                return
            if not isinstance(reply, Open):
                continue
            ticket = backend.pull(reply.ticket, lambda _: tensors)
            if self.sits_out and self.chance.random() < 0.15:
                backend.sit_out(ticket, Report(weight=0.0))
                continue
            backend.submit(ticket, tensors, self._step(tensors), None, ())

    def _train_fragments(self, part: Participation) -> None:
        """Synchronise one fragment after another, as DiLoCo does, but with steps that take no time."""
        whole = {name: torch.zeros_like(value) for name, value in self.history.model.items()}
        finished, due = set[int](), part.session.due
        for exchange in part.exchanges:
            exchange.recover()
        while not self.leaves_next and len(finished) < len(part.exchanges):
            exchange = part.exchanges[due]
            due = (due + 1) % len(part.exchanges)
            reply = require(exchange.ask_and_resend(8.0))
            if isinstance(reply, Finished):
                finished.add(exchange.fragment)
            if not isinstance(reply, Open):
                continue
            tensors = {spec.name: whole[spec.name] for spec in exchange.local.layouts.schema.tensors}
            if isinstance(require(exchange.pull(reply.ticket.base, tensors)), VersionGone):
                continue
            report = self._step(tensors)
            if require(exchange.is_over(reply.ticket)):
                continue
            match exchange.submit(reply.ticket, tensors, report):
                case Refused() as refusal:
                    exchange.refused(refusal)
                case Lost(error):
                    raise error
                case Accepted() | TooLate():
                    exchange.forget_outbox_progress()
        part.session.finished = len(finished) == len(part.exchanges)

    def _step(self, tensors: dict[str, torch.Tensor]) -> Report:
        """Train for a while. The update is noted as what this site forms next."""
        sleep(self.chance.choice((0.5, 3.0, 6.0)) * self.chance.random())
        base = as_arrays(tensors, tensors)
        self.trained += 1
        sound = self.chance.random() > 0.06
        for name, value in tensors.items():
            value += self.chance.randint(-16, 16) / 8 + self.trained / 1024
            if not sound:
                value[0] = float("nan")
        weight, steps = self.chance.choice((1.0, 2.0, 3.5)), self.chance.randint(1, 5)
        after = as_arrays(tensors, tensors)
        values = {name: base[name] - after[name] for name in base}
        green = current_green()
        green.process.forming = Formed(self.name, values, weight, steps, sound)
        return Report(weight=weight, steps=steps)


# -- the history


class History:
    """A server and its sites, until the run has ended."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder, self.told = scenario, folder, Told(scenario)
        self.chance = random.Random(f"history {scenario.seed}")
        slow = random.Random(f"threads {scenario.seed}")
        self.loop = VirtualLoop(lambda: slow.expovariate(50.0))
        self.network = Network(self.loop, random.Random(f"network {scenario.seed}"), replace(scenario.wire), self.serve)
        self.disks = Disks(power=scenario.power)
        self.model = scenario.model()
        self.sites = {name: Site(self, name) for name in scenario.sites}
        self.checks = Checks(scenario.quorum, scenario.is_async, TIMEOUT_S, LR, MOMENTUM)
        self.processes: list[Process] = []
        self.served: ServedRun | None = None
        self.failure: BaseException | None = None
        (folder / "boot_id").write_text("0")
        self.state_dir, self._starts = folder / "server-0", 0
        self._crash_in, self._crash_at, self._dying, self._full = 0, "", False, 0
        self._power_next = False
        self._finish_copy: Callable[[], None] = lambda: None
        self._before: State | None = None
        self._wake = asyncio.Event()

    def tell(self, text: str) -> None:
        self.told.trace.append(f"{self.loop.now_s:9.3f} {text}")

    # -- the server

    async def start_server(self) -> None:
        settings = settings_beside("Server", self.scenario.all_settings(self.state_dir)).with_absolute_folders()
        persistor, self._starts = Persistor(settings), self._starts + 1
        while True:
            try:
                opened = open_run(settings, dict(self.model), persistor)
                break
            except Crashed:  # during recovery
                self._copy_state(power_loss=False)
                self._dying = False
                self._finish_copy()
                settings = settings_beside("Server", self.scenario.all_settings(self.state_dir)).with_absolute_folders()
        served = assemble(opened, UserCode(persistor, TaskFilters(settings)), clock=self.clock)
        served.coordinator.start(ADDRESS)
        self.served = served
        self.checks.now_s = self.loop.now_s
        self.tell(f"the server starts with {served.run.store.versions.heads()}")
        self.checks.started(served.run, self._before)
        self._before = None
        served.run.events.subscribe("the history", lambda event: self._on_event(served, event), self._fail)

    def clock(self) -> float:
        return self.loop.now_s

    def _on_event(self, served: ServedRun, event: run_events.Happened) -> None:
        if served is not self.served:
            return
        self.checks.now_s = self.loop.now_s
        self.checks.on_event(served.run, event)
        if isinstance(event, run_events.RoundEnded):
            self.told.counts["versions" if event.summary.version is not None else "sat out"] += 1
            sites = ",".join(each.site for each in event.summary.sites)
            self.tell(f"version {event.summary.version} of fragment {event.fragment} from {sites}")
        elif not isinstance(event, run_events.TicketIssued | run_events.UpdateAccepted):
            self.told.counts[type(event).__name__] += 1

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._wake.set()

    async def serve(self, site: str, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """Carry out a request at the server that is there when it arrives."""
        served = self.served
        if served is None:
            raise ConnectionRefusedError("no server")
        arrived_s = self.loop.now_s
        try:
            status, data = await answer(served, method, path, headers, body)
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
            self._check_answer(served, site, arrived_s, method, path, headers, status, data)
        except Exception as error:
            self._fail(error)
        self.tell(f"{site} {method} {path} {status}")
        return status, data

    def _check_answer(
        self,
        served: ServedRun,
        site: str,
        arrived_s: float,
        method: str,
        path: str,
        headers: dict[str, str],
        status: int,
        data: bytes,
    ) -> None:
        lease = headers.get("Atoll-Lease", "")
        if status >= 400:
            self.told.counts[f"status {status}"] += 1
            return
        if path.endswith("/workers"):
            self.checks.joined(site, messages.Joined.model_validate_json(data))
        elif lease:
            self.checks.asked(site, arrived_s)
        if (path.endswith("/complete") or (method == "PUT" and data)) and status == 200:
            ticket = int(path.split("/")[3])
            receipt = messages.Receipt.model_validate_json(data)
            self.told.counts["receipts"] += 1
            self.checks.receipted(served.run, lease, ticket, receipt.digest)

    def crash(self, *, power_loss: bool = False) -> None:
        """Kill the server now. What it does until its tasks have ended reaches neither its disk nor a site."""
        served, self.served = self.served, None
        if served is None:
            return
        self._crash_in, self._dying = 0, True
        self._copy_state(power_loss=power_loss)
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
        self._before = served.run.state if why == "stop" else None
        served.run.send_away()
        await served.coordinator.stop(begins_again=False)
        self._copy_state(power_loss=False)
        self._finish_copy()
        if why == "begins again":
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
                self.told.counts[f"server at {name}"] += 1
                power, self._power_next = self._power_next, False
                if self.served is not None:
                    self.crash(power_loss=power)
                else:
                    self._dying = True  # while it starts
                raise Crashed

    # -- faults

    async def happen(self, fault: Fault) -> None:
        site = self.sites.get(fault.site)
        self.tell(f"fault: {fault.what} {fault.site} {fault.number:.3f}")
        self.told.counts[fault.what] += 1
        assert site is not None
        match fault.what:
            case "kill server" | "power loss":
                if self.served is not None:
                    if not (fault.what == "power loss" and not self.scenario.power):
                        self._before = self.served.run.state
                    self.crash(power_loss=fault.what == "power loss")
            case "kill server at":
                self._crash_at = SERVER_POINTS[int(fault.number * 1000) % len(SERVER_POINTS)]
                self._crash_in, self._power_next = 1 + int(fault.number * 60) % 2, fault.number > 0.7
            case "stop server":
                await self.restart("stop")
            case "disk full":
                self._full = 1 + int(fault.number * 5)
            case "kill site" | "power loss of site":
                site.kill(power_loss=fault.what != "kill site")
            case "kill site at":
                site.kill_in = 1 + int(fault.number * 12)
            case "rival":
                if site.process is not None:
                    site.rival()
            case "freeze" if site.process is not None:
                site.process.frozen = True
                self.loop.call_later(fault.number * 2 * TIMEOUT_S, site.process.thaw)
            case "cut off":
                self.network.away.add(site.name)
                self.loop.call_later(fault.number * 2 * TIMEOUT_S, self.network.away.discard, site.name)
            case "leave":
                site.leaves_next = True
            case "pause":
                await self.admin("pause_run", admin_messages.PauseRun(paused=True))
                self.loop.call_later(fault.number * 10, self._resume)
            case "roll back":
                await self._roll_back(fault.number)

    def _resume(self) -> None:
        self.loop.create_task(self.admin("pause_run", admin_messages.PauseRun(paused=False)))

    async def admin(self, operation: str, message: Any) -> bool:
        """Ask the server what only its admin may. Return whether it has agreed."""
        served = self.served
        if served is None:
            return False
        try:
            await getattr(served.admin, operation)(message)
        except (Conflict, Gone, Crashed, AtollError) as error:
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
                if site.process is None and not site.finished and self.chance.random() < 0.3:
                    site.start()

    # -- the whole

    async def play(self) -> None:
        keeping = self.loop.create_task(self._keep())
        keeping.add_done_callback(
            lambda task: None if task.cancelled() else self._fail(task.exception() or Violation("ended"))
        )
        await self.start_server()
        for site in self.sites.values():
            self.loop.call_later(self.chance.choice((0.0, 0.5, 6.0)), lambda site=site: site.process or site.start())
        for fault in self.scenario.faults:
            await self._until(fault.at_s)
            await self.happen(fault)
        await self._until(self.scenario.heals_at_s)
        self._heal()
        await self._progress()
        if self.served is not None:
            self.checks.look(self.served.run)
        if self.scenario.ends:
            await self._stop()
        keeping.cancel()

    async def _until(self, at_s: float) -> None:
        if at_s > self.loop.now_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(at_s - self.loop.now_s):
                    await self._wake.wait()
        self._require_sound()

    def _require_sound(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _heal(self) -> None:
        self.tell("faults stop")
        self.network.faults = Faults(delay_s=0.02)
        self.network.away.clear()
        self._crash_in = self._full = 0
        for site in self.sites.values():
            site.kill_in, site.leaves_next = 0, False
            if site.process is not None and site.process.frozen:
                site.process.thaw()

    async def _progress(self) -> None:
        """Once faults have stopped and all sites are there, each fragment gets a new version in time."""
        await self._wait_for(lambda: self.served is not None, "a server")
        self._resume()
        begun = dict(self.checks.newest)
        await self._wait_for(
            lambda: all(self.checks.newest[fragment] > before for fragment, before in begun.items()),
            f"a version after {begun}",
        )

    async def _stop(self) -> None:
        now = self.chance.random() < 0.3
        if now:
            self.checks.may_expire.add(STOPPED)
        while not await self.admin("stop_run", admin_messages.StopRun(now=now)):
            await self._until(self.loop.now_s + 1.0)
        await self._wait_for(
            lambda: self.served is not None and self.served.run.finished.is_set(), "the end of the run"
        )
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
                run = self.served and self.served.run
                why = (
                    [run.state.why(index, run.clock()) for index in range(len(run.state.rounds))]
                    if run
                    else "no server"
                )
                raise Violation(f"after {END_S:g} s without faults there is not {what}: {why}")
            await self._until(self.loop.now_s + 1.0)


# -- play


@contextlib.contextmanager
def virtual_world(history: History) -> Iterator[None]:
    """Let the server and the workers use the history's clock, network and disk."""
    chance, loop, disks = random.Random(f"ids {history.scenario.seed}"), history.loop, history.disks
    real_fsync = lambda fd: disks.fsync(fd)  # noqa: E731
    databases = SimpleNamespace(**{name: getattr(sqlite3, name) for name in dir(sqlite3) if not name.startswith("__")})
    databases.connect = disks.connect

    class Everything:
        def __contains__(self, name: str) -> bool:
            history.on_failpoint(name)
            return False

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (time, "monotonic", loop.time),
            (uuid, "uuid4", lambda: uuid.UUID(int=chance.getrandbits(128))),
            (runtime, "_actions", Everything()),
            (audit_log, "_BOOT_ID", history.folder / "boot_id"),
            (journal, "sqlite3", databases),
            (journal.Journal, "checkpoint", lambda self, *_: disks.checkpoint(self.path)),
            (journal.os, "fsync", real_fsync),
            (run_core, "ThreadPoolExecutor", InlineExecutor),
            (persistors, "ThreadPoolExecutor", InlineExecutor),
            (make_version, "run_jobs", run_jobs),
            (session, "threading", GreenThreading),
            (session, "Latch", GreenEvent),
            (session, "OWN_RANDOM", random.Random(f"pauses {history.scenario.seed}")),
            (session, "watch_exit", lambda joined: None),
            (session, "has_left", lambda joined: None),
            (session, "command_sees_end", lambda: False),
            (participation, "http_to", http_to),
            (part_transfer, "PartConnection", VirtualConnection),
            (part_transfer, "ThreadPoolExecutor", GreenExecutor),
            (part_transfer, "wait", wait_for_all),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        NETWORK.append(history.network)
        stack.callback(NETWORK.pop)
        yield


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
    return history.told


def on_error(history: History, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if error is not None and not isinstance(error, Crashed | asyncio.CancelledError | Killed):
        history._fail(error)
