"""A site is killed, stopped or interrupted: it goes on where it was, and no update is lost or counts twice."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fault_world import (
    EVERY_SITE_AND_ROUND,
    KILLED,
    PART_BYTES,
    QUICK,
    STREAMING,
    Result,
    SiteProcess,
    Sites,
    StreamingSites,
    beside,
    left_undisturbed,
    lines,
    parts_sent,
    said,
    serve_wide,
)
from harness.processes import Nursery, Process, wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import ForkedSite, Gate, run_to_end, serve
from kit.models import wide_model
from kit.results import of_sites
from kit.servers import state_of
from kit.wire import WireSite, update_parts, version_parts

from atoll.errors import Superseded
from atoll.registry import OwnName

pytestmark = pytest.mark.slow
UPDATE = update_parts(wide_model(), PART_BYTES)
VERSION = version_parts(wide_model(), PART_BYTES)


def bytes_of(parts: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in parts)


def difference_behind(parts: int) -> int:
    """Bytes of a difference between two versions behind its first parts."""
    from atoll.codecs.version_difference import Downlink
    from atoll.tensors.layout import version_layout
    from atoll.tensors.module_tensors import schema_of

    downlink = Downlink.of(version_layout(schema_of(wide_model()), PART_BYTES), OwnName("int8"), {})
    assert downlink is not None
    return sum(part.nbytes for part in downlink.parts[parts:])


TRAINING = "killed while it trains in round 2"
PLACES: dict[str, list[tuple[str, tuple[str, int, str, int | None] | None]]] = {
    "none": [
        ("pull.part=kill@3", ("trains", 1, "down", bytes_of(VERSION[3:]))),  # three of the six parts were there
        (TRAINING, ("trains", 2, "down", 0)),  # the base was whole
        ("outbox.seal=kill", ("begins", 2, "up", 0)),  # the round is trained again
        ("worker.acknowledged=kill", ("begins", 3, "up", 0)),
        ("outbox.sealed=kill", ("ends", 0, "up", None)),  # the rest of its update is sent, and not trained again
    ],
    # what the codec has left over is added once: amid the files, all written, all sent
    "int4": [("worker.write=kill@20", None), ("outbox.seal=kill", None), ("worker.acknowledged=kill", None)],
    "int8 both ways": [
        # three of six parts of its base are those of the next version: the other three are pulled
        ("delta.part=kill@3", ("trains", 2, "down", bytes_of(VERSION[3:]))),
        (TRAINING, ("trains", 2, "down", 0)),
        ("pull.part=kill@2", ("trains", 3, "down", difference_behind(2))),
    ],
}
"""Codec → where the processes of site a are killed, one after the other; and, of the next one, what it says first, of
which round, and how many bytes it had sent or received by then."""


@pytest.mark.covers("F1", "F2", "F3", "F4", "F8", "L10", "L16")
@pytest.mark.parametrize("codec", PLACES)
def test_a_killed_site_resumes_where_it_was(nursery: Nursery, tmp_path: Path, codec: str) -> None:
    """A site that is killed at various places resumes there, and the run ends with the bits of an undisturbed run.

    What the site has stored completely is neither pulled nor trained again.
    """
    settings: dict[str, Any] = {"aggregation.upload_codec.name": codec.split()[0]}
    if codec.endswith("both ways"):
        settings["aggregation.download_codec.name"] = "int8"
    undisturbed = left_undisturbed(tmp_path / "undisturbed", **settings)
    settings |= {"network.connections": 1, "rounds.min_sites": 1}
    with serve_wide(tmp_path, **settings) as server, beside(server, Sites(server.url, tmp_path, names=["b"])):
        site, expected = SiteProcess(nursery, tmp_path, server.url, "a"), None
        for place, goes_on in [*PLACES[codec], ("", None)]:
            if place == TRAINING:
                process = site.in_training(2)
                process.kill()
            else:
                process = site.start(place)
            assert process.wait(60) == (KILLED if place else 0)
            if expected is not None:
                what, number, way, nbytes = expected
                line = next(each for each in lines(process) if each["what"] in (what, "trains"))
                assert (line["what"], line["round"]) == (what, number), place
                assert nbytes in (None, line[way]), place
            expected = goes_on
    result = Result(tmp_path)
    result.require_same(undisturbed)
    assert len(result.tickets) == len(EVERY_SITE_AND_ROUND), "an open ticket is given again, not another one"


@pytest.mark.covers("F3", "L10")
def test_a_site_killed_while_submitting_resumes_at_the_part(
    nursery: Nursery, tmp_path: Path, undisturbed: Result
) -> None:
    """A site that is killed while it submits an update sends only the remaining parts, and does not train again."""
    with (
        serve_wide(tmp_path, **{"network.connections": 1, "rounds.min_sites": 1}) as server,
        beside(server, Sites(server.url, tmp_path, names=["b"])),
        Proxy(server.port) as proxy,
    ):
        stall = Fault("PUT .*/parts/3 ", "up", at=1, action="stall")
        proxy.faults.append(stall)
        site = SiteProcess(nursery, tmp_path, proxy.url, "a")
        first = site.start()
        assert stall.reached.wait(60)
        wait_until(lambda: any(tmp_path.glob("workers/a/*/outbox.json")), "an update that is whole in the outbox")
        assert first.kill() == KILLED
        again = site.start()
        assert again.wait(60) == 0
    begins = next(lines(again))
    # its update was formed: it is not trained again, and the three parts of its first request are not sent again
    assert (begins["what"], begins["round"], begins["up"]) == ("begins", 2, bytes_of(UPDATE[3:]))
    result = Result(tmp_path)
    result.require_same(undisturbed)
    assert len(result.tickets) == len(EVERY_SITE_AND_ROUND), "an open ticket is given again, not another one"


@pytest.mark.covers("L4", "L8", "L10", "F1", "F2", "F3")
def test_a_killed_streaming_site_resumes_at_the_part(nursery: Nursery, tmp_path: Path) -> None:
    """A streaming site that is killed during a transfer resumes at the part that broke off."""
    # The first process is killed after it has pulled all bases and three parts of the first result of fragment 0. The
    # second process is killed with half an update sent. Both resume in the middle of a cycle, and the two sites never
    # wait for each other.
    from atoll.tensors.fragments import split
    from atoll.tensors.layout import version_layout
    from atoll.tensors.module_tensors import schema_of

    parts = [version_layout(each, PART_BYTES).parts for each in split(schema_of(wide_model()), 3).schemas]
    assert len(parts[0]) > 3
    with (
        serve_wide(tmp_path, **STREAMING | {"network.connections": 1}) as server,
        beside(server, StreamingSites(server.url, tmp_path, names=["b"], steps=100)),
        Proxy(server.port) as proxy,
    ):
        site = SiteProcess(nursery, tmp_path, proxy.url, "a", "diloco")
        assert site.start(f"pull.part=kill@{sum(map(len, parts)) + 3}").wait(60) == KILLED
        before, stall = len(proxy.requests), Fault("PUT .*/parts/1 ", "up", at=1000, action="stall")
        proxy.faults.append(stall)
        second = site.start()
        assert stall.reached.wait(60)
        assert second.kill() == KILLED
        assert site.start().wait(90) == 0
        sent = parts_sent(proxy.requests[before:], 1)
    assert next(lines(second))["down"] == sum(part.nbytes for part in parts[0][3:])
    assert sent.count(1) >= 2
    assert sent.count(0) == 1
    result = Result(tmp_path)
    result.require_once()
    assert [(fragment, version) for fragment, version, _ in result.versions] == [
        (fragment, version) for fragment in range(3) for version in range(3)
    ]


@pytest.mark.covers("F3", "L7")
@pytest.mark.parametrize(
    ("loop", "fault"),
    [
        ("federated", Fault("POST /v1/tickets ", "down", 1000, "stall")),
        ("federated", Fault("PUT .*/parts/0 ", "down", BEFORE_HEADER, "stall")),
        ("diloco", Fault("PUT .*/parts/0 ", "up", 1000, "stall")),
    ],
    ids=["pulling", "submitting", "streaming"],
)
def test_ctrl_c_ends_a_stalled_site(nursery: Nursery, tmp_path: Path, loop: str, fault: Fault) -> None:
    """Ctrl-C ends a site whose connection is stalled within 30 s, before `idle_timeout_s` (60 s) has passed."""
    settings = STREAMING if loop == "diloco" else {}
    with serve_wide(tmp_path, **settings, **{"network.connections": 1}) as server, Proxy(server.port) as proxy:
        WireSite(server.url, "b")
        proxy.faults.append(fault)
        site = SiteProcess(nursery, tmp_path, proxy.url, "a", loop).start()
        assert fault.reached.wait(30.0)
        begin_s = time.monotonic()
        site.send(signal.SIGINT)
        assert site.wait(100.0) == -signal.SIGINT
        assert time.monotonic() - begin_s < 30.0
        assert site.output().endswith("atoll: interrupted\n")


@pytest.mark.covers("L7")
def test_ctrl_c_ends_an_upload_that_has_just_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C, the threads of an upload that has just started end before `idle_timeout_s` (60 s) has passed."""
    from atoll.worker.training.synchroniser import PendingSync

    stall, before, start = Fault("PUT .*/parts/0 ", "up", 1000, "stall"), threading.enumerate(), PendingSync.start

    def interrupted(self: PendingSync) -> None:
        start(self)
        assert stall.reached.wait(30)
        raise KeyboardInterrupt

    def transfers() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name.startswith("atoll-part") and each not in before]

    monkeypatch.setattr(PendingSync, "start", interrupted)
    with serve_wide(tmp_path, **STREAMING) as server, Proxy(server.port) as proxy:
        WireSite(server.url, "b")
        proxy.faults.append(stall)
        with pytest.raises(KeyboardInterrupt):
            StreamingSites(proxy.url, tmp_path, names=["a"]).join()
        wait_until(lambda: not transfers(), "the end of its transfer", 20)


