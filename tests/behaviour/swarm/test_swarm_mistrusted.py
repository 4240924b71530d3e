"""Sites that cannot do their part, or say what is not so."""

from __future__ import annotations

import base64
import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3
from harness.processes import Nursery, wait_until
from swarm_world import SITES, Result, ServerProcess, Sites, serve_swarm, sites

import atoll
from atoll.errors import BadRequest
from atoll.protocol import messages, routes
from atoll.protocol.swarm_messages import Closed, Held, PeerReport, PeerWork, Source
from atoll.server.swarm.assignments import Assignment
from atoll.transport.http_client import Http

ADDRESS = "http://127.0.0.1:9"


@contextlib.contextmanager
def joined(server: atoll.Server, site: str) -> Iterator[Http]:
    """A site that is told by hand what to say."""
    http = Http(server.url)
    try:
        join = messages.Join(protocol=routes.PROTOCOL, site=site, peer=ADDRESS)
        http.lease = http.post(routes.WORKERS, join, messages.Joined).lease
        yield http
    finally:
        http.close()


def reference(place: str) -> str:
    return f"atoll-ref://{place}/{'0' * 32}?expires=1#{'0' * 32}.{'0' * 64}"


def faulty(fault: str, **env: str) -> dict[str, str]:
    return {"script": "faulty_site.py", "FAULT": fault, **env}


@pytest.mark.slow
@pytest.mark.covers("P10", "X3")
@pytest.mark.parametrize(
    ("fault", "aggregators", "why"),
    [
        ("full", ["a"], "round 1: it has moved no byte for "),
        ("lying", ["a"], "round 1: its digests make up no version"),
        ("slow", ["b", "a"], r"round 2: it has been at it for .* s, and no round before took "),
    ],
    ids=["full", "lying", "slow"],
)
def test_replaces_a_worker_that_cannot_aggregate(
    nursery: Nursery, tmp_path: Path, fault: str, aggregators: list[str], why: str
) -> None:
    """No disk for the updates; digests of no version, which must neither end the server nor come into its journal;
    far slower than round 1 has shown that it takes, though its bytes move all the time.
    """
    env = {"a": faulty(fault, ENOUGH=str(tmp_path / "enough"))}
    settings = {"swarm.aggregators": aggregators, "network.idle_timeout_s": 1.0}
    with ServerProcess(nursery, tmp_path, **settings) as server, sites(nursery, server, **env) as running:
        if fault == "slow":
            server.said("a no longer aggregates round 2", 90)
            (tmp_path / "enough").touch()
        assert len({each.ended()["digest"] for each in running.values()}) == 1
        assert server.kept.wait() == 0
    assert re.search(f"a no longer aggregates {why}", server.log.read_text())


@pytest.mark.slow
@pytest.mark.covers("P10", "X3")
def test_status_says_while_no_worker_can_aggregate(nursery: Nursery, tmp_path: Path) -> None:
    env = dict.fromkeys(SITES, faulty("full", ROOM=str(tmp_path / "room")))
    settings = {"network.idle_timeout_s": 0.5, "rounds.total": 1}
    with ServerProcess(nursery, tmp_path, **settings) as server, sites(nursery, server, **env) as running:
        told = "workers in turn could not aggregate it; the last was "
        wait_until(lambda: told in server.reason(), "the reason")
        assert "it has moved no byte for " in server.reason()
        (tmp_path / "room").touch()
        assert len({each.ended()["digest"] for each in running.values()}) == 1
        assert server.kept.wait() == 0


@pytest.mark.covers("P10", "X3")
@pytest.mark.parametrize("place", ["10.0.0.1:80", "127.0.0.1:10", "127.0.0.1"], ids=["host", "port", "none"])
def test_a_reference_that_leads_elsewhere_is_refused(tmp_path: Path, place: str) -> None:
    with serve_swarm(tmp_path) as server, joined(server, "a") as http:
        digest = http.get(routes.MANIFEST.format(fragment=0, version=0), messages.Manifest).digest
        for version, state in ((place, "127.0.0.1:9"), ("127.0.0.1:9", place)):
            source = Source(version=reference(version), state=reference(state))
            held = Held(fragment=0, version=0, digest=digest, source=source)
            with pytest.raises(BadRequest, match=f"does not lead to {ADDRESS}"):
                http.post(routes.SWARM, PeerReport(address=ADDRESS, number=1, held=[held]), PeerWork)
        assert not http.get(routes.MANIFEST.format(fragment=0, version=0), messages.Manifest).sources


@pytest.mark.covers("P10")
def test_workers_that_have_all_failed_for_days_are_asked_again_within_the_idle_timeout() -> None:
    at = Assignment(losses=100_000, lost_s=time.monotonic(), excluded={"a": None, "b": None, "c": None})
    assert 59.0 < at.pause_s(60.0) <= 60.0


@pytest.mark.covers("P10", "X3")
@pytest.mark.parametrize("place", ["10.0.0.1:80", "127.0.0.1:10"], ids=["host", "port"])
def test_an_update_that_is_offered_elsewhere_is_refused(tmp_path: Path, place: str) -> None:
    with serve_swarm(tmp_path) as server, joined(server, "a"):
        swarm = server._require_run().swarm
        assert swarm is not None
        with pytest.raises(BadRequest, match=f"does not lead to {ADDRESS}"):
            swarm.offer("a", 1, 0, messages.Complete(digest="0" * 64, source=reference(place)))
        assert not swarm.view.offers


@pytest.mark.covers("P10")
def test_the_collecting_worker_refuses_an_update_that_is_too_large(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of so many steps with gradients of norm √82,688: 0.05 · √82,688 · √steps is 14 for c, 20 for a, 25 for b."""
    with serve_swarm(
        tmp_path, **{"aggregation.max_update_norm": 22.0, "rounds.min_sites": 2, "rounds.total": 2}
    ) as server:
        Sites(server.url, tmp_path).join()
        server.run()
    result = Result(tmp_path)
    assert [summary["workers"] for summary in result.history] == [["a", "c"]] * 2
    assert {site for site, _, state in result.tickets if state == "refused"} == {"b"}
    assert "b: update refused: its norm is 24.89, above aggregation.max_update_norm 22" in caplog.text


@pytest.mark.covers("P10")
def test_versions_of_many_parts_can_be_told(tmp_path: Path) -> None:
    """20,000 digests are those of 320 GB in parts of 16 MiB."""
    digests = base64.b64encode(b"".join(blake3(bytes([i % 256])).digest() for i in range(20_000))).decode()
    with serve_swarm(tmp_path) as server, joined(server, "a") as http:
        closed = Closed(fragment=0, version=1, tickets=[1], digest="0" * 64, part_digests=digests)
        assert http.post(routes.SWARM, PeerReport(address=ADDRESS, number=1, closed=[closed]), PeerWork).stamp
