"""Handlers of requests that transfer bytes: downloads of versions, differences and objects, and uploads of parts.

A part is checked and written to disk while its bytes arrive. Only one request at a time can upload the same part. After
an interrupted upload, a worker asks which parts the server has (`TicketOperations.get_ticket`), and sends the rest. An
incomplete part is sent again from its first byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Hashable, Iterator

from aiohttp import web
from blake3 import blake3

from atoll.aggregation.check_arriving_parts import Inspection, PartChecker, PartHasher
from atoll.blobs.model_file import ModelFile, model_header, model_runs
from atoll.errors import BadRequest, Busy, Conflict, Gone, PartCorrupt
from atoll.format_text import number_of
from atoll.protocol import messages, routes
from atoll.protocol.read_message import LENGTH_BYTES, read_framed
from atoll.rounds.events import WorkerSeen
from atoll.server.coordinator.roster import Lease
from atoll.server.coordinator.served_run import ServedRun
from atoll.server.http.caller import Caller
from atoll.server.http.downloads import send_pieces
from atoll.store.journal_tables import DeltaRow, PartRow, TicketRow, VersionRow
from atoll.store.kept_objects import Entry, ObjectStore
from atoll.store.versions import Pin
from atoll.transport.request_body import Idle, break_off, receive_part, require_part_bytes
from atoll.transport.serve_range import read_cached, serve_file

PARTS_PER_CONNECTION = 4
"""Maximum number of simultaneous part uploads for each connection of a rank.

