"""A swarm makes the bits that a server would have made, whatever the run; and its server sees no tensor."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from harness.processes import free_port
from kit.requests import get
from swarm_run import SITES, build
from swarm_world import PLAIN, ROUNDS, Result, Sites, left_by, serve_swarm

from atoll import TensorRef


@pytest.mark.covers("P10", "D10")
@pytest.mark.parametrize(
    ("starts", "sample", "populations", "workers"),
    [((("abc", 2), ("abcd", 4)), 1.0, [3, 3, 4, 4], [3, 3, 4, 4]), ((("abcd", 3),), 0.5, [4] * 3, [2] * 3)],
    ids=["grown", "sampled"],
)
def test_the_same_bits_as_a_server_makes_where_more_have_joined_than_trained(
    tmp_path: Path, starts: Any, sample: float, populations: list[int], workers: list[int]
) -> None:
    """SCAFFOLD's controls are the mean over all that have joined: a fourth leaves them three quarters."""
    found = []
    for place in ("swarm", "server"):
        common = PLAIN | {"algorithm.name": "scaffold", "rounds.sample_fraction": sample}
        for names, rounds in starts:
            least = 2 if sample < 1 else len(names)
            sizes = {"rounds.total": rounds, "rounds.sites": len(names), "rounds.min_sites": least}
            result, _ = left_by(tmp_path / place, names, **common, **sizes, **{"swarm.enabled": place == "swarm"})
        found.append(result)
    ours, theirs = found
    assert ours.bits == theirs.bits
    assert [summary["population"] for summary in ours.history] == populations
    assert [len(summary["workers"]) for summary in ours.history] == workers


MODEL_BYTES = sum(each.numel() * each.element_size() for each in (*build().parameters(), *build().buffers()))
HEADER = 1024
"""Most bytes of the header of a file, and of the padding of an update."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return left_by(tmp_path_factory.mktemp("undisturbed"))[0]


@pytest.mark.covers("P10")
def test_drops_versions_that_no_worker_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the disk, and among what others can pull."""
    from atoll.worker.peer.agent import SwarmPeer

    peers, served = list[Any](), dict[str, int]()
    leave = SwarmPeer.leave

    def seen(self: Any) -> None:
        leave(self)
        peers.append(self)
        served[self.site] = len(self._peer_server._host._objects)

    monkeypatch.setattr(SwarmPeer, "leave", seen)
    left_by(tmp_path, **{"rounds.total": 6, "disk.keep_versions": 2})
    assert {peer.site for peer in peers} == set(SITES)
    for peer in peers:
        assert {version.version for version in peer._store.versions()} <= {5, 6}
        # of each a model and its outer state, and the update of the last round
        assert served[peer.site] <= 2 * 2 + 1


