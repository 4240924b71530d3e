"""After a restart the server awaits sites by its journal: it says which of them it has not heard of yet."""

import logging
from pathlib import Path
from typing import Any

import pytest
from harness.processes import free_port, wait_until
from kit.by_hand import formed
from kit.client import Client
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.cli.status import COLUMNS, worker_row
from atoll.cli.text import awaited
from atoll.server import serve
from atoll.worker.exchange.participation import take_part
from atoll.worker.session.session import Session

UNHEARD = "not heard since the server restarted"
SILENT: dict[str, Any] = {"network.heartbeat_timeout_s": 0, "network.heartbeat_interval_s": 0}
"""Nothing is sent but what a test sends."""


@pytest.mark.covers("L13", "X4")
def test_a_site_that_is_silent_since_the_restart_is_told_apart(tmp_path: Path) -> None:
    settings = SILENT | {"rounds.sites": 2, "network.port": free_port()}
    server = plain_server(tmp_path, nn.Linear(4, 3), **settings).start()
    sessions = {site: take_part(server.url, site, folder=tmp_path / "w") for site in ("a", "b")}
    for place in sessions.values():
        assert place.exchange.ask(wait_s=5.0).ticket is not None
    assert UNHEARD not in server.status().fragments[0].reason
    server.stop()

    with plain_server(tmp_path, **settings) as server:
        (fragment,) = server.status().fragments
        assert awaited(fragment).endswith(f"; {UNHEARD}: a, b")

        sessions["a"].session.beat()
        status = server.status()
        assert awaited(status.fragments[0]).endswith(f"; {UNHEARD}: b")
        cells = {worker.site: worker_row(worker)[COLUMNS.index("heard")] for worker in status.workers}
        assert cells["a"].endswith(" s ago")
        assert cells["b"] == "not since the server restarted"
        sessions["late"] = take_part(server.url, "late", folder=tmp_path / "w")
        assert sessions["late"].exchange.ask(wait_s=0.0).reason.endswith(f"; {UNHEARD}: b")

        sessions["b"].session.beat()
        assert UNHEARD not in server.status().fragments[0].reason
        for place in sessions.values():
            place.leave()


@pytest.mark.covers("X4")
@pytest.mark.parametrize(
    ("timeout_s", "then"),
    [(3600.0, " (declared dead after 3600 s of silence)"), (0.0, "")],
    ids=["dies", "stays"],
)
def test_names_a_site_that_misses_heartbeats_and_the_consequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float, then: str
) -> None:
    """At 2.5 intervals of silence, long before the end; nothing changes in the words from then on."""
    monkeypatch.setattr(Session, "_heartbeats", lambda _: None)  # nothing is sent but what this test sends
    beats = {"network.heartbeat_interval_s": 0.4, "network.heartbeat_timeout_s": timeout_s}
    with plain_server(tmp_path, nn.Linear(4, 3), **beats, **{"rounds.sites": 3}) as server:
        sessions = {site: take_part(server.url, site, folder=tmp_path / "w") for site in ("a", "b", "c")}

        def reason(*beating: str) -> str:
            for site in beating:
                sessions[site].session.beat()
            return server.status().fragments[0].reason

        def said(ending: str, *beating: str) -> None:
            wait_until(lambda: reason(*beating).endswith(ending), f"{ending!r} in the reason", 10)

        assert "no sign of life" not in reason("a", "b", "c")
        said(f"; no sign of life from c{then}", "a", "b")
        said(f"; no sign of life from b, c{then}", "a")
        wait_until(lambda: "no sign of life" not in reason("a", "b", "c"), "all are heard again", 10)
        for place in sessions.values():
            place.leave()


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
        take_part(server.url, "a", folder=tmp_path / "elsewhere").leave()  # joins, and asks for nothing
        assert shown(server) == (2, 0)
    client.close()


@pytest.mark.covers("X4")
def test_the_end_names_the_sites_it_waits_for_and_those_that_never_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "GRACE_S", 0.5)
    monkeypatch.setattr(serve, "GRACE_SAID_S", 0.0)
    caplog.set_level(logging.INFO, "atoll.server")
    with plain_server(tmp_path, nn.Linear(4, 3), **{"rounds.total": 1}) as server:
        vanished = take_part(server.url, "vanished", folder=tmp_path / "w")
        formed(vanished)
        vanished.exchange.deliver()
        server.run()
    vanished.leave()
    assert "waiting for vanished to take the result, 0.5 s at most" in caplog.text
    assert "vanished did not fetch the result within 0.5 s" in caplog.text
