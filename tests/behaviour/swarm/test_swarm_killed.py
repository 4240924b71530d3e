"""Sites of a swarm and its server are killed or stopped, or cannot do their part: the run leaves the same bits."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, wait_until
from kit import DiLoCoSites, Gate, Threads, flip_bit, run_to_end, tensors_digest
from kit.models import wide_model
from kit.results import Result
from swarm_world import (
    EVERY_SITE_AND_ROUND,
    IN_TURN,
    PLAIN,
    SITES,
    ServerProcess,
    SiteProcess,
    Sites,
    left_by,
    serve_swarm,
    submit,
)

import atoll
from atoll.codecs.plain import Bf16Codec
from atoll.errors import RunFailed, ServerFailed
from atoll.reducers import Reducer

pytestmark = [pytest.mark.slow, pytest.mark.covers("P10")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    result, sites = left_by(tmp_path_factory.mktemp("undisturbed"), **IN_TURN)
    assert len(sites.digests) == 1
    assert result.aggregators == ["a", "b", "c"]
    return result


@contextmanager
def processes(
    nursery: Nursery, folder: Path, url: str, lives: dict[str, list[str]], **env: str
) -> Iterator[dict[str, SiteProcess]]:
    """Sites as processes with these failpoints."""
    with ExitStack() as stack:
        yield {site: stack.enter_context(SiteProcess(nursery, folder, url, site, lives[site], **env)) for site in lives}


def require_same(folder: Path, undisturbed: Result) -> Result:
    """The bits are those of the undisturbed run, and each update counted once."""
    result = Result(folder)
    assert (result.bits, result.updates) == (undisturbed.bits, undisturbed.updates)
    return result


@pytest.mark.parametrize(
    "lives",
    [
        {"a": ["swarm.collected=kill@3"], "b": ["pass.chunk=kill@2"], "c": ["worker.acknowledged=kill"]},
        {"a": ["swarm.closed=kill"], "b": ["swarm.held=kill@2"]},
        {"a": ["swarm.told=kill"]},
    ],
    ids=[
        "with-all-updates, while-it-reduces, after-its-update-was-collected",
        "before-it-says-that-it-has-reduced, the-checker",
        "after-it-said-so",
    ],
)
def test_killed_sites_change_no_bit(
    nursery: Nursery, tmp_path: Path, undisturbed: Result, lives: dict[str, list[str]]
) -> None:
    """If sites are killed at any point of a swarm's round, they come back and the result has the bits of an undisturbed
    run.
    """
    with serve_swarm(tmp_path, **IN_TURN) as server, processes(nursery, tmp_path, server.url, lives) as killed:
        others = Sites(server.url, tmp_path, SITES.keys() - lives.keys())
        digests = {each.ended() for each in killed.values()}
        others.join()
        assert len(digests | others.digests) == 1
        assert {site: each.process.deaths for site, each in killed.items()} == dict.fromkeys(lives, 1), "did not fire"
        server.run()
    require_same(tmp_path, undisturbed)


def test_a_killed_swarm_server_changes_no_bit(nursery: Nursery, tmp_path: Path, undisturbed: Result) -> None:
    """If the server of a swarm is killed again and again, the result has the bits of an undisturbed run."""
    # No site trains a round twice. A finished run that is started again stays as it is.
    lives = ("accept.before=kill", "swarm.asked=kill", "accept.after=kill@2", "recover.midway=kill", "head.before=kill")
    with ServerProcess(nursery, tmp_path, lives, **IN_TURN) as server:
        sites = Sites(server.url, tmp_path)
        sites.join()
        assert server.process.wait() == 0
        assert server.process.deaths == len(lives), "a failpoint did not fire"
    assert len(sites.digests) == 1
    assert sorted(sites.trained) == EVERY_SITE_AND_ROUND
    require_same(tmp_path, undisturbed)
    with serve_swarm(tmp_path, **IN_TURN) as server:
        server.run()
    require_same(tmp_path, undisturbed)


@pytest.mark.covers("F41")
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("version", "The version that the round starts from is damaged: its digest differs"),
        ("state", "The outer state that the round starts from is damaged"),
        ("spool", "differs from the one received: the disk has changed it"),
    ],
)
def test_an_aggregator_with_a_damaged_file_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, undisturbed: Result, what: str, said: str
) -> None:
    """If a bit of an aggregator's files changes, another site aggregates the round from its own files."""
    # The result has the same bits. The bit changes while round 2 is trained, or while one of its updates is awaited.
    gate = Gate(2, "c" if what == "spool" else SITES)
    with serve_swarm(tmp_path, **IN_TURN) as server:
        sites = Sites(server.url, tmp_path, during=gate)
        gate.wait()
        wait_until(lambda: aggregator(server) == "b", "the aggregator of round 2")
        if what == "spool":
            wait_until(lambda: collected(server) == ["a", "b"], "two updates at b")
        for path in files_of(tmp_path, "b", what):
            flip_bit(path, path.stat().st_size // 2)  # in place: it is open at b
        gate.open()
        run_to_end(server, sites)
    assert len(sites.digests) == 1
    assert "b no longer aggregates round 2" in caplog.text
    assert said in caplog.text
    assert require_same(tmp_path, undisturbed).aggregators[1] != "b"


def aggregator(server: atoll.Server) -> str:
    place = server.status().fragments[0].place
    return place.aggregator if place else ""


def collected(server: atoll.Server) -> list[str]:
    place = server.status().fragments[0].place
    return sorted(place.collected) if place else []


def files_of(folder: Path, site: str, what: str) -> list[Path]:
    """Of the newest version that a site holds, or of all updates that it has collected."""
    (note,) = (folder / "workers" / site).glob("*/held.json")
    if what == "spool":
        return sorted(note.parent.glob("spool-*"))
    newest = max(json.loads(note.read_text())["versions"], key=lambda row: int(row[1]))
    return [note.parent / f"{what}-0-{newest[3] if what == 'version' else newest[4]}.safetensors"]


@pytest.mark.parametrize("stopped", ["aggregator", "checker"])
def test_replaces_a_stopped_worker_of_a_swarm(
    nursery: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture, stopped: str
) -> None:
    """If the aggregator or its checker stops during a reduction, another worker takes its place."""
    # When it goes on, it does no harm. A stopped aggregator also loses its lease.
    caplog.set_level("INFO", "atoll.server")
    paused, lives = tmp_path / "reduces", {"a": [f"pass.chunk=pause:{tmp_path / 'reduces'}"], "b": [""]}
    lease_s = 4.0 if stopped == "aggregator" else 60.0
    settings = {"network.idle_timeout_s": 1.5, "network.heartbeat_timeout_s": lease_s, "rounds.min_sites": 1}
    with (
        serve_swarm(tmp_path, **IN_TURN, **settings) as server,
        processes(nursery, tmp_path, server.url, lives) as sites,
    ):
        other = Sites(server.url, tmp_path, "c")
        wait_until(Path(f"{paused}.reached").exists, "the reduction")
        process = sites["a" if stopped == "aggregator" else "b"].process.now
        process.send(signal.SIGSTOP)
        if stopped == "checker":
            paused.touch()
        wait_until(lambda: "round 1: version 1" in caplog.text, "round 1")
        paused.touch()
        process.send(signal.SIGCONT)
        digests = {each.ended() for each in sites.values()}
        other.join()
        assert len(digests | other.digests) == 1
        server.run()
    result = Result(tmp_path)
    first = result.history[0]
    if stopped == "aggregator":
        assert "a no longer aggregates round 1: " in caplog.text
        assert first["aggregator"] != "a"
        assert set(EVERY_SITE_AND_ROUND) - set(result.counted()) <= {("a", 1), ("a", 2)}  # it was silent meanwhile
        assert len(result.counted()) == len(set(result.counted()))
    else:
        assert (first["aggregator"], first["checker"]) == ("a", "c")
        assert result.counted() == EVERY_SITE_AND_ROUND


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("fault", "aggregators", "why"),
    [
        ("full", ["a"], "round 1: it neither sent nor received a byte for "),
        ("lying", ["a"], "round 1: the digests of its report do not belong to a version"),
        ("slow", ["b", "a"], r"round 2: it has been working for .* s, but no round before took "),
    ],
    ids=["full", "lying", "slow"],
)
def test_replaces_a_worker_that_cannot_aggregate(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    aggregators: list[str],
    why: str,
) -> None:
    """If a worker's disk is full, its digests are wrong, or it is far too slow, another worker aggregates the round."""
    # The server and its journal stay unharmed. The slow worker moves bytes all the time, but takes far longer than any
    # round before.
    from atoll.worker.peer.agent import SwarmPeer

    collect, reduce, enough = SwarmPeer._collect, SwarmPeer._reduce, threading.Event()

    def trickle(self: Any, *arguments: Any) -> Any:
        while self.site == "a" and not enough.wait(0.1):
            self._move(1)
        return collect(self, *arguments)

    def lie(self: Any, *arguments: Any) -> Any:
        made, report = reduce(self, *arguments)
        return made, report.model_copy(update={"part_digests": "A"}) if self.site == "a" else report

    if fault == "full":
        fill_disks(monkeypatch, "/workers/a/", threading.Event())
    elif fault == "lying":
        monkeypatch.setattr(SwarmPeer, "_reduce", lie)
    else:
        monkeypatch.setattr(SwarmPeer, "_collect", trickle)
    idle_timeout_s = 4.0 if fault == "slow" else 1.0  # a worker reports each second how many bytes it has moved
    settings = {"swarm.aggregators": aggregators, "network.idle_timeout_s": idle_timeout_s}
    with serve_swarm(tmp_path, **settings) as server:
        sites = Sites(server.url, tmp_path)
        try:
            wait_until(lambda: re.search(f"a no longer aggregates {why}", caplog.text), "the change", 60)
        finally:
            enough.set()  # a's threads would outlive the test
        run_to_end(server, sites)
    assert len(sites.digests) == 1


