"""What the server of a swarm takes of its workers' reports: what leads to the worker, and names what was offered."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.processes import wait_until
from kit import serve
from kit.requests import get
from kit.swarm_peers import peer_server
from kit.wire import WireSite

import atoll
from atoll.worker.peer.peer_transfers import PeerServer

pytestmark = pytest.mark.covers("P10")


class Site(WireSite):
    """A site of a swarm that says what the test tells it to say."""

    def __init__(self, url: str, name: str, served: PeerServer) -> None:
        self.address, self.proof = served.address, str(served.prove())
        super().__init__(url, name, peer=self.proof)
        self._reports = self._seen = 0
        self.reached: list[str] = []  # all that it is told of
        self.version = get(url, "/v1/fragments/0/versions/0")[1]
        source = {"version": self.reference()}
        self.held = {"fragment": 0, "version": 0, "digest": self.version["digest"], "source": source}

    def reference(self, place: str = "") -> str:
        """To a file at a place, by default this site's."""
        place = place or self.address.removeprefix("http://")
        return f"atoll-ref://{place}/{'0' * 32}?expires=1#{'0' * 32}.{'0' * 64}"

    def try_report(self, **said: Any) -> tuple[int, dict[str, Any]]:
        """Status and body of the answer."""
        self._reports += 1
        report = {"peer": self.proof, "number": self._reports, "seen": self._seen, "reached": self.reached}
        return self.post("/v1/swarm", report | {"held": [self.held]} | said)

    def report(self, *collected: dict[str, Any], closed: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """What it is told to do."""
        status, work = self.try_report(collected=list(collected), closed=list(closed))
        assert status == 200, work
        self._seen, self.reached = work["stamp"], work["peers"]
        return work

    def state_of(self, ticket: int) -> str:
        return str(get(self.url, f"/v1/tickets/{ticket}", self.lease)[1]["outcome"]["state"])


class Offer:
    """An update of a site, offered until another one has collected it."""

    def __init__(self, pool: Executor, site: Site, digest: str, place: str = "") -> None:
        self.ticket, self._digest, self._source = site.ticket()["id"], digest, site.reference(place)
        complete = {"digest": digest, "weight": 1.0, "steps": 1, "source": self._source}
        self.receipt: Future[tuple[int, dict[str, Any]]] = pool.submit(
            site.post, f"/v1/tickets/{self.ticket}/complete", complete
        )

    def collected(self, digest: str = "", bad: str = "") -> dict[str, Any]:
        """What the aggregating site says of it; by default that it has it."""
        return {"ticket": self.ticket, "digest": digest or self._digest, "source": self._source, "bad": bad}


@contextmanager
def swarm(folder: Path) -> Iterator[tuple[atoll.Server, Site, Site]]:
    """Two sites that reach each other and hold the initial version; the first aggregates."""
    no_beats = {"network.heartbeat_interval_s": 0, "network.heartbeat_timeout_s": 0}
    with ExitStack() as stack:
        server = stack.enter_context(serve(folder, **{"swarm.enabled": True, "swarm.aggregators": ["a"]}, **no_beats))
        served = [stack.enter_context(closing(peer_server())) for _ in "ab"]
        a, b = (Site(server.url, *each) for each in zip("ab", served, strict=True))
        for _ in range(3):
            a.report(), b.report()
        yield server, a, b


def closed(version: int, tickets: list[int], digests: bytes) -> dict[str, Any]:
    """What an aggregating site says of the version that it has made: its parts have these digests."""
    parts = base64.b64encode(digests).decode()
    return {"fragment": 0, "version": version, "tickets": tickets, "digest": "0" * 64, "part_digests": parts}


@pytest.mark.covers("F18")
def test_only_the_offered_digest_completes_an_update(tmp_path: Path) -> None:
    """In a swarm, an update is accepted once the aggregating site reports the digest that its site offered."""
    # An earlier update under the same ticket does not count.
    with swarm(tmp_path) as (_, a, b), ThreadPoolExecutor() as pool:
        offer, earlier = Offer(pool, b, "1" * 64), "2" * 64
        wait_until(lambda: a.report()["collect"] or offer.receipt.done(), "the offer")
        a.report(offer.collected(earlier))
        assert a.state_of(offer.ticket) == "open"
        a.report(offer.collected(earlier, bad="it holds NaN"))
        assert a.state_of(offer.ticket) == "open"
        a.report(offer.collected())
        assert a.state_of(offer.ticket) == "accepted"
        assert offer.receipt.result(60)[1]["accepted"]


@pytest.mark.covers("X3")
@pytest.mark.parametrize("place", ["10.0.0.1:80", "127.0.0.1:11", "127.0.0.1"], ids=["host", "port", "none"])
def test_a_reference_to_another_address_is_refused(tmp_path: Path, place: str) -> None:
    """The server of a swarm refuses a report or an offer whose reference points to another host or port than that of
    the site.
    """
    with swarm(tmp_path) as (_, a, b):
        for version, state in ((place, ""), ("", place)):
            source = {"version": a.reference(version), "state": a.reference(state)}
            status, told = a.try_report(held=[a.held | {"source": source}])
            assert (status, f"does not point to {a.address}" in told["message"]) == (400, True)
        with ThreadPoolExecutor() as pool:
            offer = Offer(pool, b, "1" * 64, place)
            status, told = offer.receipt.result(60)
            assert (status, f"does not point to {b.address}" in told["message"]) == (400, True)


def test_a_report_may_have_20000_digests(tmp_path: Path) -> None:
    """The server of a swarm accepts a report with 20,000 digests, which are those of 320 GB in parts of 16 MiB."""
    with swarm(tmp_path) as (_, a, _b):
        assert a.report(closed=[closed(1, [1], bytes(32 * 20_000))])["stamp"]
