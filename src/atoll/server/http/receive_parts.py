"""Receives the parts of updates and objects. Each part is checked and written to disk while its bytes arrive.

Only one request at a time can upload the same part. After an interrupted upload, a worker asks which parts the server
has (`Coordinator.get_ticket`), and sends the rest. An incomplete part is sent again from its first byte.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web
from blake3 import blake3

from atoll.aggregation.check_arriving_parts import Inspection, PartChecker
from atoll.errors import BadRequest, Busy, Conflict, Gone, PartCorrupt
from atoll.protocol import routes
from atoll.rounds.events import WorkerSeen
from atoll.server.coordinator.coordinator import Coordinator
from atoll.server.coordinator.roster import Lease
from atoll.store.kept_objects import Kept, ObjectStore
from atoll.tensors.layout import Part
from atoll.transport.request_body import Fill, PartSink, break_off, receive_part, require_part_bytes

PARTS_PER_CONNECTION = 4
"""Maximum number of part uploads of one rank at the same time, for each of its connections.

It is more than 1, because uploads over broken connections may still be open at the server.
"""
OBJECT_PARTS = 64
"""Maximum number of uploads of object parts at the same time, of all publishers together."""
SCRATCH_BYTES = 2**18
"""Size of the buffer for a part of an object, in bytes."""


class PartReceiver:
    """Handlers of requests that upload parts of updates and of objects."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, plan = coordinator, coordinator.plan
        self._inspections = [Inspection(fragment.update, plan.codecs) for fragment in plan.fragments]
        self._under_way: dict[Hashable, tuple[str, web.Request]] = {}
        self._writers: dict[tuple[str, int], _ObjectPart] = {}

    async def put_part(self, lease: Lease, ticket: int, part: int, request: web.Request) -> None:
        """Receive one part of an update, check it, and record it.

        Raises:
            BadRequest: there is no such part, or the length of the body is wrong.
            LeaseLost, Superseded: the lease is not valid.
            TicketClosed, UpdateRefused: the ticket is not open.
            Busy: the site uploads too many parts at the same time.
            PartCorrupt: the part does not match its digest.
        """
        coordinator = self._coordinator
        fragment, settings = coordinator.store.tickets.get(ticket).fragment, coordinator.settings
        layout = coordinator.plan.fragments[fragment].update
        if part >= len(layout.parts):
            raise BadRequest(
                f"Part {part} does not exist; the update has {len(layout.parts)} parts.",
                "Divide the update into parts as the ticket's layout says.",
            )
        coordinator.require_open(lease, ticket)
        planned = layout.parts[part]
        require_part_bytes(request, planned.nbytes)
        coordinator.require_space()
        most = PARTS_PER_CONNECTION * settings.network.connections * settings.model.ranks
        with self._under_way_alone((ticket, part), lease.site, most, request):
            spool, inspection = coordinator.store.tickets.spool(ticket), self._inspections[fragment]
            writer = await asyncio.get_running_loop().run_in_executor(coordinator.io, spool.begin_part, part)
            try:
                check = PartChecker(inspection, planned, writer.write, spool.fd)
                digest = await self._receive(request, check, lease.site)
                stats = check.stats
                assert stats is not None
                if stats.digest != digest:
                    raise PartCorrupt(f"Part {part} arrived damaged.", "Send this part again.")
                coordinator.record_part(lease, ticket, part, stats, writer)
            finally:
                writer.abandon()
        coordinator.apply(WorkerSeen(lease.site, lease.number))

    async def put_object_part(self, object: str, part: int, secret: str, request: web.Request) -> None:
        """Receive one part of an object, and check it.

        Raises:
            BadRequest: there is no such part, or the length of the body is wrong.
            Gone: the object does not exist, has expired, or was withdrawn.
            AuthError: the secret does not belong to the object.
            Busy: too many object parts are being uploaded at the same time.
            Conflict: the object is complete already.
            PartCorrupt: the part does not match its digest.
        """
        coordinator, loop = self._coordinator, asyncio.get_running_loop()
        if (request.content_length or 0) <= routes.DIGEST_BYTES:
            raise BadRequest(
                "The request contains no part.", "Send the bytes of the part, then the BLAKE3 digest of these bytes."
            )
        kept = coordinator.objects.find(object, secret)
        if kept.fd < 0:
            raise Conflict(f"Object {object[:8]} is already complete.", "It cannot change: publish a new object.")
        if part >= kept.cuts.count:
            raise BadRequest(f"Object {object[:8]} has no part {part}, only {kept.cuts.count} parts.")
        wanted, key = kept.cuts.part(part), (object, part)
        require_part_bytes(request, wanted.nbytes)
        coordinator.require_space()
        with self._under_way_alone(key, "the publishers of objects", OBJECT_PARTS, request):
            before = self._writers.get(key)
            kept.digests.pop(part, None)
            writer = self._writers[key] = _ObjectPart(coordinator.objects, kept, wanted)
            try:
                if before is not None:
                    await loop.run_in_executor(coordinator.io, before.end)
                sent = await self._receive(request, writer)
                if writer.hasher.digest() != sent:
                    raise PartCorrupt(f"Part {part} of object {object[:8]} arrived damaged.", "Send this part again.")
                if kept.gone.is_set():
                    raise Gone(f"Object {object[:8]} was withdrawn during its upload.", "Publish it again.")
                kept.digests[part] = sent
            finally:
                if self._writers.get(key) is writer:
                    del self._writers[key]
                await asyncio.shield(loop.run_in_executor(coordinator.io, writer.end))

    @contextmanager
    def _under_way_alone(self, key: Hashable, sender: str, most: int, request: web.Request) -> Iterator[None]:
        """Let only this request upload a part while the `with` block runs.

        If an earlier request is still uploading the same part, abort its connection: the worker no longer waits for
        that request, and its connection would stay open until the idle timeout.

        Args:
            key: identifies the part.
            sender: sender of the part. `most` is the limit for all its uploads together.
            most: maximum number of uploads of this sender at the same time. It limits the server's memory.
            request: the request that uploads the part.

        Raises:
            Busy: `sender` has `most` uploads already.
        """
        if key in self._under_way:
            break_off(self._under_way[key][1])
        elif sum(other == sender for other, _ in self._under_way.values()) >= most:
            busy = Busy(f"{sender} is sending {most} parts already.", f"Send at most {most} parts at the same time.")
            busy.retry_after_s = 1.0
            raise busy
        mine = self._under_way[key] = sender, request
        try:
            yield
        finally:
            if self._under_way.get(key) is mine:
                del self._under_way[key]

    async def _receive(self, request: web.Request, sink: PartSink, site: str = "") -> bytes:
        coordinator = self._coordinator

        def count(nbytes: int) -> None:
            coordinator.bytes_up += nbytes
            if site in coordinator.roster:
                coordinator.roster[site].bytes_up += nbytes

        return await receive_part(
            request,
            sink,
            pool=coordinator.io,
            idle_timeout_s=coordinator.settings.network.idle_timeout_s,
            on_bytes=count,
        )


