"""What a swarm's server makes of reports: which it believes, which workers reach each other, what each of them has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atoll.blobs.manifest import state_id
from atoll.errors import ConfigError
from atoll.protocol import messages
from atoll.protocol.swarm_messages import Held, Hold, PeerReport, PeerWork, ReducedRound, Source, Unreached, in_text
from atoll.protocol.values import FrozenRound, FrozenUpdate
from atoll.rounds.leases import Member
from atoll.server.swarm.assignments import SwarmView
from atoll.server.swarm.peer_reachability import Peers

pytestmark = pytest.mark.covers("P10")

DIGEST, OTHER = "1" * 64, "2" * 64


def at(site: str) -> str:
    return f"http://{site}:1"


def some(*sites: str) -> Peers:
    """These have joined, in this order."""
    members = {site: Member(site, lease, alive=True) for lease, site in enumerate(sites, 1)}
    peers = Peers(lambda: members, why_unreachable=lambda *_: "")
    for site in sites:
        peers.add(site, at(site), "p1")
    return peers


def report(peers: Peers, site: str, number: int, **said: Any) -> bool:
    said["reached"] = [at(each) for each in said.get("reached", "")]
    said["unreached"] = [Unreached(address=at(each), why="refused") for each in said.get("unreached", "")]
    return peers[site].take(PeerReport(peer=f"atoll-ref://{site}:1", number=number, **said), idle_timeout_s=60.0)


def test_an_overtaken_report_is_ignored() -> None:
    """The server ignores a worker's report if a newer report of this worker came before."""
    peers = some("a", "b")
    assert report(peers, "a", 2, reached="b", leaving=True)
    assert not report(peers, "a", 1)
    assert not report(peers, "a", 2)
    assert peers["a"].leaving
    assert peers["a"].reached == {at("b")}
    assert report(peers, "a", 3)
    assert not peers["a"].leaving


def test_two_workers_must_reach_each_other() -> None:
    """Two workers count as connected when each of them has reached the other. Until then, they are strangers."""
    peers = some("a", "b", "c")
    report(peers, "a", 1, reached="bc")
    assert peers.strangers_of("a") == ["b", "c"]
    assert peers.to_probe("a") == []
    assert peers.to_probe("b") == [at("a"), at("c")]
    report(peers, "b", 1, reached="a")
    assert peers.strangers_of("a") == ["c"]
    assert peers.strangers_of("b") == ["c"]


def test_a_message_has_a_limited_number_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server tells a worker at most `MOST_PEERS` other workers in a message."""
    monkeypatch.setattr("atoll.server.swarm.peer_reachability.MOST_PEERS", 2)
    peers = some("a", "b", "c", "d")
    assert peers.others("b") == ["a", "c"]
    assert peers.to_probe("b") == [at("a"), at("c")]


def test_sites_ask_different_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different sites are told of different sources of a version."""
    # Five workers have the version. Each site is told of two, and all sites together ask more than two.
    monkeypatch.setattr("atoll.server.swarm.assignments.MOST_SOURCES", 2)
    run: Any = SimpleNamespace(fragments=[None], settings=None, state=None)
    run.run_log = SimpleNamespace(version_digest=lambda *_: DIGEST)
    view, sites = SwarmView(run, run, run), "abcde"
    view.peers = some(*sites)
    for site in sites:
        source = Source(version=f"atoll-ref://{site}")
        report(view.peers, site, 1, held=[Held(fragment=0, version=3, digest=DIGEST, source=source)])
    told = [[each.version for each in view._some_sources(site, 0, 3)] for site in sites]
    assert [len(set(each)) for each in told] == [2] * 5
    assert len({text for each in told for text in each}) > 2
    assert len(set(view.sources(0, 3, DIGEST))) == 2


def test_a_restarted_worker_is_checked_again() -> None:
    """When a worker of a swarm has restarted, the other workers check again whether they can reach it."""
    # The numbers of its reports start again.
    peers = some("a", "b")
    report(peers, "a", 7, reached="b")
    report(peers, "b", 7, reached="a")
    assert peers.strangers_of("a") == []
    peers.add("b", at("b"), "p2")
    assert peers.strangers_of("a") == ["b"]
    assert peers.to_probe("a") == [at("b")]
    assert report(peers, "b", 1)  # its numbers begin again


def test_a_version_with_another_digest_is_no_source() -> None:
    """In a swarm, sites are not sent to a worker whose version has another digest. A leaving worker is asked last."""
    peers = some("a", "b", "c")
    held = {
        site: Held(fragment=0, version=3, digest=digest, source=Source(version=f"atoll-ref://{site}"))
        for site, digest in {"a": DIGEST, "b": OTHER, "c": DIGEST}.items()
    }
    for site, each in held.items():
        report(peers, site, 1, held=[each], leaving=site == "a")
    assert list(peers.holding(0, 3, DIGEST)) == ["c", "a"]  # one that leaves is asked last
    assert list(peers.holding(0, 2, DIGEST)) == []


