"""How long a server has not answered, and when its worker no longer waits for it.

A worker's connection to a run: joined, leased, heard from, and asking again whatever was interrupted.

A lost connection is waited for, with backoff; a lost lease is taken anew, and the open ticket comes back; a server
that was killed is both. A newer process under the same name ends this one.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

from atoll.errors import (
    AtollError,
    ConfigError,
    Gone,
    LeaseLost,
    ServerLost,
    ServerUnreachable,
    Superseded,
    TicketClosed,
    TransferStalled,
)
from atoll.format_text import duration
from atoll.latch import Latch
from atoll.protocol import messages, routes
from atoll.tensors.fragments import Split
from atoll.transport.http_client import Counters, http_to, unanswered
from atoll.worker.broken_off import NetworkLost
from atoll.worker.log_lines import LOG, in_wait, told
from atoll.worker.peer.peer_transfers import PeerServer
from atoll.worker.session import last_status
from atoll.worker.session.leave_at_exit import GOODBYE_S, forget_lease, has_left, note_lease, watch_exit
from atoll.worker.session.server_checks import is_answered, require_protocol, split_of

GIVE_UP_S = 86400.0
"""A night, and whoever mends the server in the morning, are to cost no site its place."""


def give_up_s() -> float:
    """`ATOLL_GIVE_UP_S`, else `GIVE_UP_S`; 0: never.

    Raises:
        ConfigError: it is no number of seconds.
    """
    text = os.environ.get("ATOLL_GIVE_UP_S", "")
    try:
        seconds = float(text) if text else GIVE_UP_S
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ConfigError(f"ATOLL_GIVE_UP_S is {text!r}.", "Set it to seconds; 0: without an end.")
    return seconds or math.inf


class Silence:
    """Of one server towards one worker; several threads ask.

    It begins with the first attempt that failed since the last answer: in the time in which this process was stopped
    itself, nobody was asked.

    Attributes:
        was_answered: whether the server has ever answered.
    """

    def __init__(self, server: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._server, self._clock, self._most_s = server, clock, give_up_s()
        self._lock = threading.Lock()
        self._since_s: float | None = None
        self.was_answered = False

    def answered(self) -> None:
        with self._lock:
            self._since_s, self.was_answered = None, True

    def failed(self) -> None:
        with self._lock:
            self._since_s = self._clock() if self._since_s is None else self._since_s

    @property
    def seconds(self) -> float:
        """Since when nobody has answered; 0 where the last attempt was answered."""
        with self._lock:
            return 0.0 if self._since_s is None else self._clock() - self._since_s

    @property
    def is_too_long(self) -> bool:
        """Whether the server is not waited for any more."""
        return self.seconds >= self._most_s

    @property
    def patience(self) -> str:
        """How long the server is waited for, as a sentence."""
        upto = "" if math.isinf(self._most_s) else f" for up to {duration(self._most_s)}"
        return f"This worker waits for it{upto} (ATOLL_GIVE_UP_S)."

    def error(self) -> ServerLost:
        return ServerLost(
            f"{self._server} has not answered for {duration(self.seconds)}: it is not waited for any more.",
            "If the run has ended meanwhile, its model is in the server's exports. Else start the server, then this "
            "worker again: it goes on from its files. ATOLL_GIVE_UP_S says how long one is waited for; 0: for ever.",
        )


T = TypeVar("T")

FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 8.0
HEARTBEAT_RETRY_S = 2.0
HEARTBEAT_GAP_S = 1.0
"""Between two heartbeats at least, however often the worker's state changes."""