@dataclass(eq=False)
class _ObjectPart:
    """Writes and hashes the bytes of one part of an object while they arrive, in pool threads.

    Attributes:
        objects: store of the objects.
        kept: the object.
        part: the part.
        written: number of bytes written.
        ended: whether `end` was called.
    """

    objects: ObjectStore
    kept: Kept
    part: Part
    written: int = 0
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.hasher = blake3()
        self.scratch = memoryview(bytearray(min(SCRATCH_BYTES, self.part.nbytes)))

    @property
    def complete(self) -> bool:
        """Whether all bytes of the part are written."""
        return self.written == self.part.nbytes

    def take(self, fill: Fill) -> None:
        """Write the bytes that `fill` returns, until it returns none or the part is complete."""
        while not self.complete:
            with self.lock:
                count = fill(self.scratch[: self.part.nbytes - self.written])
                if not count:
                    return
                if self.ended or self.kept.gone.is_set():
                    raise ConnectionAbortedError("the part was sent again, or its object was removed")
                self.kept.touched_s = time.monotonic()
                run = self.scratch[:count]
                self.objects.write(self.kept, run, self.part.start + self.written)
                self.hasher.update(run)
                self.written += count

    def end(self) -> None:
        """Stop writing. After this call, no thread writes this part any more."""
        with self.lock:
            self.ended = True
