"""A worker is killed, stopped or interrupted. `test_kill_matrix` kills it at its failpoints."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fault_world import (
    EVERY_SITE_AND_ROUND,
    KILLED,
    PART_BYTES,
    STREAMING,
    Result,
    SiteProcess,
    Sites,
    beside,
    said,
    serving,
    told,
)
from harness.processes import Nursery, Process, wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit.models import wide_model
from kit.wire import WireSite, update_parts

import atoll


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with serving(tmp_path, **{"network.connections": 1, "rounds.min_sites": 1}) as server:
        yield server


@pytest.mark.covers("F3", "L10")
def test_killed_while_submitting_it_resumes_at_the_part(
    nursery: Nursery, tmp_path: Path, server: atoll.Server, undisturbed: Result
) -> None:
    with beside(server, Sites(server.url, tmp_path, names=["b"])), Proxy(server.port) as proxy:
        stall = Fault("PUT .*/parts/3 ", "up", at=1, action="stall")
        proxy.faults.append(stall)
        site = SiteProcess(nursery, tmp_path, proxy.url, "a")
        first = site.start()
        assert stall.reached.wait(60)
        wait_until(lambda: any(tmp_path.glob("workers/a/*/outbox.json")), "an update that is whole in the outbox")
        assert first.kill() == KILLED
        again = site.start()
        assert again.wait(60) == 0
    begins = told(again, "begins")
    # its update was formed: it is not trained again, and the three parts of its first request are not sent again
    assert begins["round"] == 2
    assert begins["up"] == sum(stop - start for start, stop in update_parts(wide_model(), PART_BYTES)[3:])
    result = Result(tmp_path)
    result.require_same(undisturbed)
    assert result.tickets == len(EVERY_SITE_AND_ROUND), "an open ticket is given again, not another one"


@pytest.mark.covers("F3", "L7")
@pytest.mark.parametrize(
    ("settings", "script", "fault"),
    [
        ({}, "fault_worker.py", Fault("GET .*/versions/0/", "down", BEFORE_HEADER, "stall")),
        ({}, "fault_worker.py", Fault("PUT .*/parts/0 ", "down", BEFORE_HEADER, "stall")),
        (STREAMING, "stream_worker.py", Fault("PUT .*/parts/0 ", "up", 1000, "stall")),
    ],
    ids=["pulling", "submitting", "streaming"],
)
def test_ctrl_c_ends_it_soon_though_the_network_stands_still(
    nursery: Nursery, tmp_path: Path, settings: dict[str, Any], script: str, fault: Fault
) -> None:
    """Guards against threads that outlive Ctrl-C: the process stayed until `idle_timeout_s`, which is 60, was over."""
    with serving(tmp_path, **settings, **{"network.connections": 1}) as server, Proxy(server.port) as proxy:
        WireSite(server.url, "b")
        proxy.faults.append(fault)
        site = SiteProcess(nursery, tmp_path, proxy.url, "a", script).start()
        assert fault.reached.wait(30.0)
        begin_s = time.monotonic()
        site.send(signal.SIGINT)
        assert site.wait(100.0) == -signal.SIGINT
        assert time.monotonic() - begin_s < 30.0
        assert site.output().endswith("atoll: interrupted\n")


@contextmanager
def round_1_without_a(folder: Path, begin: Callable[[str], Any], over: Callable[[Any], Any]) -> Iterator[atoll.Server]:
    """Site a misses round 1, which b closes; b waits in round 2 until a is back.

    Args:
        begin: starts a, at this address.
        over: brings it back; its process.
    """
    back = threading.Event()

    def during(site: str, number: int) -> None:
        if number == 2:
            assert back.wait(60)

    short = {"rounds.min_sites": 1, "network.heartbeat_interval_s": 0.2, "network.heartbeat_timeout_s": 1.5}
    with serving(folder, **short) as server:
        other = Sites(server.url, folder, during=during, names=["b"])
        begun = begin(server.url)
        wait_until(lambda: server.status().fragments[0].version == 1, "the round without a")
        assert state_of(server, "a") == "dead"
        again = over(begun)
        wait_until(lambda: state_of(server, "a") == "alive", "its return")
        back.set()
        assert again.wait(60) == 0
        other.join()
        server.run()
        yield server
    # round 2 was open for b alone when a came back
    assert Result(folder).counted() == [("a", 3), ("b", 1), ("b", 2), ("b", 3)]


def state_of(server: atoll.Server, site: str) -> str:
    return next((worker.state for worker in server.status().workers if worker.site == site), "")


@pytest.mark.parametrize(
    "failpoints",
    [
        pytest.param("pull.part=kill@2", id="F1-pulling", marks=pytest.mark.covers("F1", "L9")),
        pytest.param("push.part=kill", id="F3-submitting", marks=pytest.mark.covers("F3", "L9")),
    ],
)
def test_the_others_finish_without_it_once_its_lease_is_over(nursery: Nursery, tmp_path: Path, failpoints: str) -> None:
    def killed(url: str) -> SiteProcess:
        site = SiteProcess(nursery, tmp_path, url, "a")
        assert site.start(failpoints).wait() == KILLED
        return site

    with round_1_without_a(tmp_path, killed, SiteProcess.start) as server:
        assert server.status().deaths == 1


@pytest.mark.covers("F5")
def test_stopped_past_its_lease_it_joins_again_and_goes_on(nursery: Nursery, tmp_path: Path) -> None:
    def stopped(url: str) -> Process:
        site = SiteProcess(nursery, tmp_path, url, "a").start(HOLD=f"1:{tmp_path}/go")
        wait_until(lambda: said(site, "trains", 1), "its training")
        site.send(signal.SIGSTOP)
        return site

    def continued(site: Process) -> Process:
        (tmp_path / "go").touch()
        site.send(signal.SIGCONT)
        output.append(site)
        return site

    output: list[Process] = []
    with round_1_without_a(tmp_path, stopped, continued):
        pass
    assert "joining again" in output[0].output()
    assert "round 1 closed without this update" in output[0].output()


@pytest.mark.covers("F43", "P6")
def test_an_exception_has_its_traceback_at_the_worker_and_one_line_at_the_server(
    nursery: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, **{"rounds.min_sites": 1}) as server:
        other = Sites(server.url, tmp_path, names=["b"])
        site = SiteProcess(nursery, tmp_path, server.url, "a").start(FAIL_IN="2")
        assert site.wait() == 1
        other.join()
        worker = next(worker for worker in server.status().workers if worker.site == "a")
        server.run()
    assert "Traceback" in site.output()
    assert "fault_worker.py" in site.output()
    assert (worker.state, worker.error) == ("failed", "ValueError: no such column: age")
    lines = [record.getMessage() for record in caplog.records if "no such column" in record.getMessage()]
    assert lines == ["a failed: ValueError: no such column: age"]
    assert Result(tmp_path).counted() == [("a", 1), ("b", 1), ("b", 2), ("b", 3)]
