"""Connections that break, stall, damage bytes or lose answers, and slow ones: what broke is sent again alone; nothing
counts twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_world import PART_BYTES, Result, Sites, parts_sent, serve_wide
from harness.processes import wait_until
from harness.proxy import BEFORE_HEADER, Fault, Pace, Proxy
from kit import SITES, FederatedSites, Gate, exported, run_to_end, serve, tensors_digest, together, train_
from kit.manual_site import ManualSite
from kit.models import wide_model
from kit.wire import DIGEST_BYTES, WireSite, update_parts, version_parts
from kit.workflows import workflow_server
from torch import nn

import atoll
from atoll.errors import Superseded

pytestmark = pytest.mark.usefixtures("pulled_apart")

VERSION, UPDATE = version_parts(wide_model(), PART_BYTES), update_parts(wide_model(), PART_BYTES)
"""Six parts of each."""
VERSION_BYTES, UPDATE_BYTES = VERSION[-1][1], UPDATE[-1][1]
LENGTH = UPDATE[2][1] - UPDATE[2][0]
DATA = "GET /v1/fragments/0/versions/0/[0-9a-f]{64} "
ONE: dict[str, Any] = {"sites": 1, "rounds": 1}


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
    with serve_wide(folder, **ONE) as server:
        assert one_round(folder, server, server.url) == (UPDATE_BYTES, VERSION_BYTES)
    return Result(folder)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with serve_wide(tmp_path, **ONE, **{"network.connections": 1, "network.idle_timeout_s": 1.0}) as server:
        yield server


@pytest.fixture
def proxy(server: atoll.Server) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.mark.parametrize(
    ("at", "action"),
    [  # the last places are in the digest that follows a part's bytes
        *((at, "reset") for at in (0, 1, LENGTH - 1, LENGTH + 1, LENGTH + DIGEST_BYTES - 1)),
        *((at, action) for at in (1, LENGTH + 1) for action in ("close", "stall")),
        *((at, "flip") for at in (0, LENGTH // 2, LENGTH - 1, LENGTH, LENGTH + DIGEST_BYTES - 1)),
    ],
)
@pytest.mark.covers("F14", "F16", "L10")
def test_sends_a_broken_part_again(
    tmp_path: Path, server: atoll.Server, proxy: Proxy, alone: Result, at: int, action: Any
) -> None:
    """If a part of an update breaks off or is damaged on its way, the site sends only this part again."""
    proxy.faults.append(Fault("PUT .*/parts/2 ", "up", at=at, action=action))
    up, _ = one_round(tmp_path, server, proxy.url)
    assert proxy.faults == []
    assert parts_sent(proxy.requests, 2) == [0, 1, 2, 2, 3, 4, 5]
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
def test_fetches_a_broken_part_again(
    tmp_path: Path, server: atoll.Server, proxy: Proxy, alone: Result, at: int, action: Any
) -> None:
    """If a part of a version breaks off or is damaged on its way, the site fetches only this part again."""
    proxy.faults.append(Fault(DATA, "down", at=at, action=action))
    _, down = one_round(tmp_path, server, proxy.url)
    assert proxy.faults == []
    assert proxy.count(DATA) == len(VERSION) + 1
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
def test_repeats_a_request_after_a_lost_response(
    tmp_path: Path, server: atoll.Server, proxy: Proxy, alone: Result, request_line: str
) -> None:
    """If the response to a request is lost, the site sends only this request again, and its update counts once."""
    proxy.faults.append(Fault(request_line, "down", at=BEFORE_HEADER, action="reset"))
    one_round(tmp_path, server, proxy.url)
    assert proxy.faults == []
    assert parts_sent(proxy.requests, 3) == ([0, 1, 2, 3, 3, 4, 5] if "parts/3" in request_line else [0, 1, 2, 3, 4, 5])
    result = Result(tmp_path)
    assert result.bits == alone.bits
    assert result.counted() == [("a", 1)]


@pytest.mark.covers("F17", "F18")
def test_a_repeated_submission_gets_the_same_receipt(tmp_path: Path) -> None:
    """A site that completes the same update again gets the same receipt. Completing it with another digest is a
    conflict.
    """
    with serve_wide(tmp_path) as server:
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
def test_the_newer_process_of_a_site_wins(tmp_path: Path) -> None:
    """If a second process joins as the same site, its update counts."""
    # The first process gets an error that explains it.
    with serve_wide(tmp_path, sites=1, rounds=1) as server:
        older, newer = (ManualSite(server.url, "a", folder=tmp_path / name) for name in ("older", "newer"))
        assert older.next_round() == 1
        model = older.pull()
        assert newer.next_round() == 1
        with pytest.raises(Superseded, match=r"(?s)has joined as 'a'.*different site name for each worker"):
            older.submit(model)
        newer.submit(newer.pull())
        assert newer.next_round() is None
        newer.close()
        server.run()
    assert Result(tmp_path).counted() == [("a", 1)]


@pytest.mark.covers("F23")
def test_refuses_a_stale_update_after_a_partition(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a network partition, the update of a site whose round has closed meanwhile is refused.

    The site then goes on with the newest version.
    """
    far, near = Gate(1, "a"), Gate(2, "b")

    def during(site: str, number: int) -> None:
        if number == 1:
            far.wait()  # the deadline must not close the round before there is a partition
        near(site, number)

    with serve_wide(tmp_path, **{"rounds.quorum": 1, "rounds.deadline_s": 0.3}) as server, Proxy(server.port) as proxy:
        behind = Sites(proxy.url, tmp_path, during=far, names=["a"])
        beside = Sites(server.url, tmp_path, during=during, names=["b"])
        far.wait()
        proxy.cut()
        wait_until(lambda: server.status().fragments[0].version == 1, "the round without the far one")
        proxy.heal()
        far.open()
        near.open()
        run_to_end(server, behind, beside)
    assert "round 1 closed without this update" in caplog.text
    counted = Result(tmp_path).counted()
    assert ("a", 1) not in counted
    assert len(counted) == len(set(counted))
    assert ("b", 1) in counted