@pytest.mark.covers("F3", "F5", "L9")
@pytest.mark.parametrize("how", ["killed while it submits", "stopped while it trains"])
def test_a_silent_site_joins_again(nursery: Nursery, tmp_path: Path, how: str) -> None:
    """A site that was declared dead, because it was killed or stopped, joins again and counts in the next round."""
    # Site `b` waits in round 2 until site `a` is back.
    gate = Gate(2, "b")
    with serve_wide(tmp_path, **QUICK, **{"rounds.min_sites": 1}) as server:
        other = Sites(server.url, tmp_path, during=gate, names=["b"])
        site = SiteProcess(nursery, tmp_path, server.url, "a")
        if how == "killed while it submits":
            assert site.start("push.part=kill").wait() == KILLED
        else:
            process = site.in_training(1)
            process.send(signal.SIGSTOP)
        wait_until(lambda: server.status().fragments[0].version == 1, "the round without a")
        assert state_of(server) == "dead"
        if how == "killed while it submits":
            process = site.start()
        else:
            site.never.touch()
            process.send(signal.SIGCONT)
        wait_until(lambda: state_of(server) == "alive", "its return")
        gate.open()
        assert process.wait(60) == 0
        run_to_end(server, other)
        assert server.status().deaths == 1
    # round 2 was open for b alone when a came back
    assert Result(tmp_path).counted() == [("a", 3), ("b", 1), ("b", 2), ("b", 3)]
    if how == "stopped while it trains":
        assert "joining again" in process.output()
        assert "round 1 closed without this update" in process.output()