More than 1, because uploads over broken connections may still be open at the server.
"""
OBJECT_PARTS = 64
"""Maximum number of simultaneous uploads of object parts, by one publisher."""


class ByteRoutes:
    """Handlers of requests for a run's versions and published objects."""

    def __init__(self, served: ServedRun) -> None:
        self.run, self.store, self.plan = served.run, served.run.store, served.run.plan
        self._place, self._objects, self._tickets = served.place, served.objects.store, served.tickets

    async def request_ticket(
        self, lease: Lease, message: messages.TicketRequest
    ) -> messages.TicketReply | tuple[messages.TicketReply, bytes | memoryview]:
        """Return what `TicketOperations.request_ticket` does, with the ticket's version if the site lacks it.

        The manifest comes with every such version. Its bytes come if there are at most `routes.VERSION_BYTES`, unless
        the site can download fewer: a difference, or the parts of one rank.

        Raises:
            Exception: an error of `TicketOperations.request_ticket`.
        """
        reply = await self._tickets.request_ticket(lease, message)
        data: bytes | memoryview = b""
        if message.holds is None:
            return reply
        ticket = reply.ticket
        if ticket is not None and ticket.base_digest != message.holds:
            with contextlib.suppress(Gone):  # the site then asks for the newest version
                manifest = await self.get_manifest(ticket.fragment, ticket.base_version)
                data = b"" if manifest.delta else await self._small_version(ticket, lease.site)
                reply = reply.model_copy(update={"manifest": manifest})
        return reply, data

    async def _small_version(self, ticket: messages.Ticket, site: str) -> bytes | memoryview:
        """Return the bytes of the version of a ticket, if they are here and few enough to come with the ticket."""
        nbytes = self.plan.fragments[ticket.fragment].version.nbytes
        if not self._place.is_here or nbytes > routes.VERSION_BYTES or self.plan.settings.model.ranks > 1:
            return b""
        data: bytes | memoryview | None
        with self.store.versions.pin(ticket.fragment, ticket.base_version) as pin:
            data = read_cached(pin.fd, memoryview(bytearray(nbytes)), 0)
            if data is None or len(data) < nbytes:
                data = await asyncio.get_running_loop().run_in_executor(self.run.io, os.pread, pin.fd, nbytes, 0)
            if pin.revoked.is_set():
                return b""
        self._counter(site)(len(data))
        return data

    async def get_manifest(self, fragment: int, version: int) -> messages.VersionManifest:
        """Return the manifest of a version (sizes and digests of its parts).

        The manifest also describes the encoded difference from the previous version, if there is one. In a swarm, it
        lists the workers that have the version.

        Raises:
            Gone: the server no longer has the version.
        """
        row = self.store.versions.get(fragment, version)
        return messages.VersionManifest(
            version=version,
            digest=row.digest,
            part_digests=[digest.hex() for digest in row.part_digests],
            delta=self._delta(fragment, version),
            sources=self._place.sources(fragment, version, row.digest),
        )

    def _delta(self, fragment: int, version: int) -> messages.Delta | None:
        row = self.store.versions.delta(fragment, version)
        if row is None or self.plan.fragments[fragment].downlink is None:
            return None
        return messages.Delta(
            base_version=row.base_version,
            base_digest=row.base_digest,
            digest=row.digest,
            part_digests=[digest.hex() for digest in row.part_digests],
        )

    async def get_version(
        self, fragment: int, version: int, digest: str, caller: Caller, request: web.Request
    ) -> web.StreamResponse:
        """Send the file of a version, or a byte range of it. The server of a swarm has only version 0.

        Raises:
            Gone: the server does not have the version, or has one with another digest.
        """
        if self._place.is_here:
            pinned = self.store.versions.pin(fragment, version)
            return await self._serve(pinned, self.plan.fragments[fragment].version.nbytes, digest, caller, request)
        if version:
            raise Gone(
                f"Version {version} is stored at workers of this swarm.", "Get its manifest, which lists the workers."
            )
        if self.store.run_log.version_digest(fragment, version) != digest:
            raise Gone(f"Version 0 does not have the digest {digest[:12]}.", "Get its manifest, which has the digest.")
        with self.store.initial_file(fragment) as fd:
            return await self._send(caller, request, fd, self.plan.fragments[fragment].version.nbytes, digest)

    async def get_delta(
        self, fragment: int, version: int, digest: str, caller: Caller, request: web.Request
    ) -> web.StreamResponse:
        """Send a version's delta (the encoded difference from the previous version), or a byte range of it.

        Raises:
            Gone: the version or its delta no longer exists, or the delta has another digest.
        """
        pinned = self.store.versions.pin_delta(fragment, version)
        downlink = self.plan.fragments[fragment].downlink
        nbytes = downlink.layout.nbytes if downlink else 0
        return await self._serve(pinned, nbytes, digest, caller, request)

    async def get_model_part(
        self, fragment: int, version: int, part: int, caller: Caller, request: web.Request
    ) -> web.StreamResponse:
        """Send one part of a version, with full-precision values as in exports, then the part's BLAKE3 (32 bytes).

        Raises:
            Gone: the server no longer has the version or the outer optimizer's state after it.
            BadRequest: there is no such part.
        """
        with self.store.versions.pin(fragment, version, with_state=self.plan.has_masters) as pin:
            layout = self.plan.fragments[fragment].version
            if part >= len(layout.parts):
                raise BadRequest(f"Part {part} does not exist; the version has {number_of(len(layout.parts), 'part')}.")
            runs = ModelFile(layout, pin.fd, pin.state_fd).part(layout.parts[part])
            response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
            response.content_length = layout.parts[part].nbytes + routes.DIGEST_BYTES
            await response.prepare(request)
            hasher, loop = blake3(), asyncio.get_running_loop()
            with Idle(request, self.plan.settings.network.idle_timeout_s, self._counter(caller.site)) as idle:
                while (run := await loop.run_in_executor(self.run.io, next, runs, None)) is not None:
                    if pin.revoked.is_set():  # when the client tries again, it gets the error `Gone`
                        break_off(request)
                        return response
                    hasher.update(run)
                    await response.write(run)
                    idle.add(len(run))
                await response.write(hasher.digest())
                await response.write_eof()
        return response

    async def get_model(self, version: int, caller: Caller, request: web.Request) -> web.StreamResponse:
        """Send the model of a version as a safetensors file, the same bytes as `atoll export` writes.

        Raises:
            Gone: the server no longer has the version, or has none: the run is a swarm, or has no model.
        """
        plan = self.plan
        if not self._place.is_here or plan.schema.is_nothing:
            what = "The run has no model." if plan.schema.is_nothing else "The workers of a swarm have its versions."
            raise Gone(what, "`atoll export` reads them there." if not self._place.is_here else "")
        with contextlib.ExitStack() as stack:
            pins = [
                stack.enter_context(self.store.versions.pin(fragment, version, with_state=plan.has_masters))
                for fragment in range(len(plan.fragments))
            ]
            header, owners = model_header(plan.schema)
            files = [(layout, pin.fd, pin.state_fd) for layout, pin in zip(plan.versions, pins, strict=True)]

            def pieces() -> Iterator[bytes | memoryview]:
                yield header
                for run in model_runs(owners, files):
                    if any(pin.revoked.is_set() for pin in pins):
                        raise Gone(f"Version {version} was deleted during the download.", "Download a newer one.")
                    yield run

            return await send_pieces(
                request,
                pieces(),
                "application/octet-stream",
                pool=self.run.io,
                nbytes=len(header) + sum(spec.nbytes for spec in owners),
                idle_timeout_s=plan.settings.network.idle_timeout_s,
                on_bytes=self._counter(caller.site),
            )

    async def _serve(
        self, pinned: Pin[VersionRow] | Pin[DeltaRow], nbytes: int, digest: str, caller: Caller, request: web.Request
    ) -> web.StreamResponse:
        try:
            if pinned.row.digest != digest:
                raise Gone(
                    f"Version {pinned.row.version} or its delta no longer has the digest {digest[:12]}.",
                    "Download the newest version instead.",
                )
            return await self._send(caller, request, pinned.fd, nbytes, digest, pinned.revoked.is_set)
        finally:
            pinned.release()

    async def _send(
        self,
        caller: Caller,
        request: web.Request,
        fd: int,
        nbytes: int,
        digest: str,
        revoked: Callable[[], bool] = lambda: False,
    ) -> web.StreamResponse:
        return await serve_file(
            request,
            fd,
            nbytes,
            digest,
            pool=self.run.io,
            idle_timeout_s=self.plan.settings.network.idle_timeout_s,
            revoked=revoked,
            on_bytes=self._counter(caller.site),
        )

    def _counter(self, site: str) -> Callable[[int], None]:
        """Return a function that counts sent bytes for the server, and for the site if the request is from one."""
        presence = self.run.roster.get(site)

        def count(nbytes: int) -> None:
            self.run.bytes_down += nbytes
            if presence is not None:
                presence.bytes_down += nbytes

        return count

    # -- objects that a process publishes at the server, and others download

    async def get_object_data(
        self, object: str, secret: str, caller: Caller, request: web.Request
    ) -> web.StreamResponse:
        """Send a complete object, or a byte range of it. If the object is removed meanwhile, close the connection.

        Raises:
            Gone: the object does not exist or has expired.
            AuthError: the secret does not belong to the object.
            Conflict: the object is not complete.
        """
        entry = self._objects.complete_one(object, secret)
        fd = self._objects.reader(entry)
        try:
            return await self._send(caller, request, fd, entry.cuts.nbytes, entry.manifest.id, entry.removed.is_set)
        finally:
            os.close(fd)


