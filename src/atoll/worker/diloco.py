"""DiLoCo at a worker: `with atoll.DiLoCo(model, optimizer, server=..., sync_every=H): any training loop`.

DiLoCo: Distributed Low-Communication Training of Language Models (Douillard et al., arXiv 2311.08105), Algorithm 1:
every worker takes H inner steps from θ(t−1); the outer gradient is the mean of θ(t−1) − θ_i(t).

An optimizer post-step hook counts the steps; every H of them it synchronises: form the pseudo-gradient, submit it,
wait for the next version, pull it into the parameters. The inner optimizer keeps its state. A server that cannot be
reached costs a synchronisation, never local progress: training goes on, and the next pseudo-gradient holds it all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from atoll.errors import Gone, TicketClosed, UpdateRefused, UsageError
from atoll.filters.base import Filter
from atoll.tensors.modules import named_tensors, schema_of
from atoll.wire import messages
from atoll.worker import update
from atoll.worker.border import border
from atoll.worker.connection import START_RETRIES, NetworkLost, default_site, require_site
from atoll.worker.files import BaseFile
from atoll.worker.given import finite_metrics, last_words, positive, require_trains, sync_retries
from atoll.worker.local import ALONE, ALONE_ENDED
from atoll.worker.reporting import LOG, ensure_lines, size
from atoll.worker.session import Session


class DiLoCo:
    """Low-communication training around any loop; `optimizer.step()` is all that it needs to see.

    Args:
        model: trained in place; its parameters become the global model's on entry.
        optimizer: the inner optimizer over its parameters.
        server: address, `http://host:8512`; by default `ATOLL_SERVER`. Without either, plain local training.
        sync_every: H, local steps between two synchronisations; by default the run's. Another value than the run's
            is refused when joining.
        site: this worker's name; by default `ATOLL_SITE`, else made of host and process.
        weight: this worker's share in the mean: a number, or a function asked at every synchronisation.
        metrics: asked at every synchronisation; finite numbers by name, averaged over the workers.
        folder: where the base and outbox files lie; by default `ATOLL_DIR`, else `.atoll`.
        labels: anything to be shown in status.
        filters: that every update of this site passes through, in this order, before any byte of it leaves.
        max_sync_retries: attempts before a synchronisation with a lost server is skipped; by default
            `ATOLL_MAX_SYNC_RETRIES`, else 6.
    """

    @border
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        server: str | None = None,
        sync_every: int | None = None,
        site: str | None = None,
        weight: float | Callable[[], float] = 1.0,
        metrics: Callable[[], dict[str, float]] | None = None,
        folder: str | Path | None = None,
        labels: dict[str, str] | None = None,
        filters: Sequence[Filter] = (),
        max_sync_retries: int | None = None,
    ) -> None:
        if sync_every is not None and sync_every < 1:
            raise UsageError(
                f"sync_every is {sync_every}.", "Give the number of local steps between two synchronisations."
            )
        self.model, self.optimizer = model, optimizer
        self._server = server or os.environ.get("ATOLL_SERVER")
        self._site = site
        self._given_sync_every = sync_every
        self._weight, self._metrics = weight, metrics
        self._folder, self._labels, self._filters = Path(folder) if folder else None, labels, filters
        self._max_retries = sync_retries(max_sync_retries)
        self._session: Session | None = None
        self._hooks: list[Any] = []
        self._begun = False
        self._ticket: messages.Ticket | None = None
        self.step = 0
        self.rounds = 0
        self.skipped = 0
        self.seconds_waited = 0.0
        self.finished = self._stopped = False
        self.sync_every = sync_every or 0
        self._since_sync = self._base_step = self._version = 0
        self._settled = 0  # the ticket of the outbox's update, once its fate is in the base
        self._local_steps = self._staleness = 0
        self._pending_metrics: dict[str, float] = {}
        self._pace = (0, time.monotonic())

    # -- life

    def __enter__(self) -> DiLoCo:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(error)

    @border
    def start(self) -> DiLoCo:
        """Join the run, pull the global model into the parameters, and hook the optimizer.

        Raises:
            ServerUnreachable: nobody answered after several attempts.
            SchemaMismatch: the run trains another model.
        """
        ensure_lines()
        if not self._server:
            LOG.info("%s", ALONE)
            return self
        require_trains(self.optimizer, self.model.parameters())
        site = require_site(self._site or default_site())
        session = Session(
            self._server,
            site,
            folder=self._folder,
            schema=schema_of(self.model),
            sync_every=self._given_sync_every,
            labels=self._labels,
            filters=self._filters,
            max_retries=START_RETRIES,
        )
        self._session = session
        try:
            self.sync_every = self._given_sync_every or session.info.sync_every or 500
            self._tensors = named_tensors(self.model)[0]
            session.resume_outbox()
            self._pull_head()
        except BaseException as error:
            session.leave(str(error))
            raise
        LOG.info("%s: joined run %s at %s; H = %d", site, session.info.name, session.http.server, self.sync_every)
        self._hook(self.optimizer)
        return self

    def stop(self, error: BaseException | None = None) -> None:
        """Remove the hook and deregister. Steps since the last synchronisation stay in the model, and are reported."""
        self._unhook()
        session = self._session
        if self._stopped:
            return
        if session is None:
            self._stopped = not self._server
            if self._stopped and error is None:
                LOG.info("%s", ALONE_ENDED)
            return
        self._stopped = True
        if self.step == 0 and error is None:
            LOG.warning(
                "%s: no optimizer step was seen. Call step() of the optimizer that DiLoCo was given.",
                session.site,
            )
        elif self._since_sync and not self.finished:
            LOG.info("%s: %d steps after the last synchronisation stay local", session.site, self._since_sync)
        said = last_words(error)
        session.leave(said)
        LOG.info(
            "%s: %d steps, %d rounds, %d skipped, %d retries, %d reconnections; sent %s, received %s, waited %.1f s",
            session.site,
            self.step,
            self.rounds,
            self.skipped,
            session.counters.retries,
            session.reconnections,
            size(session.counters.bytes_up),
            size(session.counters.bytes_down),
            self.seconds_waited,
        )

    @border
    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Go on with another optimizer over the model's parameters, wherever they are now: frameworks make new ones."""
        self.optimizer = optimizer
        require_trains(self.optimizer, self.model.parameters())
        if self._hooks:
            self._unhook()
            self._tensors = named_tensors(self.model)[0]
            self._hook(optimizer)

    @border
    def report(self, **metrics: float) -> None:
        """Numbers of this worker to be shown in status, and averaged over the workers at the next synchronisation."""
        self._pending_metrics.update(finite_metrics(metrics, self._site or "worker"))
        if self._session is not None:
            self._session.heartbeat = self._session.heartbeat.model_copy(
                update={"metrics": dict(self._pending_metrics)}
            )

    @property
    def sync_metrics(self) -> dict[str, float]:
        """Rounds, retries, reconnections, bytes and seconds waited so far; staleness of the last that counted."""
        session = self._session
        return {
            "rounds": self.rounds,
            "skipped": self.skipped,
            "staleness": self._staleness,
            "retries": session.counters.retries if session else 0,
            "reconnections": session.reconnections if session else 0,
            "bytes_up": session.counters.bytes_up if session else 0,
            "bytes_down": session.counters.bytes_down if session else 0,
            "seconds_waited": self.seconds_waited,
        }

    # -- the hook

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        self._hooks = [before(self._before_step), after(self._after_step)]

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _before_step(self, *_: Any) -> None:
        self._begun = True

    @border
    def _after_step(self, *_: Any) -> None:
        if not self._begun:  # where step() of a class calls that of its parent, torch calls the hooks of both
            return
        self._begun = False
        self.step += 1
        self._since_sync += 1
        session = self._session
        if session is None or self._stopped:
            return
        self._beat(session)
        if self._since_sync >= (self._local_steps or self.sync_every) and not self.finished:
            begin = time.monotonic()
            self._synchronise(session)
            self.seconds_waited += time.monotonic() - begin
            self._pace = (self.step, time.monotonic())

    def _beat(self, session: Session) -> None:
        step, since = self._pace
        rate = (self.step - step) / max(time.monotonic() - since, 1e-9)
        session.heartbeat = session.heartbeat.model_copy(
            update={"step": self.step, "steps_per_s": rate, "state": "training"}
        )

    def _synchronise(self, session: Session) -> None:
        try:
            try:
                self._round(session)
            except UpdateRefused as error:
                # the server named what is wrong; the round goes on without us, and we go on from the global model
                LOG.warning("%s: local steps since version %d are lost", session.site, self._version)
                session.outbox.clear()
                session.refused(error)
                self._pull_head()
        except (*NetworkLost, TicketClosed, Gone) as error:
            self.skipped += 1
            self._since_sync = 0
            self._ticket = None
            LOG.warning("%s: synchronisation skipped at step %d; training goes on. %s", session.site, self.step, error)

    def _round(self, session: Session) -> None:
        """One synchronisation: settle what is under way, submit, wait, pull."""
        ticket = self._ticket
        if self._under_way(session):
            self._settle(session)
            ticket = None
        elif ticket is not None and session.is_over(ticket, self._max_retries):
            ticket = None
        if ticket is None:
            reply = session.next_round(max_retries=self._max_retries)
            if reply.ticket is None:
                self._finish(session, reply)
                return
            ticket = self._ticket = reply.ticket
        base = session.base.note
        assert base is not None
        if ticket.base_digest != base.digest:
            if session.info.on_missed == "reset":
                self._reset(session, ticket)
                return
            self._rebase(ticket.base_version, ticket.base_digest)
        metrics = dict(self._pending_metrics) | finite_metrics(self._metrics() if self._metrics else {}, session.site)
        weight = self._weight() if callable(self._weight) else self._weight
        steps = self.step - self._base_step
        session.submit(
            ticket,
            self._tensors,
            weight=positive(weight),
            steps=steps,
            metrics=metrics,
            max_retries=self._max_retries,
        )
        session.refusals = 0
        self._await_result(session)

    def _await_result(self, session: Session) -> None:
        """Wait until the round is committed, and go on from its result."""
        session.heartbeat = session.heartbeat.model_copy(update={"state": "waiting for the others"})
        reply = session.next_round(max_retries=self._max_retries)
        self.rounds += 1
        self._staleness = reply.previous.staleness if reply.previous is not None else 0
        if reply.ticket is None:
            self._finish(session, reply)
            return
        self._ticket = reply.ticket
        self._take(session, reply.ticket.base_version, reply.ticket.base_digest)

    def _under_way(self, session: Session) -> bool:
        """Whether the outbox holds what was formed from the base, and it is not known yet what became of it."""
        note, base = session.outbox.note, session.base.note
        assert base is not None
        return note is not None and note.ticket != self._settled and note.base_digest == base.digest

    def _settle(self, session: Session) -> None:
        """A synchronisation broke off after its update was formed: find out what became of it.

        If it is in, only what was trained since is local progress: the base advances to what was submitted. If it is
        not, the next update holds all of it.
        """
        note = session.outbox.note
        assert note is not None
        outcome = session.outcome(note.ticket, self._max_retries)
        if outcome.state in ("accepted", "counted"):
            LOG.info("%s: the update of round %d is in after all", session.site, note.round)
            session.advance_base()
            self._settled = note.ticket
            self._base_step += note.steps
        else:
            session.outbox.clear()
        self._ticket = None

    def _take(self, session: Session, version: int, digest: str) -> None:
        """The global model becomes ours; nothing local has happened since it was asked for.

        A pull that has begun is brought to its end, with a newer version if it must be: nobody trains on half of one.
        """
        while True:
            try:
                session.pull(version, digest, self._tensors, max_retries=self._max_retries)
                break
            except Gone:
                reply = session.next_ticket(wait_s=0.0)
                self._ticket, version, digest = reply.ticket, reply.head_version, reply.head_digest
        if session.outbox.note is not None:  # kept: until it is durable the server may fall back, and need it again
            self._settled = session.outbox.note.ticket
        session.heartbeat = session.heartbeat.model_copy(update={"version": version, "state": "training"})
        self._since_sync, self._base_step, self._version = 0, self.step, version
        self._local_steps = self._ticket.local_steps if self._ticket is not None else 0

    def _reset(self, session: Session, ticket: messages.Ticket) -> None:
        """The head moved while we were away, and this algorithm begins every round from it."""
        lost, version = self.step - self._base_step, self._version
        self._take(session, ticket.base_version, ticket.base_digest)
        LOG.warning(
            "%s: the run moved on to version %d; %d local steps since version %d are lost",
            session.site,
            self._version,
            lost,
            version,
        )

    def _rebase(self, version: int, digest: str) -> None:
        """The head moved while we were away: carry local progress over to it."""
        session = self._session
        assert session is not None
        moved = BaseFile(session.folder, session.layout, "base-next")
        try:
            session.pull(version, digest, None, moved)
            update.rebase_(self._tensors, session.base, moved)
            session.base.replace_with(moved)
        finally:
            moved.close()
        self._version = version
        LOG.info("%s: the run moved on to version %d; local steps were carried over", session.site, version)

    def _pull_head(self) -> None:
        session = self._session
        assert session is not None
        reply = session.next_round(wait_s=0.0, max_retries=START_RETRIES)
        self._ticket = reply.ticket
        if reply.status == "finished":
            self._finish(session, reply)
        else:
            self._take(session, reply.head_version, reply.head_digest)

    def _finish(self, session: Session, reply: messages.TicketReply) -> None:
        self._take(session, reply.head_version, reply.head_digest)
        self.finished = True
        told = f" ({reply.reason})" if reply.reason != "finished" else ""
        LOG.info("%s: the run is finished at version %d%s; further steps stay local", session.site, self._version, told)