class Raises(Reducer):
    """A reducer that raises wherever it is called."""

    def reduce_(self, rows: Iterable[torch.Tensor], weights: Sequence[float], out: torch.Tensor) -> None:
        """Raise."""
        raise ZeroDivisionError("3 of 0 rows")


@dataclass(frozen=True)
class Undecodable(Bf16Codec):
    """A codec that raises wherever a worker decodes the update of a site, its own or another one."""

    name = "undecodable"

    def decode_(self, source: torch.Tensor, target: torch.Tensor, dtype: str) -> None:
        """Raise, unless the site checks its update while it encodes it."""
        if threading.current_thread().name.startswith(("atoll-part", "atoll-swarm")):
            raise ZeroDivisionError("3 of 0 rows")
        super().decode_(source, target, dtype)


class RaisingSGD(torch.optim.SGD):
    """An outer optimizer that raises, after the trial that it has to pass at the server and at each site.

    Attributes:
        may_raise: whether the trials are over.
    """

    may_raise = False

    def step(self, *_: Any) -> None:  # type: ignore[override]
        """Step, or raise."""
        if RaisingSGD.may_raise:
            raise ZeroDivisionError("3 of 0 rows")
        super().step()


def trained_in_swarm(url: str, folder: Path, site: str) -> None:
    """Take part in a run with a site that trains each round."""
    with atoll.join(url, site=site, folder=folder / "workers", swarm=True) as worker:
        for fl_round in worker:
            RaisingSGD.may_raise = True  # all sites have joined
            submit(fl_round, fl_round.load_into(wide_model()), site)


