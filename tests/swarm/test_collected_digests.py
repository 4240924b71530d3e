"""The aggregating worker's report counts for the update that was offered, and for no other one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kit import serve

from atoll.testing.processes import wait_until
from atoll.transport.client import Http
from atoll.wire import messages, routes
from atoll.wire.swarm_messages import Collected, Held, PeerReport, PeerWork, Source

ADDRESSES = {"a": "http://127.0.0.1:9", "b": "http://127.0.0.1:10"}


class Site:
    """A site of a swarm that says what the test tells it to say."""

    def __init__(self, url: str, name: str) -> None:
        self.http, self.name, self.address, self._reports = Http(url), name, ADDRESSES[name], 0
        join = messages.Join(protocol=routes.PROTOCOL, site=name, peer=self.address)
        self.http.lease = self.http.post(routes.WORKERS, join, messages.Joined).lease
        digest = self.http.get(routes.MANIFEST.format(fragment=0, version=0), messages.Manifest).digest
        self._held = Held(fragment=0, version=0, digest=digest, source=Source(version=self.reference()))

    def reference(self) -> str:
        return f"atoll-ref://{self.address.removeprefix('http://')}/{'0' * 32}?expires=1#{'0' * 32}.{'0' * 64}"

    def report(self, *collected: Collected) -> PeerWork:
        self._reports += 1
        reached = [address for name, address in ADDRESSES.items() if name != self.name]
        report = PeerReport(
            address=self.address, number=self._reports, held=[self._held], reached=reached, collected=list(collected)
        )
        return self.http.post(routes.SWARM, report, PeerWork)

    def state_of(self, ticket: int) -> str:
        return self.http.get(routes.TICKET.format(ticket=ticket), messages.TicketState).outcome.state


@pytest.mark.covers("P10", "F18")
def test_counts_a_collected_update_only_with_the_digest_that_was_offered(tmp_path: Path) -> None:
    """The aggregating worker collected an earlier update under the ticket: it has yet to collect the offered one."""
    with serve(tmp_path, placement="swarm", aggregators=["a"], heartbeat_timeout_s=0) as server:
        a, b = Site(server.url, "a"), Site(server.url, "b")
        for _ in range(2):
            a.report(), b.report()
        request = messages.TicketRequest(wait_s=10.0)
        ticket = b.http.post(routes.TICKETS, request, messages.TicketReply, timeout_s=30.0).ticket
        assert ticket is not None
        offered, earlier = "1" * 64, "2" * 64
        complete = messages.Complete(digest=offered, weight=1.0, steps=1, source=b.reference())
        with ThreadPoolExecutor(1) as thread:
            receipt = thread.submit(
                b.http.post, routes.COMPLETE.format(ticket=ticket.ticket), complete, messages.Receipt, timeout_s=60.0
            )
            wait_until(lambda: a.report().collect or receipt.done(), "the offer")
            a.report(Collected(ticket=ticket.ticket, digest=earlier, source=b.reference()))
            assert a.state_of(ticket.ticket) == "open"
            a.report(Collected(ticket=ticket.ticket, digest=earlier, source=b.reference(), bad="it holds NaN"))
            assert a.state_of(ticket.ticket) == "open"
            a.report(Collected(ticket=ticket.ticket, digest=offered, source=b.reference()))
            assert a.state_of(ticket.ticket) == "accepted"
            assert receipt.result(60).accepted
        a.http.close(), b.http.close()
