"""Parts of updates on their way in: each is written and looked at as it comes, by one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from atoll.aggregation.check_arriving_parts import Inspection, PartStats
from atoll.aggregation.decode_updates import read_at
from atoll.errors import Busy, PartCorrupt
from atoll.server.coordinator.run import Run
from atoll.store.update_spool import PartWriter
from atoll.tensors.layout import Part
from atoll.transport.receive_upload import break_off, receive_part

PARTS_PER_CONNECTION = 4
"""Of one rank of a site, on their way at once, for each connection it is to use: what broke off may still be here."""


class Uploads:
    """Receives the parts of a run's updates."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._inspections = [Inspection(fragment.update, run.plan.codecs) for fragment in run.plan.fragments]
        self._under_way: dict[tuple[int, int], tuple[str, web.Request]] = {}

    @asynccontextmanager
    async def received(
        self, request: web.Request, site: str, ticket: int, fragment: int, part: Part
    ) -> AsyncIterator[tuple[PartWriter, PartStats]]:
        """A part, once all of it is there; on leaving, it is given up unless it was recorded.

        A request for the same part that is still under way is broken off: its sender has given it up, and else it would
        keep its connection until it stands still for the idle timeout.

        Raises:
            PartCorrupt: it arrived damaged.
            Busy: the site sends more at once than anybody has a reason to; each takes memory here.
        """
        key = (ticket, part.index)
        if key in self._under_way:
            break_off(self._under_way[key][1])
        else:
            self._require_few(site)
        self._under_way[key] = site, request
        try:
            spool = self._run.store.tickets.spool(ticket)
            writer: PartWriter = await asyncio.get_running_loop().run_in_executor(
                self._run.io, spool.begin_part, part.index
            )
            try:
                yield writer, await self._receive(request, site, self._inspections[fragment], part, writer, spool.fd)
            finally:
                writer.abandon()
        finally:
            if self._under_way.get(key) == (site, request):
                del self._under_way[key]

    def _require_few(self, site: str) -> None:
        count = sum(sender == site for sender, _ in self._under_way.values())
        most = PARTS_PER_CONNECTION * self._run.settings.connections * self._run.settings.ranks
        if count >= most:
            busy = Busy(f"{site} has {count} parts on their way at once.", f"Send at most {most}.")
            busy.retry_after_s = 1.0
            raise busy

    async def _receive(
        self, request: web.Request, site: str, inspection: Inspection, part: Part, writer: PartWriter, fd: int
    ) -> PartStats:
        def read(room: memoryview, offset: int) -> None:
            read_at(fd, room, offset)

        with inspection.begin(part, writer.write, read) as inspector:
            digest = await receive_part(
                request,
                inspector,
                pool=self._run.io,
                idle_timeout_s=self._run.settings.idle_timeout_s,
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
