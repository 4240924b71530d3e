"""A swarm makes the bits that a server would have made, whatever the run; and its server sees no tensor."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, free_port
from kit import DiLoCoSites
from kit.models import wide_model
from kit.packages import install
from kit.results import Result, of_sites
from swarm_world import PLAIN, ROUNDS, SITES, SiteProcess, Sites, left_by, serve_swarm

from atoll import TensorRef

pytestmark = pytest.mark.covers("P10")


@pytest.mark.covers("D10")
@pytest.mark.parametrize(
    ("starts", "sample", "populations", "workers"),
    [((("abc", 2), ("abcd", 4)), 1.0, [3, 3, 4, 4], [3, 3, 4, 4]), ((("abcd", 3),), 0.5, [4] * 3, [2] * 3)],
    ids=["grown", "sampled"],
)
def test_swarm_scaffold_counts_all_joined_sites(
    tmp_path: Path, starts: Any, sample: float, populations: list[int], workers: list[int]
) -> None:
    """A swarm gives the same bits as a server, although SCAFFOLD's controls are the mean over all sites that have
    joined.

    When a fourth site joins, three quarters of the control are left.
    """
    found = []
    for place in ("swarm", "server"):
        common = PLAIN | {"algorithm.name": "scaffold", "rounds.sample_fraction": sample}
        for names, rounds in starts:
            least = 2 if sample < 1 else len(names)
            sizes = {"rounds.total": rounds, "rounds.sites": len(names), "rounds.min_sites": least}
            result, _ = left_by(tmp_path / place, names, **common, **sizes, **{"swarm.enabled": place == "swarm"})
        found.append(result)
    ours, theirs = found
    assert ours.without_exports == theirs.without_exports
    assert [summary["population"] for summary in ours.history] == populations
    assert [len(summary["sites"]) for summary in ours.history] == workers


@pytest.mark.covers("X10")
def test_the_rules_of_buffers_hold_in_a_swarm(tmp_path: Path) -> None:
    """With rules for buffers, a swarm gives the same bits as a server.

    A tensor that each site keeps to itself has its initial value in every version.
    """
    rules = {"1.running_mean": "first", "1.running_var": "max", "1.num_batches_tracked": "sum", "1.weight": "keep"}
    ours, theirs = (
        left_by(tmp_path / place, **{"model.buffers": rules, "swarm.enabled": place == "swarm"})[0]
        for place in ("swarm", "server")
    )
    assert ours.without_exports == theirs.without_exports


H, ORDER = 4, "abcaacbba"
DILOCO: dict[str, Any] = PLAIN | {"algorithm.name": "diloco", "diloco.sync_every": H, "async.enabled": True}


class InTurn(DiLoCoSites):
    """Behind a first round together they send their updates one after the other, as `ORDER` says.

    A site whose turn it is sends its update behind its fourth step, and begins the next four with what has come of it.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        self._all_here = threading.Barrier(len(SITES))
        self._passed, self._turn, self._is_over = threading.Condition(), 0, False
        super().__init__(*given, **options, during=self._wait)

    def _work(self, site: str) -> None:
        super()._work(site)
        with self._passed:
            self._is_over = True
            self._passed.notify_all()

    def _wait(self, site: str, step: int) -> None:
        if step == H:
            self._all_here.wait()
        with self._passed:
            if step > H and step % H == 0:
                self._turn += 1
                self._passed.notify_all()
            if step > H and step % H == H - 1:
                self._passed.wait_for(lambda: self._is_over or ORDER[self._turn : self._turn + 1] == site)


def left_by_steps(
    folder: Path, steps: int = 40, kind: type[DiLoCoSites] = DiLoCoSites, **settings: Any
) -> tuple[Result, DiLoCoSites]:
    with serve_swarm(folder, **DILOCO | settings) as server:
        sites = kind(server.url, folder, steps, SITES, build=wide_model, weights=SITES, swarm=True)
        sites.join()
        status = server.status()
    assert status.bytes_up == 0 or not settings.get("swarm.enabled", True)
    return Result(folder), sites


@pytest.mark.covers("D10")
def test_an_asynchronous_swarm_with_fragments_finishes(tmp_path: Path) -> None:
    """In an asynchronous swarm with fragments, every update is in one version, and more than one worker aggregates.
    Every worker sees the end.
    """
    result, sites = left_by_steps(tmp_path, steps=400, **{"rounds.total": 9, "diloco.num_fragments": 2})
    assert len(result.updates) == sum(len(summary["sites"]) for summary in result.history)
    assert len(set(result.aggregators)) > 1
    assert all(loop.finished for loop in sites.loops.values())


