"""Streaming runs under fire: killed servers and workers, lost answers, joiners, networks that break."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_world import SITES, ServerProcess, build, serving
from stream_world import EVERY_UPDATE, FRAGMENTS, SETTINGS, STEPS, StreamingSites, local_step
from torch import nn

import atoll
from atoll.codecs.update import codecs_of, encoded_layout
from atoll.errors import ServerUnreachable
from atoll.tensors.fragments import split
from atoll.tensors.layout import version_layout
from atoll.tensors.modules import schema_of
from atoll.testing.processes import Nursery, Process
from atoll.testing.proxy import BEFORE_HEADER, Fault, Proxy
from atoll.worker.connection import Connection
from atoll.worker.session import Session


class Left:
    """What a finished run has left on disk."""

    def __init__(self, folder: Path) -> None:
        self.model = hashlib.sha256((folder / "state/exports/model.safetensors").read_bytes()).hexdigest()
        with contextlib.closing(sqlite3.connect(folder / "state/journal.sqlite")) as journal:
            self.versions = journal.execute(
                "SELECT fragment, version, digest FROM history WHERE NOT lost ORDER BY fragment, version"
            ).fetchall()
            self.states = journal.execute(
                "SELECT fragment, hex(state_digests) FROM versions WHERE version = 2 ORDER BY fragment"
            ).fetchall()
            self.counted = journal.execute(
                "SELECT site, fragment, base_version, count(*) FROM tickets WHERE state = 'counted' "
                "GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
            ).fetchall()

    @property
    def bits(self) -> tuple[Any, ...]:
        return self.model, self.versions, self.states


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == again and torch.equal(mine, theirs) for (name, mine), (again, theirs) in pairs)


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Left:
    folder = tmp_path_factory.mktemp("undisturbed")
    with ServerProcess(nursery, folder, **SETTINGS) as server:
        sites = StreamingSites(server.url, folder)
        sites.join()
        assert server.kept.wait() == 0
        assert server.kept.deaths == 0
    assert same(sites.models["a"], sites.models["b"])
    left = Left(folder)
    assert left.counted == EVERY_UPDATE
    return left


LIVES = [
    pytest.param(["part.recorded=kill@3"], id="a-part-of-the-first-fragment"),
    pytest.param(["accept.before=kill@3"], id="before-an-accept-of-the-second-fragment"),
    pytest.param(["accept.after=kill@6"], id="after-the-last-accept-of-a-cycle"),
    pytest.param(["pass.write=kill@2"], id="while-the-second-fragment-is-written"),
    pytest.param(["head.before=kill@5"], id="before-the-head-of-the-second-fragment-moves"),
    pytest.param(["head.after=kill@4"], id="after-the-head-of-the-first-fragment-moved"),
    pytest.param(["head.after=kill@5", "recover.midway=kill@2", "accept.after=kill@3"], id="again-and-again"),
    pytest.param(["head.after=kill@2"], id="while-it-begins-with-one-of-three-first-versions"),
]


@pytest.mark.covers("L10", "L11", "F6")
@pytest.mark.parametrize("lives", LIVES)
def test_a_server_killed_in_the_middle_of_a_cycle(
    nursery: Nursery, tmp_path: Path, undisturbed: Left, lives: list[str]
) -> None:
    with ServerProcess(nursery, tmp_path, tuple(lives), **SETTINGS) as server:
        sites = StreamingSites(server.url, tmp_path)
        sites.join()
        assert server.kept.wait() == 0
        assert server.kept.deaths == len(lives), "a failpoint did not fire"
    left = Left(tmp_path)
    assert left.bits == undisturbed.bits
    assert left.counted == EVERY_UPDATE
    assert [loop.sync_metrics["skipped"] for loop in sites.loops.values()] == [0, 0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with serving(tmp_path, **SETTINGS, connections=1) as server:
        yield server


@pytest.mark.covers("L10")
def test_a_broken_transfer_of_a_fragment_resumes_at_the_part(
    tmp_path: Path, server: atoll.Server, undisturbed: Left
) -> None:
    """The connection breaks within the second part of a fragment's update: the first is not sent again."""
    codecs = codecs_of("int8", {})
    layouts = [
        encoded_layout(part, "int8", codecs, SETTINGS["part_bytes"]) for part in split(schema_of(build()), 3).schemas
    ]
    fragment = max(range(FRAGMENTS), key=lambda index: len(layouts[index].parts))
    assert len(layouts[fragment].parts) >= 2
    with Proxy(server.port) as proxy:
        broken = Fault("PUT .*/parts/1 ", "up", at=1000, action="reset")
        proxy.faults.append(broken)
        a = StreamingSites(proxy.url, tmp_path, names=["a"])
        b = StreamingSites(server.url, tmp_path, names=["b"])
        assert broken.reached.wait(60)
        a.join()
        b.join()
        hit = next(line for line in proxy.requests if "/parts/1 " in line).split("/parts/")[0]
        sent = [line.split("/parts/")[1].split()[0] for line in proxy.requests if line.startswith(f"{hit}/parts/")]
    server.run()
    assert sent.count("0") == 1
    assert sent.count("1") >= 2
    left = Left(tmp_path)
    assert left.bits == undisturbed.bits
    assert left.counted == EVERY_UPDATE