@pytest.mark.covers("X3")
def test_an_unreachable_peer_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live worker that others cannot reach is evicted, with the reason."""
    # Of three workers, this is the one that the two others cannot reach. Of two, it is the one that joined last.
    monkeypatch.setattr("atoll.server.swarm.peer_reachability.EVICT_AFTER_S", 0.0)
    peers = some("a", "b", "c")
    report(peers, "b", 1, reached="c", unreached="a")
    report(peers, "c", 1, reached="b", unreached="a")
    assert peers.unreachable() is None  # a may have died
    report(peers, "a", 1)
    found = peers.unreachable()
    assert found is not None
    assert found[:2] == ("a", 1)
    assert "b cannot reach a at http://a:1 (refused)" in found[2]

    pair = some("a", "b")
    report(pair, "a", 1, unreached="b")
    report(pair, "b", 1)
    found = pair.unreachable()
    assert found is not None
    assert found[:2] == ("b", 2)  # the one that came last


@pytest.mark.covers("X3")
def test_failed_connections_before_a_restart_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has restarted does not count as unreachable because others failed to reach its dead process."""
    now_s = 100.0
    monkeypatch.setattr("atoll.server.swarm.peer_reachability.time", SimpleNamespace(monotonic=lambda: now_s))
    peers = some("a", "b")
    report(peers, "a", 1, unreached="b")  # which has died
    now_s += 60
    assert peers.unreachable() is None
    peers.add("b", at("b"), "p2")
    report(peers, "a", 2, unreached="b")  # its next try is under way
    now_s += 1
    report(peers, "b", 1, reached="a")
    assert peers.unreachable() is None
    report(peers, "a", 3, reached="b")
    now_s += 60
    report(peers, "b", 2, reached="a")
    assert peers.unreachable() is None


async def test_an_evicted_worker_may_rejoin_after_restarting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evicted worker may not join again from its old process. It may join from a new process."""
    monkeypatch.setattr("atoll.server.swarm.peer_reachability.EVICT_AFTER_S", 0.0)
    peers = some("a", "b")
    report(peers, "a", 1, unreached="b")
    report(peers, "b", 1)
    peers.unreachable()
    proof = f"atoll-ref://b:1/{'0' * 32}?expires=1#{'0' * 32}.{'0' * 64}"
    again = messages.Join(protocol=1, site="b", host="here", process="p1", peer=proof)
    with pytest.raises(ConfigError, match="b cannot take part"):
        await peers.join(again)
    await peers.join(again.model_copy(update={"process": "p2"}))
    assert peers["b"].process == "p2"


def version(number: int) -> Held:
    return Held(fragment=0, version=number, digest=DIGEST, source=Source(version="atoll-ref://a"))


def test_dropped_versions_and_results_no_longer_count() -> None:
    """If the server's answer leaves out a version or a result, it no longer counts, even if an older report of the
    worker still has it.
    """
    # A server was killed before it committed version 1. It begins again, and its answers leave out version 1.
    peers, held = some("a"), [version(0), version(1)]
    closed = [ReducedRound(fragment=0, version=1, tickets=[1], digest=DIGEST)]
    kept = Hold(fragment=0, version=0, digest=DIGEST, sources=[])

    def has() -> tuple[list[int], int]:
        return [number for _, number in peers["a"].held], len(peers["a"].closed)

    report(peers, "a", 1, held=held, closed=closed, seen=7)  # to a server that has told it nothing yet
    assert has() == ([0, 1], 1)
    peers["a"].answered(PeerWork(stamp=8, hold=[kept]))
    assert has() == ([0], 0)
    report(peers, "a", 2, held=held, closed=closed, seen=7)  # sent before that answer came
    assert has() == ([0], 0)
    work = FrozenRound(fragment=0, number=1, base_version=0, version=1, updates=[share(1)])
    peers["a"].answered(PeerWork(stamp=9, hold=[kept], close=[work]))
    report(peers, "a", 3, held=held, closed=closed, seen=9)  # made once more
    assert has() == ([0, 1], 1)
    peers["a"].answered(PeerWork(stamp=9, hold=[kept], close=[work]))
    assert has() == ([0, 1], 1)


def share(ticket: int) -> FrozenUpdate:
    return FrozenUpdate(ticket=ticket, site="a", digest=OTHER, weight=1.0, norm=1.0, steps=1, scale=1.0)


def test_a_checked_version_includes_its_outer_state() -> None:
    """In a swarm, a worker counts as having a new version only if it also has the right outer optimizer state."""
    run: Any = SimpleNamespace(fragments=[None], settings=None, state=None)
    view = SwarmView(run, run, run)
    view.peers = some("b")
    closed = ReducedRound(fragment=0, version=3, tickets=[1], digest=DIGEST, state_digests=in_text([b"s" * 32]))
    source = Source(version="atoll-ref://b")
    for number, (state, has) in enumerate({"": False, OTHER: False, state_id([b"s" * 32]): True}.items()):
        held = Held(fragment=0, version=3, digest=DIGEST, state_digest=state, source=source)
        report(view.peers, "b", number, held=[held])
        assert view.has("b", closed) is has
