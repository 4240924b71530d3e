"""A response that is cut off inside its status line or headers is a broken connection: the request is made again.

Every site has a proxy of its own, which cuts one response to every kind of request, and always at the same place of the
headers. All sites take part in the same run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import FederatedSites, exported, serve, tensors_digest, together

import atoll

pytestmark = pytest.mark.slow

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
    "a part": "PUT .*/parts/",
    "the word that all is sent": "POST .*/complete ",
    "leaving": "POST /v1/workers/leave ",
}


def after(text: bytes) -> Callable[[bytes], int]:
    """Where this text ends in a header."""
    return lambda header: header.index(text) + len(text)


def before_end(count: int) -> Callable[[bytes], int]:
    return lambda header: len(header) - count


def in_last_name(header: bytes) -> int:
    """Inside the name of the last header."""
    return header.rindex(b"\r\n", 0, -4) + 4


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
    "last-name": in_last_name,
    "last-value": before_end(5),
    "cr-of-the-last-header": before_end(3),
    "before-the-blank-line": before_end(2),
    "cr-of-the-blank-line": before_end(1),
}
"""Every class of bytes of a header → how many pass."""


@pytest.fixture
def proxies() -> Iterator[Callable[[int], Proxy]]:
    with ExitStack() as stack:
        yield lambda port: stack.enter_context(Proxy(port))


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


def broken(kinds: dict[str, str], place: Callable[[bytes], int], action: str) -> list[Fault]:
    return [Fault(line, "down", BEFORE_HEADER, action, in_header=place) for line in kinds.values()]


def left(through: dict[str, Proxy]) -> dict[str, list[str]]:
    """Faults of each site that did not happen."""
    return {site: [fault.request for fault in proxy.faults] for site, proxy in through.items()}


@dataclass(frozen=True)
class Placement:
    """Where rounds are aggregated, and what comes of a run there without a fault.

    Attributes:
        places: of each site; every third one in a swarm, whose sites connect with each other.
        kinds: of requests.
        digest: of the exported model; no model lies at the server of a swarm.
    """

    settings: dict[str, Any]
    places: dict[str, Callable[[bytes], int]]
    kinds: dict[str, str]
    digest: str | None


@pytest.fixture(scope="module", params=["server", "swarm"])
def placement(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Placement:
    swarm, folder = request.param == "swarm", tmp_path_factory.mktemp("undisturbed")
    places = dict(list(PLACES.items())[::3]) if swarm else PLACES
    settings: dict[str, Any] = {"rounds.sites": len(places), "swarm.enabled": swarm}
    if not swarm:
        settings["aggregation.download_codec.name"] = "int8"  # so that differences go down, too
    with serve(folder, **settings) as server:
        FederatedSites(server.url, folder, places).join()
        server.run()
    return Placement(settings, places, SWARM if swarm else KINDS, None if swarm else tensors_digest(exported(folder)))


@pytest.mark.parametrize("action", ["close", "reset"])
@pytest.mark.covers("F14", "F15", "F17", "L10")
def test_a_response_cut_in_its_headers_is_asked_for_again(
    tmp_path: Path, proxies: Callable[[int], Proxy], placement: Placement, action: str
) -> None:
    with serve(tmp_path, **placement.settings) as server:
        sites, through = [], {}
        for site, place in placement.places.items():
            through[site] = proxies(server.port)
            through[site].faults += broken(placement.kinds, place, action)
            sites.append(FederatedSites(through[site].url, tmp_path, [site]))
        for each in sites:
            each.join()
        server.run()
    assert left(through) == {site: [] for site in placement.places}
    trained = {key: count for each in sites for key, count in each.trained.items()}
    assert trained == {(site, number): 1 for site in placement.places for number in (1, 2, 3)}
    assert placement.digest is None or tensors_digest(exported(tmp_path)) == placement.digest


@pytest.mark.covers("F15", "F17")
def test_answers_a_task_once_though_response_headers_are_cut(tmp_path: Path, proxies: Callable[[int], Proxy]) -> None:
    """Tensors of a task and of its answer are objects of their own, because they are large."""
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

    with atoll.Server(
        workflow=main,
        settings={"disk.state_dir": tmp_path / "state", "network.port": 0, "workflow.streamed_tasks": ["double"]},
    ) as server:
        through = {site: proxies(server.port) for site in PLACES}
        for site, place in PLACES.items():
            through[site].faults += broken(TASKS, place, "close")
        together(*(partial(work, site, proxy.url) for site, proxy in through.items()))
        server.run()
    assert left(through) == {site: [] for site in PLACES}
    assert worked == dict.fromkeys(PLACES, 1)
    assert {site: float(each.sum()) for site, each in answers.items()} == dict.fromkeys(PLACES, 200_000.0)