PACE = Pace(delay_s=0.1, bytes_per_s=1.2 * 1460 / (0.2 * 0.01**0.5))
"""87,600 bytes/s: 71 such connections fill 50 Mbit/s."""
TIMEOUT_S = 2.0


@pytest.mark.covers("F21", "L9")
def test_parallel_connections_speed_up_a_slow_site(tmp_path: Path) -> None:
    """A site with slow connections sends and fetches parts over several of them at once, and stays
    alive to the server.
    """
    # The busiest connection alone is in use for longer than the timeout after which a silent worker is given up.
    model = nn.Linear(1024, 416)  # 1.7 MB in 27 parts: 2.4 s each way over eight connections, 19 over one
    network = {"connections": 8, "heartbeat_timeout_s": TIMEOUT_S, "idle_timeout_s": 30.0}
    settings = ONE | {f"network.{name}": value for name, value in network.items()}
    with serve(tmp_path, model, **settings) as server, Proxy(server.port, PACE) as proxy:
        with atoll.join(proxy.url, site="far", folder=tmp_path / "workers") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                with torch.no_grad():
                    model.weight.add_(1.0)
                fl_round.submit(model, weight=1.0)
            moved = [dict(each) for each in proxy.moved_bytes]
        server.run()
        status = server.status()
    for way in ("up", "down"):
        total, most = sum(each[way] for each in moved), max(each[way] for each in moved)
        assert most / PACE.bytes_per_s > TIMEOUT_S  # so long, a silent worker would have been given up
        assert total / most >= 5
    assert status.deaths == 0


KINDS = {
    "the run": "GET /v1/run ",
    "the schema": "GET /v1/schema ",
    "joining": "POST /v1/workers ",
    "a heartbeat": "POST /v1/heartbeat ",
    "a ticket": "POST /v1/tickets ",
    "what became of a ticket": r"GET /v1/tickets/\d+ ",
    "a version": r"GET /v1/fragments/0/versions/\d+ ",
    "tensors of a version": r"GET /v1/fragments/0/versions/\d+/[0-9a-f]{64} ",
    "a difference of versions": r"GET /v1/fragments/0/versions/\d+/delta/[0-9a-f]{64} ",
    "an update": "PUT .*/parts/",
    "leaving": "POST /v1/workers/leave ",
}


SWARM = {
    "the run": "GET /v1/run ",
    "the plan": "GET /v1/swarm/plan ",
    "a report to the swarm": "POST /v1/swarm ",
    "a version": r"GET /v1/fragments/0/versions/\d+ ",
    "the word that all is ready": "POST .*/complete ",
}


TASKS = {
    "a task": "POST /v1/tasks ",
    "what a task's tensors are": r"GET /v1/objects/[^/]+ ",
    "tensors of a task": r"GET /v1/objects/[^/]+/data ",
    "an object for an answer": "POST /v1/objects ",
    "a part of an answer": "PUT /v1/objects/[^/]+/parts/",
    "the word that an answer is complete": "POST /v1/objects/[^/]+/complete ",
    "an answer": "POST /v1/tasks/[^/]+/answer ",
}


def after(text: bytes) -> Callable[[bytes], int]:
    """Where this text ends in a header."""
    return lambda header: header.index(text) + len(text)


def before_end(count: int) -> Callable[[bytes], int]:
    return lambda header: len(header) - count


