"""One worker's place in a run: joined, leased, heard from; its files; its tickets.

Everything here can be interrupted: by a lost connection (backoff, then the same request again), a lost lease (join
again, the open ticket comes back), a server that was killed (the same, with a new epoch), or the death of this
process (the outbox is sent by the next one). The two loops that users see, `federated.py` and `diloco.py`, stand on it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from atoll import registry
from atoll.codecs.base import Codec
from atoll.errors import (
    AtollError,
    Busy,
    ConfigError,
    DiskFull,
    Gone,
    LeaseLost,
    ServerUnreachable,
    Superseded,
    TicketClosed,
    TransferStalled,
    VersionSkew,
)
from atoll.failpoints import failpoint
from atoll.tensors.chunks import Scatter
from atoll.tensors.layout import Layout, update_layout, version_layout
from atoll.tensors.modules import Tensors
from atoll.tensors.schema import PARAMS, Schema, TensorSpec
from atoll.transport.client import Counters, Http, Sink
from atoll.transport.tls import read_token
from atoll.wire import messages, routes
from atoll.worker import update
from atoll.worker.files import BaseFile, BaseNote, Outbox, OutboxNote, locked
from atoll.worker.reporting import LOG, progress, size

T = TypeVar("T")

FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 8.0

NetworkLost = (ServerUnreachable, TransferStalled, Busy, DiskFull)
"""What may pass by itself: asked again, after a pause."""


class Session:
    """A worker's place in a run.

    Args:
        server: address of the server.
        site: the worker's name.
        folder: where its files lie; by default `ATOLL_DIR`, else `.atoll` in the current folder.
        schema: of its model, where it has one already; compared before it joins.
        sync_every: its own H, where it has one; refused where the run's differs.
        labels: shown in status.
        max_retries: attempts after which a lost server is given up; None: never.
    """

    def __init__(
        self,
        server: str,
        site: str,
        *,
        folder: Path | None = None,
        schema: Schema | None = None,
        sync_every: int | None = None,
        labels: dict[str, str] | None = None,
        max_retries: int | None = None,
    ) -> None:
        self.site = site
        self.http = Http(server, token=read_token(token_file()), ca=os.environ.get("ATOLL_TLS_CA"))
        self.reconnections = 0
        self.heartbeat = messages.Heartbeat()
        self.finished = False
        self._process = uuid.uuid4().hex[:16]
        self._labels = labels or {}
        self._sync_every = sync_every
        self._closing = threading.Event()
        self._join_lock = threading.Lock()
        self._beat: threading.Thread | None = None
        self._cleanup = contextlib.ExitStack()
        self._fatal: AtollError | None = None
        try:
            self.info = self.patiently(lambda: self.http.get(routes.RUN, messages.RunInfo), max_retries, "join")
            self.http.resize(self.info.connections, self.info.idle_timeout_s)
            if self.info.protocol != routes.PROTOCOL:
                older = "this worker" if self.info.protocol > routes.PROTOCOL else "the server"
                raise VersionSkew(
                    f"This worker speaks protocol {routes.PROTOCOL}, {self.http.server} speaks {self.info.protocol}.",
                    f"Upgrade Atoll at {older}.",
                )
            self.schema = self._fetch_schema()
            if schema is not None:
                schema.require_equal(self.schema, mine=f"worker {site}", theirs="the server")
            folder = folder or Path(os.environ.get("ATOLL_DIR", ".atoll"))
            self.folder = folder / site / self.info.run
            self._cleanup.enter_context(locked(self.folder, site))
            self.layout = version_layout(self.schema, self.info.part_bytes)
            self.codecs: dict[str, Codec] = {
                name: registry.load("codecs", name)() for name in {"none", self.info.codec}
            }
            self.base = BaseFile(self.folder, self.layout)
            self._cleanup.callback(self.base.close)
            self.outbox = Outbox(self.folder, self.update_layout())
            self._cleanup.callback(self.outbox.close)
            self._join(max_retries)
            self._start_heartbeats()
        except BaseException:
            self._cleanup.close()
            self.http.close()
            raise

    # -- being there

    @property
    def counters(self) -> Counters:
        return self.http.counters

    def update_layout(self) -> Layout:
        """The layout of an update, as the server issues it: `params` by the run's codec, everything else as it is."""

        def encoding(spec: TensorSpec) -> Codec:
            return self.codecs[self.info.codec if spec.group == PARAMS else "none"]

        return update_layout(self.schema.tensors, encoding, self.info.part_bytes)

    def _fetch_schema(self) -> Schema:
        message = self.patiently(lambda: self.http.get(routes.SCHEMA, messages.SchemaMessage), None, "read the schema")
        schema = Schema.from_json(message.model_dump())
        if schema.digest != self.info.schema_digest:
            raise VersionSkew(
                "The server's schema does not have the digest that it names.", "Upgrade Atoll on both sides."
            )
        return schema

    def _join(self, max_retries: int | None = None) -> None:
        """Take part, or take part again under a new lease."""
        message = messages.Join(
            protocol=routes.PROTOCOL,
            site=self.site,
            host=socket.gethostname()[:256],
            process=self._process,
            schema_digest=self.schema.digest,
            sync_every=self._sync_every,
            labels=self._labels,
        )
        joined = self.patiently(lambda: self.http.post(routes.WORKERS, message, messages.Joined), max_retries, "join")
        self.http.lease = joined.lease
        self.epoch = joined.epoch

    def rejoin(self, lost: str) -> None:
        """Join again, once, however many threads find that `lost` is no longer valid."""
        with self._join_lock:
            if self.http.lease == lost:
                self.reconnections += 1
                LOG.info("%s: the server no longer knows this worker; joining again", self.site)
                self._join()

    def _start_heartbeats(self) -> None:
        if self.info.heartbeat_interval_s:
            self._beat = threading.Thread(target=self._heartbeats, name="atoll-heartbeat", daemon=True)
            self._beat.start()

    def _heartbeats(self) -> None:
        while not self._closing.wait(self.info.heartbeat_interval_s * random.uniform(0.9, 1.1)):
            self.beat()

    def beat(self) -> None:
        """Tell the server that this worker lives, and how far it is."""
        lease = self.http.lease
        counters = self.counters
        message = self.heartbeat.model_copy(
            update={
                "retries": counters.retries,
                "reconnections": self.reconnections,
                "bytes_up": counters.bytes_up,
                "bytes_down": counters.bytes_down,
            }
        )
        try:
            reply = self.http.post(routes.HEARTBEAT, message, messages.HeartbeatReply)
            self.finished = self.finished or reply.finished
        except Superseded as error:
            self._fatal = error
            self._closing.set()
        except LeaseLost:
            with contextlib.suppress(AtollError):
                self.rejoin(lease)
        except AtollError as error:
            LOG.debug("%s: heartbeat failed: %s", self.site, error)

    def leave(self, error: str | None = None) -> None:
        """Deregister, stop the heartbeats and close the files; the outbox stays if it was not counted."""
        if self._closing.is_set() and self._fatal is None:
            return
        self._closing.set()
        if self._beat is not None:
            self._beat.join()
        try:
            if self._fatal is None:
                self.http.send(routes.LEAVE, messages.Leave(error=error[:2000] if error else None))
        except AtollError as problem:
            LOG.debug("%s: could not say goodbye: %s", self.site, problem)
        finally:
            self.http.close()
            self._cleanup.close()

    def patiently(self, ask: Callable[[], T], max_retries: int | None, what: str) -> T:
        """Ask until it is answered: a lost server is waited for, a lost lease is taken anew.

        Raises:
            TransferError, DiskFull: after `max_retries` attempts; None waits for ever.
        """
        pause_s, attempt = FIRST_BACKOFF_S, 0
        while True:
            if self._fatal is not None:
                raise self._fatal
            lease = self.http.lease
            try:
                result = ask()
                if attempt:
                    LOG.info("%s: the server is back; going on to %s", self.site, what)
                return result
            except LeaseLost:
                if not lease:
                    raise
                self.rejoin(lease)
            except NetworkLost as error:
                attempt += 1
                if max_retries is not None and attempt > max_retries:
                    raise
                wait_s = max(pause_s * random.uniform(0.75, 1.25), error.retry_after_s or 0.0)
                level = LOG.warning if attempt in (1, 4) or attempt % 20 == 0 else LOG.debug
                level("%s: cannot %s: %s Trying again in %.1f s.", self.site, what, error, wait_s)
                if self._closing.wait(wait_s) and self._fatal is None:
                    raise
                pause_s = min(2 * pause_s, LONGEST_BACKOFF_S)
                if attempt == 1:
                    self.reconnections += 1

    # -- one round

    def next_ticket(self, *, wait_s: float | None = None, max_retries: int | None = None) -> messages.TicketReply:
        """The ticket of the open round, or the word that the run is finished.

        Args:
            wait_s: give up after so long and return the reply "wait"; None waits until a round opens.
        """
        begin = time.monotonic()
        said = begin
        while True:
            left_s = routes.LONG_POLL_S if wait_s is None else max(0.0, begin + wait_s - time.monotonic())
            request = messages.TicketRequest(wait_s=min(left_s, routes.LONG_POLL_S))
            ask = functools.partial(
                self.http.post, routes.TICKETS, request, messages.TicketReply, timeout_s=routes.LONG_POLL_S + 10.0
            )
            reply = self.patiently(ask, max_retries, "ask for the next round")
            if reply.status == "finished":
                self.finished = True
            if reply.status != "wait" or (wait_s is not None and time.monotonic() - begin >= wait_s):
                return reply
            if time.monotonic() - said >= 15.0:
                said = time.monotonic()
                LOG.info("%s: waiting %.0f s: %s", self.site, said - begin, reply.reason)

    def pull(self, version: int, digest: str, into: Tensors | None, base: BaseFile | None = None) -> None:
        """Bring a version into the base file, and on its way into the tensors.

        Raises:
            Gone: the server no longer keeps it; ask for the head.
        """
        base = base or self.base
        note = base.note
        if note is not None and note.complete and (note.run, note.digest) == (self.info.run, digest):
            if into is not None:
                update.load_(into, base)
            return
        manifest_path = routes.MANIFEST.format(fragment=0, version=version)
        manifest = self.patiently(
            lambda: self.http.get(manifest_path, messages.Manifest), None, f"pull version {version}"
        )
        if manifest.digest != digest:
            raise Gone(f"Version {version} is no longer the one that was offered.", "Ask for the head again.")
        digests = [bytes.fromhex(text) for text in manifest.part_digests]
        path = routes.VERSION_DATA.format(fragment=0, version=version, digest=digest)
        note = BaseNote(self.info.run, 0, version, digest, manifest.part_digests, complete=False)
        resumed = base.note is not None and base.note.digest == digest
        wanted = base.begin(note)
        sinks: list[Sink] = [base] if resumed or into is None else [base, Scatter(self.layout, into)]
        remaining = {part.index: part for part in wanted}

        def fetch() -> None:
            todo = (
                [part for part in remaining.values() if base.digest(part) != digests[part.index]]
                if attempts
                else wanted
            )
            attempts.append(len(todo))
            self.http.pull(path, self.layout, digests, todo, sinks, on_bytes=bar.add)

        attempts: list[int] = []
        self.heartbeat = self.heartbeat.model_copy(update={"state": f"pulling version {version}"})
        with progress(f"{self.site}: pulling version {version}", sum(part.nbytes for part in wanted)) as bar:
            self.patiently(fetch, None, f"pull version {version}")
        failpoint("pull.done")
        base.finish()
        if into is not None and resumed:
            update.load_(into, base)

    def form(
        self,
        ticket: messages.Ticket,
        tensors: Tensors,
        *,
        weight: float,
        steps: int,
        metrics: dict[str, float],
    ) -> update.Formed:
        """Write the update of this ticket into the outbox; from here on it survives this process."""
        if ticket.layout_digest != self.outbox.layout.digest:
            raise VersionSkew(
                "The server lays the update out in another way than this worker.",
                "Upgrade Atoll to the same version on both sides.",
            )
        self.outbox.clear()
        formed = update.form_update(self.outbox, self.base, tensors, self.codecs)
        self.outbox.seal(
            OutboxNote(
                run=self.info.run,
                ticket=ticket.ticket,
                fragment=ticket.fragment,
                base_version=ticket.base_version,
                layout_digest=ticket.layout_digest,
                digest=formed.digest,
                part_digests=[digest.hex() for digest in formed.part_digests],
                weight=weight,
                steps=steps,
                metrics=metrics,
            )
        )
        return formed

    def send(self, max_retries: int | None = None) -> messages.Receipt:
        """Send what is in the outbox: the parts that the server lacks, then the word that it is complete.

        Raises:
            TicketClosed: the round went on without this update.
            UpdateRefused: the server looked at it, and it cannot count.
        """
        note = self.outbox.note
        assert note is not None
        digests = [bytes.fromhex(text) for text in note.part_digests]
        complete = messages.Complete(digest=note.digest, weight=note.weight, steps=note.steps, metrics=note.metrics)
        first = True

        def submit() -> messages.Receipt:
            nonlocal first
            parts = self.outbox.layout.parts
            if not first or self.resuming:
                state = self.http.get(routes.TICKET.format(ticket=note.ticket), messages.TicketState)
                if state.outcome.state == "expired":
                    raise TicketClosed(f"The round of ticket {note.ticket} is over: {state.outcome.reason}.")
                if state.outcome.state in ("accepted", "counted"):
                    parts = ()
                have = dict(zip(state.parts, state.part_digests, strict=True))
                parts = tuple(part for part in parts if have.get(part.index) != note.part_digests[part.index])
            first = False
            self.http.push(
                lambda part: routes.PART.format(ticket=note.ticket, part=part),
                self.outbox.fd,
                parts,
                digests,
                on_bytes=bar.add,
            )
            return self.http.post(routes.COMPLETE.format(ticket=note.ticket), complete, messages.Receipt)

        self.heartbeat = self.heartbeat.model_copy(update={"state": f"submitting to round {note.base_version + 1}"})
        with progress(f"{self.site}: submitting", self.outbox.layout.nbytes) as bar:
            receipt = self.patiently(submit, max_retries, "submit")
        self.resuming = False
        failpoint("worker.acknowledged")
        LOG.debug("%s: submitted %s for version %d", self.site, size(self.outbox.layout.nbytes), note.base_version)
        return receipt

    def outcome(self, ticket: int, max_retries: int | None = None) -> messages.Outcome:
        """What became of a ticket; one that the server does not know any more has expired."""
        path = routes.TICKET.format(ticket=ticket)
        try:
            return self.patiently(
                lambda: self.http.get(path, messages.TicketState),
                max_retries,
                "ask what became of the update",
            ).outcome
        except Gone as error:
            return messages.Outcome(ticket=ticket, state="expired", base_version=0, reason=str(error))

    def advance_base(self) -> None:
        """What is in the outbox counts: the base becomes what was submitted, so that it is local progress only once."""
        note = self.base.note
        assert note is not None
        self.base.begin_local(note)
        update.advance_base_(self.base, self.outbox, self.codecs)

    resuming = False
    """Whether the outbox was filled by an earlier process, so that the server may hold parts of it already."""

    def resume_outbox(self) -> messages.Receipt | None:
        """Send what an earlier process of this worker left; None where there is nothing that can still count."""
        note = self.outbox.note
        if note is None or note.run != self.info.run:
            self.outbox.clear()
            return None
        self.resuming = True
        try:
            receipt = self.send()
            LOG.info("%s: the update of an earlier process is in: round %d", self.site, note.base_version + 1)
            return receipt
        except (TicketClosed, Gone) as error:
            LOG.info("%s: the update of an earlier process came too late: %s", self.site, error)
            self.outbox.clear()
            return None
        finally:
            self.resuming = False


def default_site() -> str:
    """`ATOLL_SITE`, else a name made of host and process."""
    given = os.environ.get("ATOLL_SITE")
    if given:
        return given
    host = "".join(char if char.isalnum() or char in "-_" else "-" for char in socket.gethostname())
    return f"{host.lstrip('-_')[:40] or 'worker'}-{os.getpid()}"


def require_site(site: str) -> str:
    """A site name that every server accepts.

    Raises:
        ConfigError: it has other characters, or is too long.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(messages.Site).validate_python(site)
    except ValidationError:
        raise ConfigError(
            f"{site!r} is not a site name.", "Use 1 to 64 letters, digits, dots, hyphens and underscores."
        ) from None


def token_file() -> Path | None:
    path = os.environ.get("ATOLL_TOKEN_FILE")
    return Path(path) if path else None
