"""A network that drops packets without a word: no call hangs for long, and training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import DiLoCoSites, FederatedSites, Gate, Threads, run_to_end, serve
from kit.models import Weights
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.protocol import routes
from atoll.worker.session import session

pytestmark = [pytest.mark.covers("F22"), pytest.mark.usefixtures("pulled_apart")]

SETTINGS: dict[str, Any] = {
    "network.heartbeat_interval_s": 2.0,
    "network.heartbeat_timeout_s": 0,
    "algorithm": "diloco",
    "H": 4,
    "rounds": 4,
    "codec": "none",
}
FEDERATED: dict[str, Any] = {"algorithm": "fedavg", "H": None, "sites": 1}
STREAMED = {"K": 2, "tau": 1, "alpha": 0.5}
CALLS = "(GET|PUT|POST) /v1/(?!heartbeat)"
LOOKS = f"GET {routes.HEALTH} "


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeouts with which training stands still for at most 30 s, all at a tenth; shares of them stay."""
    monkeypatch.setattr(routes, "LONG_POLL_S", 1.5)
    monkeypatch.setattr(routes, "CALL_TIMEOUT_S", 2.5)
    monkeypatch.setattr(session, "LOOK_S", 0.3)


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[atoll.Server]:
    with serve(tmp_path, **SETTINGS | request.param) as server:
        yield server


@pytest.fixture
def proxy(server: atoll.Server) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


def wait_for_skipped(sites: DiLoCoSites, turns: int) -> None:
    """Until so many turns of site a have broken off, because the network is silent."""
    loop = wait_until(lambda: sites.loops.get("a"), "its start")
    wait_until(lambda: loop.skipped >= turns, f"{turns} turns that are skipped", timeout_s=60)


@pytest.mark.parametrize("server", [{"sites": 1}, {"sites": 1, **STREAMED}], indirect=True)
@pytest.mark.covers("L10")
def test_goes_on_training_in_a_silent_network(tmp_path: Path, server: atoll.Server, proxy: Proxy) -> None:
    """A DiLoCo site goes on training when its network falls silent, and synchronises again when the network is back."""
    # After the first failure, each synchronisation tries only once. It waits for one call that times out and one look
    # for the server: less than 30 s with the defaults.

    def during(site: str, step: int) -> None:
        steps_s.append(time.monotonic())
        if step == 5 and not silent.is_set():  # after the first synchronisation
            proxy.silence()
            silent.set()

    silent, steps_s = threading.Event(), list[float]()
    sites = DiLoCoSites(proxy.url, tmp_path, 10**6, ["a"], during=during, max_sync_retries=20)  # would take minutes
    wait_for_skipped(sites, 2)
    calls, looks = proxy.count(CALLS), proxy.count(LOOKS)
    wait_for_skipped(sites, 5)
    assert proxy.count(CALLS) - calls <= 1
    assert proxy.count(LOOKS) - looks <= 4
    assert max(after - before for before, after in pairwise(steps_s)) < 2 * routes.CALL_TIMEOUT_S
    rounds = sites.loops["a"].rounds
    proxy.heal()
    run_to_end(server, sites)
    assert sites.loops["a"].rounds > rounds
    assert sites.loops["a"].finished


@pytest.mark.parametrize("server", [{}, STREAMED], indirect=True)
@pytest.mark.covers("L10")
def test_a_waiting_site_notices_a_silent_network(tmp_path: Path, server: atoll.Server, proxy: Proxy) -> None:
    """A site that waits for a round notices when its network falls silent, and then skips synchronisations. As long as
    the server answers, it skips none, however long it waits.
    """
    healed = threading.Event()
    far = DiLoCoSites(proxy.url, tmp_path, 10**6, ["a"])
    near = DiLoCoSites(server.url, tmp_path, 10**6, ["b"], during=lambda *_: healed.wait(60))
    wait_until(lambda: proxy.count("PUT .*/parts/"), "the first update")
    before = proxy.count("POST /v1/tickets ")
    wait_until(lambda: proxy.count("POST /v1/tickets ") >= before + 3, "long polls that end")
    assert (far.loops["a"].skipped, far.loops["a"].sync_metrics["retries"]) == (0, 0)
    proxy.silence()
    wait_for_skipped(far, 2)
    proxy.heal()
    healed.set()
    run_to_end(server, far, near)
    assert far.loops["a"].finished


def line() -> Weights:
    """Two tensors of 64 KiB: three parts of a version, with its head."""
    return Weights(x=torch.zeros(16_384), y=torch.zeros(16_384))


def values(tensors: Iterable[torch.Tensor]) -> set[float]:
    return {value for tensor in tensors for value in tensor.detach().unique().tolist()}