class Connection:
    """One process of a site, known to the server.

    Args:
        server: address of the server.
        site: the worker's name.
        labels: shown in status.
        max_retries: attempts after which a server that never answered is given up; None: it is waited for as
            ATOLL_GIVE_UP_S says.

    Raises:
        VersionSkew: the two sides speak different protocols.
        ServerLost: the server did not answer for so long. ServerUnreachable: not in `max_retries` attempts; or
            something else answers.
    """

    peer_server: PeerServer | None = None  # in a swarm

    def __init__(
        self, server: str, site: str, *, labels: dict[str, str] | None, max_retries: int | None = None
    ) -> None:
        self.site = site
        self.http = http_to(server)
        self.silence = Silence(self.http.server)
        self.reconnections, self.answers_tasks, self.evaluates = 0, False, False
        self._heartbeat, self._news, self._telling = messages.Heartbeat(), threading.Event(), threading.RLock()
        self._warnings: dict[int, list[str]] = {}
        self.optimizers: Collection[Any] = ()  # that train here, as far as they are known
        self.finished = False
        self.on_wait: Callable[[], None] = lambda: None  # called every now and then while somebody else is waited for
        self.durable_versions: dict[int, int | None] = {}  # of each fragment, the newest that survives a power loss
        self._process = uuid.uuid4().hex[:16]
        self._labels = labels or {}
        self._closing = Latch()  # an interrupt within a wait must not hold up `leave`
        self._join_lock = threading.Lock()
        self._beat: threading.Thread | None = None
        self._fatal: AtollError | None = None
        self.info = self.patiently(lambda: self.http.get(routes.RUN, messages.RunInfo), max_retries, "join")
        require_protocol(self.info, self.http.server)
        self.split = self._fetch_split()
        self.schema, self.due = self.split.schema, 0

    @property
    def counters(self) -> Counters:
        return self.http.counters

    @property
    def heartbeat(self) -> messages.Heartbeat:
        """What the next heartbeat says. One that changes the state is sent soon, others when they are due."""
        return self._heartbeat

    @heartbeat.setter
    def heartbeat(self, message: messages.Heartbeat) -> None:
        changed = message.state != self._heartbeat.state
        self._heartbeat = message
        if changed:
            self._news.set()

    @property
    def streams(self) -> bool:
        """Whether the run has more than whole rounds: fragments, or results that are merged later."""
        return self.info.fragments > 1 or self.info.tau > 0 or self.info.alpha > 0

    def require_here(self) -> None:
        """For threads that work on while the worker leaves: nothing of its files may be touched any more.

        Raises:
            ServerUnreachable: it has left.
        """
        if self._closing.is_set():
            raise self._fatal or ServerUnreachable("This worker has left the run.", "Join again.")

    def tell(self, **changes: Any) -> None:
        """Have the next heartbeat say something else; from any thread."""
        with self._telling:
            self.heartbeat = self._heartbeat.model_copy(update=changes)

    def warn(self, fragment: int, warnings: list[str]) -> None:
        """Have the next heartbeat carry these warnings about a fragment, in place of earlier ones."""
        with self._telling:
            self._warnings[fragment] = warnings
            self.tell(warnings=[text for _, each in sorted(self._warnings.items()) for text in each])

    def _fetch_split(self) -> Split:
        ask = partial(self.http.get, routes.SCHEMA, messages.SchemaMessage)
        return split_of(self.patiently(ask, None, "read the schema"), self.info)

    def join(
        self, max_retries: int | None = None, *, sync_every: int | None = None, num_fragments: int | None = None
    ) -> None:
        """Take part; heartbeats begin.

        Args:
            sync_every: the worker's own H, where it has one; the server refuses another than the run's.
            num_fragments: likewise.
        """
        self._sync_every, self._num_fragments = sync_every, num_fragments
        self._join(max_retries)
        watch_exit(self)
        self.watch_calls()
        if self.info.heartbeat_interval_s:
            self._beat = threading.Thread(target=self._heartbeats, name="atoll-heartbeat", daemon=True)
            self._beat.start()

    def watch_calls(self) -> None:
        """Have calls end that a silent network would hold up."""
        every_s = self.info.waiting_heartbeat_s
        ask = partial(self._send_heartbeat, every_s, every_s)
        self.http.watch.begin(lambda: is_answered(self.http, ask), every_s)

    def _join(self, max_retries: int | None = None) -> None:
        """Take part, or take part again under a new lease."""
        message = messages.Join(
            protocol=routes.PROTOCOL,
            site=self.site,
            run=self.info.run,
            host=socket.gethostname()[:256],
            process=self._process,
            schema_digest=self.schema.digest,
            sync_every=self._sync_every,
            num_fragments=self._num_fragments,
            labels=self._labels,
            peer=self.peer_server.address if self.peer_server else "",
            **self.told_of_state(),
        )
        joined = self.patiently(lambda: self.http.post(routes.WORKERS, message, messages.Joined), max_retries, "join")
        self.http.lease, self.due, self.evaluates = joined.lease, joined.due, joined.evaluates
        note_lease(self.site, self.http.server, joined.lease)

    def told_of_state(self) -> dict[str, Any]:
        """What a join says of what the algorithm keeps at the site; nothing in runs without."""
        return {}

    def rejoin(self, lost: str) -> None:
        """Join again, once, however many threads find that `lost` is no longer valid; the network is tried once.

        Raises:
            ServerLost: another run is at the address now; the progress of this worker is none of it.
        """
        with self._join_lock:
            if self._fatal is None and self.http.lease == lost:
                self.reconnections += 1
                LOG.info("%s: the server no longer knows this worker; joining again", self.site)
                try:
                    self._join(0)
                except ServerLost as error:
                    self._fatal = error
                    self._closing.set()
                    raise

    def _heartbeats(self) -> None:
        answered = self.beat()
        interval_s = self.info.heartbeat_interval_s
        while True:
            pause_s = interval_s if answered else min(interval_s, HEARTBEAT_RETRY_S)
            pause_s *= random.uniform(0.9, 1.1)
            if self._closing.wait(min(pause_s, HEARTBEAT_GAP_S)):
                return
            self._news.wait(max(0.0, pause_s - HEARTBEAT_GAP_S))
            if self._closing.is_set():
                return
            self._news.clear()
            answered = self.beat()

    def beat(self) -> bool:
        """Tell the server that this worker lives, and how far it is; returns whether it answered.

        Half an interval without an answer gives the connection up: a half-open one must not cost the lease.
        """
        lease = self.http.lease
        try:
            self._send_heartbeat()
            self._answered()
            return True
        except Superseded as error:
            self._fatal = error
            self._closing.set()
        except LeaseLost:
            if not self._closing.is_set():
                with contextlib.suppress(AtollError):
                    self.rejoin(lease)
        except AtollError as error:
            self._failed(error)
            LOG.debug("%s: heartbeat failed: %s", self.site, error)
        return False

    def _failed(self, error: AtollError) -> None:
        """An attempt failed: nobody answered, or somebody did who could do nothing."""
        if isinstance(error, ServerUnreachable | TransferStalled):
            self.silence.failed()
        else:
            self._answered()

    def _answered(self) -> None:
        self.silence.answered()
        self.http.watch.answered()

    def end(self) -> None:
        """Say that this worker submits nothing more: no round waits for it, and it stays for the results."""
        self.tell(ends=True, state="waiting for the last results")
        self.beat()

    def next_ticket(
        self, fragment: int = 0, *, wait_s: float | None = None, max_retries: int | None = None
    ) -> messages.TicketReply:
        """The ticket of the open round, or the word that the run is finished.

        Args:
            fragment: of which.
            wait_s: give up after so long and return the reply "wait"; None waits until a round opens.
        """
        begin = said = time.monotonic()
        self.tell(state="waiting for the round")
        while True:
            left_s = routes.LONG_POLL_S if wait_s is None else max(0.0, begin + wait_s - time.monotonic())
            left_s = min(left_s, routes.LONG_POLL_S)
            request = messages.TicketRequest(fragment=fragment, wait_s=left_s, tasks=self.answers_tasks)
            ask = partial(
                self.http.post, routes.TICKETS, request, messages.TicketReply, timeout_s=routes.LONG_POLL_S + 10.0
            )
            reply = self.patiently(ask, max_retries, "ask for the next round")
            self.durable_versions[fragment] = reply.durable_version
            if reply.status == "finished" and self.info.fragments == 1:
                self.finished = True
            if reply.status != "wait" or reply.tasks or (wait_s is not None and time.monotonic() - begin >= wait_s):
                return reply
            self.on_wait()
            if time.monotonic() - said >= 15.0:
                said = time.monotonic()
                LOG.info("%s: %s", self.site, in_wait(said - begin, reply))

    def outcome(self, ticket: int, max_retries: int | None = None) -> messages.Outcome:
        """What became of a ticket; one that the server does not know any more has expired."""
        ask = partial(self.http.get, routes.TICKET.format(ticket=ticket), messages.TicketState)
        try:
            return self.patiently(ask, max_retries, "ask what became of the update").outcome
        except Gone as error:
            return messages.Outcome(ticket=ticket, state="expired", base_version=0, reason=str(error))

    def parts_at_server(self, ticket: int, digests: Mapping[int, bytes]) -> Collection[int]:
        """Which of these parts need not be sent: the server has them, with these digests.

        Args:
            digests: index → BLAKE3.

        Raises:
            TicketClosed: the round went on without this update.
        """
        state = self.http.get(routes.TICKET.format(ticket=ticket), messages.TicketState)
        if state.outcome.state == "expired":
            raise TicketClosed(f"The round of ticket {ticket} is over: {state.outcome.reason}.")
        if state.outcome.is_in:
            return digests.keys()
        return {
            index
            for index, digest in zip(state.parts, state.part_digests, strict=True)
            if digest == digests.get(index, b"").hex()
        }

    def _send_heartbeat(self, most_s: float = 30.0, timeout_s: float | None = None) -> None:
        counters = self.counters
        message = self.heartbeat.model_copy(
            update={
                "retries": counters.retries,
                "reconnections": self.reconnections,
                "bytes_up": counters.bytes_up,
                "bytes_down": counters.bytes_down,
            }
        )
        timeout_s = timeout_s or min(most_s, max(1.0, self.info.heartbeat_interval_s / 2))
        reply = self.http.post(routes.HEARTBEAT, message, messages.HeartbeatReply, timeout_s=timeout_s)
        self.finished = self.finished or reply.finished
        self.durable_versions = dict(enumerate(reply.durable_versions))

    def leave(self, error: str | None = None) -> None:
        """Deregister and stop the heartbeats, after a last one; soon, whatever the server does. Idempotent."""
        if self._closing.is_set() and self._fatal is None:
            return
        self._closing.set()
        self._news.set()
        if self._beat is not None:
            self._beat.join(GOODBYE_S)
        silent = self._beat is not None and self._beat.is_alive()  # one is under way, and the server does not answer
        try:
            if self._fatal is None and not silent:
                if self._beat is not None:
                    self.tell(state="failed" if error else "left")
                    self._send_heartbeat(GOODBYE_S)
                last_status.keep(self.http)
                self.http.send(routes.LEAVE, messages.Leave(error=told(error) if error else None), timeout_s=GOODBYE_S)
            forget_lease(self.site, self.http.lease)
        except (AtollError, OSError) as problem:
            LOG.debug("%s: could not say goodbye: %s", self.site, problem)
        finally:
            has_left(self)
            self.http.close()

    def patiently(self, ask: Callable[[], T], max_retries: int | None, what: str) -> T:
        """Ask until it is answered: a lost server is waited for, a lost lease is taken anew.

        Args:
            max_retries: attempts after the first one; none after one that `Watch` has ended: it took as long as they.

        Raises:
            TransferError, DiskFull: after `max_retries` attempts.
            ServerLost: with None, when nobody has answered for too long.
        """
        pause_s, attempt, lost, stale = FIRST_BACKOFF_S, 0, 0, ""
        while True:
            if self._fatal is not None:
                raise self._fatal
            lease = self.http.lease
            try:
                if not self.http.watch.is_back():
                    raise unanswered(self.http.server)
                if stale:
                    self.rejoin(stale)
                    stale, lease = "", self.http.lease
                result = ask()
                self._answered()
                if attempt:
                    LOG.info("%s: the server is back; going on to %s", self.site, what)
                return result
            except LeaseLost:
                if stale or not lease:  # a rank that is not the first cannot join again
                    raise
                self._closing.wait(min(lost * FIRST_BACKOFF_S, LONGEST_BACKOFF_S))  # none the first time
                lost, stale = lost + 1, lease
            except NetworkLost as error:
                attempt += 1
                self._failed(error)
                if max_retries is not None and (attempt > max_retries or self.http.watch.is_lost):
                    raise
                if isinstance(error, ServerUnreachable) and error.is_other and not self.silence.was_answered:
                    raise
                if max_retries is None and self.silence.is_too_long:
                    raise self.silence.error() from error
                self.on_wait()
                wait_s = max(pause_s * random.uniform(0.75, 1.25), error.retry_after_s or 0.0)
                level = LOG.warning if attempt in (1, 4) or attempt % 20 == 0 else LOG.debug
                patience = f" {self.silence.patience}" if max_retries is None else ""
                level("%s: cannot %s: %s%s Trying again in %.1f s.", self.site, what, error, patience, wait_s)
                if self._closing.wait(wait_s) and self._fatal is None:
                    raise
                pause_s = min(2 * pause_s, LONGEST_BACKOFF_S)
                if attempt == 1:
                    self.reconnections += 1
