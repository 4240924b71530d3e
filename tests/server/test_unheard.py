"""After a restart the server awaits sites by its journal: it says which of them it has not heard of yet."""

import logging
from pathlib import Path
from typing import Any

import pytest
from harness.processes import free_port, wait_until
from kit.servers import new_server
from torch import nn

import atoll
from atoll.cli.status import COLUMNS, worker_row
from atoll.cli.text import awaited
from atoll.protocol.values import UpdateInfo
from atoll.server import serve
from atoll.tensors.module_tensors import named_tensors
from atoll.worker.exchange.participation import take_part
from atoll.worker.session.session import Session

UNHEARD = "not heard since the server restarted"


@pytest.mark.covers("L13", "X4")
def test_a_site_that_is_silent_since_the_restart_is_told_apart(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "algorithm.name": "fedavg",
        "rounds.sites": 2,
        "network.heartbeat_timeout_s": 0,
        "network.heartbeat_interval_s": 0,  # nothing is sent but what this test sends
        "network.port": free_port(),
        "disk.state_dir": tmp_path / "state",
    }
    server = new_server(nn.Linear(4, 3), **options).start()
    sessions = {site: take_part(server.url, site, folder=tmp_path / "w") for site in ("a", "b")}
    for place in sessions.values():
        assert place.exchange.ask(wait_s=5.0).ticket is not None
    assert UNHEARD not in server.status().fragments[0].reason
    server.stop()

    with new_server(None, **options) as server:
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
    options: dict[str, Any] = {
        "rounds.sites": 3,
        "network.heartbeat_interval_s": 0.4,
        "network.heartbeat_timeout_s": timeout_s,
    }
    model = nn.Linear(4, 3)
    with new_server(
        model, **{"network.port": 0, "algorithm.name": "fedavg", "disk.state_dir": tmp_path / "state"}, **options
    ) as server:
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
    options: dict[str, Any] = {
        "algorithm.name": "fedavg",
        "rounds.sites": 1,
        "rounds.total": 5,
        "network.heartbeat_timeout_s": 0,
        "network.heartbeat_interval_s": 0,
        "network.port": free_port(),
        "disk.state_dir": tmp_path / "state",
    }

    def shown(server: atoll.Server) -> tuple[int, int]:
        (worker,) = server.status().workers
        return worker.version, worker.staleness

    with new_server(nn.Linear(4, 3), **options) as server:
        client = atoll.functional.Client(server.url, site="a", folder=tmp_path / "w")
        for number in (1, 2):
            assert client.next_round() == number
            client.submit(client.pull())
        assert client.next_round() == 3
        assert shown(server) == (2, 0)

    with new_server(None, **options) as server:
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
    model = nn.Linear(4, 3)
    with atoll.Server(
        model,
        settings={
            "network.port": 0,
            "algorithm.name": "fedavg",
            "rounds.total": 1,
            "rounds.sites": 1,
            "disk.state_dir": tmp_path / "s",
        },
    ) as server:
        vanished = take_part(server.url, "vanished", folder=tmp_path / "w")
        ticket = vanished.exchange.ask().ticket
        assert ticket is not None
        tensors = named_tensors(model)[0]
        vanished.exchange.pull(ticket.base, tensors)
        vanished.exchange.form(ticket, tensors, UpdateInfo(1.0, 1, {}))
        vanished.exchange.deliver()
        server.run()
    vanished.leave()
    assert "waiting for vanished to take the result, 0.5 s at most" in caplog.text
    assert "vanished did not fetch the result within 0.5 s" in caplog.text
