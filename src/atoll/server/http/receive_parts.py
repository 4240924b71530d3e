"""Parts of updates and objects on their way in: each is written and checked as it comes, by one request at a time."""

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
from atoll.transport.receive_upload import Fill, PartSink, break_off, receive_part, require_part_bytes

PARTS_PER_CONNECTION = 4
"""Of one rank of a site, on their way at once, for each connection it is to use: a broken one may still be here."""
OBJECT_PARTS = 64
"""Parts of objects that may be on their way in, of all publishers together."""
SCRATCH_BYTES = 2**18


class PartReceiver:
    """Receives the parts of a run's updates, and of the objects that its server keeps."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, plan = coordinator, coordinator.plan
        self._inspections = [Inspection(fragment.update, plan.codecs) for fragment in plan.fragments]
        self._under_way: dict[Hashable, tuple[str, web.Request]] = {}
        self._writers: dict[tuple[str, int], _ObjectPart] = {}

    async def put_part(self, lease: Lease, ticket: int, part: int, request: web.Request) -> None:
        """Take the part of an update that a request brings."""
        coordinator = self._coordinator
        fragment, settings = coordinator.store.tickets.get(ticket).fragment, coordinator.settings
        layout = coordinator.plan.fragments[fragment].update
        if part >= len(layout.parts):
            raise BadRequest(
                f"There is no part {part}; the update has {len(layout.parts)}.",
                "Cut it as the ticket's layout says.",
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
        """Take the part of an object that a request brings."""
        coordinator, loop = self._coordinator, asyncio.get_running_loop()
        if (request.content_length or 0) <= routes.DIGEST_BYTES:
            raise BadRequest("The request has no part in it.", "Send its bytes and then their BLAKE3.")
        kept = coordinator.objects.find(object, secret)
        if kept.fd < 0:
            raise Conflict(f"Object {object[:8]} is complete.", "It never changes: publish another.")
        if part >= kept.cuts.count:
            raise BadRequest(f"Object {object[:8]} has no part {part}; it has {kept.cuts.count}.")
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
                    raise Gone(f"Object {object[:8]} was withdrawn while it arrived.", "Publish it again.")
                kept.digests[part] = sent
            finally:
                if self._writers.get(key) is writer:
                    del self._writers[key]
                await asyncio.shield(loop.run_in_executor(coordinator.io, writer.end))

    @contextmanager
    def _under_way_alone(self, key: Hashable, sender: str, most: int, request: web.Request) -> Iterator[None]:
        """Keep a part for one request.

        A request for the same part that is still under way is broken off: its sender has given it up, and else it would
        keep its connection until it stands still for the idle timeout.

        Raises:
            Busy: `sender` has `most` parts on their way; each takes memory here.
        """
        if key in self._under_way:
            break_off(self._under_way[key][1])
        elif sum(other == sender for other, _ in self._under_way.values()) >= most:
            busy = Busy(f"{sender} has {most} parts on their way at once.", f"Send at most {most}.")
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
    """A part of an object, written and hashed by a thread of the pool."""

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
        """Whether all of it is written."""
        return self.written == self.part.nbytes

    def take(self, fill: Fill) -> None:
        """Write what there is."""
        while not self.complete:
            with self.lock:
                count = fill(self.scratch[: self.part.nbytes - self.written])
                if not count:
                    return
                if self.ended or self.kept.gone.is_set():
                    raise ConnectionAbortedError("the part was given up")
                self.kept.touched_s = time.monotonic()
                run = self.scratch[:count]
                self.objects.write(self.kept, run, self.part.start + self.written)
                self.hasher.update(run)
                self.written += count

    def end(self) -> None:
        """Nothing is written any more once this returns."""
        with self.lock:
            self.ended = True
