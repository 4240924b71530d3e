"""The operations on versions: their manifests, their bytes, and what goes down in their place."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator

from aiohttp import web
from blake3 import blake3

from atoll.aggregation.plan import Plan
from atoll.errors import BadRequest, Gone
from atoll.protocol import messages, routes
from atoll.server.coordinator.roster import holder_of
from atoll.server.coordinator.run import Run
from atoll.server.model_file import ModelFile
from atoll.server.startup import initial_file
from atoll.store.handles import PinnedDelta, PinnedVersion
from atoll.store.model_copies import Held
from atoll.store.store import Store
from atoll.transport.receive_upload import Idle, break_off
from atoll.transport.serve_range import serve_file


class VersionHandlers:
    """Part of `Handlers`."""

    run: Run
    store: Store
    plan: Plan

    async def get_manifest(self, fragment: int, version: int) -> messages.Manifest:
        row, layout = self.store.version(fragment, version), self.plan.fragments[fragment].version
        return messages.Manifest(
            fragment=fragment,
            version=version,
            digest=row.digest,
            layout_digest=layout.digest,
            nbytes=layout.nbytes,
            part_digests=[digest.hex() for digest in row.part_digests],
            delta=self._delta(fragment, version),
            sources=self.run.swarm.sources(fragment, version, row.digest) if self.run.swarm else [],
        )

    def _delta(self, fragment: int, version: int) -> messages.Delta | None:
        row, downlink = self.store.delta(fragment, version), self.plan.fragments[fragment].downlink
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
        pinned = self.store.pin_version(fragment, version)
        return await self._serve(pinned, self.plan.fragments[fragment].version.nbytes, digest, request)

    async def _serve_initial(
        self, fragment: int, version: int, digest: str, request: web.Request
    ) -> web.StreamResponse:
        """All that the server of a swarm has of the model."""
        if version or self.store.version_digest(fragment, version) != digest:
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
                idle_timeout_s=self.plan.settings.idle_timeout_s,
                revoked=lambda: False,
                on_bytes=lambda count: self._count_down(request, count),
            )

    async def get_delta(self, fragment: int, version: int, digest: str, request: web.Request) -> web.StreamResponse:
        pinned = self.store.pin_delta(fragment, version)
        downlink = self.plan.fragments[fragment].downlink
        nbytes = downlink.layout.nbytes if downlink else 0
        return await self._serve(pinned, nbytes, digest, request)

    async def get_model_part(self, fragment: int, version: int, part: int, request: web.Request) -> web.StreamResponse:
        hold = functools.partial(self.store.reading if self.plan.has_masters else self.store.pinned, fragment, version)
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
        self, request: web.Request, response: web.StreamResponse, runs: Iterator[memoryview], hold: Callable[[], Held]
    ) -> None:
        """Send bytes that are in no file, made a run at a time, and the BLAKE3 of them.

        The files are held while a run is made, never while it is sent: a reader that stands still holds nothing.
        """
        hasher, loop = blake3(), asyncio.get_running_loop()
        with Idle(request, self.plan.settings.idle_timeout_s, lambda count: self._count_down(request, count)) as idle:
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
        self, pinned: PinnedVersion | PinnedDelta, nbytes: int, digest: str, request: web.Request
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
                idle_timeout_s=self.plan.settings.idle_timeout_s,
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
