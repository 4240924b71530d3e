"""DiLoCo of a whole model: form the pseudo-gradient, submit it, wait for the next version, go on from it.

What becomes of a synchronisation that breaks off: docs/decisions/0005.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from atoll.border import bordered
from atoll.protocol.values import (
    Accepted,
    Closed,
    Finished,
    Lost,
    Next,
    Open,
    Pulled,
    Refused,
    Superseded,
    Ticket,
    UpdateInfo,
    VersionRef,
)
from atoll.tensors.module_tensors import Tensors
from atoll.worker.exchange.exchange import Exchange
from atoll.worker.exchange.participation import Participation
from atoll.worker.log_lines import LOG, why_skipped
from atoll.worker.metrics import Measured
from atoll.worker.training.outage import Outage


@bordered
class WholeModel(ABC):
    """Part of `DiLoCo`."""

    step: int
    sync_every: int
    lost: bool
    _max_retries: int
    _place: Participation | None
    _tensors: Tensors
    _measured: Measured

    def __init__(self) -> None:
        self._ticket: Ticket | None = None
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
    def _info(self, base: VersionRef, steps: int) -> UpdateInfo:
        """Return what the update that is about to be formed from this version says."""

    def _synchronise(self, exchange: Exchange) -> None:
        broke_off = self._round(exchange)
        site, info = exchange.site, exchange.session.info
        if broke_off is None:
            self._outage.ended(site, f"synchronised at step {self.step}")
        elif not (isinstance(broke_off, Closed) and self._ended_without_us(exchange)):
            self.skipped += 1
            self._since_sync = 0
            self._ticket = None
            self._outage.skipped(broke_off.error, site, f"at step {self.step}", why_skipped(broke_off.error, info))

    def _round(self, exchange: Exchange) -> Closed | Lost | None:
        """One synchronisation: settle what is under way, submit, wait, pull; return what it broke off for."""
        steps = exchange.settle(self._retries)
        if isinstance(steps, Lost):
            return steps
        if steps is not None:
            self._base_step += steps
            self._ticket = None
        ticket = self._valid_ticket(exchange)
        if isinstance(ticket, Lost):
            return ticket
        if ticket is None:
            reply = exchange.next(retries=self._retries)
            if isinstance(reply, Lost):
                return reply
            if not isinstance(reply, Open):
                return self._finish(exchange, reply)
            ticket = self._ticket = reply.ticket
        base = exchange.base.note
        assert base is not None
        if ticket.base.digest != base.digest:
            if exchange.session.info.on_missed == "reset":
                return self._reset(exchange, ticket)
            broke_off = self._rebase(exchange, ticket)
            if broke_off is not None:
                return broke_off
        info = self._info(ticket.base, self.step - self._base_step)
        match exchange.submit(ticket, self._tensors, info, retries=self._retries):
            case Accepted():
                return self._await_result(exchange)
            case Refused() as refusal:  # the server named what is wrong; begin again from the global model
                LOG.warning("%s: local steps since version %d are lost", exchange.site, self._version)
                exchange.refused(refusal)
                return self._pull_head(exchange, self._retries)
            case Closed() | Lost() as broke_off:
                return broke_off

    def _valid_ticket(self, exchange: Exchange) -> Ticket | Lost | None:
        """Return the ticket that is there, where it can still be submitted under."""
        ticket = self._ticket
        if ticket is None:
            return None
        is_over = exchange.is_over(ticket, self._retries)
        if isinstance(is_over, Lost):
            return is_over
        return None if is_over else ticket

    def _await_result(self, exchange: Exchange) -> Lost | None:
        """Wait until the round is committed, and go on from its result."""
        exchange.session.tell(state="waiting for the others")
        reply = exchange.next(retries=self._retries)
        if isinstance(reply, Lost):
            return reply
        self.rounds += 1
        self._staleness = reply.previous.staleness if reply.previous is not None else 0
        if not isinstance(reply, Open):
            return self._finish(exchange, reply)
        self._ticket = reply.ticket
        lost = self._take(exchange, reply.ticket.base, waits=False)
        if lost is None:
            self._look(exchange)
        return lost

    def _look(self, exchange: Exchange) -> None:
        """The model is the global one: have it measured."""
        assert exchange.base.note is not None
        self._measured.look(exchange.base.note.digest)

    def credit(self, metrics: dict[str, float]) -> bool:
        """Take numbers that were measured just now for those of the global version; False where the model is none.

        It is one after a synchronisation, until the next step. For frameworks, which measure when they do.
        """
        place = self._place
        if place is None or place.session.streams or self.step != self._base_step:
            return False
        base = place.exchange.base.note
        if base is None or not base.digest:
            return False
        self._measured.credit(metrics, base.digest)
        return True

    def _take(self, exchange: Exchange, version: VersionRef, *, waits: bool = True) -> Lost | None:
        """Make a global version the model; nothing local has happened since it was asked for.

        Args:
            waits: for a server that is lost in the middle. If not, training goes on from a model that is the version in
                part; the next synchronisation carries what it makes of it over to the head.
        """
        session, before = exchange.session, exchange.base.note
        # ranks pull their parts, and go on from one version; and where a round begins from one, the steps would be lost
        waits = waits or session.ranks.together or session.info.on_missed == "reset"
        pull = exchange.pull_newest(version, self._tensors, retries=self._retries, waits=waits)
        if isinstance(pull, Lost):
            if not waits and exchange.base.note is not before:
                self._go_on_from_a_part(exchange, version.number)
            return pull
        if pull.newer is not None:
            self._ticket = pull.newer.ticket if isinstance(pull.newer, Open) else None
        exchange.begin_from_base()
        session.tell(version=pull.version.number, state="training")
        self._since_sync, self._base_step, self._version = 0, self.step, pull.version.number
        self._local_steps = self._ticket.local_steps if self._ticket is not None else 0
        return None

    def _go_on_from_a_part(self, exchange: Exchange, version: int) -> None:
        LOG.warning(
            "%s: the pull of version %d broke off: the model is that version in part, and training goes on from it",
            exchange.site,
            version,
        )
        exchange.begin_from(self._tensors)
        exchange.begin_from_base()
        self._since_sync, self._base_step = 0, self.step

    def _reset(self, exchange: Exchange, ticket: Ticket) -> Lost | None:
        """The head moved while we were away, and this algorithm begins every round from it."""
        missed, version = self.step - self._base_step, self._version
        lost = self._take(exchange, ticket.base)
        if lost is not None:
            return lost
        self._look(exchange)
        LOG.warning(
            "%s: the run moved on to version %d; %d local steps since version %d are lost",
            exchange.site,
            self._version,
            missed,
            version,
        )
        return None

    def _rebase(self, exchange: Exchange, ticket: Ticket) -> Closed | Lost | None:
        """Carry local progress over to the head, which moved while we were away."""
        pull = exchange.rebase(ticket.base, self._tensors, retries=self._retries)
        if not isinstance(pull, Pulled):
            return Closed(pull.error) if isinstance(pull, Superseded) else pull
        self._version = ticket.base.number
        LOG.info("%s: the run moved on to version %d; local steps were carried over", exchange.site, self._version)
        return None

    def _pull_head(self, exchange: Exchange, retries: int | None, *, is_in: bool = False) -> Lost | None:
        """Make the newest version the model.

        Args:
            is_in: whether an update of this worker may wait for its round to close. The round is waited for: what was
                trained from the version before it would count as new, and be a round old.
        """
        reply = exchange.next(None if is_in else 0.0, retries=retries)
        if isinstance(reply, Lost):
            return reply
        self._ticket = reply.ticket if isinstance(reply, Open) else None
        if isinstance(reply, Finished):
            return self._finish(exchange, reply)
        lost = self._take(exchange, reply.head)
        if lost is None:
            self._look(exchange)
        return lost

    def _say_what_stays(self, exchange: Exchange, counted: int | None) -> None:
        """At the end: log how many local steps have not reached the run.

        Args:
            counted: the last step whose progress is in an update that counted; None: as this class knows it.
        """
        counted = exchange.counted_step(self._base_step) if counted is None else counted
        steps, turn = self.step - counted, self.sync_every // exchange.session.info.fragments
        if not steps:
            return
        if self.lost or steps > self._since_sync or (self.skipped and steps >= turn):
            LOG.warning(
                "%s: %d steps since step %d were not sent: what was trained since is in this script's model alone",
                exchange.site,
                steps,
                counted,
            )
        else:
            LOG.info("%s: %d steps after the last synchronisation stay local", exchange.site, steps)

    def _finish(self, exchange: Exchange, reply: Next) -> Lost | None:
        lost = self._take(exchange, reply.head)
        if lost is not None:
            return lost
        self.over = True
        told = f" ({reply.reason})" if reply.reason != "finished" else ""
        LOG.info(
            "%s: the run is finished at version %d%s; further steps stay local", exchange.site, self._version, told
        )
        return None

    def _ended_without_us(self, exchange: Exchange) -> bool:
        """Return whether a ticket was over because the run is: an asynchronous one ends without some updates.

        It is no skipped synchronisation then. Where the network is lost on the way, a later turn finds out.
        """
        reply = exchange.ask(0.0, retries=0)
        return isinstance(reply, Finished) and self._finish(exchange, reply) is None