class PartReceiver:
    """Handlers of requests that upload parts of updates and of objects."""

    def __init__(self, served: ServedRun) -> None:
        self._run, self._leases, self._updates = served.run, served.leases, served.updates
        self._objects, plan = served.objects.store, served.run.plan
        self._inspections = [Inspection(fragment.update, plan.codecs) for fragment in plan.fragments]
        self._uploads: dict[Hashable, tuple[str, web.Request]] = {}
        self._writers: dict[tuple[str, int], _ObjectPart] = {}

    async def put_part(self, lease: Lease, ticket: int, part: int, request: web.Request) -> messages.Receipt | None:
        """Receive one part of an update, check it, and record it.

        If the message `Complete` follows the part, submit the update, and return the receipt.

        Raises:
            BadRequest: there is no such part, the length of the body is wrong, or the message is not valid.
            LeaseLost, Superseded: the lease is not valid.
            Gone: this run has never issued the ticket.
            TicketClosed, UpdateRefused: the ticket is not open, or the update does not count.
            Busy, DiskFull: the site uploads too many parts at the same time, or the disk has too little space.
            PartCorrupt: the part does not match its digest.
            Conflict: the update's digest is not that of its parts.
        """
        run = self._run
        row, settings = run.store.tickets.get(ticket), run.settings
        layout = run.plan.fragments[row.fragment].update
        self._leases.require_open(lease, ticket)  # first: in a restored directory, another fragment may have the number
        if part >= len(layout.parts):
            raise BadRequest(
                f"Part {part} does not exist; the update has {number_of(len(layout.parts), 'part')}.",
                "Divide the update into parts as the ticket's layout says.",
            )
        planned = layout.parts[part]
        rest_bytes = require_part_bytes(request, planned.nbytes, LENGTH_BYTES + routes.CONTROL_BODY_BYTES)
        run.require_space()
        self._updates.begins(lease.site, ticket, row.fragment)
        most = PARTS_PER_CONNECTION * settings.network.connections * settings.model.ranks
        with self._only_upload((ticket, part), lease.site, most, request):
            taken = await self.take_part(
                *(lease, row, part),
                lambda arriving: self._receive(request, arriving, f"Part {part}", lease.site, rest_bytes),
            )
        return await self.after_part(lease, ticket, taken)

    async def take_part(
        self, lease: Lease, row: TicketRow, part: int, receive: Callable[[PartChecker], Awaitable[bytes]]
    ) -> tuple[messages.Complete, PartRow | None] | None:
        """Write one part of an update, check it, and record it, unless the acceptance of the update does so.

        Args:
            lease: lease of the site.
            row: ticket of the update, which is open.
            part: number of the part.
            receive: gives the part's bytes to the checker, and returns what follows the part and its digest.

        Returns:
            The message that follows the part, and the part if it is not recorded yet; None: no message follows.

        Raises:
            Exception: an error of `receive`, or one of those of `put_part`.
        """
        run, spool = self._run, self._run.store.tickets.spool(row.ticket)
        planned, writer = run.plan.fragments[row.fragment].update.parts[part], spool.begin_part(part)
        try:
            arriving = PartChecker(self._inspections[row.fragment], planned, writer.write, spool.fd)
            trailer = await receive(arriving)
            message = _complete_in(trailer) if trailer else None
            completes = message is not None
            last = self._updates.record_part(lease, row.ticket, part, arriving.stats, writer, completes=completes)
        finally:
            writer.abandon()
        return None if message is None else (message, last)

    async def after_part(
        self, lease: Lease, ticket: int, taken: tuple[messages.Complete, PartRow | None] | None
    ) -> messages.Receipt | None:
        """Submit the update if its message came with the part that `take_part` has taken. Call it at once."""
        if taken is not None:
            return await self._updates.complete(lease, ticket, *taken)
        self._run.ledger.record(WorkerSeen(lease.site, lease.number))
        return None

    async def put_object_part(self, object: str, part: int, secret: str, request: web.Request) -> None:
        """Receive one part of an object, and check it.

        Raises:
            BadRequest: there is no such part, or the length of the body is wrong.
            Gone: the object does not exist, has expired, or was withdrawn.
            AuthError: the secret does not belong to the object.
            Busy, DiskFull: too many object parts are being uploaded at the same time, or the disk has too little space.
            Conflict: the object is complete already.
            PartCorrupt: the part does not match its digest.
        """
        run, loop = self._run, asyncio.get_running_loop()
        if (request.content_length or 0) <= routes.DIGEST_BYTES:
            raise BadRequest(
                "The request contains no part.", "Send the bytes of the part, then the BLAKE3 digest of these bytes."
            )
        entry = self._objects.find(object, secret)
        if not entry.is_arriving:
            raise Conflict(f"Object {object[:8]} is already complete.", "It cannot change: publish a new object.")
        if part >= entry.cuts.count:
            raise BadRequest(f"Object {object[:8]} has no part {part}, only {number_of(entry.cuts.count, 'part')}.")
        expected, key = entry.cuts.part(part), (object, part)
        require_part_bytes(request, expected.nbytes)
        run.require_space()
        with self._only_upload(key, f"objects of {entry.payer}", OBJECT_PARTS, request):
            before = self._writers.get(key)
            entry.digests.pop(part, None)
            writer = self._writers[key] = _ObjectPart(self._objects, entry, expected.start)
            try:
                if before is not None:
                    await loop.run_in_executor(run.io, before.end)
                arriving = PartHasher(expected, writer.write)
                await self._receive(request, arriving, f"Part {part} of object {object[:8]}")
                if self._writers.get(key) is not writer:  # a newer request is about to write over these bytes
                    raise ConnectionAbortedError("the part was sent again")
                if entry.removed.is_set():
                    raise Gone(f"Object {object[:8]} was withdrawn during its upload.", "Publish it again.")
                entry.digests[part] = arriving.digest
            finally:
                if self._writers.get(key) is writer:
                    del self._writers[key]
                await asyncio.shield(loop.run_in_executor(run.io, writer.end))

    @contextlib.contextmanager
    def _only_upload(self, key: Hashable, sender: str, most: int, request: web.Request) -> Iterator[None]:
        """During the `with` block, let only this request upload the part.

        If an earlier request is still uploading the same part, abort its connection: the sender no longer waits for
        that request, and the connection would stay open until the idle timeout.

        Args:
            key: identifies the part.
            sender: sender of the part.
            most: maximum number of simultaneous uploads by this sender. It limits the server's memory.
            request: the request that uploads the part.

        Raises:
            Busy: `sender` has `most` uploads already.
        """
        if key in self._uploads:
            break_off(self._uploads[key][1])
        elif sum(other == sender for other, _ in self._uploads.values()) >= most:
            busy = Busy(f"{most} uploads by {sender} are running already.", f"Send at most {most} parts at a time.")
            busy.retry_after_s = 1.0
            raise busy
        upload = self._uploads[key] = sender, request
        try:
            yield
        finally:
            if self._uploads.get(key) is upload:
                del self._uploads[key]

    async def _receive(
        self,
        request: web.Request,
        arriving: PartHasher,
        what: str,
        site: str = "",
        rest_bytes: int = routes.DIGEST_BYTES,
    ) -> bytes:
        """Receive and write one part. Return what follows its digest.

        Args:
            request: the request.
            arriving: writes and hashes the part.
            what: the part, for messages.
            site: the site that sends it; empty if it is no site's.
            rest_bytes: number of bytes after the part: its digest, and what follows.

        Raises:
            PartCorrupt: the part does not match the digest that follows it.
        """
        run = self._run

        def count(nbytes: int) -> None:
            run.bytes_up += nbytes
            if site in run.roster:
                run.roster[site].bytes_up += nbytes

        rest = await receive_part(
            request,
            arriving,
            pool=run.io,
            idle_timeout_s=run.settings.network.idle_timeout_s,
            on_bytes=count,
            rest_bytes=rest_bytes,
        )
        if arriving.digest != rest[: routes.DIGEST_BYTES]:
            raise PartCorrupt(f"{what} arrived damaged.", "Send this part again.")
        return rest[routes.DIGEST_BYTES :]


def _complete_in(trailer: bytes) -> messages.Complete:
    try:
        message, more = read_framed(messages.Complete, trailer)
    except ValueError as error:
        raise BadRequest(
            f"The message after the part is not valid: {error}.", "See Complete in /openapi.json."
        ) from None
    if more:
        raise BadRequest(f"{number_of(len(more), 'byte')} stand after the message Complete.", "Send nothing after it.")
    return message


class _ObjectPart:
    """Writes the bytes of one part of an object while they arrive, in pool threads."""

    def __init__(self, objects: ObjectStore, entry: Entry, start: int) -> None:
        self._objects, self._entry, self._offset = objects, entry, start
        self._lock, self._ended = threading.Lock(), False

    def write(self, data: memoryview) -> None:
        """Append bytes to the part."""
        with self._lock:
            if self._ended or self._entry.removed.is_set():
                raise ConnectionAbortedError("the part was sent again, or its object was removed")
            self._objects.write(self._entry, data, self._offset)
            self._offset += len(data)

    def end(self) -> None:
        """Stop writing. After this call, no thread writes this part any more."""
        with self._lock:
            self._ended = True