@pytest.mark.covers("L10", "F8")
def test_an_answer_that_is_lost_counts_once_and_nothing_is_lost(
    tmp_path: Path, server: atoll.Server, undisturbed: Left
) -> None:
    with Proxy(server.port) as proxy:
        proxy.faults.append(Fault("POST .*/complete ", "down", at=BEFORE_HEADER, action="reset"))
        a = StreamingSites(proxy.url, tmp_path, names=["a"])
        b = StreamingSites(server.url, tmp_path, names=["b"])
        a.join()
        b.join()
    server.run()
    assert Left(tmp_path).bits == undisturbed.bits
    assert Left(tmp_path).counted == EVERY_UPDATE


class Stopped(Exception):
    pass


@pytest.mark.covers("L4", "L8", "F2")
def test_a_worker_that_begins_anew_in_the_middle_of_a_cycle_is_in_it_at_once(
    tmp_path: Path, server: atoll.Server
) -> None:
    """a ends after fragment 0 was merged and fragment 1 taken; its next process goes on with fragments 1 or 2.

    b waits for nobody who waits for b: both come to the end, with every round of every fragment counted.
    """

    def during(site: str, step: int) -> None:
        if step == 4:
            raise Stopped

    b = StreamingSites(server.url, tmp_path, names=["b"], steps=60)
    first = StreamingSites(server.url, tmp_path, names=["a"], during=during)
    with pytest.raises(Stopped):
        first.join()
    second = StreamingSites(server.url, tmp_path, names=["a"], steps=60)
    second.join()
    b.join()
    server.run()
    assert [(fragment, version) for fragment, version, _ in Left(tmp_path).versions] == [
        (fragment, version) for fragment in range(3) for version in range(3)
    ]
    assert all(times == 1 for *_, times in Left(tmp_path).counted)
    assert same(second.models["a"], b.models["b"])


@pytest.mark.covers("L4")
def test_a_joiner_falls_in_with_the_cycle(tmp_path: Path) -> None:
    """c comes when fragment 0 has had its first round: it waits with the others, and counts from the next rounds on."""
    joined = threading.Event()
    at_step = threading.Barrier(3)

    def during(site: str, step: int) -> None:
        if step == 3:
            at_step.wait(30)
            assert joined.wait(30)

    with serving(tmp_path, **SETTINGS | {"rounds": 4}, connections=1) as server:
        old = StreamingSites(server.url, tmp_path, during=during, steps=60)
        at_step.wait(30)

        def begun(site: str, step: int) -> None:
            joined.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SITES, "c", 4.0)
            new = StreamingSites(server.url, tmp_path, names=["c"], during=begun, steps=60)
            new.join()
        old.join()
        server.run()
    counted = {(fragment, base) for site, fragment, base, _ in Left(tmp_path).counted if site == "c"}
    assert counted == {(1, 1), (2, 1), (0, 2), (1, 2), (2, 2), (0, 3), (1, 3), (2, 3)}
    for loop in new.loops.values():
        assert loop.finished