@pytest.mark.covers("X9")
@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"aggregation.reducer.name": "raises"}, "ZeroDivisionError"),
        ({"aggregation.upload_codec.name": "undecodable"}, r"it could not decode the update of \w: ZeroDivisionError"),
        (PLAIN | {"algorithm.outer_optimizer.name": "raises"}, "ZeroDivisionError"),
    ],
    ids=["reducer", "codec", "outer optimizer"],
)
def test_code_that_raises_everywhere_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], what: str
) -> None:
    """If the run's reducer, codec or outer optimizer raises at every worker, the run ends with the error, and so do all
    sites.
    """
    monkeypatch.setattr("atoll.registry._registered", {})
    atoll.register("reducers", "raises", Raises)
    atoll.register("codecs", "undecodable", Undecodable)
    atoll.register("outer", "raises", RaisingSGD)
    monkeypatch.setattr(RaisingSGD, "may_raise", False)
    ends: dict[str, BaseException] = {}

    def work(site: str) -> None:
        with pytest.raises(ServerFailed) as raised:
            trained_in_swarm(server.url, tmp_path, site)
        ends[site] = raised.value

    with serve_swarm(tmp_path, **settings) as server:
        sites = Threads(*(partial(work, site) for site in SITES))
        with pytest.raises(RunFailed, match=rf"Round 1 failed at \w, \w, .* the last was \w: {what}") as raised:
            assert server.wait(30), "the run has not failed"
        sites.join()
    assert "ZeroDivisionError: 3 of 0 rows" in raised.value.message
    assert ends.keys() == SITES.keys()
    assert all("ZeroDivisionError: 3 of 0 rows" in error.message for error in ends.values())


