"""Handlers of requests for versions, differences between versions, and published objects."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from aiohttp import web
from blake3 import blake3

from atoll.blobs.manifest import Cuts
from atoll.blobs.model_file import ModelFile
from atoll.errors import BadRequest, Gone
from atoll.protocol import messages, routes
from atoll.server.coordinator.coordinator import Coordinator
from atoll.server.coordinator.roster import holder_of
from atoll.server.startup import initial_file
from atoll.store.journal_tables import DeltaRow, VersionRow
from atoll.store.versions import Pin
from atoll.transport.request_body import Idle, break_off
from atoll.transport.serve_range import serve_file


class ByteRoutes:
    """Handlers of requests for a run's versions and published objects."""

    def __init__(self, run: Coordinator) -> None:
        self.run, self.store, self.plan = run, run.store, run.plan

    async def get_manifest(self, fragment: int, version: int) -> messages.Manifest:
        """Return the manifest of a version (sizes and digests of its parts).

        It also describes the encoded difference from the version before, if there is one. In a swarm, it lists the
        workers that have the version.

        Raises:
            Gone: the server no longer has the version.
        """
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
        """Send the file of a version, or a byte range of it. The server of a swarm has only version 0.

        Raises:
            Gone: the server does not have the version, or has one with another digest.
        """
        if self.run.swarm is None:
            pinned = self.store.versions.pin(fragment, version)
            return await self._serve(pinned, self.plan.fragments[fragment].version.nbytes, digest, request)
        if version or self.store.run_log.version_digest(fragment, version) != digest:
            raise Gone(
                f"Version {version} is stored at workers of this swarm.", "Get its manifest, which lists the workers."
            )
        with initial_file(self.store.directory, fragment) as fd:
            return await self._send(request, fd, self.plan.fragments[fragment].version.nbytes, digest)

    async def get_delta(self, fragment: int, version: int, digest: str, request: web.Request) -> web.StreamResponse:
        """Send a version's delta (the encoded difference from the version before), or a byte range of it.

        Raises:
            Gone: the version or its delta no longer exists, or the delta has another digest.
        """
        pinned = self.store.versions.pin_delta(fragment, version)
        downlink = self.plan.fragments[fragment].downlink
        nbytes = downlink.layout.nbytes if downlink else 0
        return await self._serve(pinned, nbytes, digest, request)

    async def get_model_part(self, fragment: int, version: int, part: int, request: web.Request) -> web.StreamResponse:
        """Send one part of a version with the exact values that exported files have, then the part's BLAKE3 (32 bytes).

        Raises:
            Gone: the server no longer has the version or the outer optimizer's state after it.
            BadRequest: there is no such part.
        """
        with self.store.versions.pin(fragment, version, with_state=self.plan.has_masters) as pin:
            layout = self.plan.fragments[fragment].version
            if part >= len(layout.parts):
                raise BadRequest(f"Part {part} does not exist; the version has {len(layout.parts)} parts.")
            runs = ModelFile(layout, pin.fd, pin.state_fd).part(layout.parts[part])
            response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
            response.content_length = layout.parts[part].nbytes + routes.DIGEST_BYTES
            await response.prepare(request)
            hasher, loop = blake3(), asyncio.get_running_loop()
            with Idle(request, self.plan.settings.network.idle_timeout_s, self._counter(request)) as idle:
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

    async def _serve(
        self, pinned: Pin[VersionRow] | Pin[DeltaRow], nbytes: int, digest: str, request: web.Request
    ) -> web.StreamResponse:
        try:
            if pinned.row.digest != digest:
                raise Gone(
                    f"Version {pinned.row.version} or its delta no longer has the digest {digest[:12]}.",
                    "Ask which version is the newest.",
                )
            return await self._send(request, pinned.fd, nbytes, digest, pinned.revoked.is_set)
        finally:
            pinned.release()

    async def _send(
        self, request: web.Request, fd: int, nbytes: int, digest: str, revoked: Callable[[], bool] = lambda: False
    ) -> web.StreamResponse:
        return await serve_file(
            request,
            fd,
            nbytes,
            digest,
            pool=self.run.io,
            idle_timeout_s=self.plan.settings.network.idle_timeout_s,
            revoked=revoked,
            on_bytes=self._counter(request),
        )

    def _counter(self, request: web.Request) -> Callable[[int], None]:
        """Return a function that counts sent bytes, for the server and, if the request has a lease, for the site."""
        presence = holder_of(request.headers.get(routes.LEASE_HEADER), self.run.roster)

        def count(nbytes: int) -> None:
            self.run.bytes_down += nbytes
            if presence is not None:
                presence.bytes_down += nbytes

        return count

    # -- objects that a process publishes at the server, and others download

    async def open_object(self, message: messages.ObjectOpen) -> messages.ObjectOpened:
        """Create an empty object, to which the publisher sends parts. The answer has the object's secret.

        Raises:
            BadRequest: the object is too large, or its part sizes are invalid.
            Busy, DiskFull: there is no space now.
        """
        cuts = Cuts(message.head_bytes, message.nbytes, message.part_bytes)
        cuts.require_object("The object")
        if message.inline and message.nbytes > routes.INLINE_BYTES:
            raise BadRequest(
                f"The object has {message.nbytes} bytes, too many to be sent inside a message.",
                f"Send at most {routes.INLINE_BYTES} bytes that way; use chunk_bytes for a larger object.",
            )
        self.run.require_space()
        kept, secret = self.run.objects.open(cuts, inline=message.inline, expires_s=message.expires_s)
        return messages.ObjectOpened(
            object=kept.object, secret=secret, expires_s=max(0.0, kept.expires_at - time.time())
        )

    async def complete_object(self, object: str, secret: str, message: messages.ObjectComplete) -> None:
        """Make an object downloadable after all its parts have arrived. The same request may be repeated.

        Raises:
            Gone: the object does not exist or has expired.
            AuthError: the secret does not belong to the object.
            Conflict: parts are missing, or do not match the digest.
            DiskFull, StoreError: the record of the object could not be written.
        """
        self.run.objects.complete(self.run.objects.find(object, secret), message.digest)

    async def get_object(self, object: str, secret: str) -> messages.BlobManifest:
        """Return the manifest of a complete object. If the object is inline, the manifest contains its bytes.

        Raises:
            Gone: the object does not exist or has expired.
            AuthError: the secret does not belong to the object.
            Conflict: the object is not complete.
        """
        kept = self.run.objects.complete_one(object, secret)
        return messages.BlobManifest.of(kept.manifest, self.run.objects.inline_bytes(kept))

    async def get_object_data(self, object: str, secret: str, request: web.Request) -> web.StreamResponse:
        """Send a complete object, or a byte range of it. If the object is removed meanwhile, close the connection.

        Raises:
            Gone: the object does not exist or has expired.
            AuthError: the secret does not belong to the object.
            Conflict: the object is not complete.
        """
        kept = self.run.objects.complete_one(object, secret)
        fd = self.run.objects.reader(kept)
        try:
            return await self._send(request, fd, kept.cuts.nbytes, kept.manifest.id, kept.gone.is_set)
        finally:
            os.close(fd)

    async def remove_object(self, object: str, secret: str) -> None:
        """Delete an object. Its running downloads end with an error.

        Raises:
            Gone: the object does not exist or has expired.
            AuthError: the secret does not belong to the object, or the object is the server's own.
        """
        self.run.objects.remove(object, secret)
