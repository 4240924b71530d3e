"""A site of a history: its processes, one after another, with the worker's own code, and what they train."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from atoll.errors import AtollError, Superseded, UpdateRefused
from atoll.protocol.messages import Report, Ticket, VersionRef
from atoll.protocol.values import Accepted, Finished, Lost, Open, Refused, TooLate, VersionGone, require
from atoll.tensors.module_tensors import Tensors
from atoll.tensors.schema import extra_name
from atoll.worker.exchange import encode_update
from atoll.worker.exchange.encode_update import Finish
from atoll.worker.exchange.exchange import Exchange
from atoll.worker.exchange.local_state import Residuals
from atoll.worker.exchange.participation import LoopTerms, Participation, take_part
from atoll.worker.training.fragment_order import SyncRules
from atoll.worker.training.metrics import GlobalModelMetrics
from atoll.worker.training.round_backends import ServerBackend
from atoll.worker.training.submitted_groups import given_groups
from atoll.worker.training.synchroniser import Synchroniser
from harness.histories.checks import Checks, Formed, Values, Violation, as_arrays
from harness.histories.disk import copy, lose_power_at_site
from harness.histories.scenario import MOST_STEPS, MOST_WEIGHT, TIMEOUT_S, Scenario
from harness.histories.virtual_loop import Killed, Process, VirtualLoop, current_green, sleep

ADDRESS = "http://127.0.0.1:8476"


class World(Protocol):
    """What a site knows of its history."""

    scenario: Scenario
    folder: Path
    loop: VirtualLoop
    checks: Checks
    counts: Counter[str]
    processes: list[SiteProcess]

    @property
    def is_healed(self) -> bool:
        """Whether faults have stopped."""

    def tell(self, text: str) -> None:
        """Add a line to the trace."""


class SiteProcess(Process):
    """A process of a site.

    Attributes:
        part: its participation, once it has joined.
        forming: the update that it forms next or has formed last.
        control: the change of SCAFFOLD's control variate in that update; None with other algorithms.
        forming_in: the exchange that forms it, and the ticket; None once it is noted.
        sees_base: returns the update that is formed, if the loop that forms it is Atoll's own.
        steps: number of local steps so far.
    """

    part: Participation | None = None
    forming: Formed | None = None
    control: Values | None = None
    forming_in: tuple[Exchange, int] | None = None
    sees_base: Callable[[Ticket, Tensors, Report], Formed] | None = None
    steps = 0

    def close(self) -> None:
        """Close the files of a process that was killed, as the system does."""
        if self.part is not None:
            with contextlib.suppress(Exception):  # it may wait for a thread, but none is left
                self.part.session.cleanup.close()


_form = Exchange.form


def form(exchange: Exchange, ticket: Ticket, tensors: Tensors, report: Report, **more: Any) -> encode_update.Formed:
    """Do what `Exchange.form` does, and note which update the process forms."""
    process = own_process()
    process.forming_in = exchange, ticket.id
    if process.sees_base is not None:
        process.forming = process.sees_base(ticket, tensors, report)
    return _form(exchange, ticket, tensors, report, **more)


def residuals_of(state: Residuals) -> tuple[Values, Values]:
    """What the codec had lost before the update that was just formed, and what it has lost with it."""
    now, names = state.note.current, list(state._segments)
    both = (
        {name: state._files[file].values(state._segments[name], 0, state._segments[name].spec.numel) for name in names}
        for file in (now, 1 - now)
    )
    before, after = (as_arrays(values, names) for values in both)
    return before, after


def own_process() -> SiteProcess:
    """Return the process that runs now: a site may have two at a time."""
    green = current_green()
    assert green is not None
    assert isinstance(green.process, SiteProcess)
    return green.process


class Site:
    """A site, through all its processes: its folder, and the process that takes part now."""

    def __init__(self, history: World, name: str) -> None:
        self.history, self.name, self.starts = history, name, 0
        self.chance = random.Random(f"site {name} {history.scenario.seed}")
        self.folder = history.folder / f"site-{name}-0"
        self.process: SiteProcess | None = None
        self.trained = 0
        # where a round needs all sites, one that sits out would hold it up for as long as it likes
        self.sits_out = name == history.scenario.sites[-1] and history.scenario.quorum < len(history.scenario.sites)
        self.kill_in = 0  # failpoints until this site is killed
        self.leaves_next = False
        self.finished = False
        self.own_weight = self.chance.choice((1.0, 2.0, 3.5))
        self.away_until_s = self.chance.choice((0.0, 0.5, 2.5))

    def start(self) -> None:
        """Begin a process of the site, in its folder."""
        self.starts += 1
        history, process = self.history, SiteProcess(self.name, self.history.loop)
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
        self.gone()

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
                self.history.counts[f"site at {name}"] += 1
                self.kill()
                raise Killed

    def _note_formed(self, process: Process) -> None:
        assert isinstance(process, SiteProcess)
        exchange, ticket = process.forming_in or (None, 0)
        formed = process.forming
        if exchange is None or formed is None or exchange.outbox.note is None or exchange.outbox.note.ticket != ticket:
            return  # an update that was formed before is sealed again, for another ticket
        process.forming_in = None
        if (residuals := exchange.local.residuals) is not None:
            carried, left = residuals_of(residuals)
            values = {name: value + carried[name] - left[name] for name, value in formed.values.items()}
            formed = replace(formed, values=values, carried=carried, left=left)
        self.history.checks.has_formed(exchange.outbox.note.digest, formed)

    # -- in its process

    def _live(self, process: SiteProcess, folder: Path) -> None:
        history, why = self.history, "ended"
        part: Participation | None = None
        try:
            kind = history.scenario.kind
            is_loop = kind in ("fragments", "streaming")
            part = take_part(ADDRESS, self.name, folder=folder, loop=LoopTerms() if is_loop else None)
            process.part = part
            train = {"fragments": self._train_fragments, "streaming": self._train_streaming}.get(kind, self._train)
            train(part)
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
                    self.gone()

    def gone(self) -> None:
        """The process has ended. Another one begins later, perhaps after the lease has ended."""
        self.process = None
        away_s = self.chance.choice((0.5, 0.5, 2.0 * TIMEOUT_S)) * self.chance.random()
        self.away_until_s = self.history.loop.now_s + away_s

    def _train(self, part: Participation) -> None:
        backend = ServerBackend(part)
        tensors = {name: torch.zeros_like(value) for name, value in self.history.scenario.model().items()}
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
            finish = self._controls(backend, ticket.base.number) if backend.local.groups else None
            backend.submit(ticket, tensors, self._step(tensors), finish, ())

    def _controls(self, backend: ServerBackend, version: int) -> Finish:
        """Draw how SCAFFOLD's control variate changes. What the site has of it so far has to be what counted."""
        mine = backend.own_state("control")
        self.history.checks.trains_with(
            self.name, version, {extra_name("control", name): as_arrays(mine, [name])[name] for name in mine}
        )
        change = {name: torch.full_like(value, self.chance.randint(-16, 16) / 8) for name, value in mine.items()}
        own_process().control = {extra_name("control", name): as_arrays(change, [name])[name] for name in change}
        local = backend.local
        assert local.rule is not None
        return given_groups({"control": change}, local.groups, local.algorithm_state, local.rule.state_groups)

    def _train_fragments(self, part: Participation) -> None:
        """Synchronise one fragment after another, as DiLoCo does, but with steps that take no time."""
        whole = {name: torch.zeros_like(value) for name, value in self.history.scenario.model().items()}
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

    def _train_streaming(self, part: Participation) -> None:
        """Train as DiLoCo does, with the package's own loop, and with steps that add to all tensors."""
        process, session = own_process(), part.session
        tensors = {name: torch.zeros_like(value) for name, value in self.history.scenario.model().items()}
        process.sees_base = self._formed_in_streaming
        rules = SyncRules.of(session.info, session.info.sync_every)
        unmeasured = GlobalModelMetrics(None, lambda: self.name)
        sync = Synchroniser(
            session, part.exchanges, lambda: tensors, rules, self._report_in_streaming, unmeasured, max_retries=3
        )
        try:
            sync.start()
            while not self.leaves_next and not sync.finished:
                sleep((0.2 if self.history.is_healed else self.chance.choice((0.2, 0.5, 2.0))) * self.chance.random())
                process.steps += 1
                self._add(tensors, "nan" if self.chance.random() < 0.02 else "")
                if sync.begins(process.steps):
                    sync.after_step(process.steps)
            sync.drain()
        except BaseException:
            sync.abandon()
            raise
        session.finished = sync.finished

    def _report_in_streaming(self, base: VersionRef, steps: int) -> Report:
        weight = 2 * MOST_WEIGHT if self.chance.random() < 0.03 else self.chance.choice((1.0, 2.0, 3.5))
        if self.sits_out and self.chance.random() < 0.15:
            weight = 0.0
        return Report(weight=weight, steps=steps)

    def _formed_in_streaming(self, ticket: Ticket, tensors: Tensors, report: Report) -> Formed:
        """The update of these tensors: the difference from the version that its ticket names."""
        base = self.history.checks.of_digest[ticket.base.digest].stored
        values = {name: base[name] - value for name, value in as_arrays(tensors, tensors).items()}
        is_sound = report.weight <= MOST_WEIGHT and all(np.isfinite(value).all() for value in values.values())
        process = own_process()
        return Formed(
            *(self.name, values, report.weight, report.steps, is_sound),
            made=(process, process.steps),
            included=-Formed.last_of(values),
        )

    def _add(self, tensors: dict[str, torch.Tensor], wrong: str) -> None:
        """Train one step: each last element counts the steps."""
        self.trained += 1
        for value in tensors.values():
            value[:-1] += self.chance.randint(-16, 16) / 8 + self.trained / 1024
            value[-1] += 1.0
            if wrong == "nan":
                value[0] = float("nan")

    def _step(self, tensors: dict[str, torch.Tensor]) -> Report:
        """Train for a while. The update is noted as what this site forms next."""
        most_s = 0.5 if self.history.is_healed else self.chance.choice((0.5, 3.0, 7.0))
        sleep(most_s * self.chance.random())
        base = as_arrays(tensors, tensors)
        self.trained += 1
        wrong = self.chance.choice(("nan", "weight", "steps")) if self.chance.random() < 0.06 else ""
        kind = self.history.scenario.kind
        if (wrong == "steps" and kind != "fednova") or (wrong == "weight" and kind == "scaffold"):
            wrong = "nan"  # only FedNova divides by steps, and SCAFFOLD's server takes the site's first weight
        for value in tensors.values():
            value += self.chance.randint(-16, 16) / 8 + self.trained / 1024
            if wrong == "nan":
                value[0] = float("nan")
        weight, steps = self.chance.choice((1.0, 2.0, 3.5)), self.chance.randint(1, 5)
        process = own_process()
        if process.control:  # SCAFFOLD's shares are those of the sites' first updates
            weight = self.own_weight
        weight = 2 * MOST_WEIGHT if wrong == "weight" else weight
        steps = 2 * MOST_STEPS if wrong == "steps" else steps
        after = as_arrays(tensors, tensors)
        values = {name: base[name] - after[name] for name in base}
        process.forming = Formed(self.name, values, weight, steps, not wrong, process.control or {})
        return Report(weight=weight, steps=steps)
