"""Parts of updates on their way in: each is written and looked at as it comes, by one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from atoll.aggregation.inspect import Inspection, PartStats
from atoll.aggregation.scratch import read_at
from atoll.errors import PartCorrupt
from atoll.server.run import Run
from atoll.store.spool import PartWriter
from atoll.tensors.layout import Part
from atoll.transport.host import receive_part
from atoll.transport.sockets import break_off


class Uploads:
    """Receives the parts of a run's updates."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._inspection = Inspection(run.plan.update, run.plan.codecs)
        self._under_way: dict[tuple[int, int], web.Request] = {}

    @asynccontextmanager
    async def received(
        self, request: web.Request, site: str, ticket: int, part: Part
    ) -> AsyncIterator[tuple[PartWriter, PartStats]]:
        """A part, once all of it is there; on leaving, it is given up unless it was recorded.

        A request for the same part that is still under way is broken off: its sender has given it up, and else it would
        keep its connection until it stands still for the idle timeout.

        Raises:
            PartCorrupt: it arrived damaged.
        """
        key = (ticket, part.index)
        if key in self._under_way:
            break_off(self._under_way[key])
        self._under_way[key] = request
        try:
            spool = self._run.store.spool(ticket)
            writer: PartWriter = await asyncio.get_running_loop().run_in_executor(
                self._run.io, spool.begin_part, part.index
            )
            try:
                yield writer, await self._receive(request, site, part, writer, spool.fd)
            finally:
                writer.abandon()
        finally:
            if self._under_way.get(key) is request:
                del self._under_way[key]

    async def _receive(self, request: web.Request, site: str, part: Part, writer: PartWriter, fd: int) -> PartStats:
        run = self._run

        def read(room: memoryview, offset: int) -> None:
            read_at(fd, room, offset)

        with self._inspection.begin(part, writer.write, read) as inspector:
            digest = await receive_part(
                request,
                inspector,
                part.nbytes,
                pool=run.io,
                idle_timeout_s=run.settings.idle_timeout_s,
                on_bytes=lambda count: self._count(site, count),
            )
            stats = inspector.stats()
        writer.close()
        if stats.digest != digest:
            raise PartCorrupt(f"Part {part.index} arrived damaged.", "Send this part again.")
        return stats

    def _count(self, site: str, count: int) -> None:
        self._run.bytes_up += count
        if site in self._run.roster:
            self._run.roster[site].bytes_up += count