@pytest.mark.covers("F19")
def test_the_older_of_two_processes_of_a_site_ends(nursery: Nursery, tmp_path: Path, undisturbed: Result) -> None:
    """Of two processes under one name, the newer one goes on to the undisturbed bits; the older one ends with exit
    code 6, and is told to use another name.
    """
    with serve_wide(tmp_path) as server:
        beside = Sites(server.url, tmp_path, names=["b"])
        older = SiteProcess(nursery, tmp_path, server.url, "a")
        first = older.in_training(1)
        newer = SiteProcess(nursery, tmp_path, server.url, "a").start(ATOLL_DIR=str(tmp_path / "other"))
        wait_until(lambda: said(newer, "trains", 1), "the training of the newer process")
        older.never.touch()
        assert first.wait(60) == Superseded.exit_code == 6
        assert "Use a different site name for each worker" in first.output()
        assert newer.wait(60) == 0
        run_to_end(server, beside)
        assert server.status().deaths == 0
    Result(tmp_path).require_same(undisturbed)


SCRIPT = """
import os
from pathlib import Path

import torch

import atoll
from harness.processes import wait_until
from kit.models import SITES, build_model

site, model = os.environ["ATOLL_SITE"], build_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with atoll.DiLoCo(model, optimizer, weight=SITES[site], labels={"start": os.environ["START"]}) as diloco:
    Path(f"{site}-{os.environ['ENTERED']}").touch()
    gate = Path(os.environ["GATE"])
    wait_until(gate.exists, "the gate")
    while not diloco.finished:
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.1 + (1.0 if site == "a" else -0.5)
        optimizer.step()
"""


@pytest.mark.parametrize(
    "overlap", [{}, {"tau": 1, "inflight": 2, "alpha": 0.5}], ids=["one at a time", "two under way"]
)
@pytest.mark.covers("F4")
def test_a_restarted_worker_waits_for_its_updates_round(
    tmp_path: Path, nursery: Nursery, overlap: dict[str, Any]
) -> None:
    """A restarted worker waits until the round of its submitted update closes, and does not train from the old version
    meanwhile.
    """
    # The worker's local steps on the other fragment are lost, so the bits differ from those of an undisturbed run.
    (tmp_path / "open").touch()

    def start(site: ForkedSite, failpoints: str = "", gate: str = "open") -> Process:
        number = str(site.starts + 1)
        return site.start(failpoints, ENTERED=f"entered-{number}", GATE=str(tmp_path / gate), START=number)

    def waits() -> bool:
        return any(each.labels == {"start": "2"} and "wait" in each.doing for each in server.status().workers)

    with serve(tmp_path, algorithm="diloco", codec="none", H=4, K=2, rounds=3, **overlap) as server:
        a, b = (ForkedSite(nursery, tmp_path, server.url, site, SCRIPT) for site in "ab")
        later = start(b, gate="later")
        start(a, "worker.acknowledged=kill").wait(60)
        again = start(a)
        entered = tmp_path / "a-entered-2"
        wait_until(lambda: entered.exists() or waits(), "site a in its second process")
        assert not entered.exists()
        (tmp_path / "later").touch()
        assert [again.wait(60), later.wait(60)] == [0, 0]
        server.run()
        assert of_sites(server.status().history, "staleness") == [[0, 0]] * 6