@pytest.mark.covers("P10")
def test_an_aggregator_shows_progress_from_its_first_byte_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at all updates once more before it reduces them, which takes its time where they are large."""
    from atoll.worker.peer.agent import SwarmPeer

    moved, reducing, move, reduce = list[int](), threading.Event(), SwarmPeer._move, SwarmPeer._reduce

    def counted(self: Any, nbytes: int) -> None:
        if reducing.is_set():
            moved.append(nbytes)
        move(self, nbytes)

    def told(self: Any, *arguments: Any) -> Any:
        reducing.set()
        try:
            return reduce(self, *arguments)
        finally:
            reducing.clear()

    monkeypatch.setattr(SwarmPeer, "_move", counted)
    monkeypatch.setattr(SwarmPeer, "_reduce", told)
    left_by(tmp_path / "swarm", **{"rounds.total": 1})
    parts = len(SITES) + 1  # their updates, and the version
    assert 0 < sum(moved) - parts * MODEL_BYTES <= parts * HEADER
    assert max(moved) <= 2**16  # part by part


@pytest.mark.covers("P10")
def test_only_the_initial_model_passes_the_server_once(tmp_path: Path) -> None:
    with serve_swarm(tmp_path) as server:
        _, version = get(server.url, "/v1/fragments/0/versions/0")
        sites = Sites(server.url, tmp_path)
        sites.join()
        status = server.status()
    assert status.bytes_up == 0
    assert status.bytes_down == version["nbytes"]
    assert not [path for path in (tmp_path / "state/slots").iterdir() if path.stat().st_size]


@pytest.mark.covers("P10")
def test_what_a_worker_has_it_does_not_pull(tmp_path: Path) -> None:
    """Of two sites each is the aggregator or the checker of every round, and holds every version.

    So in each round one update of the two goes to the other site, and the new version with its outer state; the initial
    model goes from the server to one of them, and from that one to the other, which pulls it twice if it comes to train
    before it holds it.
    """
    _, sites = left_by(tmp_path, "ab", **{"rounds.sites": 2})
    momentum = sum(4 * each.numel() for each in build().parameters())
    up, down = (sum(each) for each in zip(*sites.moved.values(), strict=True))
    assert 0 < down - up - MODEL_BYTES <= HEADER  # what the server gave
    rest = up - ROUNDS * (MODEL_BYTES + MODEL_BYTES + momentum)  # an update, a version and its outer state
    assert any(0 < rest - times * MODEL_BYTES <= (2 * ROUNDS + times) * HEADER for times in (1, 2))


@pytest.mark.covers("P10")
def test_a_version_that_its_holder_has_let_go_of_is_asked_of_the_next_and_then_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Result
) -> None:
    """A worker that holds a version may let go of it, or end, between two questions: no round ends with that."""
    from atoll.worker.peer.peer_transfers import PeerServer

    in_order, seen = PeerServer.in_order, set[int]()

    def stale_first(self: Any, sources: Sequence[str]) -> list[str]:
        ref = TensorRef.parse(sources[0])
        gone, dead = replace(ref, object="0" * 32), replace(ref, port=free_port())
        first = id(self) not in seen
        seen.add(id(self))
        return [str(gone), str(dead), *([] if first else in_order(self, sources))]

    monkeypatch.setattr(PeerServer, "in_order", stale_first)
    ours, _ = left_by(tmp_path / "swarm")
    assert len(seen) == len(SITES)
    assert ours.bits == undisturbed.bits


@pytest.mark.covers("P10")
def test_an_answer_that_a_later_one_has_overtaken_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Result
) -> None:
    """A worker asks twice at once, as soon as it has news: what it is told of before would have it reduce again."""
    from atoll.transport.http_client import Http
    from atoll.worker.peer.agent import SwarmPeer

    post, told, reduced = Http.post, defaultdict[int, list[Any]](list), list[int]()
    reduce = SwarmPeer._reduce

    def late(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        """Every third time, what was told two times before."""
        answer = post(self, path, *arguments, **options)
        if path != "/v1/swarm":
            return answer
        told[id(self)].append(answer)
        return answer if len(told[id(self)]) % 3 else told[id(self)][-3]

    def counting(self: Any, work: Any, *arguments: Any) -> Any:
        reduced.append(work.version)
        return reduce(self, work, *arguments)

    monkeypatch.setattr(Http, "post", late)
    monkeypatch.setattr(SwarmPeer, "_reduce", counting)
    ours, _ = left_by(tmp_path / "swarm")
    assert ours.bits == undisturbed.bits
    assert reduced == [1, 2, 3]


@pytest.mark.covers("P10")
def test_answers_of_a_server_that_was_started_again_count_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it had given many."""
    from atoll.transport.http_client import Http

    post, told = Http.post, Counter[int]()

    def of_another_at_first(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        answer = post(self, path, *arguments, **options)
        if path == "/v1/swarm":
            told[id(self)] += 1
            if told[id(self)] <= 3:
                return answer.model_copy(update={"server": 1, "order": 10_000 + answer.order})
        return answer

    monkeypatch.setattr(Http, "post", of_another_at_first)
    ours, _ = left_by(tmp_path / "swarm")
    assert len(told) >= len(SITES)
    assert min(told.values()) > 3
    assert max(told.values()) < 1000, "as many as the one before had given"
    assert [summary["round"] for summary in ours.history] == [1, 2, 3]


@pytest.mark.covers("P10")
@pytest.mark.parametrize(("named", "expected"), [("bc", ["b", "c", "b", "c"]), ("c", ["c", "c", "c", "c"])])
def test_aggregators_of_the_users_choice_take_turns(tmp_path: Path, named: str, expected: list[str]) -> None:
    result, _ = left_by(tmp_path, **{"swarm.aggregators": tuple(named), "rounds.total": 4})
    assert result.aggregators == expected
    assert all(one["checker"] not in ("", one["aggregator"]) for one in result.history)


@pytest.mark.covers("P10")
def test_the_seed_decides_the_aggregator(tmp_path: Path) -> None:
    orders = []
    for number, seed in enumerate((1, 1, 2)):
        orders.append(left_by(tmp_path / str(number), **{"run.seed": seed, "rounds.total": 6})[0].aggregators)
        assert all(one != other for one, other in pairwise(orders[-1]))
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
