"""The operations on versions and objects: manifests, bytes, and differences between versions."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from blake3 import blake3

from atoll.aggregation.plan import Plan
from atoll.blobs.manifest import Cuts
from atoll.blobs.model_file import ModelFile
from atoll.errors import BadRequest, Busy, Conflict, Gone, PartCorrupt
from atoll.protocol import messages, routes
from atoll.server.coordinator.coordinator import Coordinator
from atoll.server.coordinator.roster import holder_of
from atoll.server.startup import initial_file
from atoll.store.journal_tables import DeltaRow, VersionRow
from atoll.store.kept_objects import Kept
from atoll.store.store import Store
from atoll.store.versions import Pin
from atoll.tensors.layout import Part
from atoll.transport.receive_upload import Fill, Idle, break_off, receive_part, require_part_bytes
from atoll.transport.serve_range import serve_file

Hold = AbstractContextManager[tuple[int, int | None]]
"""Keeps a version and the outer state beside it as they are; gives their descriptors."""


class VersionHandlers:
    """Part of `Handlers`."""

    run: Coordinator
    store: Store
    plan: Plan

    async def get_manifest(self, fragment: int, version: int) -> messages.Manifest:
        row, layout = self.store.versions.get(fragment, version), self.plan.fragments[fragment].version
        return messages.Manifest(
            fragment=fragment,
            version=version,
            digest=row.digest,
            layout_digest=layout.digest,
            nbytes=layout.nbytes,
            part_digests=[digest.hex() for digest in row.part_digests],
            delta=self._delta(fragment, version),
            sources=self.run.swarm.view.sources(fragment, version, row.digest) if self.run.swarm else [],
        )

    def _delta(self, fragment: int, version: int) -> messages.Delta | None:
        row, downlink = self.store.versions.delta(fragment, version), self.plan.fragments[fragment].downlink
        if row is None or downlink is None:
            return None
        return messages.Delta(
            base_version=row.base_version,
            base_digest=row.base_digest,
            digest=row.digest,
            layout_digest=downlink.layout.digest,
            nbytes=downlink.layout.nbytes,
            part_digests=[digest.hex() for digest in row.part_digests],
        )

    async def get_version(self, fragment: int, version: int, digest: str, request: web.Request) -> web.StreamResponse:
        if self.run.swarm is not None:
            return await self._serve_initial(fragment, version, digest, request)
        pinned = self.store.versions.pin(fragment, version)
        return await self._serve(pinned, self.plan.fragments[fragment].version.nbytes, digest, request)

    async def _serve_initial(
        self, fragment: int, version: int, digest: str, request: web.Request
    ) -> web.StreamResponse:
        """All that the server of a swarm has of the model."""
        if version or self.store.run_log.version_digest(fragment, version) != digest:
            raise Gone(
                f"Version {version} lies with the workers of this swarm.", "Ask for its manifest, which says where."
            )
        with initial_file(self.store.directory, fragment) as fd:
            return await serve_file(
                request,
                fd,
                self.plan.fragments[fragment].version.nbytes,
                digest,
                pool=self.run.io,
                idle_timeout_s=self.plan.settings.network.idle_timeout_s,
                revoked=lambda: False,
                on_bytes=lambda count: self._count_down(request, count),
            )

    async def get_delta(self, fragment: int, version: int, digest: str, request: web.Request) -> web.StreamResponse:
        pinned = self.store.versions.pin_delta(fragment, version)
        downlink = self.plan.fragments[fragment].downlink
        nbytes = downlink.layout.nbytes if downlink else 0
        return await self._serve(pinned, nbytes, digest, request)

    async def get_model_part(self, fragment: int, version: int, part: int, request: web.Request) -> web.StreamResponse:
        hold = functools.partial(self.store.versions.reading, fragment, version, with_state=self.plan.has_masters)
        with hold() as files:
            layout = self.plan.fragments[fragment].version
            if part >= len(layout.parts):
                raise BadRequest(f"There is no part {part}; the version has {len(layout.parts)}.")
            runs = ModelFile(layout, *files).part(layout.parts[part])
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = layout.parts[part].nbytes + routes.DIGEST_BYTES
        await response.prepare(request)
        await self._send_made(request, response, runs, hold)
        return response

    async def _send_made(
        self,
        request: web.Request,
        response: web.StreamResponse,
        runs: Iterator[memoryview],
        hold: Callable[[], Hold],
    ) -> None:
        """Send bytes that are in no file, made a run at a time, and the BLAKE3 of them.

        The files are held while a run is made, never while it is sent: a reader that stands still holds nothing.
        """
        hasher, loop = blake3(), asyncio.get_running_loop()
        with Idle(
            request, self.plan.settings.network.idle_timeout_s, lambda count: self._count_down(request, count)
        ) as idle:
            while True:
                try:
                    with hold():
                        run = await loop.run_in_executor(self.run.io, next, runs, None)
                except Gone:  # between two runs; asked again, it is answered so
                    break_off(request)
                    return
                if run is None:
                    break
                hasher.update(run)
                await response.write(run)
                idle.add(len(run))
            await response.write(hasher.digest())
            await response.write_eof()

    async def _serve(
        self, pinned: Pin[VersionRow] | Pin[DeltaRow], nbytes: int, digest: str, request: web.Request
    ) -> web.StreamResponse:
        try:
            if pinned.row.digest != digest:
                raise Gone(
                    f"Version {pinned.row.version} is no longer the one with digest {digest[:12]}.",
                    "Ask for the head again.",
                )
            return await serve_file(
                request,
                pinned.fd,
                nbytes,
                digest,
                pool=self.run.io,
                idle_timeout_s=self.plan.settings.network.idle_timeout_s,
                revoked=pinned.revoked.is_set,
                on_bytes=lambda count: self._count_down(request, count),
            )
        finally:
            pinned.release()

    def _count_down(self, request: web.Request, count: int) -> None:
        self.run.bytes_down += count
        presence = holder_of(request.headers.get(routes.LEASE_HEADER), self.run.roster)
        if presence is not None:
            presence.bytes_down += count


# -- The operations on objects: what one process publishes through the server, and others pull from it.


AT_ONCE = 64
"""Parts of objects that may be on their way in, of all publishers together."""
SCRATCH_BYTES = 2**18


class ObjectHandlers:
    """The operations on objects of the server that serves `run`."""

    run: Coordinator

    def __init__(self) -> None:
        self._arriving: dict[tuple[str, int], _Arrival] = {}

    async def open_object(self, message: messages.ObjectOpen) -> messages.ObjectOpened:
        cuts = Cuts(message.head_bytes, message.nbytes, message.part_bytes)
        cuts.require_object("The object")
        if message.inline and message.nbytes > routes.INLINE_BYTES:
            raise BadRequest(
                f"The object has {message.nbytes} bytes, too many to travel inline.",
                f"At most {routes.INLINE_BYTES}; give chunk_bytes for a larger one.",
            )
        self.run.require_space()
        kept, secret = self.run.objects.open(cuts, inline=message.inline, expires_s=message.expires_s)
        return messages.ObjectOpened(
            object=kept.object, secret=secret, expires_s=max(0.0, kept.expires_at - time.time())
        )

    async def put_object_part(
        self, object: str, part: int, secret: str, request: web.Request
    ) -> messages.ObjectPartReceipt:
        if (request.content_length or 0) <= routes.DIGEST_BYTES:
            raise BadRequest("The request has no part in it.", "Send its bytes and then their BLAKE3.")
        kept = self.run.objects.find(object, secret)
        if kept.fd < 0:
            raise Conflict(f"Object {object[:8]} is complete.", "It never changes: publish another.")
        if part >= kept.cuts.count:
            raise BadRequest(f"Object {object[:8]} has no part {part}; it has {kept.cuts.count}.")
        wanted = kept.cuts.part(part)
        require_part_bytes(request, wanted.nbytes)
        self.run.require_space()
        async with self._arrival(kept, wanted, request) as arrival:
            sent = await receive_part(
                request,
                arrival,
                pool=self.run.io,
                idle_timeout_s=self.run.settings.network.idle_timeout_s,
                on_bytes=lambda count: self._count_up(kept, count),
            )
            if arrival.hasher.digest() != sent:
                raise PartCorrupt(f"Part {part} of object {object[:8]} arrived damaged.", "Send this part again.")
            if kept.gone.is_set():
                raise Gone(f"Object {object[:8]} was withdrawn while it arrived.", "Publish it again.")
            kept.digests[part] = sent
        return messages.ObjectPartReceipt(object=object, part=part, digest=sent.hex())

    @asynccontextmanager
    async def _arrival(self, kept: Kept, part: Part, request: web.Request) -> AsyncIterator[_Arrival]:
        """Room for a part; one that still arrives under the same number is broken off, and writes no more."""
        key = (kept.object, part.index)
        before = self._arriving.get(key)
        if before is None and len(self._arriving) >= AT_ONCE:
            busy = Busy(f"{AT_ONCE} parts of objects are on their way to this server.", "Publish again later.")
            busy.retry_after_s = 1.0
            raise busy
        kept.digests.pop(part.index, None)
        arrival = self._arriving[key] = _Arrival(self.run, kept, part, request)
        try:
            if before is not None:
                break_off(before.request)
                await asyncio.get_running_loop().run_in_executor(self.run.io, before.end)
            yield arrival
        finally:
            if self._arriving.get(key) is arrival:
                del self._arriving[key]
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(self.run.io, arrival.end))

    def _count_up(self, kept: Kept, count: int) -> None:
        kept.touched_s = time.monotonic()
        self.run.bytes_up += count

    async def complete_object(self, object: str, secret: str, message: messages.ObjectComplete) -> None:
        self.run.objects.complete(self.run.objects.find(object, secret), message.digest)

    async def get_object(self, object: str, secret: str) -> messages.BlobManifest:
        kept = self.run.objects.complete_one(object, secret)
        return messages.BlobManifest.of(kept.manifest, self.run.objects.inline_bytes(kept))

    async def get_object_data(self, object: str, secret: str, request: web.Request) -> web.StreamResponse:
        kept = self.run.objects.complete_one(object, secret)
        fd = self.run.objects.reader(kept)
        try:
            return await serve_file(
                request,
                fd,
                kept.cuts.nbytes,
                kept.manifest.id,
                pool=self.run.io,
                idle_timeout_s=self.run.settings.network.idle_timeout_s,
                revoked=kept.gone.is_set,
                on_bytes=self._count_down_object,
            )
        finally:
            os.close(fd)

    def _count_down_object(self, count: int) -> None:
        self.run.bytes_down += count

    async def remove_object(self, object: str, secret: str) -> None:
        self.run.objects.remove(object, secret)


@dataclass(eq=False)
class _Arrival:
    """One part on its way to the disk, written and hashed by a thread of the pool."""

    run: Coordinator
    kept: Kept
    part: Part
    request: web.Request
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
                run = self.scratch[:count]
                self.run.objects.write(self.kept, run, self.part.start + self.written)
                self.hasher.update(run)
                self.written += count

    def end(self) -> None:
        """Nothing is written any more once this returns."""
        with self.lock:
            self.ended = True
