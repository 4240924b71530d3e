"""DiLoCo of a whole model: form the pseudo-gradient, submit it, wait for the next version, go on from it.

What becomes of a synchronisation that breaks off: docs/decisions/0005.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from atoll.errors import Gone, TicketClosed, UpdateRefused
from atoll.tensors.modules import Tensors
from atoll.wire import messages
from atoll.worker.connection import START_RETRIES, NetworkLost
from atoll.worker.reporting import LOG
from atoll.worker.session import Session


class WholeModel(ABC):
    """Part of `DiLoCo`."""

    step: int
    _max_retries: int
    _session: Session | None
    _tensors: Tensors

    def __init__(self) -> None:
        self._ticket: messages.Ticket | None = None
        self.rounds = 0
        self.skipped = 0
        self.finished = False
        self._since_sync = self._base_step = self._version = 0
        self._local_steps = self._staleness = 0
        self._settled = 0  # the ticket of the outbox's update, once its fate is in the base

    @abstractmethod
    def _said(self) -> tuple[float, dict[str, float]]:
        """Weight and metrics of the update that is about to be formed."""

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
            if isinstance(error, TicketClosed) and self._ended_without_us(session):
                return
            self.skipped += 1
            self._since_sync = 0
            self._ticket = None
            LOG.warning("%s: synchronisation skipped at step %d; training goes on. %s", session.site, self.step, error)

    def _ended_without_us(self, session: Session) -> bool:
        """Whether a ticket was over because the run is: an asynchronous one ends while others still train."""
        try:
            reply = session.next_ticket(wait_s=0.0, max_retries=0)
        except NetworkLost:
            return False
        if reply.status == "finished":
            self._finish(session, reply)
        return self.finished

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
            self._rebase(session, ticket.base_version, ticket.base_digest)
        weight, metrics = self._said()
        steps = self.step - self._base_step
        session.submit(
            ticket,
            self._tensors,
            weight=weight,
            steps=steps,
            metrics=metrics,
            max_retries=self._max_retries,
        )
        session.refusals = 0
        self._await_result(session)

    def _await_result(self, session: Session) -> None:
        """Wait until the round is committed, and go on from its result."""
        session.tell(state="waiting for the others")
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
        session.tell(version=version, state="training")
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

    def _rebase(self, session: Session, version: int, digest: str) -> None:
        """The head moved while we were away: carry local progress over to it."""
        session.rebase(version, digest, self._tensors)
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
