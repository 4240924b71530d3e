"""Workers of streaming runs that are killed, stopped, begin anew or come later: each goes on where it is due."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_world import (
    KILLED,
    PART_BYTES,
    STREAMING,
    Result,
    SiteProcess,
    StreamingSites,
    beside,
    lines,
    require_ends_soon_by_ctrl_c,
    same,
    serving,
)
from harness.processes import Nursery
from harness.proxy import Fault, Proxy
from kit.models import wide_model

import atoll
from atoll.protocol.values import UpdateInfo
from atoll.tensors.fragments import split
from atoll.tensors.layout import version_layout
from atoll.tensors.module_tensors import schema_of
from atoll.worker.exchange.participation import LoopTerms, take_part


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with serving(tmp_path, **STREAMING | {"network.connections": 1}) as server:
        yield server


class Stopped(Exception):
    pass


@pytest.mark.covers("L4", "L8", "F2")
def test_a_worker_that_begins_anew_in_the_middle_of_a_cycle_is_in_it_at_once(
    tmp_path: Path, server: atoll.Server
) -> None:
    """a ends after fragment 0 was merged and fragment 1 taken; its next process goes on with fragments 1 or 2.

    b never waits for a site that waits for b: both come to the end, with every round of every fragment counted.
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
    assert [(fragment, version) for fragment, version, _ in Result(tmp_path).versions] == [
        (fragment, version) for fragment in range(3) for version in range(3)
    ]
    Result(tmp_path).require_once()
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

    with serving(tmp_path, **STREAMING | {"rounds.total": 4, "network.connections": 1}) as server:
        old = StreamingSites(server.url, tmp_path, during=during, steps=60)
        at_step.wait(30)

        def begun(site: str, step: int) -> None:
            joined.set()

        new = StreamingSites(server.url, tmp_path, names=["c"], during=begun, steps=60)
        new.join()
        old.join()
        server.run()
    counted = {(fragment, number) for site, fragment, number in Result(tmp_path).updates if site == "c"}
    assert counted == {(1, 2), (2, 2), (0, 3), (1, 3), (2, 3), (0, 4), (1, 4), (2, 4)}
    for loop in new.loops.values():
        assert loop.finished


def test_an_earlier_process_left_updates_of_two_fragments(tmp_path: Path, server: atoll.Server) -> None:
    """Both outboxes are sent by the next process; of fragment 2, whose ticket it never had, its second round counts."""
    place = take_part(server.url, "a", folder=tmp_path / "workers", loop=LoopTerms())
    take_part(server.url, "b", folder=tmp_path / "elsewhere", loop=LoopTerms())  # until the next process of b comes
    for fragment in (0, 1):
        exchange = place.exchanges[fragment]
        ticket = exchange.ask_and_resend(10.0).ticket
        assert ticket is not None
        tensors = dict(wide_model().state_dict())
        exchange.pull(ticket.base, None)
        exchange.form(ticket, tensors, UpdateInfo(1.0, 2, {}))
    place.leave()
    again = StreamingSites(server.url, tmp_path, names=["a"], steps=53)
    b = StreamingSites(server.url, tmp_path, names=["b"], steps=53)
    again.join()
    b.join()
    server.run()
    every = [(site, fragment, number) for site in "ab" for fragment in range(3) for number in (1, 2)]
    assert Result(tmp_path).updates == [each for each in every if each != ("a", 2, 1)]


@pytest.mark.covers("L10", "F1")
def test_killed_while_a_fragment_comes_down_it_resumes_at_the_part(
    nursery: Nursery, tmp_path: Path, server: atoll.Server
) -> None:
    """Of the first result of fragment 0 three parts had come when it was killed; the bases of the others are whole."""
    parts = [version_layout(each, PART_BYTES).parts for each in split(schema_of(wide_model()), 3).schemas]
    assert len(parts[0]) > 3
    with beside(server, StreamingSites(server.url, tmp_path, names=["b"], steps=100)):
        site = SiteProcess(nursery, tmp_path, server.url, "a", "stream_worker.py")
        again = site.killed_and_again(f"pull.part=kill@{sum(map(len, parts)) + 3}")
    assert next(lines(again))["down"] == sum(part.nbytes for part in parts[0][3:])
    Result(tmp_path).require_once()


@pytest.mark.covers("L8", "F3")
def test_killed_with_an_update_half_sent_its_next_process_sends_the_rest(
    nursery: Nursery, tmp_path: Path, server: atoll.Server
) -> None:
    others = StreamingSites(server.url, tmp_path, names=["b"], steps=100)
    with beside(server, others), Proxy(server.port) as proxy:
        stall = Fault("PUT .*/parts/1 ", "up", at=1000, action="stall")
        proxy.faults.append(stall)
        site = SiteProcess(nursery, tmp_path, proxy.url, "a", "stream_worker.py")
        first = site.start()
        assert stall.reached.wait(60)
        assert first.kill() == KILLED
        before = len(proxy.requests)
        again = site.start()
        assert again.wait(90) == 0
        ticket = next(line for line in proxy.requests[:before] if "/parts/1 " in line).split("/parts/")[0]
        sent = [line.split("/parts/")[1].split()[0] for line in proxy.requests[before:] if line.startswith(ticket)]
    assert "1" in sent
    assert "0" not in sent
    Result(tmp_path).require_once()


@pytest.mark.covers("L7", "F3")
def test_ctrl_c_ends_it_soon_though_what_is_under_way_stands_still(
    nursery: Nursery, tmp_path: Path, server: atoll.Server
) -> None:
    other = StreamingSites(server.url, tmp_path, names=["b"], steps=100)
    with Proxy(server.port) as proxy:
        stall = Fault("PUT .*/parts/0 ", "up", at=1000, action="stall")
        proxy.faults.append(stall)
        site = SiteProcess(nursery, tmp_path, proxy.url, "a", "stream_worker.py").start()
        assert stall.reached.wait(60)
        require_ends_soon_by_ctrl_c(site)
        proxy.cut()
    StreamingSites(server.url, tmp_path, names=["a"], steps=100).join()
    other.join()
