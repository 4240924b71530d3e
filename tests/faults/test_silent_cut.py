"""A network that drops packets without a word: no call hangs for long, and training goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import DiLoCoSites, FederatedSites, serve

import atoll
from atoll.testing.processes import wait_until
from atoll.testing.proxy import Proxy

CALLS = "(GET|PUT|POST) /v1/(?!heartbeat)"
STREAMED = {"num_fragments": 2, "tau": 1, "alpha": 0.5}


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[atoll.Server]:
    settings: dict[str, Any] = {"algorithm": "diloco", "sync_every": 4, "rounds": 4, "codec": "none"}
    settings |= {"heartbeat_interval_s": 2.0, "heartbeat_timeout_s": 0, "waiting_heartbeat_s": 0.5}
    with serve(tmp_path, **settings | request.param) as server:
        yield server


@pytest.fixture
def proxy(server: atoll.Server) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


class Outage:
    """Waits for turns that break off while the network is silent."""

    def __init__(self, proxy: Proxy, sites: DiLoCoSites, site: str) -> None:
        self._proxy, self._sites, self._site = proxy, sites, site

    def skipped(self, turns: int) -> None:
        loop = wait_until(lambda: self._sites.loops.get(self._site), "its start")
        wait_until(lambda: loop.skipped >= turns, f"{turns} turns that are skipped", timeout_s=60)

    def calls(self) -> int:
        return self._proxy.count(CALLS)


@pytest.mark.parametrize("server", [{"num_workers": 1}, {"num_workers": 1, **STREAMED}], indirect=True)
@pytest.mark.covers("F22", "L10")
def test_training_goes_on_when_the_network_falls_silent_and_every_later_turn_tries_once(
    tmp_path: Path, server: atoll.Server, proxy: Proxy
) -> None:
    def during(site: str, step: int) -> None:
        if step == 5 and not silent.is_set():  # after the first synchronisation
            proxy.silence()
            silent.set()

    silent = threading.Event()
    sites = DiLoCoSites(proxy.url, tmp_path, 10**6, ["a"], during=during, max_sync_retries=20)  # would take minutes
    outage = Outage(proxy, sites, "a")
    outage.skipped(2)
    before = outage.calls()
    outage.skipped(5)
    assert outage.calls() - before <= 3
    rounds = sites.loops["a"].rounds
    proxy.heal()
    sites.join()
    server.run()
    assert sites.loops["a"].rounds > rounds
    assert sites.loops["a"].finished


@pytest.mark.parametrize("server", [{}, STREAMED], indirect=True)
@pytest.mark.covers("F22", "L10")
def test_a_site_that_waits_for_another_notices_that_the_network_fell_silent(
    tmp_path: Path, server: atoll.Server, proxy: Proxy
) -> None:
    healed = threading.Event()
    far = DiLoCoSites(proxy.url, tmp_path, 10**6, ["a"])
    near = DiLoCoSites(server.url, tmp_path, 10**6, ["b"], during=lambda *_: healed.wait(60))
    wait_until(lambda: proxy.count("POST .*/complete "), "the first update")
    wait_until(lambda: proxy.requests[-1].startswith(("POST /v1/tickets ", "POST /v1/heartbeat ")), "a wait for b")
    proxy.silence()
    Outage(proxy, far, "a").skipped(2)
    proxy.heal()
    healed.set()
    far.join()
    near.join()
    server.run()
    assert far.loops["a"].finished


@pytest.mark.parametrize("server", [{}, STREAMED], indirect=True)
@pytest.mark.covers("F22")
def test_a_wait_for_another_site_is_no_silent_network(tmp_path: Path, server: atoll.Server, proxy: Proxy) -> None:
    """Heartbeats are answered meanwhile, many times the number that would end a call."""
    go_on = threading.Event()
    first = DiLoCoSites(proxy.url, tmp_path, 10**6, ["a"])
    second = DiLoCoSites(server.url, tmp_path, 10**6, ["b"], during=lambda *_: go_on.wait(60))
    wait_until(lambda: proxy.count("POST .*/complete "), "the first update")
    before = proxy.count("/v1/heartbeat ")
    wait_until(lambda: proxy.count("/v1/heartbeat ") >= before + 6, "heartbeats while it waits")
    go_on.set()
    first.join()
    second.join()
    server.run()
    assert (first.loops["a"].skipped, first.loops["a"].sync_metrics["retries"]) == (0, 0)


@pytest.mark.parametrize(
    "server", [{"algorithm": "fedavg", "sync_every": None, "num_workers": 1, "rounds": 2}], indirect=True
)
@pytest.mark.covers("F22")
def test_a_federated_site_waits_through_a_silent_network(tmp_path: Path, server: atoll.Server, proxy: Proxy) -> None:
    def during(site: str, number: int) -> None:
        if number == 1:
            proxy.silence()
            silent.set()

    silent = threading.Event()
    sites = FederatedSites(proxy.url, tmp_path, ["a"], during=during)
    assert silent.wait(30)
    begin = proxy.count("/v1/heartbeat ")
    wait_until(lambda: proxy.count("/v1/heartbeat ") >= begin + 6, "heartbeats that are not answered")
    proxy.heal()
    sites.join()
    server.run()
    assert sites.trained == {("a", 1): 1, ("a", 2): 1}
