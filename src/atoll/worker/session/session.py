"""One worker's place in a run: its connection, and what it has of the run's fragments.

The two loops that users see, `federated_loop.py` and `diloco_loop.py`, stand on it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.algorithms.resolve import local_rule
from atoll.errors import ConfigError
from atoll.filters.base import Filter
from atoll.protocol import messages, routes
from atoll.protocol.swarm_messages import SwarmPlan
from atoll.tensors.schema import Schema
from atoll.transport.resumable_transfer import HttpTransfer
from atoll.worker.exchange.algorithm_state import AlgorithmState
from atoll.worker.exchange.base_and_outbox import folder_of, locked, remove_earlier
from atoll.worker.exchange.exchange import Exchange
from atoll.worker.peer.peer_transfers import PeerServer
from atoll.worker.session.connection import Connection
from atoll.worker.session.leave_at_exit import last_words

if TYPE_CHECKING:
    from atoll.worker.peer.agent import SwarmPeer


class Session(Connection, Exchange):
    """A worker's place in a run. Of a run whose model is one fragment, it is that fragment's `Exchange` itself.

    Args:
        server: address of the server.
        site: the worker's name.
        folder: where its files lie; by default `ATOLL_DIR`, else `.atoll` in the current folder.
        schema: of its model, where it has one already; compared before it joins.
        sync_every: its own H, where it has one; refused where the run's differs.
        num_fragments: its own number of fragments, likewise.
        labels: shown in status.
        filters: that its updates pass through before they leave.
        max_retries: attempts after which a lost server is given up; None: never.
        streams: whether it can take part in a run that streams.
        share: rank and number of ranks, where the model is sharded: this one's files are its own.

    Attributes:
        fragments: what it has of each of the run's fragments.
        rule: how the run's algorithm corrects local training; None: not at all.
        corrects: whether it has corrected a round.
        has_left: whether its files are closed: nothing can be asked of it any more.

    Raises:
        ConfigError: the run streams, and this worker cannot; or it is for another number of ranks; or this site does
            not have its algorithm.
    """

    corrects = has_left = False

    def __init__(
        self,
        server: str,
        site: str,
        *,
        folder: Path | None = None,
        schema: Schema | None = None,
        sync_every: int | None = None,
        num_fragments: int | None = None,
        labels: dict[str, str] | None = None,
        filters: Sequence[Filter] = (),
        max_retries: int | None = None,
        streams: bool = False,
        share: tuple[int, int] | None = None,
    ) -> None:
        Connection.__init__(self, server, site, labels=labels, max_retries=max_retries)
        self._cleanup = contextlib.ExitStack()
        self._swarm: SwarmPeer | None = None
        parts = HttpTransfer(self.http, self.info.connections, self.info.idle_timeout_s)
        self._cleanup.callback(parts.close)
        try:
            if self.streams and not streams:
                raise ConfigError(
                    f"The run {self.info.name!r} streams (num_fragments {self.info.fragments}, tau {self.info.tau}, "
                    f"alpha {self.info.alpha:g}), and this worker takes whole rounds.",
                    "Train with atoll.DiLoCo(model, optimizer), or leave num_fragments, tau and alpha out of the run.",
                )
            if share is not None and share[1] != self.info.ranks:
                raise ConfigError(
                    f"The model of worker {site} is sharded over {share[1]} ranks, and the run {self.info.name!r} has "
                    f"ranks = {self.info.ranks}.",
                    f"Start the server with --ranks {share[1]}, or this worker with --nproc-per-node "
                    f"{self.info.ranks} of torchrun.",
                )
            self.rule = local_rule(self.info.algorithm, self.info.local, self.info.local_package)
            if schema is not None:
                schema.require_equal(self.schema.model, mine=f"worker {site}", theirs="the server")
            home = (folder or Path(os.environ.get("ATOLL_DIR", ".atoll"))) / site
            where = folder_of(home, self.info.run, share)
            self._cleanup.enter_context(locked(where, site))
            self.fragments: tuple[Exchange, ...]
            if self.split.count == 1:
                rank = share[0] if share else None
                Exchange.__init__(self, self, parts, where, None, self.schema, filters, self._cleanup, rank)
                self.fragments = (self,)
            else:
                self.fragments = tuple(
                    Exchange(self, parts, where, index, each, filters, self._cleanup)
                    for index, each in enumerate(self.split.schemas)
                )
            if self.rule is not None and self.rule.keeps:
                self.kept = self._turns.add(AlgorithmState(self.folder, self.schema, self.rule.keeps, self.owner))
                self.kept.begin_anew_where_told(site)
            peer = self._peer(where) if self.info.placement == "swarm" else None
            self.join(max_retries, sync_every=sync_every, num_fragments=num_fragments)
            if self.split.count == 1 and self.kept is not None:
                self.kept.begin_at_zero()
            remove_earlier(where, site, share)
            if peer is not None:
                peer.start()
        except BaseException as error:
            if self.http.lease:  # it has joined, and would be waited for
                Connection.leave(self, last_words(error))
            self._cleanup.close()
            self.http.close()
            raise

    def _peer(self, where: Path) -> SwarmPeer:
        """This worker's part in a swarm."""
        from atoll.aggregation.plan import Plan
        from atoll.worker.peer.agent import SwarmPeer, plan_of
        from atoll.worker.peer.peer_transfers import open_host

        told = self.patiently(lambda: self.http.get(routes.SWARM_PLAN, SwarmPlan), None, "read the plan")
        plan = plan_of(told, lambda settings: Plan.make(settings, self.split))
        host = open_host(self.site, self.http.host, self.info.idle_timeout_s)
        self.peer_server = PeerServer(host, self.counters, os.environ.get("ATOLL_TLS_CA"))
        self._cleanup.callback(self.peer_server.close)
        self._swarm = SwarmPeer(
            self.site, self.http, self.peer_server, plan, where, self.info.run, self.info.idle_timeout_s, self.rejoin
        )
        self._cleanup.callback(self._swarm.close)
        return self._swarm

    def told_of_state(self) -> dict[str, Any]:
        if self.split.count > 1 or self.kept is None:
            return {}
        return self.kept.told

    def next_ticket(
        self, fragment: int = 0, *, wait_s: float | None = None, max_retries: int | None = None
    ) -> messages.TicketReply:
        """As `Connection.next_ticket`; the state that the site keeps is that behind its last update that counts."""
        reply = super().next_ticket(fragment, wait_s=wait_s, max_retries=max_retries)
        if reply.counted is not None and self.split.count == 1 and self.kept is not None:
            self.kept.follow(reply.counted)
        return reply

    def leave(self, error: str | None = None) -> None:
        """Deregister and close the files; an outbox stays where its update was not counted. Idempotent."""
        self.has_left = True
        try:
            if self._swarm is not None:
                self._swarm.leave()
            super().leave(error)
        finally:
            self._cleanup.close()
