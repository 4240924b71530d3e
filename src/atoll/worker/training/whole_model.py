"""DiLoCo of a whole model: form the pseudo-gradient, submit it, wait for the next version, go on from it.

What becomes of a synchronisation that breaks off: docs/decisions/0005.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

from atoll.border import bordered
from atoll.errors import TicketClosed, UpdateRefused
from atoll.protocol import messages
from atoll.tensors.module_tensors import Tensors
from atoll.worker.broken_off import NetworkLost
from atoll.worker.exchange.exchange import (
    BROKE_OFF,
    begin_from_base,
    counted_step,
    ended_without_us,
    pull_newest,
    settle,
    unsettled,
)
from atoll.worker.log_lines import LOG, why_skipped
from atoll.worker.metrics import Measured
from atoll.worker.session.session import Session
from atoll.worker.training.outage import Outage


@bordered
class WholeModel(ABC):
    """Part of `DiLoCo`."""

    step: int
    sync_every: int
    lost: bool
    _max_retries: int
    _session: Session | None
    _tensors: Tensors
    _measured: Measured

    def __init__(self) -> None:
        self._ticket: messages.Ticket | None = None
        self.rounds = 0
        self.skipped = 0
        self.over = False
        self._since_sync = self._base_step = self._version = 0
        self._local_steps = self._staleness = 0
        self._outage = Outage()

    @property
    def _retries(self) -> int:
        return 0 if self._outage.is_on else self._max_retries

    @abstractmethod
    def _said(self, digest: str, fragment: int) -> tuple[float, dict[str, float]]:
        """Weight and metrics of the update that is about to be formed: from the version with this digest."""

    def _synchronise(self, session: Session) -> None:
        try:
            try:
                self._round(session)
            except UpdateRefused as error:
                # refused: the server named what is wrong; begin again from the global model
                LOG.warning("%s: local steps since version %d are lost", session.site, self._version)
                session.outbox.clear()
                session.refused(error)
                self._pull_head(self._retries)
        except BROKE_OFF as error:
            if isinstance(error, TicketClosed) and ended_without_us(session, partial(self._finish, session)):
                return
            self.skipped += 1
            self._since_sync = 0
            self._ticket = None
            why = why_skipped(error, session.info)
            self._outage.skipped(error, session.site, f"at step {self.step}", why)
        else:
            self._outage.ended(session.site, f"synchronised at step {self.step}")

    def _round(self, session: Session) -> None:
        """One synchronisation: settle what is under way, submit, wait, pull."""
        ticket = self._ticket
        if (note := unsettled(session)) is not None:
            self._base_step += settle(session, note, self._retries)
            ticket = self._ticket = None
        elif ticket is not None and session.is_over(ticket, self._retries):
            ticket = None
        if ticket is None:
            reply = session.next_round(max_retries=self._retries)
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
            self._rebase(session, ticket.base_version, ticket.base_digest)
        weight, metrics = self._said(ticket.base_digest, session.fragment)
        steps = self.step - self._base_step
        session.submit(
            ticket,
            self._tensors,
            weight=weight,
            steps=steps,
            metrics=metrics,
            max_retries=self._retries,
        )
        session.refusals = 0
        self._await_result(session)

    def _await_result(self, session: Session) -> None:
        """Wait until the round is committed, and go on from its result."""
        session.tell(state="waiting for the others")
        reply = session.next_round(max_retries=self._retries)
        self.rounds += 1
        self._staleness = reply.previous.staleness if reply.previous is not None else 0
        if reply.ticket is None:
            self._finish(session, reply)
            return
        self._ticket = reply.ticket
        self._take(session, reply.ticket.base_version, reply.ticket.base_digest, waits=False)
        self._look(session)

    def _look(self, session: Session) -> None:
        """The model is the global one: have it measured."""
        assert session.base.note is not None
        self._measured.look(session.base.note.digest)

    def credit(self, metrics: dict[str, float]) -> bool:
        """Take numbers that were measured just now for those of the global version; False where the model is none.

        It is one behind a synchronisation, until the next step. For frameworks, which measure when they do.
        """
        session = self._session
        if session is None or session.streams or self.step != self._base_step:
            return False
        if session.base.note is None or not session.base.note.digest:
            return False
        self._measured.credit(metrics, session.base.note.digest)
        return True

    def _take(self, session: Session, version: int, digest: str, *, waits: bool = True) -> None:
        """The global model becomes ours; nothing local has happened since it was asked for.

        Args:
            waits: for a server that is lost in the middle. If not, training goes on from a model that is the version in
                part; the next synchronisation carries what it makes of it over to the head.
        """
        before = session.base.note
        # ranks pull their parts, and go on from one version; and where a round begins from one, the steps would be lost
        waits = waits or session.layout.rank is not None or session.info.on_missed == "reset"
        try:
            newer = pull_newest(session, version, digest, self._tensors, max_retries=self._retries, waits=waits)
        except NetworkLost:
            if not waits and session.base.note is not before:
                self._go_on_from_a_part(session, version)
            raise
        if newer is not None:
            self._ticket, version = newer.ticket, newer.head_version
        begin_from_base(session)
        session.tell(version=version, state="training")
        self._since_sync, self._base_step, self._version = 0, self.step, version
        self._local_steps = self._ticket.local_steps if self._ticket is not None else 0

    def _go_on_from_a_part(self, session: Session, version: int) -> None:
        LOG.warning(
            "%s: the pull of version %d broke off: the model is that version in part, and training goes on from it",
            session.site,
            version,
        )
        session.begin_from(self._tensors)
        begin_from_base(session)
        self._since_sync, self._base_step = 0, self.step

    def _reset(self, session: Session, ticket: messages.Ticket) -> None:
        """The head moved while we were away, and this algorithm begins every round from it."""
        lost, version = self.step - self._base_step, self._version
        self._take(session, ticket.base_version, ticket.base_digest)
        self._look(session)
        LOG.warning(
            "%s: the run moved on to version %d; %d local steps since version %d are lost",
            session.site,
            self._version,
            lost,
            version,
        )

    def _rebase(self, session: Session, version: int, digest: str) -> None:
        """The head moved while we were away: carry local progress over to it."""
        session.rebase(version, digest, self._tensors, max_retries=self._retries)
        self._version = version
        LOG.info("%s: the run moved on to version %d; local steps were carried over", session.site, version)

    def _pull_head(self, max_retries: int | None, *, is_in: bool = False) -> None:
        """Make the newest version the model.

        Args:
            is_in: whether an update of this worker may wait for its round to close. The round is waited for: what was
                trained from the version before it would count as new, and be a round old.
        """
        session = self._session
        assert session is not None
        reply = session.next_round(wait_s=None if is_in else 0.0, max_retries=max_retries)
        self._ticket = reply.ticket
        if reply.status == "finished":
            self._finish(session, reply)
        else:
            self._take(session, reply.head_version, reply.head_digest)
            self._look(session)

    def _say_what_stays(self, session: Session, counted: int | None) -> None:
        """At the end: log how many local steps have not reached the run.

        Args:
            counted: the last step whose progress is in an update that counted; None: as this class knows it.
        """
        counted = counted_step(session, self._base_step) if counted is None else counted
        steps, turn = self.step - counted, self.sync_every // session.info.fragments
        if not steps:
            return
        if self.lost or steps > self._since_sync or (self.skipped and steps >= turn):
            LOG.warning(
                "%s: %d steps since step %d were not sent: what was trained since is in this script's model alone",
                session.site,
                steps,
                counted,
            )
        else:
            LOG.info("%s: %d steps after the last synchronisation stay local", session.site, steps)

    def _finish(self, session: Session, reply: messages.TicketReply) -> None:
        self._take(session, reply.head_version, reply.head_digest)
        self.over = True
        told = f" ({reply.reason})" if reply.reason != "finished" else ""
        LOG.info("%s: the run is finished at version %d%s; further steps stay local", session.site, self._version, told)
