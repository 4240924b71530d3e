"""The server is killed while sites train, send a part or leave. `test_kill_matrix` kills it at its failpoints."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from fault_world import PART_BYTES, Result, ServerProcess, Sites
from harness.processes import Nursery, wait_until
from harness.proxy import Fault, Proxy


@pytest.mark.covers("F6")
def test_goes_on_after_a_kill_while_all_sites_train(nursery: Nursery, tmp_path: Path, undisturbed: Result) -> None:
    training = threading.Barrier(3)  # both workers and the test
    go_on = threading.Event()

    def during(site: str, number: int) -> None:
        if number == 2:
            training.wait(30)
            assert go_on.wait(30)

    with ServerProcess(nursery, tmp_path) as server:
        sites = Sites(server.url, tmp_path, during=during)
        training.wait(60)
        server.kept.now.kill()
        wait_until(lambda: server.kept.deaths == 1, "a new start")
        go_on.set()
        sites.join()
        assert server.kept.wait() == 0
    Result(tmp_path).require_same(undisturbed, sites)


@pytest.mark.covers("F7")
def test_killed_in_the_middle_of_a_part(nursery: Nursery, tmp_path: Path, undisturbed: Result) -> None:
    """Half a part is on its way when the server dies; what it had before is not sent again."""
    with ServerProcess(nursery, tmp_path, **{"network.connections": 1}) as server, Proxy(server.port) as proxy:
        stall = Fault("PUT .*/parts/3 ", "up", at=PART_BYTES // 2, action="stall")
        proxy.faults.append(stall)
        sites = Sites(proxy.url, tmp_path)
        assert stall.reached.wait(60)
        server.kept.now.kill()
        proxy.cut()
        wait_until(lambda: server.kept.deaths == 1, "a new start")
        proxy.heal()
        sites.join()
        assert server.kept.wait() == 0
        first = proxy.requests.index(next(line for line in proxy.requests if "/parts/3 " in line))
        ticket = proxy.requests[first].split("/parts/")[0]
        sent = [
            int(line.split("/parts/")[1].split()[0]) for line in proxy.requests if line.startswith(f"{ticket}/parts/")
        ]
        # a request a part: 0, 1 and 2 were there before the kill, and are not sent again
        assert [part for part in sent if part != 3] == [0, 1, 2, 4, 5]
        assert sent.count(3) >= 2  # tried again a few times while nothing answered
    Result(tmp_path).require_same(undisturbed, sites)


@pytest.mark.covers("F6")
def test_killed_while_it_exports(nursery: Nursery, tmp_path: Path, undisturbed: Result) -> None:
    """The workers have left by then, unheard; the test does not wait for the end of their leases."""
    with ServerProcess(nursery, tmp_path, ("export.write=kill",)) as server:
        sites = Sites(server.url, tmp_path)
        sites.join()
        wait_until(lambda: server.kept.deaths == 1, "its death")
        wait_until((tmp_path / "state/exports/model.safetensors").exists, "the export")
        leftovers = list((tmp_path / "state/exports").glob(".model*"))
    assert leftovers == []
    Result(tmp_path).require_same(undisturbed, sites)


@pytest.mark.covers("F6")
def test_a_finished_run_that_is_started_again_stays_as_it_is(
    nursery: Nursery, tmp_path: Path, undisturbed: Result
) -> None:
    with ServerProcess(nursery, tmp_path) as server:
        Sites(server.url, tmp_path).join()
        assert server.kept.wait() == 0
    with ServerProcess(nursery, tmp_path, **{"rounds.total": 3}) as server:
        assert server.kept.wait() == 0
    assert Result(tmp_path).bits == undisturbed.bits
