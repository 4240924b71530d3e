"""After a restart the server awaits sites by its journal: it says which of them it has not heard of yet."""

import logging
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, free_port, wait_until
from kit.client import Client
from kit.processes import command
from kit.servers import plain_server
from kit.wire import WireSite
from torch import nn

import atoll

UNHEARD = "no request since the server restarted"
SILENT: dict[str, Any] = {"network.heartbeat_timeout_s": 0, "network.heartbeat_interval_s": 0}
"""Nothing is sent but what a test sends."""


@pytest.mark.covers("L13", "X4")
def test_a_site_that_is_silent_since_the_restart_is_told_apart(tmp_path: Path, nursery: Nursery) -> None:
    settings = SILENT | {"rounds.sites": 2, "network.port": free_port()}
    with plain_server(tmp_path, nn.Linear(4, 3), **settings) as server:
        a, b = (WireSite(server.url, site) for site in "ab")
        for site in (a, b):
            site.ticket()
        assert UNHEARD not in server.status().fragments[0].reason

    with plain_server(tmp_path, **settings) as server:
        assert server.status().fragments[0].reason.endswith(f"; {UNHEARD}: a, b")
        a.beat()
        assert server.status().fragments[0].reason.endswith(f"; {UNHEARD}: b")
        shown = command(nursery, tmp_path, "status", "--server", server.url).stdout.splitlines()
        rows = {line.split()[0]: line for line in shown}
        assert f"; {UNHEARD}: b" in "\n".join(shown)
        assert " s ago" in rows["a"]
        assert "none since the server restarted" in rows["b"]
        assert WireSite(server.url, "late").ask(wait_s=0.0)["reason"].endswith(f"; {UNHEARD}: b")
        b.beat()
        assert UNHEARD not in server.status().fragments[0].reason


@pytest.mark.covers("X4")
@pytest.mark.parametrize(
    ("timeout_s", "then"),
    [(3600.0, " (declared dead after 3600 s without a heartbeat)"), (0.0, "")],
    ids=["dies", "stays"],
)
def test_names_a_site_that_misses_heartbeats_and_the_consequence(tmp_path: Path, timeout_s: float, then: str) -> None:
    """At 2.5 intervals of silence, long before the end; nothing changes in the words from then on."""
    beats = {"network.heartbeat_interval_s": 0.4, "network.heartbeat_timeout_s": timeout_s}
    with plain_server(tmp_path, nn.Linear(4, 3), **beats, **{"rounds.sites": 3}) as server:
        sites = {site: WireSite(server.url, site) for site in "abc"}

        def reason(beating: str) -> str:
            for site in beating:
                sites[site].beat()
            return server.status().fragments[0].reason

        assert "no heartbeat" not in reason("abc")
        for beating, silent in (("ab", "c"), ("a", "b, c")):
            ending = f"; no heartbeat from {silent}{then}"
            wait_until(lambda: reason(beating).endswith(ending), ending, 10)  # noqa: B023
        wait_until(lambda: "no heartbeat" not in reason("abc"), "all are heard again", 10)


@pytest.mark.covers("X4")
def test_a_site_that_is_silent_since_the_restart_is_shown_with_the_version_it_had(tmp_path: Path) -> None:
    """Version 0 and two rounds behind was shown, whatever it had."""
    settings = SILENT | {"network.port": free_port()}

    def shown(server: atoll.Server) -> tuple[int, int]:
        (worker,) = server.status().workers
        return worker.version, worker.staleness

    with plain_server(tmp_path, nn.Linear(4, 3), **settings) as server:
        client = Client(server.url, site="a", folder=tmp_path / "w")
        for number in (1, 2):
            assert client.next_round() == number
            client.submit(client.pull())
        assert client.next_round() == 3
        assert shown(server) == (2, 0)

    with plain_server(tmp_path, **settings) as server:
        assert not server.status().workers[0].heard
        assert shown(server) == (2, 0)
        WireSite(server.url).leave()  # joins, and asks for nothing
        assert shown(server) == (2, 0)
    client.close()


@pytest.mark.covers("X4")
def test_the_end_names_the_sites_it_waits_for_and_those_that_never_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from atoll.server import serve

    monkeypatch.setattr(serve, "GRACE_S", 0.5)
    monkeypatch.setattr(serve, "GRACE_SAID_S", 0.0)
    caplog.set_level(logging.INFO, "atoll.server")
    with plain_server(tmp_path, nn.Linear(4, 3), **{"rounds.total": 1}) as server:
        WireSite(server.url, "vanished").train().submit()
        server.run()
    assert "waiting for vanished to download the result, at most 0.5 s" in caplog.text
    assert "vanished did not download the result within 0.5 s" in caplog.text
