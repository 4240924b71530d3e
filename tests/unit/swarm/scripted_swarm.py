"""A swarm's server without a network, and workers that say what a test lets them say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll import Settings
from atoll.protocol import messages, routes
from atoll.protocol.swarm_messages import CollectedUpdate, Held, PeerReport, PeerWork, ReducedRound, Source, in_text
from atoll.rounds import events
from atoll.server.assemble_run import UserCode, assemble
from atoll.server.coordinator.persistor import Persistor
from atoll.server.coordinator.roster import Lease
from atoll.server.coordinator.served_run import ServedRun
from atoll.server.startup import open_run
from atoll.server.swarm.assignments import Assignment, Offer, SwarmRounds
from atoll.server.tasks.task_payloads import TaskFilters
from atoll.tensors.reference import TensorRef

DIGEST = "1" * 64


class ScriptedWorker:
    """One worker: its lease, and what its next report says."""

    def __init__(self, site: str, lease: Lease) -> None:
        self.site, self.lease, self.address = site, lease, f"http://{site}.example:1"
        self.number = self.moved = 0
        self.held: dict[tuple[int, int], Held] = {}
        self.said: dict[str, Any] = {}
        self.work = PeerWork(stamp=0)

    def reference(self, number: int) -> str:
        """A reference to an object at this worker; another number is another object."""
        return str(TensorRef(f"{self.site}.example", 1, False, f"{number:032x}", "0" * 32, DIGEST, 2_000_000_000))


class ScriptedSwarm:
    """A swarm's server in this process, and its workers.

    Attributes:
        run: what the server's parts share.
        workers: site → worker.
    """

    def __init__(self, served: ServedRun) -> None:
        self.served, self.run = served, served.run
        self.workers: dict[str, ScriptedWorker] = {}
        assert isinstance(served.place, SwarmRounds)
        self.swarm = served.place

    @property
    def job(self) -> Assignment:
        """The workers of the present round."""
        return self.swarm.view.assignments[0]

    async def join(self, *sites: str) -> None:
        """Let workers join, report, and reach each other."""
        for site in sites:
            worker = ScriptedWorker(site, Lease(site, 0, "", ""))
            join = messages.Join(protocol=routes.PROTOCOL, site=site, process=f"{site}1", peer=worker.reference(0))
            worker.lease = Lease.parse((await self.served.sites.join(join)).lease)
            self.workers[site] = worker
        for worker in self.workers.values():
            worker.said["reached"] = [each.address for each in self.workers.values() if each is not worker]
        for site in sites:
            await self.report(site)

    async def report(self, site: str, **said: Any) -> PeerWork:
        """Send a worker's next report, and return its work. What it says stays, until it says otherwise."""
        worker = self.workers[site]
        worker.number += 1
        worker.said |= said
        message = PeerReport(
            peer=worker.reference(0),
            number=worker.number,
            seen=worker.work.stamp,
            held=list(worker.held.values()),
            **worker.said,
        )
        worker.work = await self.swarm.work_in_swarm(worker.lease, message)
        return worker.work

    async def hold(self, *sites: str, version: int = 0, digest: str = "") -> None:
        """Let workers report that they have a version, by default version 0."""
        for site in sites:
            worker = self.workers[site]
            held = Held(
                fragment=0,
                version=version,
                digest=digest or self.run.store.versions.get(0, version).digest,
                source=Source(version=worker.reference(version)),
            )
            worker.held[0, version] = held
            await self.report(site)

    def ticket(self, site: str) -> int:
        """Issue a site's ticket of the open round, and return its number."""
        lease = self.workers[site].lease
        for effect in self.run.ledger.record(events.TicketRequested(site, lease.number, 0)):
            if isinstance(effect, events.TicketIssued):
                return effect.ticket
        raise AssertionError(f"no ticket for {site}")

    def offer(self, site: str, ticket: int, number: int = 1000) -> Offer:
        """Let a site offer its update, and return the offer; another number is another try."""
        complete = messages.Complete(digest=DIGEST, steps=1, source=self.workers[site].reference(number))
        self.swarm.offer(site, ticket, 0, complete)
        return self.swarm.view.offers[ticket]

    async def collects(self, site: str, offers: Mapping[int, Offer], **said: Any) -> None:
        """Let a worker report the updates that it has collected, or why it could not."""
        collected = [
            CollectedUpdate(ticket=ticket, digest=offer.complete.digest, source=offer.complete.source or "", **said)
            for ticket, offer in offers.items()
        ]
        await self.report(site, collected=collected)

    def reduced(self, **said: Any) -> ReducedRound:
        """A sound report of the aggregator about the round that it has to close."""
        closing = self.job.closing
        assert closing is not None
        layout = self.run.plan.fragments[0].version
        parts = [bytes([number]) * 32 for number in range(len(layout.parts))]
        report = {
            "fragment": 0,
            "version": closing.version,
            "tickets": closing.tickets,
            "digest": layout.blob_id(parts),
            "part_digests": in_text(parts),
            "grad_norm": 1.0,
        }
        return ReducedRound(**(report | said))


@asynccontextmanager
async def scripted_swarm(folder: Path, *sites: str, **settings: Any) -> AsyncIterator[ScriptedSwarm]:
    """A swarm of FedAvg with these sites, which have joined and hold version 0."""
    given = {
        "algorithm.name": "fedavg",
        "rounds.total": 5,
        "rounds.sites": len(sites),
        "swarm.enabled": True,
        "disk.state_dir": folder / "state",
    }
    torch.manual_seed(0)
    chosen = Settings.build(given | settings)
    persistor = Persistor(chosen)
    opened = open_run(chosen, nn.Linear(3, 1), persistor, None)
    served = assemble(opened, UserCode(persistor, TaskFilters(chosen)))
    served.coordinator.start()
    try:
        swarm = ScriptedSwarm(served)
        swarm.swarm.view.peers._why_unreachable = lambda *_: ""  # these workers have no addresses
        await swarm.join(*sites)
        await swarm.hold(*sites)
        yield swarm
    finally:
        served.run.send_away()
        await asyncio.wait_for(served.coordinator.stop(), 20)
