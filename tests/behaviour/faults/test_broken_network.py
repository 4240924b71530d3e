"""Connections that break, stall, damage bytes or lose answers: what broke is sent again alone; nothing counts
twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_world import PART_BYTES, Result, Sites, serving
from harness.processes import wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import SITES, train_
from kit.models import wide_model
from kit.wire import DIGEST_BYTES, WireSite, update_parts, version_parts

import atoll
from atoll.errors import AtollError, Superseded

VERSION, UPDATE = version_parts(wide_model(), PART_BYTES), update_parts(wide_model(), PART_BYTES)
VERSION_BYTES, UPDATE_BYTES = VERSION[-1][1], UPDATE[-1][1]
LENGTH = UPDATE[2][1] - UPDATE[2][0]
DATA = "GET /v1/fragments/0/versions/0/[0-9a-f]{64} "
GETS, PUTS = len(VERSION), list(range(len(UPDATE)))
"""Requests for parts when nothing breaks: six of each, over one connection."""


def one_round(folder: Path, server: atoll.Server, url: str) -> tuple[int, int]:
    """One site's round through `url`; tensor bytes that it sent and received."""
    model = wide_model()
    with atoll.join(url, site="a", folder=folder / "workers") as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            train_(model, "a", fl_round.number)
            fl_round.submit(model, weight=SITES["a"])
        moved = worker.bytes_up, worker.bytes_down
    server.run()
    return moved


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("undisturbed")
    with serving(folder, **{"rounds.sites": 1, "rounds.total": 1}) as server:
        assert one_round(folder, server, server.url) == (UPDATE_BYTES, VERSION_BYTES)
    return Result(folder)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with serving(
        tmp_path, **{"rounds.sites": 1, "rounds.total": 1, "network.connections": 1, "network.idle_timeout_s": 1.0}
    ) as server:
        yield server


@pytest.fixture
def proxy(server: atoll.Server) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


def parts_sent(proxy: Proxy) -> list[int]:
    """The part of every request that brings one."""
    return [int(line.split("/parts/")[1].split()[0]) for line in proxy.requests if "/parts/" in line]