@pytest.mark.covers("L25", "L10")
def test_local_progress_of_a_fragment_is_carried_over_to_its_head(tmp_path: Path) -> None:
    """As with a whole model, for two fragments of one number each; inner steps of −1, H = 2, outer SGD with lr ½."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.y = (nn.Parameter(torch.tensor([value])) for value in (8.0, 20.0))

    options: dict[str, Any] = {"algorithm": "diloco", "rounds": 2, "sync_every": 2, "num_fragments": 2}
    options |= {"codec": "none", "port": 0, "outer_lr": 0.5, "outer_momentum": 0.0}
    with atoll.Server(Two(), **options, state_dir=tmp_path / "s") as server, Proxy(server.port) as proxy:
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        seen: list[tuple[float, float]] = []
        with atoll.DiLoCo(
            model, optimizer, server=proxy.url, site="a", folder=tmp_path / "w", max_sync_retries=0
        ) as diloco:
            proxy.faults.append(Fault("POST .*/complete ", "down", at=BEFORE_HEADER, action="reset"))
            while not diloco.finished:
                optimizer.zero_grad()
                (model.x.sum() + model.y.sum()).backward()
                optimizer.step()
                seen.append((model.x.item(), model.y.item()))
        assert diloco.skipped == 1
    # 1: x is taken, the answer is lost. 2: x is asked for again: its base is 8 − 1 = 7, its head 7½, so w = 6 → 6½.
    #    Its round 2 comes after round 1 of y, which is taken instead: w = 18, u = 2, θ1 = 19.
    # 3: x: w = 5½, u = 2, θ2 = 6½. 4: y: w = 18, u = 1, θ2 = 18½ … and the run is finished.
    assert seen == [(7.0, 19.0), (6.5, 19.0), (6.5, 18.0), (6.5, 18.0)]


@pytest.mark.covers("L10")
def test_training_goes_on_without_the_server_and_nothing_is_lost(
    nursery: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is away for a while: turns are skipped, and what was trained meanwhile counts afterwards."""
    caplog.set_level("INFO", "atoll")
    settings = SETTINGS | {"num_workers": 1, "rounds": 3, "outer_lr": 1.0, "outer_momentum": 0.0, "codec": "none"}
    with ServerProcess(nursery, tmp_path, **settings) as server, Proxy(server.port) as proxy:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with atoll.DiLoCo(
            model, optimizer, server=proxy.url, site="a", folder=tmp_path / "w", max_sync_retries=0
        ) as diloco:
            for step in range(60):
                if step == 4:
                    proxy.cut()
                if step == 11:
                    proxy.heal()
                local_step(model, optimizer, "a", step)
                if diloco.finished:
                    break
            assert diloco.finished
            assert diloco.skipped > 0
            assert caplog.text.count("a: the server is back; synchronising again from step") == 1
        assert server.kept.wait() == 0
    assert [(fragment, version) for fragment, version, _ in Left(tmp_path).versions] == [
        (fragment, version) for fragment in range(3) for version in range(4)
    ]


def test_an_earlier_process_left_updates_of_two_fragments(tmp_path: Path, server: atoll.Server) -> None:
    """Both outboxes are sent by the next process; of fragment 2, whose ticket it never had, its second round counts."""
    session = Session(server.url, "a", folder=tmp_path / "workers", streams=True)
    Session(server.url, "b", folder=tmp_path / "elsewhere", streams=True)  # until the next process of b comes
    for fragment in (0, 1):
        exchange = session.fragments[fragment]
        ticket = exchange.next_round(wait_s=10.0).ticket
        assert ticket is not None
        tensors = dict(build().state_dict())
        exchange.pull(ticket.base_version, ticket.base_digest, None)
        exchange.form(ticket, tensors, weight=1.0, steps=2, metrics={})
    session.leave()
    again = StreamingSites(server.url, tmp_path, names=["a"], steps=STEPS + 40)
    b = StreamingSites(server.url, tmp_path, names=["b"], steps=STEPS + 40)
    again.join()
    b.join()
    server.run()
    assert Left(tmp_path).counted == [each for each in EVERY_UPDATE if each != ("a", 2, 0, 1)]


class StreamingSite:
    """One site as a process of its own, running `stream_worker.py`."""

    def __init__(self, nursery: Nursery, folder: Path, url: str, site: str) -> None:
        self._nursery, self._folder = nursery, folder
        self._env = {"ATOLL_SERVER": url, "ATOLL_SITE": site, "ATOLL_DIR": str(folder / "workers")}
        self.starts = 0

    def start(self, failpoints: str = "") -> Process:
        self.starts += 1
        return self._nursery.start(
            str(Path(__file__).with_name("stream_worker.py")),
            cwd=self._folder,
            env=self._env,
            failpoints=failpoints,
            log=self._folder / f"worker-{self._env['ATOLL_SITE']}-{self.starts}.log",
        )


def lines(process: Process) -> list[dict[str, Any]]:
    return [json.loads(line) for line in process.output().splitlines() if line.startswith("{")]


