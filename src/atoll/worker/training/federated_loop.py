"""The federated loop: `with atoll.join(...) as worker: for round in worker: ...`.

Each round yields the global model; the script trains it and submits what it became. Without a server the same
script runs alone: one round, plain local training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from atoll.border import border, bordered, say_interrupt_in_a_line
from atoll.errors import Gone, UsageError
from atoll.filters.base import Filter
from atoll.protocol import messages
from atoll.worker.exchange.look_at_head import load_beside
from atoll.worker.exchange.submitted_model import local_model
from atoll.worker.log_lines import LOG, ensure_lines, size
from atoll.worker.session.address import server_of
from atoll.worker.session.connection import Connection
from atoll.worker.session.leave_at_exit import last_words
from atoll.worker.session.server_checks import require_joined
from atoll.worker.session.session import Session
from atoll.worker.site_name import default_site, require_site
from atoll.worker.tasks.answer_tasks import Answering, Answers
from atoll.worker.training.alone import ALONE, LocalWorker, Model, Round
from atoll.worker.training.federated_round import FederatedRound
from atoll.worker.training.match_model import matching
from atoll.worker.training.simulated_seat import seat_here


@bordered
class Worker(Answers):
    """One site's part in a federated run: iterate over its rounds. Made by `atoll.join`.

    Where handlers are registered, tasks of the run's other workflows are answered with them within that loop: before
    the first round and behind the last one.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        super().__init__(Answering(session, session.filters, local=lambda: local_model(session), folder=session.folder))
        session.answers_tasks = True
        self._left = False
        self._round: FederatedRound | None = None

    @property
    def site(self) -> str:
        return self._session.site

    @property
    def bytes_up(self) -> int:
        """Bytes of tensors sent so far."""
        return self._session.counters.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes of tensors received so far."""
        return self._session.counters.bytes_down

    @border
    def __enter__(self) -> Worker:
        require_joined(self._session.has_left, self.site, "atoll.join")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        say_interrupt_in_a_line(error)
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Deregister; with the error that ended local training, where there was one."""
        if self._left:
            return
        self._left = True
        said = last_words(error)
        self._answering.close()
        self._session.leave(said)
        LOG.info(
            "%s: left after sending %s and receiving %s",
            self.site,
            size(self._session.counters.bytes_up),
            size(self._session.counters.bytes_down),
        )

    @border
    def load_into(self, model: Model) -> Model:
        """Pull the newest global model into `model`, in place; after the last round, that is the result.

        A round that is open keeps the version that it started from, and can still be submitted.

        Raises:
            SchemaMismatch: it is not the model of the run.
            UsageError: this worker has left its run.
        """
        require_joined(self._session.has_left, self.site, "atoll.join")
        tensors = matching(self._session, model)
        if self._round is not None and not self._round.done:
            load_beside(self._session, tensors, self._round.base_digest)
            return model
        while True:
            reply = self._session.next_ticket(wait_s=0.0)
            try:
                self._session.pull(reply.head_version, reply.head_digest, tensors)
                return model
            except Gone:  # the head moved on while it was pulled
                continue

    def __iter__(self) -> Iterator[Round]:
        rounds = self._rounds()
        while (round_ := self._following(rounds)) is not None:
            yield round_

    @border
    def _following(self, rounds: Iterator[Round]) -> Round | None:
        require_joined(self._session.has_left, self.site, "atoll.join")
        return next(rounds, None)

    def _rounds(self) -> Iterator[Round]:
        answering, info = self._answering, self._session.info
        answering.require_evaluator()
        if not info.trains and answering.has_handlers:
            answering.serve(rounds=False)
            return
        self._session.resume_outbox()
        while True:
            reply = self._session.next_round()
            if reply.status == "wait":  # tasks come first
                if not answering.serve(rounds=True):
                    return
                continue
            self._tell(reply.previous)
            if reply.ticket is None:
                if reply.tasks and not answering.has_handlers:
                    LOG.warning(
                        "%s: training is over, and the run goes on with tasks, for which this site has no handler: "
                        "register them before the loop, with worker.evaluates(function) or worker.task(name)",
                        self.site,
                    )
                elif reply.tasks:
                    answering.serve(rounds=False)
                told = f" ({reply.reason})" if reply.reason != "finished" else ""
                LOG.info("%s: the run is finished at version %d%s", self.site, reply.head_version, told)
                return
            round_ = self._round = FederatedRound(self._session, reply.ticket)
            yield round_
            if not round_.done:
                raise UsageError(
                    f"Round {round_.number} ended without an update from {self.site}.",
                    "Call round.submit(model) once in every round; leave the `with` block to stop taking part.",
                )

    def _tell(self, previous: messages.Outcome | None) -> None:
        """Warn about an update that was formed and did not count; without one, a ticket that is over is no news."""
        note = self._session.outbox.note
        if previous is None or previous.state != "expired" or note is None or note.ticket != previous.ticket:
            return
        LOG.warning("%s: the update of round %d did not count: %s", self.site, note.round, previous.reason)


@border
def join(
    server: str | None = None,
    site: str | None = None,
    *,
    folder: str | Path | None = None,
    labels: dict[str, str] | None = None,
    filters: Sequence[Filter] = (),
    require_server: bool = False,
) -> Worker | LocalWorker:
    """Take part in a federated run; use it as a context manager and iterate over its rounds.

    Args:
        server: address, `http://host:8512`; by default `ATOLL_SERVER`. Without either the script runs alone.
        site: this worker's name; by default `ATOLL_SITE`, else made of host and process.
        folder: where the base and outbox files lie; by default `ATOLL_DIR`, else `.atoll`.
        labels: anything to be shown in status.
        filters: that every update of this site passes through, in this order, before any byte of it leaves.
        require_server: refuse to train alone where no server is configured.

    Returns:
        A `Worker`; where there is no server a `LocalWorker`, which has one round.

    Raises:
        ConfigError: no server is configured, and one is required; or an ATOLL_ variable is misspelt.
        ServerLost: the server did not answer for as long as ATOLL_GIVE_UP_S says; a day by default.
        ServerUnreachable: something else answers at its address.
        StateLocked: another process on this machine takes part as the same site.
    """
    if (seat := seat_here()) is not None:
        return seat.with_filters(filters)
    ensure_lines()
    server = server_of(server, require_server=require_server)
    if not server:
        LOG.info("%s", ALONE)
        return LocalWorker()
    site = require_site(site or default_site())
    where = Path(folder) if folder else None
    session = Session(server, site, folder=where, labels=labels, filters=filters)
    LOG.info("%s: joined run %s (%s) at %s", site, session.info.name, session.info.algorithm, session.http.server)
    return Worker(session)


def takes_part(server: str | None) -> bool:
    """Whether `join` with this address has a run to take part in: its server's, or the one that is simulated."""
    return bool(server) or seat_here() is not None


def run_here(server: str | None, site: str) -> messages.RunInfo | None:
    """What the run is, before `join` takes part in it; None where a script trains alone.

    Raises:
        VersionSkew: the two sides speak different protocols.
        ServerLost, ServerUnreachable: as `join`.
    """
    if (seat := seat_here()) is not None:
        return seat.info
    if not server:
        return None
    connection = Connection(server, site, labels=None)
    connection.http.close()
    return connection.info
