"""Parts of updates on their way in: each is written and checked as it comes, by one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from atoll.aggregation.check_arriving_parts import Inspection, PartStats
from atoll.aggregation.decode_updates import read_at
from atoll.errors import BadRequest, Busy, PartCorrupt
from atoll.protocol import messages
from atoll.rounds.events import WorkerSeen
from atoll.server.coordinator.coordinator import Coordinator
from atoll.server.coordinator.roster import Lease
from atoll.store.update_spool import PartWriter
from atoll.tensors.layout import Part
from atoll.transport.receive_upload import break_off, receive_part, require_part_bytes

PARTS_PER_CONNECTION = 4
"""Of one rank of a site, on their way at once, for each connection it is to use: a broken one may still be here."""


class PartReceiver:
    """Receives the parts of a run's updates."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        plan = coordinator.plan
        self._inspections = [Inspection(fragment.update, plan.codecs) for fragment in plan.fragments]
        self._under_way: dict[tuple[int, int], tuple[str, web.Request]] = {}

    async def put_part(self, lease: Lease, ticket: int, part: int, request: web.Request) -> messages.PartReceipt:
        """Take the part that a request brings."""
        coordinator = self._coordinator
        fragment = coordinator.store.tickets.get(ticket).fragment
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
        async with self._received(request, lease.site, ticket, fragment, planned) as (writer, stats):
            coordinator.record_part(lease, ticket, part, stats, writer)
        coordinator.apply(WorkerSeen(lease.site, lease.number))
        return messages.PartReceipt(ticket=ticket, part=part, digest=stats.digest.hex())

    @asynccontextmanager
    async def _received(
        self, request: web.Request, site: str, ticket: int, fragment: int, part: Part
    ) -> AsyncIterator[tuple[PartWriter, PartStats]]:
        """Give a part once all of it is there; on leaving, it is given up unless it was recorded.

        A request for the same part that is still under way is broken off: its sender has given it up, and else it would
        keep its connection until it stands still for the idle timeout.

        Raises:
            PartCorrupt: it arrived damaged.
            Busy: the site sends more at once than it has a reason to; each part takes memory here.
        """
        key = (ticket, part.index)
        if key in self._under_way:
            break_off(self._under_way[key][1])
        else:
            self._require_few(site)
        self._under_way[key] = site, request
        try:
            spool = self._coordinator.store.tickets.spool(ticket)
            writer: PartWriter = await asyncio.get_running_loop().run_in_executor(
                self._coordinator.io, spool.begin_part, part.index
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
        settings = self._coordinator.settings
        most = PARTS_PER_CONNECTION * settings.network.connections * settings.model.ranks
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
                pool=self._coordinator.io,
                idle_timeout_s=self._coordinator.settings.network.idle_timeout_s,
                on_bytes=lambda nbytes: self._count(site, nbytes),
            )
            stats = inspector.stats()
        if stats.digest != digest:
            raise PartCorrupt(f"Part {part.index} arrived damaged.", "Send this part again.")
        return stats

    def _count(self, site: str, nbytes: int) -> None:
        self._coordinator.bytes_up += nbytes
        if site in self._coordinator.roster:
            self._coordinator.roster[site].bytes_up += nbytes
