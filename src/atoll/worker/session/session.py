"""A worker's session with the server: its registration, its heartbeats, and its calls with retries.

If the connection is lost, calls are retried, with growing pauses. If the server has forgotten the worker, the worker
joins again and gets its open ticket (permission to submit an update) back. If a newer process joins with the same site
name, this process ends.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from atoll.errors import (
    TRANSIENT,
    AtollError,
    Busy,
    Gone,
    LeaseLost,
    ServerFailed,
    ServerLost,
    ServerUnreachable,
    Superseded,
    TicketClosed,
    TransferStalled,
    VersionSkew,
    print_interrupt_in_a_line,
)
from atoll.format_text import duration
from atoll.protocol import messages, routes
from atoll.protocol.status_messages import Status
from atoll.protocol.values import Lost, Next, next_of, require
from atoll.runtime import OWN_RANDOM, Latch
from atoll.tensors.fragments import Split
from atoll.transport.http_client import Http, is_silence
from atoll.worker.arguments import give_up_s
from atoll.worker.log_lines import LOG, error_text, in_wait
from atoll.worker.session.leave_at_exit import (
    GOODBYE_S,
    command_sees_end,
    forget_lease,
    has_left,
    note_lease,
    watch_exit,
)
from atoll.worker.session.ranks import ALONE, RankGroup, keep_ranks_waiting

T = TypeVar("T")

LEAST_PATIENCE_S = 1.0
"""Shortest timeout of a call: with a lower `ATOLL_GIVE_UP_S`, a call still has this much time."""
LOOK_S = 3.0
"""Seconds in which a server has to answer that it is there, after a call that has timed out. With `CALL_TIMEOUT_S` and
a pause, training stands still for less than 30 s when the network falls silent."""
FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 8.0
WORKED_S = 5.0
"""Seconds that an attempt took after which a broken connection counts as one that worked: the next attempt follows at
once, and pauses begin with the first one again."""
BRIEF_S = 1.0
"""A server that is busy for less than this many seconds does what is part of a run, so the log has no warning."""
HEARTBEAT_RETRY_S = 2.0
RENEW_RETRY_S = 600.0
"""Most seconds between two attempts to renew the site's credential."""
DELAYS, LONG_DELAY_S = 4, 0.03
"""Number of heartbeats of which the shortest exchange counts as the delay of the link; a delay that is worth a warning,
in seconds."""
HEARTBEAT_GAP_S = 1.0
"""Least seconds between two heartbeats, however often the worker's state changes."""
OF_THE_OPTIMIZER, OF_EVALUATIONS, OF_THE_ALGORITHM, OF_WEIGHT_COPIES, OF_LOST_STEPS = -1, -2, -3, -4, -5
OF_FROZEN, OF_THE_LINK = -6, -7
"""Keys of warnings that are not about a fragment, for `Session.warn`."""

DAMAGED_FIRST, DAMAGED_LATER = 2, 8
"""How often in a row a call is tried if its answer is damaged: before the first valid answer of the server, and later.
Before, another program may answer at the address; later, a single bit was flipped, or another program took the port."""

FREE_CALLS, FREE_CALLS_A_FRAGMENT = 12, 4
"""Calls that a worker makes without progress before it slows down, and further ones for each fragment. An honest server
needs fewer from one update to the next."""
WORK_S = 60.0
"""Seconds that a worker takes between two calls after which the later one counts as the first without progress."""
REMEMBERED = 16
"""Number of updates, versions and tasks that count as progress only once."""

FATAL = (Superseded, ServerFailed, ServerLost)
"""Answers that end a worker, whichever of its requests gets them first: a failed server may end before another one."""

SAY_EVERY_S = 15.0
"""Seconds between two log lines while the worker waits for a round."""


