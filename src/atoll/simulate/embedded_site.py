"""A worker in the process of its server, in another thread: for notebooks and tests. No socket is between them.

The worker is the one that `atoll.join` returns. In each round, a `SimulatedSite` reads the global model from the
server's file and writes the update into the file in which the server stores it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.errors import Gone, ServerFailed, TicketClosed, UpdateRefused, UsageError
from atoll.filters.base import Filter, require_filters
from atoll.posix import Descriptor
from atoll.protocol import messages, routes
from atoll.protocol.messages import Report, Ticket, VersionRef
from atoll.protocol.values import Next, Open, Wait
from atoll.server.local_site import LocalRound, LocalSite, SiteCalls
from atoll.server.serve import Server
from atoll.simulate.engine import SiteRound
from atoll.simulate.simulated_site import Shared, SimulatedSite
from atoll.store.journal_tables import VersionRow
from atoll.store.versions import Pin
from atoll.tensors.arrays import Arrays
from atoll.tensors.module_tensors import Tensors
from atoll.tensors.reference import new_id
from atoll.tensors.schema import Schema
from atoll.transport.http_client import Counters
from atoll.worker.arguments import require_site
from atoll.worker.exchange import apply_version
from atoll.worker.exchange.base_and_outbox import TensorFile, folder_of, locked
from atoll.worker.exchange.encode_update import Finish, LocalFragment
from atoll.worker.exchange.exchange import MAX_REFUSALS
from atoll.worker.exchange.local_state import pending, state_in
from atoll.worker.log_lines import LOG
from atoll.worker.session.leave_at_exit import last_words
from atoll.worker.training.federated_loop import Worker
from atoll.worker.training.round_backends import Into, matching


class EmbeddedSite:
    """The backend of a worker in the server's process. Implements `RoundBackend`.

    Args:
        calls: the site at the server.
        folder: the folder of the sites' own folders; a site keeps files there only if its algorithm or codec needs any.
        filters: the filters that are applied to the site's updates.

    Raises:
        ConfigError: such a site cannot take part in the run.
        StateLocked: another worker takes part as the same site, with the same folder.
    """

    def __init__(self, calls: SiteCalls, folder: Path, filters: Sequence[Filter]) -> None:
        self._calls, self._filters, self.site = calls, filters, calls.site
        self.process: int | None = os.getpid()
        self.counters, self.has_left, self._refusals = Counters(), False, 0
        self._shared = Shared.of(*calls.describe())
        self._folder = folder_of(folder.absolute() / self.site, self._shared.info.run, None)
        self._lock = locked(self._folder, self.site, folder.absolute())
        self._opened: LocalRound | None = None
        self._round: SimulatedSite | None = None
        self._lock.__enter__()
        try:
            calls.join(new_id())
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise

    @property
    def schema(self) -> Schema:
        """The schema of the run's model."""
        return self._shared.schema

    @property
    def local(self) -> LocalFragment | None:
        """The base version, filters and local state of the newest round; None before the first."""
        return self._round.local if self._round is not None else None

    @property
    def _now(self) -> SimulatedSite:
        """The newest round of this site."""
        assert self._round is not None  # a `Round` of the worker exists
        return self._round

    def tensors_of(self, model: nn.Module | Arrays) -> dict[str, Tensor]:
        """Return the model's own tensors by name. First check that they match the tensors of the run's model."""
        return matching(self.schema, self.site, model)

    def to_fill(self, tensors: Tensors, version: int) -> dict[str, Tensor]:
        """Return the tensors into which to load a version, for a model with these tensors."""
        return self._round.to_fill(tensors, version) if self._round is not None else dict(tensors)

    def next_round(self, wait_s: float | None) -> Next:
        """Wait for the next round. A version that has disappeared meanwhile is not trained from."""
        until_s = None if wait_s is None else time.monotonic() + wait_s
        while True:
            left_s = routes.LONG_POLL_S if until_s is None else max(0.0, until_s - time.monotonic())
            reply = self._ask(min(routes.LONG_POLL_S, left_s))
            if isinstance(reply, Open):
                try:
                    self._begin(reply)
                except Gone:
                    continue
            elif isinstance(reply, Wait) and (until_s is None or time.monotonic() < until_s):
                continue
            return reply

    def _ask(self, wait_s: float) -> Next:
        async def ask(site: LocalSite) -> Next:
            state = None
            if self._shared.rule is not None and self._shared.rule.state_groups:
                with site.newest() as head:
                    state = state_in(self._folder, site.counted(), head.row.version)
            return await site.next_ticket(wait_s, state)

        return self._calls(ask)

    def _begin(self, reply: Open) -> None:
        """Open the files of a round, in place of those of the round before."""

        async def open_(site: LocalSite) -> tuple[LocalRound, SiteRound]:
            outcomes, has_counted = site.outcomes(pending(self._folder)), site.has_counted
            told = SiteRound(
                site=self.site, ticket=reply.ticket, outcomes=outcomes, counts=has_counted, counted=reply.counted
            )
            return site.files_of(reply.ticket), told

        self._close()
        self._opened, told = self._calls(open_)
        base_fd = os.dup(self._opened.base.fd)
        self._round = SimulatedSite(self._shared, told, base_fd, self._opened.spool.fd, self._folder)
        self._round.local.filters, self._round.counters = self._filters, self.counters

    def _close(self) -> None:
        """Close the files of the newest round, and let the server reuse them."""
        if self._round is not None:
            self._round.close()
        if (opened := self._opened) is not None:
            self._opened = None

            async def release(_: LocalSite) -> None:
                opened.release()

            self._calls(release)

    def pull(self, ticket: Ticket, into: Into) -> Ticket:
        """Load the version from the server's file."""
        return self._now.pull(ticket, into)

    def load_newest(self, into: Tensors, keep: VersionRef | None) -> None:
        """Load the newest version from the server's file; the version of a round stays where it is."""

        async def newest(site: LocalSite) -> Pin[VersionRow]:
            return site.newest()

        layout = self._shared.layouts.version
        with self._calls(newest) as pin:
            file = TensorFile(Path("newest version"), Descriptor(os.dup(pin.fd)), layout.nbytes)
            file.layout = layout
            try:
                apply_version.load_(into, file)
            finally:
                file.close()
        self.counters.add(down=layout.nbytes)

    def has_base(self, ticket: Ticket) -> bool:
        """Return whether the script has loaded the version that the ticket names."""
        return self._now.has_base(ticket)

    def global_state(self, group: str) -> dict[str, Tensor]:
        """Return tensors that the algorithm keeps beside the global model: parameter name → new tensor of `group`."""
        return self._now.global_state(group)

    def own_state(self, group: str) -> dict[str, Tensor]:
        """Return a group of tensors that the algorithm keeps at this site: parameter name → new tensor."""
        return self._now.own_state(group)

    def submit(
        self, ticket: Ticket, tensors: Tensors, report: Report, finish: Finish | None, optimizers: Sequence[Optimizer]
    ) -> None:
        """Write the update into the server's file, and submit it. Return when it was accepted or refused."""
        now = self._now
        now.submit(ticket, tensors, report, finish, optimizers)
        message, stats = now.update, now.stats
        assert message is not None

        async def submit(site: LocalSite) -> None:
            await site.submit(ticket, message, stats)

        try:
            self._calls(submit)
            self._refusals = 0
        except (TicketClosed, Gone) as error:
            LOG.warning("%s: round %d closed without this update: %s", self.site, ticket.round, error)
        except UpdateRefused as error:
            self._refusals += 1
            LOG.warning("%s: this update does not count: %s", self.site, error)
            if self._refusals >= MAX_REFUSALS:
                raise

    def sit_out(self, ticket: Ticket, report: Report) -> None:
        """Tell the server that the site sits out the round."""

        async def sit_out(site: LocalSite) -> None:
            await site.sit_out(ticket, messages.SitOut(metrics=dict(report.metrics)))

        try:
            self._calls(sit_out)
        except (TicketClosed, UpdateRefused) as error:
            LOG.warning("%s: round %d closed before this site sat it out: %s", self.site, ticket.round, error)

    def leave(self, error: BaseException | None) -> None:
        """Leave the run, and close the site's files."""
        self.has_left = True
        try:
            with contextlib.suppress(UsageError, ServerFailed):  # the server has ended
                self._close()
            self._calls.leave(last_words(error))
        finally:
            self._lock.__exit__(None, None, None)
        LOG.info("%s: left the run", self.site)


def local_worker(
    server: Server, site: str, *, folder: str | Path | None = None, filters: Sequence[Filter] = ()
) -> Worker:
    """Join the run of a server in this process, without a network: see `atoll.testing.run.local_worker`."""
    where = Path(folder) if folder else server.settings.disk.state_dir / "local-sites"
    return Worker(EmbeddedSite(server.local_site(require_site(site)), where, require_filters(filters)))