@pytest.mark.covers("L10", "F1")
def test_killed_while_a_fragment_comes_down_it_resumes_at_the_part(
    nursery: Nursery, tmp_path: Path, server: atoll.Server
) -> None:
    """Of the first result of fragment 0 three parts had come when it was killed; the bases of the others are whole."""
    parts = [
        version_layout(each, SETTINGS["part_bytes"]).parts for each in split(schema_of(build()), FRAGMENTS).schemas
    ]
    assert len(parts[0]) > 3
    other = StreamingSites(server.url, tmp_path, names=["b"], steps=100)
    site = StreamingSite(nursery, tmp_path, server.url, "a")
    first = site.start(f"pull.part=kill@{sum(map(len, parts)) + 3}")
    assert first.wait(60) == -signal.SIGKILL
    again = site.start()
    assert again.wait(90) == 0
    other.join()
    server.run()
    assert lines(again)[0]["down"] == sum(part.nbytes for part in parts[0][3:])
    assert all(times == 1 for *_, times in Left(tmp_path).counted)


@pytest.mark.covers("L8", "F3")
def test_killed_with_an_update_half_sent_its_next_process_sends_the_rest(
    nursery: Nursery, tmp_path: Path, server: atoll.Server, undisturbed: Left
) -> None:
    other = StreamingSites(server.url, tmp_path, names=["b"], steps=100)
    with Proxy(server.port) as proxy:
        stall = Fault("PUT .*/parts/1 ", "up", at=1000, action="stall")
        proxy.faults.append(stall)
        site = StreamingSite(nursery, tmp_path, proxy.url, "a")
        first = site.start()
        assert stall.reached.wait(60)
        assert first.kill() == -signal.SIGKILL
        before = len(proxy.requests)
        again = site.start()
        assert again.wait(90) == 0
        ticket = next(line for line in proxy.requests[:before] if "/parts/1 " in line).split("/parts/")[0]
        sent = [line.split("/parts/")[1].split()[0] for line in proxy.requests[before:] if line.startswith(ticket)]
    other.join()
    server.run()
    assert "1" in sent
    assert "0" not in sent
    assert all(times == 1 for *_, times in Left(tmp_path).counted)


@pytest.mark.covers("L7", "F3")
def test_ctrl_c_ends_it_soon_though_what_is_under_way_stands_still(
    nursery: Nursery, tmp_path: Path, server: atoll.Server
) -> None:
    other = StreamingSites(server.url, tmp_path, names=["b"], steps=100)
    with Proxy(server.port) as proxy:
        stall = Fault("PUT .*/parts/0 ", "up", at=1000, action="stall")
        proxy.faults.append(stall)
        site = StreamingSite(nursery, tmp_path, proxy.url, "a").start()
        assert stall.reached.wait(60)
        begin_s = time.monotonic()
        site.send(signal.SIGINT)
        assert site.wait(100.0) != 0
        assert time.monotonic() - begin_s < 30.0  # idle_timeout_s is 60
        assert "KeyboardInterrupt" in site.output()
        proxy.cut()
    StreamingSites(server.url, tmp_path, names=["a"], steps=100).join()
    other.join()


@pytest.mark.covers("L10")
def test_while_the_server_is_away_the_first_turn_is_patient_and_the_others_try_once(
    tmp_path: Path, server: atoll.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int | None] = []
    patiently = Connection.patiently

    def counting(self: Connection, ask: Any, max_retries: int | None, what: str) -> Any:
        try:
            return patiently(self, ask, max_retries, what)
        except ServerUnreachable:
            attempts.append(max_retries)
            raise

    monkeypatch.setattr(Connection, "patiently", counting)
    with Proxy(server.port) as proxy:

        def during(site: str, step: int) -> None:
            if site == "a" and step == 1:
                proxy.cut()
            if site == "a" and step == 9:
                proxy.heal()

        a = StreamingSites(proxy.url, tmp_path, during, names=["a"], steps=100, max_sync_retries=2)
        b = StreamingSites(server.url, tmp_path, names=["b"], steps=100)
        a.join()
        b.join()
    server.run()
    assert attempts[0] == 2
    assert attempts[1:] == [0] * (len(attempts) - 1)
    assert a.loops["a"].sync_metrics["skipped"] == len(attempts) >= 2
    assert Left(tmp_path).counted == EVERY_UPDATE
    assert same(a.models["a"], b.models["b"])