def climb(model: nn.Module, optimizer: torch.optim.Optimizer, site: str, step: int) -> None:
    """At a rate of 1 every element of site a grows by 1, and of site b by 3."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -1.0 if site == "a" else -3.0)
    optimizer.step()


CLIMBS: dict[str, Any] = {
    "build": line,
    "inner": lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    "step": climb,
    "weight": 1.0,
}


@pytest.mark.covers("L10")
def test_goes_on_training_from_a_partly_loaded_version(tmp_path: Path) -> None:
    """A site whose network falls silent while it loads a version goes on training, and each of its steps counts."""
    # Two steps make a round, and the outer step adds the mean of the updates: version 1 is (2·1 + 2·3) / 2 = 4. When
    # the network falls silent, a part of the model at site `a` is version 1 and the rest is its own result, 2. Site `a`
    # makes n more steps, and they count as n from either value: version 2 is 4 + (n·1 + 2·3) / 2 everywhere.

    def stand_still() -> None:
        wait_until(lambda: 4.0 in values(sites.models["a"].parameters()), "a part of version 1")
        proxy.silence()

    def during(site: str, step: int) -> None:
        loop = sites.loops["a"]
        if loop.skipped == 1 and not began_from:
            began_from.append(values(sites.models["a"].parameters()))
        if loop.skipped >= 2:
            proxy.heal()

    began_from: list[set[float]] = []
    outer = {"algorithm.outer_optimizer.lr": 1.0, "algorithm.outer_optimizer.momentum": 0.0}
    settings = SETTINGS | {"H": 2, "rounds": 2} | outer
    with serve(tmp_path, line(), **settings) as server, Proxy(server.port) as proxy:
        proxy.faults.append(Fault("GET .*/versions/1/", "down", at=BEFORE_HEADER, action="stall", wait=stand_still))
        sites = DiLoCoSites(proxy.url, tmp_path, 10**6, ["a"], during=during, max_sync_retries=2, **CLIMBS)
        near = DiLoCoSites(server.url, tmp_path, 10**6, ["b"], **CLIMBS)
        run_to_end(server, sites, near)
        result = load_file(server.exports / "model.safetensors")
    assert began_from == [{2.0, 4.0}]
    n = sites.loops["a"].step - 2
    assert n >= 4  # two turns, at least, that were skipped
    expected = 4 + (n * 1 + 2 * 3) / 2
    ends = (result.values(), sites.models["a"].parameters(), near.models["b"].parameters())
    assert [values(end) for end in ends] == [{expected}] * 3


@pytest.mark.parametrize("server", [FEDERATED | {"rounds": 2}], indirect=True)
def test_a_federated_site_waits_through_a_silent_network(tmp_path: Path, server: atoll.Server, proxy: Proxy) -> None:
    """A federated site whose network falls silent waits until the network is back, and trains each round once."""

    def during(site: str, number: int) -> None:
        if number == 1:
            proxy.silence()
            silent.set()

    silent = threading.Event()
    sites = FederatedSites(proxy.url, tmp_path, ["a"], during=during)
    assert silent.wait(30)
    wait_until(lambda: proxy.count(LOOKS) >= 3, "questions for the server that are not answered")
    proxy.heal()
    run_to_end(server, sites)
    assert sites.trained == {("a", 1): 1, ("a", 2): 1}


ONE_CALL = {
    "pull": "GET /v1/fragments/0/versions/[0-9]+/.*",
    "part": "PUT .*/parts/",
    "ticket": "POST /v1/tickets ",
}


@pytest.mark.parametrize("call", ONE_CALL)
@pytest.mark.parametrize(
    ("kind", "settings", "cut_at"),
    [  # after the first synchronisation, or in round 1
        (partial(DiLoCoSites, steps=10**6), {"sites": 1}, 5),
        (FederatedSites, FEDERATED, 1),
    ],
    ids=["diloco", "federated"],
)
@pytest.mark.covers("L10")
def test_a_dead_connection_does_not_stop_training(
    tmp_path: Path, kind: Callable[..., Threads], settings: dict[str, Any], cut_at: int, call: str
) -> None:
    """If a firewall has forgotten a site's connections, only one request times out, and later ones use new connections.
    Training goes on.
    """
    faults: list[Fault] = []

    def during(site: str, at: int) -> None:
        if at == cut_at and not faults:
            faults.append(Fault(ONE_CALL[call], "down", BEFORE_HEADER, "stall", wait=proxy.silence))
            proxy.faults += faults

    with serve(tmp_path, **SETTINGS | settings | {"rounds": 3}) as server, Proxy(server.port) as proxy:
        sites = kind(proxy.url, tmp_path, names=["a"], during=during)
        wait_until(lambda: faults and faults[0].reached.is_set(), "the cut")
        before = proxy.count("POST /v1/heartbeat ")
        wait_until(lambda: proxy.count("POST /v1/heartbeat ") > before, "a heartbeat into the silence")
        proxy.heal()
        sites.join(timeout_s=30)
        server.run()
        assert server.status().version == 3
        if isinstance(sites, DiLoCoSites):
            assert sites.loops["a"].finished
        else:
            assert sites.trained == {("a", 1): 1, ("a", 2): 1, ("a", 3): 1}


def test_a_site_gives_up_unanswering_connections_in_time(tmp_path: Path) -> None:
    """A site gives up connections that accept every byte and answer nothing, before the server declares the site dead.

    The server's timeout is far below the half minute that a request may take.
    """
    gate = Gate(1, "a")
    network = {"network.heartbeat_timeout_s": 8.0, "network.idle_timeout_s": 1.0}
    with serve(tmp_path, sites=1, rounds=1, **network) as server, Proxy(server.port) as proxy:
        sites = FederatedSites(proxy.url, tmp_path, ["a"], during=gate)
        gate.wait()
        wait_until(lambda: proxy.count("/v1/heartbeat"), "a heartbeat")
        proxy.freeze()
        before = proxy.count("/v1/heartbeat")
        wait_until(lambda: proxy.count("/v1/heartbeat") >= before + 4, "heartbeats on another connection")
        assert server.status().deaths == 0
        gate.open()
        run_to_end(server, sites)
    assert sites.trained == {("a", 1): 1}