@pytest.mark.covers("D10")
@pytest.mark.parametrize(
    "settings",
    [{"async.staleness_weight": "inverse_sqrt", "aggregation.upload_codec.name": "int8"}, {"async.momentum_every": 2}],
    ids=["weighed-by-staleness", "delayed-nesterov"],
)
def test_an_asynchronous_swarm_gives_a_servers_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    """If the updates come in the same order, an asynchronous swarm gives the same bits as a server."""
    run = {"kind": InTurn, "async.sync_rounds_first": 1, "rounds.total": 1 + len(ORDER)} | settings
    ours, sites = left_by_steps(tmp_path / "swarm", **run)
    theirs, _ = left_by_steps(tmp_path / "server", **run, **{"swarm.enabled": False})
    assert ours.versions == theirs.versions
    first, *one_by_one = ours.history
    assert [each["site"] for each in first["sites"]] == ["a", "b", "c"]
    assert of_sites(one_by_one) == [[site] for site in ORDER]
    # a, b, c from version 1; a has missed b, c; a again; c: a, a; b: c, a, a, c; b again; a: c, b, b
    assert of_sites(one_by_one, "staleness") == [[0], [1], [2], [2], [0], [2], [4], [0], [3]]
    assert of_sites(theirs.history, "staleness") == of_sites(ours.history, "staleness")
    assert all(loop.finished for loop in sites.loops.values())


PACKAGE = '''\
from dataclasses import dataclass, replace

from atoll.algorithms.base import Algorithm
from atoll.codecs import Bf16Codec
from atoll.reducers import WeightedMean


class Fp16Codec(Bf16Codec):
    name = "fp16"

    @staticmethod
    def _stored(dtype):
        return "F16" if dtype in ("F64", "F32") else dtype


@dataclass(frozen=True)
class Squared(WeightedMean):
    """Weights count squared."""

    def weigh(self, facts):
        return super().weigh(replace(facts, weights=[weight * weight for weight in facts.weights]))


half = Algorithm(name="half", citation="none", outer="rmsprop", outer_options={"lr": 0.01, "alpha": 0.5})
'''


OURS = {"algorithm.name": "half", "aggregation.reducer.name": "squared", "aggregation.upload_codec.name": "fp16"}
STOCK = {"algorithm.name": "fedavg", "aggregation.reducer.name": "mean", "aggregation.upload_codec.name": "none"}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "atoll.codecs": {"fp16": "swarm_plugin:Fp16Codec"},
        "atoll.reducers": {"squared": "swarm_plugin:Squared"},
        "atoll.algorithms": {"half": "swarm_plugin:half"},
    }
    install(monkeypatch, tmp_path / "packages", "swarm_plugin", PACKAGE, points)


@pytest.mark.usefixtures("installed")
@pytest.mark.covers("D10")
def test_an_installed_package_gives_a_servers_bits(tmp_path: Path) -> None:
    """With an algorithm, a reducer and other parts of an installed package, a swarm gives the same bits as a server.
    Each part changes the result.
    """
    ours, _ = left_by(tmp_path / "swarm", **PLAIN | OURS)
    theirs, _ = left_by(tmp_path / "server", **PLAIN | OURS, **{"swarm.enabled": False})
    assert ours.without_exports == theirs.without_exports
    for name, stock in STOCK.items():  # each has a part in them
        other, _ = left_by(tmp_path / name, **PLAIN | OURS | {name: stock}, **{"swarm.enabled": False})
        assert other.without_exports != ours.without_exports


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.covers("X3")
def test_a_site_without_the_runs_package_cannot_join(nursery: Nursery, tmp_path: Path) -> None:
    """A site that lacks the package of the run's algorithm cannot join the swarm. Its error says how to register the
    algorithm.
    """
    with serve_swarm(tmp_path, **PLAIN | OURS | {"aggregation.upload_codec.name": "none"}) as server:
        with SiteProcess(nursery, tmp_path, server.url, "c") as site:  # it has not got what is put on this one's path
            assert site.process.wait() != 0
        assert server.status().workers == []
    said = site.process.now.output()
    assert "This site cannot aggregate rounds of the swarm: The run's algorithm 'half' is neither" in said
    assert "call atoll.register('algorithms', 'half', …) in the script before it joins" in said


MODEL_BYTES = sum(each.nbytes for each in wide_model().state_dict().values())
HEADER = 1024
"""Most bytes of the header of a file, and of the padding of an update."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return left_by(tmp_path_factory.mktemp("undisturbed"))[0]


def test_workers_drop_versions_that_no_worker_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a swarm drop versions that no worker needs, from the disk and from what others can download."""
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
        # of each a model and its outer state, the update of the last round, and the proof of the address
        assert served[peer.site] <= 2 * 2 + 1 + 1


