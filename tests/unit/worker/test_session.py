"""When a session sends heartbeats, and how long it waits for a server that stands still."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from harness.processes import wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.worker.exchange.participation import take_part
from atoll.worker.session import session as session_module
from atoll.worker.session.session import Session


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    """Its heartbeat interval is far longer than a test."""
    with plain_server(
        tmp_path, nn.Linear(8, 4), **{"network.heartbeat_interval_s": 600.0, "network.heartbeat_timeout_s": 0}
    ) as server:
        yield server


def test_however_often_the_state_changes_heartbeats_keep_their_distance(
    server: atoll.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "HEARTBEAT_GAP_S", 0.1)
    sent: list[float] = []
    send = Session._send_heartbeat

    def counted(self: Session, *more: float) -> None:
        if self.http.server == server.url:  # a place of an earlier test may still be ending
            sent.append(time.monotonic())
        send(self, *more)

    monkeypatch.setattr(Session, "_send_heartbeat", counted)
    place = take_part(server.url, "a", folder=tmp_path / "w")

    def changed() -> bool:
        place.session.tell(state=f"state {time.monotonic()}")
        return len(sent) >= 5

    wait_until(changed, "five heartbeats")
    assert min(later - earlier for earlier, later in pairwise(sent[:5])) > 0.09
    place.leave()


@pytest.mark.covers("L13")
def test_a_server_that_stands_still_is_left_soon(
    server: atoll.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a goodbye of half a minute or more after Ctrl-C; the server learns of it by the silence."""
    monkeypatch.setattr(session_module, "GOODBYE_S", 0.2)
    with Proxy(int(server.url.rpartition(":")[2])) as proxy:
        place = take_part(proxy.url, "a", folder=tmp_path / "w")
        wait_until(lambda: proxy.count("POST .*heartbeat"), "a heartbeat")
        proxy.faults += [Fault("POST .*heartbeat", "up", BEFORE_HEADER, "stall") for _ in range(2)]
        proxy.faults.append(Fault("POST .*leave", "up", BEFORE_HEADER, "stall"))
        begin = time.monotonic()
        place.leave()
        assert time.monotonic() - begin < 10.0