class OutageTimer:
    """Measures for how long the server has not answered one worker. Thread-safe.

    The time begins with the first failed attempt after the last answer, not with the last answer itself: this process
    may have been stopped in between (SIGSTOP, a sleeping laptop).

    Args:
        server: address of the server, for messages.
        clock: returns the current time, in seconds.

    Attributes:
        most_s: seconds after which the worker gives up; infinity: never.
        was_answered: whether the server has ever answered.
    """

    def __init__(self, server: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._server, self._clock, self.most_s = server, clock, give_up_s()
        self._lock = threading.Lock()
        self._since_s: float | None = None
        self._cause: AtollError | None = None
        self.was_answered = False

    def answered(self) -> None:
        """Record that the server has answered."""
        with self._lock:
            self._since_s, self.was_answered = None, True

    def failed(self, cause: AtollError | None = None) -> None:
        """Record that the server has not answered an attempt.

        Args:
            cause: why the attempt failed, for the error of the last one; None: not known.
        """
        with self._lock:
            self._since_s = self._clock() if self._since_s is None else self._since_s
            self._cause = cause

    @property
    def seconds(self) -> float:
        """Seconds since the first unanswered attempt; 0 if the server answered the last attempt."""
        with self._lock:
            return 0.0 if self._since_s is None else self._clock() - self._since_s

    @property
    def is_too_long(self) -> bool:
        """Whether the worker gives up, because the server has not answered for `ATOLL_GIVE_UP_S` seconds."""
        return self.seconds >= self.most_s

    def require_patience(self, since_s: float, what: str, why: str) -> None:
        """Raise an error if the worker gives up, because the server answers but a call has not succeeded for too long.

        Args:
            since_s: time of the first attempt that failed, by `time.monotonic`.
            what: what the call is for, to complete "cannot …".
            why: why the last attempt failed.

        Raises:
            ServerLost: the attempts have failed for `ATOLL_GIVE_UP_S`.
        """
        seconds = time.monotonic() - since_s
        if seconds >= self.most_s:
            raise ServerLost(
                f"For {duration(seconds)}, this worker could not {what}, although {self._server} answers: {why}",
                "See the log of the server. ATOLL_GIVE_UP_S sets for how many seconds a worker keeps trying.",
            )

    @property
    def patience(self) -> str:
        """A sentence that says for how long the worker keeps trying to reach the server."""
        upto = "" if math.isinf(self.most_s) else f" for up to {duration(self.most_s)}"
        return f"This worker keeps trying{upto} (ATOLL_GIVE_UP_S)."

    def error(self) -> ServerLost:
        """Return the error to raise when the worker gives up trying to reach the server."""
        cause = self._cause
        why = f" The last attempt failed: {cause.message}" if cause else ""
        remedy = cause.remedy if cause and cause.remedy else "Start the server."
        return ServerLost(
            f"{self._server} has not answered for {duration(self.seconds)}; this worker stops trying.{why}",
            f"{remedy} Then start this worker again, which continues from its files. If the run has ended, its model "
            "is in the server's exports. ATOLL_GIVE_UP_S sets for how many seconds a worker keeps trying; 0 means no "
            "limit.",
        )


class Repeats:
    """Slows down a loop of calls to the server that bring no progress, and ends it if they never do.

    Args:
        session: the session that makes the calls.
        what: what the calls are for, to complete "cannot …"; empty: the loop may go on forever.
        longest_s: longest pause between two calls.
    """

    def __init__(self, session: Session, what: str = "", longest_s: float = LONGEST_BACKOFF_S) -> None:
        self._session, self._what, self._longest_s = session, what, longest_s
        self._pause_s, self._since_s, self._last_s = 0.0, time.monotonic(), 0.0

    def reset(self) -> None:
        """Record progress: the next pauses are short again."""
        self._pause_s, self._since_s = 0.0, time.monotonic()

    def again(self, why: str = "") -> None:
        """Wait until the next call may begin. The first pause has 0 s.

        Args:
            why: why the last call brought no progress.

        Raises:
            ServerLost: there was no progress for `ATOLL_GIVE_UP_S`.
            ServerUnreachable: this worker has left the run.
        """
        session, now_s = self._session, time.monotonic()
        if self._pause_s and self._what:
            session.silence.require_patience(self._since_s, self._what, why)
        session.closing_wait(min(self._pause_s - (now_s - self._last_s), session.silence.most_s))
        session.require_here()
        keep_ranks_waiting()
        self._pause_s, self._last_s = min(2 * self._pause_s or FIRST_BACKOFF_S, self._longest_s), time.monotonic()


class Progress:
    """Slow down a worker that makes no progress, and end it after `ATOLL_GIVE_UP_S`.

    Each answer of a server may be valid, and the worker may still get nowhere: tickets that the server does not know
    afterwards, versions that it does not have, the same task again and again. Only three things count as progress,
    and each only the first time: an update that the server accepts, a version that is complete at this site, and a
    task that the server takes an answer to. Two threads may be counted as one call.

    Args:
        session: the session that makes the calls.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._why = "it accepts no update, provides no version and takes no task's answer"
        self._repeats = Repeats(session, "make progress")
        self._seen = deque[object](maxlen=REMEMBERED)
        self._calls, self._answered_s = 0, math.inf

    def begin(self) -> None:
        """Record that a call begins. If there were too many without progress, wait until it may begin.

        Raises:
            ServerLost: there was no progress for `ATOLL_GIVE_UP_S`.
            ServerUnreachable: this worker has left the run.
        """
        if time.monotonic() - self._answered_s > WORK_S:
            self._calls = 0
        free = FREE_CALLS + FREE_CALLS_A_FRAGMENT * self._session.fragments
        self._calls += 1
        if self._calls <= free:
            self._repeats.reset()
        else:
            self._repeats.again(self._why)

    def answered(self, why: str = "") -> None:
        """Record that a call has ended.

        Args:
            why: the reason, if it has failed.
        """
        self._answered_s, self._why = time.monotonic(), why or self._why

    def waited(self) -> None:
        """Record that the last call was answered as late as it asked for: waiting for other sites is no lack."""
        self._calls -= 1
        self._repeats.reset()

    def made(self, *what: object) -> None:
        """Record progress.

        Args:
            what: the ticket of the update, the digest of the version, or the id of the task.
        """
        if what not in self._seen:
            self._calls = 0
        self._seen.append(what)


class Session:
    """The session of one worker process with the server, from join to leave.

    Args:
        http: the connections to the server; also used for files and tasks.
        site: the site's name.
        labels: labels of the worker, shown in the status.
        ranks: the processes of the worker. Rank 0 joins, sends heartbeats and makes calls; every rank gets the answers.

    Attributes:
        way_out: what every message and part passes before it leaves this machine.
        info: description of the run.
        split: how the model is divided into fragments.
        schema: names, shapes and dtypes of the run's model.
        heartbeat: the content of the next heartbeat; changed by `tell`.
        counters: bytes and retries so far.
        optimizers: the optimizers of this process that the script has passed to Atoll.
        fragments: number of the run's fragments; 0 until it is known.
        progress: what the calls have brought forward.
        arrived: for each fragment, the manifest and the bytes of the version that came with the last ticket, until they
            are taken; no bytes if the version is not small.
        durable_versions: for each fragment, the number of the newest version that would survive a power loss of the
            server.
        peer_proof: in a swarm, a reference with the address where other workers reach this one; else None.
        state_fields: returns the fields of `SiteState`, about the state that the algorithm keeps at the site; an empty
            dict if the algorithm keeps none.
        before_leave: called first when the worker leaves.
        cleanup: the exit stack that is closed after the worker has left.
        is_untold: whether the worker has left, but could not tell the server so.

    Raises:
        VersionSkew: worker and server speak different protocols.
        ServerLost: the server did not answer for too long.
        ServerUnreachable: a program answers, but without TLS or with a wrong certificate.
        ConfigError: the site's policy does not let it take part.
    """

    def __init__(
        self,
        http: Http,
        site: str,
        *,
        labels: dict[str, str] | None = None,
        ranks: RankGroup = ALONE,
    ) -> None:
        self.site, self.http, self.ranks, self.way_out = site, http, ranks, http.way_out
        self.silence, self.counters = OutageTimer(http.where), http.counters
        http.patience_s = max(LEAST_PATIENCE_S, self.silence.most_s)
        http.on_problem = self._on_problem
        self.reconnections, self.answers_tasks, self.evaluates, self.due = 0, False, False, 0
        self.heartbeat, self._news, self._telling = messages.Heartbeat(), threading.Event(), threading.RLock()
        self._warnings: dict[int, list[str]] = {}
        self._delays_s, self._asked = deque[float](maxlen=DELAYS), set[int]()
        self.optimizers: Collection[Any] = ()
        self.finished = self.has_left = self.is_untold = False
        self.before_leave: Callable[[], None] = lambda: None
        self.cleanup = contextlib.ExitStack()
        self.arrived: dict[int, tuple[messages.VersionManifest, memoryview]] = {}
        self.durable_versions: dict[int, int | None] = {}
        self.peer_proof: str | None = None
        self.state_fields: Callable[[], dict[str, Any]] = dict
        self._process = uuid.uuid4().hex[:16]
        self._labels = labels or {}
        self._early = Repeats(self)
        self.fragments, self.progress = 0, Progress(self)
        self._closing = Latch()  # no `threading.Event`: a signal in its `wait` could block `leave`
        self._join_lock = threading.Lock()
        self._beat: threading.Thread | None = None
        self._is_silent = False  # whether a call has timed out since the last answer
        self._fatal: AtollError | None = None
        self._renew_from_s = 0.0  # time before which no further attempt to renew the credential is made
        self.read_run()

    def read_run(self) -> None:
        """Read the description of the run and its schema.

        Read them again if the server announces another file layout: the first update of a run may give new shapes to
        buffers.
        """
        self.info, self.split = self._read_run()
        self.fragments = self.info.fragments
        self.schema = self.split.schema

    def _read_run(self) -> tuple[messages.RunInfo, Split]:
        self.way_out.require_server(self.http.server)
        info = self.patiently(partial(self.http.get, routes.RUN, messages.RunInfo), None, "join")
        if info.protocol != routes.PROTOCOL:
            older = "this worker" if info.protocol > routes.PROTOCOL else "the server"
            raise VersionSkew(
                f"This worker uses protocol {routes.PROTOCOL}, the server {self.http.server} uses {info.protocol}.",
                f"Upgrade Atoll at {older}.",
            )
        read = messages.SchemaMessage.split_in
        ask = partial(self.http.fetch, routes.SCHEMA, read, "SchemaMessage")
        split = self.patiently(ask, None, "read the schema")
        info.require_split(split)
        self.way_out.require_run(info, self.http.server)
        sent = [spec.name for spec in split.schema.model.tensors if info.trains and not spec.is_kept]
        self.way_out.require_tensors(sent, f"the run {info.name!r}")
        return info, split

    def require_here(self) -> None:
        """Raise an error if this worker has left the run.

        Call this before changing the site's files, since a thread may still run after the worker has left.

        Raises:
            ServerUnreachable: the worker has left.
            AtollError: the error that ended the worker, if there was one.
        """
        if self._closing.is_set():
            raise self._fatal or ServerUnreachable("This worker has left the run.", "Join again.")

    def _on_problem(self, error: AtollError) -> None:
        """If an answer ends this worker, let every later call and step raise its error, and end the heartbeats."""
        if isinstance(error, FATAL):
            self._fatal = error
            self._closing.set()
            self._news.set()
            print_interrupt_in_a_line()  # a loop over rounds or tasks is a generator: no public function raises for it

    def require_sound(self) -> None:
        """Raise the error of the answer that ends this worker, if there is one."""
        if self._fatal is not None:
            raise self._fatal

    def closing_wait(self, seconds: float) -> bool:
        """Wait for some seconds, or until this worker leaves. Return whether it has left."""
        return self._closing.wait(seconds)

    # -- heartbeats

    def tell(self, **changes: Any) -> None:
        """Change fields of the next heartbeat. If `state` changes, the heartbeat is sent soon. Safe from any thread."""
        with self._telling:
            before, self.heartbeat = self.heartbeat.state, self.heartbeat.model_copy(update=changes)
        if self.heartbeat.state != before:
            self._news.set()

    def warn(self, fragment: int, warnings: list[str]) -> None:
        """Replace the warnings about a fragment, which the next heartbeat reports to the server.

        Args:
            fragment: the fragment's number; or for other warnings, a negative key such as `OF_THE_OPTIMIZER`.
            warnings: the new warnings; an empty list removes the old ones.
        """
        with self._telling:
            self._warnings[fragment] = warnings
            self.tell(warnings=[text for _, each in sorted(self._warnings.items()) for text in each])

    def is_first(self, key: int) -> bool:
        """Return whether this is the first call with this key: for what is checked or said once."""
        is_first = key not in self._asked
        self._asked.add(key)
        return is_first

    def report(self, key: int, text: str) -> None:
        """Log a warning, and report it to the server, too, where it replaces earlier ones with this key."""
        LOG.warning("%s: %s", self.site, text)
        self.warn(key, [text])

    def beat(self) -> bool:
        """Send a heartbeat. Return whether the server accepted it.

        If the server has forgotten the worker, join again. The timeout is half a heartbeat interval. So if a heartbeat
        times out on a dead connection, there is time for another one before the server declares the worker dead.
        """
        lease = self.http.lease
        try:
            self._send_heartbeat()
            self._answered()
            return True
        except LeaseLost:
            if not self._closing.is_set():
                with contextlib.suppress(AtollError):
                    self.rejoin(lease)
        except AtollError as error:
            self._failed(error)
            LOG.debug("%s: heartbeat failed: %s", self.site, error)
        return False

    def end(self) -> None:
        """Tell the server that this worker submits no more updates, so that no round waits for this worker."""
        self.tell(ends=True, state="waiting for the last results")
        self.beat()

    def _heartbeats(self) -> None:
        answered = self.beat()
        interval_s = self.info.heartbeat_interval_s
        while True:
            pause_s = interval_s if answered else min(interval_s, HEARTBEAT_RETRY_S)
            pause_s *= OWN_RANDOM.uniform(0.9, 1.1)
            if self._closing.wait(min(pause_s, HEARTBEAT_GAP_S)):
                return
            self._news.wait(max(0.0, pause_s - HEARTBEAT_GAP_S))
            if self._closing.is_set():
                return
            self._news.clear()
            answered = self.beat()
            if answered:
                self.renew()

    def _renewals(self) -> None:
        """Renew the credential in a run without heartbeats."""
        while (credential := self.http.credential) is not None:
            left_s = credential.note.renew_at_s - time.time()
            if self._closing.wait(min(max(left_s, HEARTBEAT_RETRY_S), RENEW_RETRY_S)):
                return
            self.renew()

    def renew(self) -> None:
        """Renew the site's credential if it is due. If that fails, go on with the present one, and try again later."""
        credential = self.http.credential
        if credential is None or time.monotonic() < self._renew_from_s or not credential.is_due():
            return
        from atoll.transport.enrolment import TIMEOUT_S, renew, until

        timeout_s = max(1.0, self.info.heartbeat_interval_s / 2) if self.info.heartbeat_interval_s else TIMEOUT_S
        try:
            if renew(self.http, credential, timeout_s):
                LOG.info("%s: the credential was renewed; it is valid until %s", self.site, until(credential.note))
                return
        except AtollError as error:
            LOG.warning(
                "%s: the credential, valid until %s, could not be renewed yet: %s",
                self.site,
                until(credential.note),
                error,
            )
        left_s = credential.note.expires_at_s - time.time()
        self._renew_from_s = time.monotonic() + min(RENEW_RETRY_S, max(1.0, left_s / 10))

    def _send_heartbeat(self, most_s: float = 30.0) -> None:
        counters = self.counters
        message = self.heartbeat.model_copy(
            update={
                "retries": counters.retries,
                "reconnections": self.reconnections,
                "bytes_up": counters.bytes_up,
                "bytes_down": counters.bytes_down,
            }
        )
        timeout_s = min(most_s, max(1.0, self.info.heartbeat_interval_s / 2))
        begin_s = time.monotonic()
        reply = self.http.post(routes.HEARTBEAT, message, messages.HeartbeatReply, timeout_s=timeout_s)
        self._note_delay(time.monotonic() - begin_s)
        self.finished = self.finished or reply.finished
        self.durable_versions = dict(enumerate(reply.durable_versions))

    def _note_delay(self, seconds: float) -> None:
        """Note how long a small request took. Warn once if fragments make training wait for the link more often.

        The shortest of several requests counts: the first one also opens a connection.
        """
        self._delays_s.append(seconds)
        info, delay_s = self.info, min(self._delays_s)
        if len(self._delays_s) < DELAYS or delay_s < LONG_DELAY_S:
            return
        if info.fragments > 1 and not info.tau and info.sync_every and self.is_first(OF_THE_LINK):
            steps = max(1, math.ceil(2 * delay_s * self.heartbeat.steps_per_s))
            self.report(
                OF_THE_LINK,
                f"an exchange with the server takes {1000 * delay_s:.0f} ms, and training waits for two of them every "
                f"{max(1, info.sync_every // info.fragments)} steps, because diloco.num_fragments is {info.fragments} "
                f"without overlap. Set diloco.fragment_sync_delay to {steps} or more, or num_fragments to 1",
            )

    # -- join and leave

    def join(self, *, sync_every: int | None = None, num_fragments: int | None = None) -> None:
        """Join the run, and start the heartbeats.

        Args:
            sync_every: the script's own number of local steps between synchronisations; None: the run's number. The
                server refuses a value that differs from the run's.
            num_fragments: the script's own number of fragments; None: the run's number. The server refuses a value that
                differs from the run's.
        """
        self._sync_every, self._num_fragments = sync_every, num_fragments
        if not self.ranks.is_first:  # rank 0 joins for all, and sends the heartbeats
            self.http.lease = self.ranks.from_rank0(lambda: "")
            return
        self.ranks.from_rank0(self._join)
        watch_exit(self)
        work = self._heartbeats if self.info.heartbeat_interval_s else self._renewals
        if self.info.heartbeat_interval_s or self.http.credential is not None:
            self._beat = threading.Thread(target=work, name="atoll-heartbeat", daemon=True)
            self._beat.start()

    def _join(self, max_retries: int | None = None) -> str:
        """Join the run, or join it again. Return the new lease: the text with which this process acts for its site.

        Args:
            max_retries: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.
        """
        message = messages.Join(
            protocol=routes.PROTOCOL,
            site=self.site,
            run=self.info.run,
            host=socket.gethostname()[:256],
            process=self._process,
            schema_digest=None if self.reconnections else self.schema.digest,  # shapes of buffers may have changed
            sync_every=self._sync_every,
            num_fragments=self._num_fragments,
            labels=self._labels,
            peer=self.peer_proof,
            **self.state_fields(),
        )
        ask = partial(self.http.post, routes.WORKERS, message, messages.Joined)
        joined = self.patiently(ask, max_retries, "join")
        if joined.due >= self.info.fragments:
            raise VersionSkew(
                f"{self.http.server} asks for fragment {joined.due}, but the run has {self.info.fragments}.",
                "Use the same release of Atoll on both sides.",
            )
        self.http.lease, self.due, self.evaluates = joined.lease, joined.due, joined.evaluates
        note_lease(self.site, self.http.server, joined.lease)
        if joined.displaces is not None:
            LOG.info(
                "%s: this process replaces the one on host %s that last joined under this site name. If that process "
                "still runs, give one of the two another site name.",
                self.site,
                joined.displaces or "an unnamed host",
            )
        return joined.lease

    def rejoin(self, lost: str) -> None:
        """Join the run again, without retries. If another thread has already done this, do nothing.

        Args:
            lost: the lease (the right to act for the site) that is no longer valid.

        Raises:
            ServerLost: the server now has another run, which this worker's local progress does not belong to.
            LeaseLost: this is not rank 0. Only rank 0 joins again, for all ranks.
            TRANSIENT: the attempt failed.
        """
        if not self.ranks.is_first:
            raise LeaseLost(f"The server no longer knows the worker {self.site}, which rank 0 has to register again.")
        with self._join_lock:
            if self._fatal is None and self.http.lease == lost:
                self.reconnections += 1
                LOG.info("%s: the server no longer knows this worker; joining again", self.site)
                self._join(0)

    def leave(self, error: str | None = None) -> None:
        """Leave the run: stop the heartbeats and tell the server. Wait only a few seconds for an answer. Idempotent.

        Args:
            error: the error that ended training; None: training ended well.
        """
        self.has_left = True
        with self.cleanup:
            self.before_leave()
            self._leave(error)

    def _leave(self, error: str | None) -> None:
        if self._closing.is_set() and self._fatal is None:
            return
        self._closing.set()
        self._news.set()
        if not self.ranks.is_first:  # rank 0 tells the server
            self.http.close()
            return
        if self._beat is not None:
            self._beat.join(GOODBYE_S)
        silent = self._beat is not None and self._beat.is_alive()  # a heartbeat is unanswered: the server is silent
        self.is_untold = self._fatal is None and silent
        try:
            if self._fatal is None and not silent:
                if self.info.heartbeat_interval_s or self.heartbeat.warnings:
                    self.tell(state="failed" if error else "left")
                    self._send_heartbeat(GOODBYE_S)
                if error is None and command_sees_end():
                    return  # `atoll worker` tells the server by the note of the lease
                message = messages.Leave(error=error_text(error) if error else None)
                self.http.send(routes.LEAVE, message, timeout_s=GOODBYE_S)
            forget_lease(self.site, self.http.lease)
        except (AtollError, OSError) as problem:
            self.is_untold = True
            LOG.debug("%s: could not tell the server that this worker leaves: %s", self.site, problem)
        finally:
            has_left(self)
            self.http.close()

    # -- calls

    def call(self, ask: Callable[[], T], what: str, *, retries: int | None = None, kind: Any = Any) -> T | Lost:
        """Make a call to the server at rank 0, with retries, and return the answer at every rank.

        Args:
            ask: makes the call once.
            what: what the call is for, to complete "cannot …" in the log.
            retries: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.
            kind: the type of the answer if it is not plain JSON.

        Returns:
            The answer; `Lost` if the last retry failed.
        """
        return self._for_all_ranks(lambda: self.patiently(ask, retries, what), kind)

    def _for_all_ranks(self, ask: Callable[[], T], kind: Any) -> T | Lost:
        try:
            return self.ranks.from_rank0(ask, kind)
        except TRANSIENT as error:
            return Lost(error)

    def move(self, work: Callable[[], None], what: str, *, retries: int | None = None) -> Lost | None:
        """Let every rank transfer its own tensors. Repeat until all ranks have succeeded, or rank 0 stops the attempts.

        Args:
            work: makes the transfer of the calling rank once.
            what: what the transfer is for, to complete "cannot …" in the log.
            retries: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.

        Returns:
            `Lost` if a rank failed in the last attempt, else None.
        """
        attempts = _Attempts(self, retries, what)
        try:
            while True:
                self.http.lease = self.ranks.from_rank0(attempts.begin)
                try:
                    self.ranks.gather(work)
                    attempts.succeeded()
                    return None
                except AtollError as error:
                    attempts.failed(error)
        except TRANSIENT as error:
            return Lost(error)

    def patiently(self, ask: Callable[[], T], max_retries: int | None, what: str) -> T:
        """Make a call to the server with retries, in this process alone, and return the answer.

        Args:
            ask: makes the call once.
            max_retries: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.
            what: what the call is for, to complete "cannot …" in the log.

        Raises:
            TRANSIENT: the last retry failed.
            ServerLost: `max_retries` is None, and the server has not answered for `ATOLL_GIVE_UP_S`.
        """
        attempts = _Attempts(self, max_retries, what)
        self.progress.begin()
        try:
            while True:
                attempts.begin()
                try:
                    result = ask()
                    attempts.succeeded()
                    self.progress.answered()
                    return result
                except AtollError as error:
                    attempts.failed(error)
        except AtollError as error:
            self.progress.answered(error.message)
            raise

    def next_ticket(
        self,
        fragment: int = 0,
        *,
        wait_s: float | None = None,
        retries: int | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        holds: str | None = None,
    ) -> Next | Lost:
        """Wait for a fragment's next round. Return `Open`, which contains the ticket (permission to submit an update).

        Return `Finished` if there is no further round, a plain `Next` if this worker submits no more updates, `Wait` if
        the run sends tasks first, and `Lost` if the last retry failed.

        Args:
            fragment: the fragment's number.
            wait_s: seconds after which `Wait` is returned if no round has opened; None: no limit.
            retries: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.
            shapes: shapes of this site's buffers that differ from the schema, for the server to take over.
            holds: digest of the version that this process has, or empty: another version may come with the ticket, in
                `arrived`. None: it does not come.

        Raises:
            SchemaMismatch: the run cannot have these shapes.
        """
        ask = partial(self._wait_for_ticket, fragment, wait_s, retries, shapes or {}, holds)
        reply = self._for_all_ranks(ask, messages.TicketReply)
        if isinstance(reply, Lost):
            return reply
        self.durable_versions[fragment] = reply.durable_version
        if reply.status == "finished" and self.info.fragments == 1:
            self.finished = True
        return next_of(reply, fragment)

    def _wait_for_ticket(
        self,
        fragment: int,
        wait_s: float | None,
        retries: int | None,
        shapes: Mapping[str, Sequence[int]],
        holds: str | None,
    ) -> messages.TicketReply:
        begin = logged_s = time.monotonic()
        self.tell(state=messages.WAITING)
        while True:
            left_s = self.http.poll_s if wait_s is None else max(0.0, begin + wait_s - time.monotonic())
            request = messages.TicketRequest(
                fragment=fragment,
                wait_s=min(left_s, self.http.poll_s),
                tasks=self.answers_tasks,
                **self.state_fields(),
                shapes={name: list(shape) for name, shape in shapes.items()},
                holds=holds,
            )
            ask = partial(self._ask_for_ticket, request)
            asked_s = time.monotonic()
            reply = self.patiently(ask, retries, "ask for the next round")
            if reply.ticket is not None:
                self._require_fit(reply.ticket, fragment)
            self.pace(reply.status == "wait", asked_s, request.wait_s)
            is_over = wait_s is not None and time.monotonic() - begin >= wait_s
            if reply.status != "wait" or reply.tasks or is_over:
                return reply
            keep_ranks_waiting()
            if time.monotonic() - logged_s >= SAY_EVERY_S:
                logged_s = time.monotonic()
                LOG.info("%s: still %s", self.site, in_wait(logged_s - begin, reply))

    def _ask_for_ticket(self, request: messages.TicketRequest) -> messages.TicketReply:
        self.arrived.pop(request.fragment, None)
        if request.holds is None:
            return self.http.post(routes.TICKETS, request, messages.TicketReply)
        reply, data = self.http.post_framed(routes.TICKETS, request, messages.TicketReply)
        if reply.manifest is not None:
            self.arrived[request.fragment] = reply.manifest, data
        return reply

    def _require_fit(self, ticket: messages.Ticket, fragment: int) -> None:
        text = ""
        if ticket.fragment != fragment:
            text = f"for fragment {ticket.fragment}, not {fragment}"
        elif ticket.local_steps and not self.info.sync_every:
            text = f"with {ticket.local_steps} local steps, but in this run the script decides when a round ends"
        if text:
            raise VersionSkew(
                f"{self.http.server} gave a ticket {text}.", "Use the same release of Atoll on both sides."
            )

    def pace(self, is_wait: bool, asked_s: float, wait_s: float) -> None:
        """Slow down long polls that the server answers "wait" at once, instead of after `wait_s`.

        Args:
            is_wait: whether the server answered "wait".
            asked_s: time of the request, by `time.monotonic`.
            wait_s: seconds that the server was asked to wait.
        """
        is_early = time.monotonic() - asked_s < wait_s / 2
        if is_wait and is_early:
            self._early.again()
        else:
            self._early.reset()
        if is_wait and wait_s and not is_early:
            self.progress.waited()

    def outcome(self, ticket: int, retries: int | None = None) -> messages.Outcome | Lost:
        """Return the state of a ticket's update: accepted, counted, refused, sat out or expired.

        If the server no longer knows the ticket, the state is "expired". If the last retry failed, return `Lost`.

        Args:
            ticket: the ticket under which the update was submitted.
            retries: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.
        """
        what = "learn whether the update counts"
        return self.call(lambda: self._state_of(ticket).outcome, what, retries=retries, kind=messages.Outcome)

    def require_outcome(self, ticket: int) -> messages.Outcome:
        """Return the state of a ticket's update. Where `outcome` would return `Lost`, raise its error.

        Raises:
            TRANSIENT: this worker left during the call.
            ServerLost: the server has not answered for `ATOLL_GIVE_UP_S`.
        """
        return require(self.outcome(ticket))

    def parts_at_server(self, ticket: int, digests: Mapping[int, bytes], update: str) -> Collection[int]:
        """Return the indices of the update's parts that the server already has, with the same digests.

        Args:
            ticket: the ticket under which the update is submitted.
            digests: BLAKE3 of each part, by the part's index.
            update: digest of the update.

        Raises:
            TicketClosed: the round closed without this update, or another one was accepted under its ticket.
        """
        state = self._state_of(ticket)
        if state.outcome.state == "expired":
            raise TicketClosed(f"The round closed without this worker's update: {state.outcome.reason}.")
        if state.outcome.is_in and state.outcome.digest not in ("", update):
            raise TicketClosed(f"Another process of {self.site} has submitted another update for ticket {ticket}.")
        if state.outcome.is_in:
            return digests.keys()
        return {
            index
            for index, digest in zip(state.parts, state.part_digests, strict=True)
            if digest == digests.get(index, b"").hex()
        }

    def _state_of(self, ticket: int) -> messages.TicketState:
        try:
            state = self.http.get(routes.TICKET.format(ticket=ticket), messages.TicketState)
            if state.outcome.ticket != ticket:
                raise VersionSkew(
                    f"{self.http.server} answered for ticket {state.outcome.ticket}, not {ticket}.",
                    "Use the same release of Atoll on both sides.",
                )
            return state
        except Gone as error:  # the server no longer knows the ticket
            outcome = messages.Outcome(ticket=ticket, state="expired", base_version=0, reason=str(error))
            return messages.TicketState(outcome=outcome, parts=[], part_digests=[])

    def complete(self, ticket: int, message: messages.Complete) -> messages.Receipt:
        """Tell the server once that the update under a ticket is complete. Return its receipt."""
        return self.http.post(routes.COMPLETE.format(ticket=ticket), message, messages.Receipt)

    def manifest(self, fragment: int, number: int) -> messages.VersionManifest:
        """Ask once for the manifest (the parts and their digests) of the fragment's version with this number."""
        return self.http.get(routes.MANIFEST.format(fragment=fragment, version=number), messages.VersionManifest)

    def head(self, fragment: int) -> messages.VersionRef:
        """Ask once for the newest version of a fragment: its number from the run's status, then its digest."""
        fragments = self.http.get(routes.STATUS, Status).fragments
        if fragment >= len(fragments):
            raise Gone(f"The status of {self.http.server} does not have fragment {fragment}.", "Ask again.")
        number = fragments[fragment].version
        return messages.VersionRef(fragment, number, self.manifest(fragment, number).digest)

    def _failed(self, error: AtollError) -> None:
        """Record a failed attempt.

        Any error counts as an answer, except an unreachable server, a stalled transfer and a damaged answer.
        """
        if isinstance(error, ServerUnreachable | TransferStalled) or error.is_damaged:
            self.silence.failed(error)
        else:
            self._answered()
        self._is_silent = self._is_silent or is_silence(error)

    def _answered(self) -> None:
        self.silence.answered()
        self._is_silent = False

    def look_for_server(self) -> None:
        """If the last call has timed out, ask on a new connection whether the server is there; any answer will do.

        Raises:
            ServerUnreachable, TransferStalled: the server does not answer.
        """
        if not self._is_silent:
            return
        try:
            self.http.reach(routes.HEALTH, timeout_s=LOOK_S)
        except (ServerUnreachable, TransferStalled):
            raise
        except AtollError as error:
            LOG.debug("%s: %s", self.http.server, error)
        self._answered()


class _Attempts:
    """The attempts at one call to the server: waits between attempts, and decides when to stop.

    If the server has forgotten the worker, the worker first joins the run again.

    Args:
        session: the session that makes the call.
        most: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.
        what: what the call is for, to complete "cannot …" in the log.
    """

    def __init__(self, session: Session, most: int | None, what: str) -> None:
        self._session, self._most, self._what = session, most, what
        self._pause_s, self._count, self._lost, self._damaged = FIRST_BACKOFF_S, 0, 0, 0
        self._since_s = self._begun_s = 0.0  # time of the first failure; 0: none yet; time at which the attempt began
        self._lease = self._stale = ""  # lease of the attempt; lease that is no longer valid
        self._error: AtollError | None = None
        self._is_silent = False  # whether the server was looked for in vain, after a call that has timed out
        self._told = False  # whether the log has had a line about a failure

    def begin(self) -> str:
        """Wait until the next attempt may begin. Return the lease (the right to act for the site) for the attempt.

        Raises:
            TRANSIENT: the last retry failed.
            ServerLost: the server has not answered for `ATOLL_GIVE_UP_S`.
            LeaseLost: this worker cannot join again, because it has never joined or is not rank 0.
            AtollError: the error that has ended this session, such as `Superseded`.
        """
        session = self._session
        while True:
            if self._error is not None:
                self._pause(self._error)
            self._error = None
            if session._fatal is not None:
                raise session._fatal
            try:
                session.look_for_server()
                if self._stale:
                    session.rejoin(self._stale)
                    self._stale = ""
                self._lease, self._begun_s = session.http.lease, time.monotonic()
                return self._lease
            except TRANSIENT as error:
                if self._is_silent and not is_silence(error):  # after the silence, the network says something again
                    self._pause_s = FIRST_BACKOFF_S
                self._error, self._is_silent = error, is_silence(error)

    def failed(self, error: AtollError) -> None:
        """Record that an attempt failed with this error. The next call of `begin` waits, or raises the error.

        If a further attempt cannot help, raise the error at once.
        """
        if not isinstance(error, (LeaseLost, *TRANSIENT)) and not error.is_damaged:
            raise error
        if type(error) is ServerUnreachable and not is_silence(error) and time.monotonic() - self._begun_s >= WORKED_S:
            self._pause_s = 0.0
        self._error = error

    def succeeded(self) -> None:
        """Record that the server answered the attempt.

        If earlier attempts failed, log that the server answers again.
        """
        self._session._answered()
        if self._told:
            LOG.info("%s: the server answers again; continuing to %s", self._session.site, self._what)

    def _pause(self, error: AtollError) -> None:
        session, silence = self._session, self._session.silence
        self._since_s = self._since_s or time.monotonic()
        if isinstance(error, LeaseLost):
            if not self._lease:
                raise error
            silence.require_patience(self._since_s, self._what, error.message)
            session._closing.wait(min(self._lost * FIRST_BACKOFF_S, LONGEST_BACKOFF_S))  # the first time, 0 s
            self._lost, self._stale = self._lost + 1, self._lease
            return
        self._count += 1
        session._failed(error)
        self._require_hope(error)
        keep_ranks_waiting()
        pause_s = self._pause_s * OWN_RANDOM.uniform(0.75, 1.25) or OWN_RANDOM.uniform(0.0, FIRST_BACKOFF_S)
        wait_s = max(pause_s, error.retry_after_s or 0.0)
        wait_s = min(wait_s, max(silence.most_s - silence.seconds, 0.0))
        is_quiet = error.is_damaged and not silence.was_answered  # the error follows soon if it stays
        level = LOG.warning if not is_quiet and (self._count in (1, 4) or self._count % 20 == 0) else LOG.debug
        patience = f" {silence.patience}" if self._most is None else ""
        is_step = self._count == 1 and isinstance(error, Busy) and 0 < (error.retry_after_s or 0) < BRIEF_S
        if is_step:
            LOG.info("%s: %s Trying again in %.1f s.", session.site, error.message, wait_s)
        else:
            self._told = True
            level("%s: cannot %s: %s%s Trying again in %.1f s.", session.site, self._what, error, patience, wait_s)
        if session._closing.wait(wait_s) and session._fatal is None:
            raise error
        self._pause_s = min(2 * self._pause_s or FIRST_BACKOFF_S, LONGEST_BACKOFF_S)
        if self._count == 1 and not is_step:
            session.reconnections += 1

    def _require_hope(self, error: AtollError) -> None:
        """Raise the error, or `ServerLost`, if there is to be no further attempt."""
        silence = self._session.silence
        if self._most is not None and (self._count > self._most or self._is_silent):
            raise error  # a call that times out has taken as long as all retries together
        self._damaged = self._damaged + 1 if error.is_damaged else 0
        if self._damaged >= (DAMAGED_LATER if silence.was_answered else DAMAGED_FIRST):
            raise error
        is_other = isinstance(error, ServerUnreachable) and error.is_other and not error.is_damaged
        if is_other and not silence.was_answered:
            raise error
        if self._most is None:
            if silence.is_too_long:
                raise error if error.is_damaged else silence.error() from error
            silence.require_patience(self._since_s, self._what, error.message)