def test_an_aggregator_reports_progress_before_reducing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An aggregator of a swarm reports progress while it reads updates, so that it is not taken for stuck."""
    from atoll.worker.peer.agent import SwarmPeer

    moved, reducing, move, reduce = list[int](), set[SwarmPeer](), SwarmPeer._move, SwarmPeer._reduce

    def counted(self: Any, nbytes: int) -> None:
        if self in reducing:  # the others may still download the version that they hold for others
            moved.append(nbytes)
        move(self, nbytes)

    def told(self: Any, *arguments: Any) -> Any:
        reducing.add(self)
        try:
            return reduce(self, *arguments)
        finally:
            reducing.discard(self)

    monkeypatch.setattr(SwarmPeer, "_move", counted)
    monkeypatch.setattr(SwarmPeer, "_reduce", told)
    left_by(tmp_path / "swarm", **{"rounds.total": 1})
    parts = len(SITES) + 1  # their updates, and the version
    assert 0 < sum(moved) - parts * MODEL_BYTES <= parts * HEADER
    assert max(moved) <= 2**16  # part by part


def test_the_server_sends_the_initial_model_once(tmp_path: Path) -> None:
    """In a swarm, the server sends the initial model once and receives no tensor bytes. All other tensors go between
    the workers.
    """
    with serve_swarm(tmp_path) as server:
        initial = (tmp_path / "state" / "initial-0.safetensors").stat().st_size
        sites = Sites(server.url, tmp_path)
        sites.join()
        status = server.status()
    assert status.bytes_up == 0
    assert status.bytes_down == initial
    assert not [path for path in (tmp_path / "state/slots").iterdir() if path.stat().st_size]


def test_a_worker_downloads_nothing_it_already_has(tmp_path: Path) -> None:
    """Workers of a swarm do not download what they have."""
    # Each of two sites aggregates or checks every round, so it holds every version. In each round, one update and the
    # version with its outer state travel. The initial model goes from the server to one site and from there to the
    # other, once or twice.
    _, sites = left_by(tmp_path, "ab", **{"rounds.sites": 2})
    momentum = sum(4 * each.numel() for each in wide_model().parameters())
    up, down = (sum(each) for each in zip(*sites.moved.values(), strict=True))
    assert 0 < down - up - MODEL_BYTES <= HEADER  # what the server gave
    rest = up - ROUNDS * (MODEL_BYTES + MODEL_BYTES + momentum)  # an update, a version and its outer state
    assert any(0 < rest - times * MODEL_BYTES <= (2 * ROUNDS + times) * HEADER for times in (1, 2))


def test_a_worker_asks_the_next_version_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Result
) -> None:
    """If a worker has dropped a version or ended, the next holder of the version is asked. The round goes on with the
    same bits.
    """
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


def test_a_worker_ignores_overtaken_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Result
) -> None:
    """A worker of a swarm ignores an old answer of the server that arrives after a newer one."""
    # Answers of a restarted server count from its first one. A worker asks twice at once when it has news. An overtaken
    # answer would make it reduce again. Its first three answers are those of an earlier server, which had given many.
    from atoll.transport.http_client import Http
    from atoll.worker.peer.agent import SwarmPeer

    post, reduce = Http.post, SwarmPeer._reduce
    told, reduced = defaultdict[int, list[Any]](list), list[int]()

    def late(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        """Then every third time, what was told two times before."""
        answer = post(self, path, *arguments, **options)
        if path != "/v1/swarm":
            return answer
        own = told[id(self)]
        if len(own) < 3:
            answer = answer.model_copy(update={"server": 1, "order": 10_000 + answer.order})
        own.append(answer)
        return own[-3] if len(own) > 5 and len(own) % 3 == 0 else answer

    def counting(self: Any, work: Any, *arguments: Any) -> Any:
        reduced.append(work.version)
        return reduce(self, work, *arguments)

    monkeypatch.setattr(Http, "post", late)
    monkeypatch.setattr(SwarmPeer, "_reduce", counting)
    ours, _ = left_by(tmp_path / "swarm")
    assert ours.bits == undisturbed.bits
    assert reduced == [1, 2, 3]
    asked = [len(own) for own in told.values()]
    assert min(asked) > 5, "each was given answers that were overtaken"
    assert max(asked) < 1000, "as many as the earlier server had given"


def test_only_chosen_workers_aggregate(tmp_path: Path) -> None:
    """With `swarm.aggregators` ('b', 'c'), these two workers aggregate by turns. Another worker checks each round."""
    result, _ = left_by(tmp_path, **{"swarm.aggregators": ("b", "c"), "rounds.total": 4})
    assert result.aggregators == ["b", "c", "b", "c"]
    assert all(one["checker"] not in ("", one["aggregator"]) for one in result.history)


def test_the_seed_decides_the_aggregator(tmp_path: Path) -> None:
    """A round is aggregated by the site that is first by a digest of seed, version and name, but never by one site
    twice in a row.
    """
    result, _ = left_by(tmp_path, **{"run.seed": 5, "rounds.total": 6})
    expected = [""]
    for version in range(6):
        drawn = {hashlib.sha256(f"5/0/{version}/{site}".encode()).hexdigest(): site for site in SITES}
        expected.append(next(site for _, site in sorted(drawn.items()) if site != expected[-1]))
    assert result.aggregators == expected[1:]