PLACES: dict[str, Callable[[bytes], int]] = {
    "version": after(b"HTTP/1"),
    "status": lambda header: header.index(b" ") + 3,
    "behind-status": lambda header: header.index(b" ") + 4,
    "reason": lambda header: header.index(b" ") + 6,
    "cr-of-the-status-line": after(b"\r"),
    "behind-the-status-line": after(b"\r\n"),
    "name": lambda header: header.index(b"\r\n") + 5,
    "colon": lambda header: header.index(b":") + 1,
    "value": lambda header: header.index(b": ") + 3,
    "cr-of-a-header": lambda header: header.index(b"\r", header.index(b"\r") + 1) + 1,
    "behind-a-header": lambda header: header.index(b"\n", header.index(b"\n") + 1) + 1,
    "last-name": lambda header: header.rindex(b"\r\n", 0, -4) + 4,
    "last-value": before_end(5),
    "cr-of-the-last-header": before_end(3),
    "before-the-blank-line": before_end(2),
    "cr-of-the-blank-line": before_end(1),
}
"""Every class of bytes of a header → how many pass."""


def broken(kinds: dict[str, str], place: Callable[[bytes], int]) -> list[Fault]:
    """A cut of one response to each kind of request, at the same place of its headers."""
    actions: Iterator[Any] = cycle(("close", "reset"))
    return [Fault(line, "down", BEFORE_HEADER, next(actions), in_header=place) for line in kinds.values()]


def left(through: dict[str, Proxy]) -> dict[str, list[str]]:
    """Faults that did not happen, of each site that has some."""
    return {site: [fault.request for fault in proxy.faults] for site, proxy in through.items() if proxy.faults}


@pytest.mark.slow
@pytest.mark.parametrize("swarm", [False, True], ids=["server", "swarm"])
@pytest.mark.covers("F14", "F15", "F17", "L10")
def test_repeats_a_request_after_broken_response_headers(tmp_path: Path, swarm: bool) -> None:
    """If a response breaks off within its headers, the site repeats the request."""
    # Each update is trained only once. Each site has its own proxy, which cuts one response to each kind of request at
    # the same place in the headers. In the swarm case, every third place is tried.
    places = dict(list(PLACES.items())[::3]) if swarm else PLACES
    settings: dict[str, Any] = {"rounds.sites": len(places), "rounds.total": 2, "swarm.enabled": swarm}
    if not swarm:
        settings["aggregation.download_codec.name"] = "int8"  # so that differences go down, too
    digests = []
    for name in ("cut",) if swarm else ("undisturbed", "cut"):
        with serve(tmp_path / name, **settings) as server, ExitStack() as stack:
            through = {site: stack.enter_context(Proxy(server.port)) for site in places}
            for site, place in places.items() if name == "cut" else ():
                through[site].faults += broken(SWARM if swarm else KINDS, place)
            sites = [FederatedSites(through[site].url, tmp_path / name, [site], swarm=swarm) for site in places]
            run_to_end(server, *sites)
        assert left(through) == {}
        trained = {key: count for each in sites for key, count in each.trained.items()}
        assert trained == {(site, number): 1 for site in places for number in (1, 2)}
        digests.append("" if swarm else tensors_digest(exported(tmp_path / name)))
    assert len(set(digests)) == 1


@pytest.mark.slow
@pytest.mark.covers("F15", "F17")
def test_answers_a_task_once_though_responses_break(tmp_path: Path) -> None:
    """If responses break off within their headers, each site still works on its task once and answers it.

    The tensors of a task and of its answer are large, so they travel as objects of their own.
    """
    worked: Counter[str] = Counter()
    answers: dict[str, torch.Tensor] = {}

    def main(controller: Any) -> None:
        controller.sites(at_least=len(PLACES), timeout_s=60)
        payload = {"w": torch.ones(100_000)}
        for result in controller.broadcast("double", payload, sites=list(PLACES)):
            answers[result.site] = result.payload["w"]

    def work(site: str, url: str) -> None:
        with atoll.tasks(url, site) as worker:

            @worker.task("double")
            def double(payload: Any) -> Any:
                worked[site] += 1
                return {"w": payload["w"] * 2}

            worker.run()

    with workflow_server(tmp_path, main, **{"workflow.streamed_tasks": ["double"]}) as server, ExitStack() as stack:
        through = {site: stack.enter_context(Proxy(server.port)) for site in PLACES}
        for site, place in PLACES.items():
            through[site].faults += broken(TASKS, place)
        together(*(partial(work, site, proxy.url) for site, proxy in through.items()))
        server.run()
    assert left(through) == {}
    assert worked == dict.fromkeys(PLACES, 1)
    assert {site: float(each.sum()) for site, each in answers.items()} == dict.fromkeys(PLACES, 200_000.0)