def fill_disks(monkeypatch: pytest.MonkeyPatch, home: str, room: threading.Event) -> None:
    """No site of these folders has space for the updates of others before there is room."""
    allocate = os.posix_fallocate

    def refuse(fd: int, offset: int, nbytes: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if home in path and "/spool-" in path and not room.is_set():
            raise OSError(errno.ENOSPC, "no space left on device")
        allocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", refuse)


@pytest.mark.covers("X3")
def test_the_status_shows_if_no_worker_can_aggregate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no worker can aggregate a round, the status says how many failed in a row and why. Once there is disk
    space, the run goes on.
    """
    room = threading.Event()
    fill_disks(monkeypatch, "/workers/", room)
    with serve_swarm(tmp_path, **{"network.idle_timeout_s": 0.5, "rounds.total": 1}) as server:
        sites = Sites(server.url, tmp_path)
        told = "workers in a row could not aggregate the round; the last was "
        reason = wait_until(
            lambda: (reason := server.status().fragments[0].reason) and told in reason and reason, "the reason"
        )
        assert "it neither sent nor received a byte for " in reason
        room.set()
        run_to_end(server, sites)
    assert len(sites.digests) == 1


DILOCO: dict[str, Any] = IN_TURN | {"algorithm.name": "diloco", "diloco.sync_every": 4}
STREAMING: dict[str, Any] = {
    "diloco.num_fragments": 2,
    "diloco.fragment_sync_delay": 1,
    "diloco.fragment_update_alpha": 0.25,
}
Loops = partial(DiLoCoSites, steps=1000, build=wide_model, weights=SITES, swarm=True)


@pytest.mark.covers("D10")
def test_a_killed_diloco_server_keeps_the_bits(nursery: Nursery, tmp_path: Path) -> None:
    """If the server of a DiLoCo swarm is killed twice, the same updates count and the versions have the same bits."""
    found = []
    for lives in ((), ("accept.after=kill@2", "head.before=kill")):
        (folder := tmp_path / str(len(lives))).mkdir()
        with ServerProcess(nursery, folder, lives, **DILOCO) as server:
            Loops(server.url, folder, names=SITES).join()
            assert server.process.wait() == 0
            assert server.process.deaths == len(lives), "a failpoint did not fire"
        found.append(Result(folder))
    undisturbed, result = found
    assert (result.versions, result.updates) == (undisturbed.versions, undisturbed.updates)
    assert result.counted() == EVERY_SITE_AND_ROUND


@pytest.mark.covers("D10", "L4")
def test_all_sites_agree_after_kills_while_streaming(nursery: Nursery, tmp_path: Path) -> None:
    """If an aggregator and the server are killed in a swarm with streamed fragments, all sites end with
    the same model.
    """
    # Every fragment has its rounds, and no update counts twice. The killed site repeats its local steps.
    lives = ("accept.after=kill@2", "head.before=kill")
    with (
        ServerProcess(nursery, tmp_path, lives, **DILOCO | STREAMING | {"swarm.aggregators": ["a"]}) as server,
        processes(nursery, tmp_path, server.url, {"a": ["pass.chunk=kill"]}, LOOP="diloco") as killed,
    ):
        others = Loops(server.url, tmp_path, names="bc")
        digests = {killed["a"].ended()}
        others.join()
        assert server.process.wait() == 0
        assert (server.process.deaths, killed["a"].process.deaths) == (2, 1), "a failpoint did not fire"
    digests |= {tensors_digest(dict(model.state_dict())) for model in others.models.values()}
    assert len(digests) == 1
    result = Result(tmp_path)
    assert [(fragment, version) for fragment, version, _ in result.versions] == [
        (fragment, version) for fragment in range(2) for version in range(4)
    ]
    assert max(Counter(result.updates).values()) == 1
    assert len(result.updates) >= 2 * len(EVERY_SITE_AND_ROUND) - 4


@pytest.mark.covers("L3", "L5")
def test_an_asynchronous_swarm_goes_on_without_its_aggregator(nursery: Nursery, tmp_path: Path) -> None:
    """If an asynchronous swarm loses its aggregator while other sites' updates wait, another worker aggregates. The run
    makes all its versions.
    """
    lives = {site: ["swarm.closed=kill"] for site in ("a", "b")}
    changed = {"async.enabled": True, "rounds.total": 12, "network.idle_timeout_s": 3.0, "swarm.aggregators": []}
    with (
        serve_swarm(tmp_path, **DILOCO | changed) as server,
        processes(nursery, tmp_path, server.url, lives, LOOP="diloco"),
    ):
        Loops(server.url, tmp_path, names="c")
        server.run()
    assert [version for _, version, _ in Result(tmp_path).versions] == list(range(13))