@pytest.mark.parametrize(
    ("at", "action"),
    [  # the last places are in the digest that follows a part's bytes
        *((at, "reset") for at in (0, 1, LENGTH - 1, LENGTH + 1, LENGTH + DIGEST_BYTES - 1)),
        *((at, action) for at in (1, LENGTH + 1) for action in ("close", "stall")),
        *((at, "flip") for at in (0, LENGTH // 2, LENGTH - 1, LENGTH, LENGTH + DIGEST_BYTES - 1)),
    ],
)
@pytest.mark.covers("F14", "F16", "L10")
def test_an_upload_that_breaks_or_is_damaged_is_sent_again_from_that_part(
    tmp_path: Path, server: atoll.Server, proxy: Proxy, alone: Result, at: int, action: Any
) -> None:
    proxy.faults.append(Fault("PUT .*/parts/2 ", "up", at=at, action=action))
    up, _ = one_round(tmp_path, server, proxy.url)
    assert proxy.faults == []
    assert parts_sent(proxy) == [0, 1, 2, 2, 3, 4, 5]
    assert UPDATE_BYTES <= up <= UPDATE_BYTES + LENGTH
    assert action != "flip" or up == UPDATE_BYTES + LENGTH
    assert Result(tmp_path).bits == alone.bits


@pytest.mark.parametrize(
    ("at", "action"),
    [
        *((at, "reset") for at in (0, 1, PART_BYTES - 1, BEFORE_HEADER)),
        (1, "close"),
        (1, "stall"),
        (0, "flip"),
        (PART_BYTES - 1, "flip"),
    ],
)
@pytest.mark.covers("F15", "F16", "L10")
def test_a_download_that_breaks_or_is_damaged_is_fetched_again_from_that_part(
    tmp_path: Path, server: atoll.Server, proxy: Proxy, alone: Result, at: int, action: Any
) -> None:
    proxy.faults.append(Fault(DATA, "down", at=at, action=action))
    _, down = one_round(tmp_path, server, proxy.url)
    assert proxy.faults == []
    assert proxy.count(DATA) == GETS + 1
    start, stop = next(part for part in VERSION if part[1] > at)
    if action == "flip":
        assert down == VERSION_BYTES + stop - start
    else:
        assert VERSION_BYTES <= down <= VERSION_BYTES + max(at - start, 0)
    assert Result(tmp_path).bits == alone.bits


@pytest.mark.parametrize(
    "request_line", ["POST .*/complete ", "PUT .*/parts/3 ", "POST /v1/tickets ", "POST /v1/workers "]
)
@pytest.mark.covers("F17")
def test_a_lost_acknowledgement_is_asked_for_again_and_counts_once(
    tmp_path: Path, server: atoll.Server, proxy: Proxy, alone: Result, request_line: str
) -> None:
    proxy.faults.append(Fault(request_line, "down", at=BEFORE_HEADER, action="reset"))
    one_round(tmp_path, server, proxy.url)
    assert proxy.faults == []
    again = [3] if "parts/3" in request_line else []
    assert parts_sent(proxy) == sorted(PUTS + again)
    result = Result(tmp_path)
    assert result.bits == alone.bits
    assert result.counted() == [("a", 1)]


@pytest.mark.covers("F17", "F18")
def test_the_same_submission_again_gets_the_same_receipt_and_other_bytes_get_a_conflict(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        a, _ = (WireSite(server.url, site) for site in "ab")  # the round waits for b meanwhile
        update = a.train(1.0).push()
        receipt = update.complete()
        assert receipt[0] == 200
        assert update.complete() == receipt
        status, told = update.complete(digest="0" * 64)
        assert (status, told["code"]) == (409, "conflict")
        assert "already has the update" in told["message"]
        assert update.put(0)[1]["code"] == "ticket_closed"  # nor can its bytes be written over
        assert update.complete() == receipt


@pytest.mark.covers("F19")
def test_the_newer_of_two_processes_of_a_site_wins_and_the_other_is_told(tmp_path: Path) -> None:
    first_trains, second_trains = threading.Event(), threading.Event()

    def older(site: str, number: int) -> None:
        first_trains.set()
        assert second_trains.wait(30)

    def newer(site: str, number: int) -> None:
        second_trains.set()
        with pytest.raises(Superseded) as caught:
            first.join()
        ends.append(str(caught.value))
        assert server.status().fragments[0].version == 0

    ends: list[str] = []
    with serving(tmp_path, **{"rounds.sites": 1, "rounds.total": 1}) as server:
        first = Sites(server.url, tmp_path / "older", ["a"], during=older)
        assert first_trains.wait(30)
        Sites(server.url, tmp_path / "newer", ["a"], during=newer).join()
        server.run()
    (told,) = ends
    assert "has joined as 'a'" in told
    assert "different site name for each worker" in told
    assert Result(tmp_path).counted() == [("a", 1)]


@pytest.mark.covers("F22")
def test_half_open_connections_are_given_up_before_the_worker_is_declared_dead(
    tmp_path: Path,
) -> None:
    """They take every byte and answer nothing; the timeout is far below the half minute that a request may take."""
    trains, go_on = threading.Event(), threading.Event()

    def during(site: str, number: int) -> None:
        if number == 1:
            trains.set()
            assert go_on.wait(60)

    with serving(
        tmp_path,
        **{
            "rounds.sites": 1,
            "rounds.total": 1,
            "network.heartbeat_interval_s": 0.5,
            "network.heartbeat_timeout_s": 8.0,
            "network.idle_timeout_s": 1.0,
        },
    ) as server:
        with Proxy(server.port) as proxy:
            sites = Sites(proxy.url, tmp_path, during=during, names=["a"])
            assert trains.wait(30)
            wait_until(lambda: proxy.count("/v1/heartbeat"), "a heartbeat")
            proxy.freeze()
            before = proxy.count("/v1/heartbeat")
            wait_until(lambda: proxy.count("/v1/heartbeat") >= before + 4, "heartbeats on another connection")
            assert server.status().deaths == 0
            go_on.set()
            sites.join()
        server.run()
    assert Result(tmp_path).counted() == [("a", 1)]


@pytest.mark.covers("F23")
def test_after_a_partition_a_stale_update_is_refused_and_the_worker_goes_on_with_the_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut, healed = threading.Event(), threading.Event()

    def far(site: str, number: int) -> None:
        if number == 1:
            cut.set()
            assert healed.wait(60)

    def near(site: str, number: int) -> None:
        if number == 1:
            assert cut.wait(60)  # the deadline must not close the round before there is a partition
        if number == 2:
            assert healed.wait(60)

    with serving(tmp_path, **{"rounds.quorum": 1, "rounds.deadline_s": 0.3}) as server, Proxy(server.port) as proxy:
        behind = Sites(proxy.url, tmp_path, during=far, names=["a"])
        beside = Sites(server.url, tmp_path, during=near, names=["b"])
        assert cut.wait(30)
        proxy.cut()
        wait_until(lambda: server.status().fragments[0].version == 1, "the round without the far one")
        proxy.heal()
        healed.set()
        behind.join()
        beside.join()
        server.run()
    assert "round 1 closed without this update" in caplog.text
    counted = Result(tmp_path).counted()
    assert ("a", 1) not in counted
    assert len(counted) == len(set(counted))
    assert ("b", 1) in counted


@pytest.mark.covers("L10")
def test_a_server_that_is_not_there_at_the_start_is_a_clear_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "0.2")
    with pytest.raises(AtollError, match=r"http://127\.0\.0\.1:9 has not answered") as caught:
        atoll.join("http://127.0.0.1:9", site="a", folder=tmp_path)
    assert caught.value.exit_code == 5
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AtollError, match="has not answered"):
        atoll.DiLoCo(model, optimizer, server="http://127.0.0.1:9", site="a", folder=tmp_path).start()
