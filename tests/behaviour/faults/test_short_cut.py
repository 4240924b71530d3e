"""A network that is silent for a moment, and is back with its old connections dead: a firewall has forgotten them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.processes import wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import DiLoCoSites, FederatedSites, serve

SETTINGS: dict[str, Any] = {
    "rounds.sites": 1,
    "rounds.total": 3,
    "aggregation.upload_codec.name": "none",
    "network.heartbeat_interval_s": 2.0,
    "network.heartbeat_timeout_s": 0,
    "network.waiting_heartbeat_s": 1.0,
}
DILOCO = {"algorithm.name": "diloco", "diloco.sync_every": 4}
CALLS = {
    "pull": "GET /v1/fragments/0/versions/[0-9]+/.*",
    "part": "PUT .*/parts/",
    "ticket": "POST /v1/tickets ",
    "complete": "POST .*/complete ",
}


def cut(proxy: Proxy, request: str) -> Fault:
    """At the next such request, every connection falls silent."""
    fault = Fault(request, "down", BEFORE_HEADER, "stall", wait=proxy.silence)
    proxy.faults.append(fault)
    return fault


def heal_after_one_lost_heartbeat(proxy: Proxy, fault: Fault) -> None:
    assert fault.reached.wait(30)
    before = proxy.count("POST /v1/heartbeat ")
    wait_until(lambda: proxy.count("POST /v1/heartbeat ") > before, "a heartbeat into the silence")
    proxy.heal()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("loop", ["diloco", "federated"])
@pytest.mark.covers("F22", "L10")
def test_a_call_on_a_connection_that_died_in_a_short_cut_does_not_stop_training(
    tmp_path: Path, loop: str, call: str
) -> None:
    """Without heartbeats the call would wait for its own timeout, 60 to 90 s."""
    faults: list[Fault] = []

    def during(site: str, at: int) -> None:
        if at == (5 if loop == "diloco" else 1) and not faults:  # after the first synchronisation, or in round 1
            faults.append(cut(proxy, CALLS[call]))

    with serve(tmp_path, **SETTINGS | (DILOCO if loop == "diloco" else {})) as server, Proxy(server.port) as proxy:
        sites: Any
        if loop == "diloco":
            sites = DiLoCoSites(proxy.url, tmp_path, 10**6, ["a"], during=during)
        else:
            sites = FederatedSites(proxy.url, tmp_path, ["a"], during=during)
        wait_until(lambda: faults, "the place of the cut")
        heal_after_one_lost_heartbeat(proxy, faults[0])
        sites.join(timeout_s=30)
        server.run()
        if loop == "diloco":
            assert sites.loops["a"].finished
        else:
            assert sites.trained == {("a", 1): 1, ("a", 2): 1, ("a", 3): 1}
