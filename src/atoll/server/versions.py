"""The operations on versions: their manifests, their bytes, and what goes down in their place."""

from __future__ import annotations

from aiohttp import web

from atoll.errors import Gone
from atoll.server.plan import Plan
from atoll.server.run import Run
from atoll.store.handles import PinnedDelta, PinnedVersion
from atoll.store.store import Store
from atoll.transport.host import serve_file
from atoll.wire import messages, routes


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
        pinned = self.store.pin_version(fragment, version)
        return await self._serve(pinned, self.plan.fragments[fragment].version.nbytes, digest, request)

    async def get_delta(self, fragment: int, version: int, digest: str, request: web.Request) -> web.StreamResponse:
        pinned = self.store.pin_delta(fragment, version)
        downlink = self.plan.fragments[fragment].downlink
        nbytes = downlink.layout.nbytes if downlink else 0
        return await self._serve(pinned, nbytes, digest, request)

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
        site = (request.headers.get(routes.LEASE_HEADER) or "").partition(":")[0]
        if site in self.run.roster:
            self.run.roster[site].bytes_down += count
