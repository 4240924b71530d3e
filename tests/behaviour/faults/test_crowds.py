"""Many at once: connections that never finish a request, and sites that try again at the same moment."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fault_world import Result, ServerProcess, Sites
from harness.processes import Nursery, wait_until

from atoll.errors import ServerUnreachable
from atoll.testing.run import status
from atoll.worker.session import session

CONNECTIONS = 500


@pytest.mark.slow
@pytest.mark.covers("F24")
@pytest.mark.parametrize("begin", [b"POST /v1/wor", b"PUT /v1/tickets/1/parts/0 HTTP/1.1\r\nHost: here\r\n"])
def test_500_unfinished_requests_slow_no_other_site(
    nursery: Nursery, tmp_path: Path, undisturbed: Result, begin: bytes
) -> None:
    """While 500 connections each hold back the end of a request, a run at the same server goes on to its bits.

    Its requests are answered at once, and the server closes the unfinished ones after 10 s, by itself.
    """
    with ServerProcess(nursery, tmp_path) as server, contextlib.ExitStack() as stack:
        wait_until(lambda: "listening" in server.log.read_text(), "the server")
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            for _ in range(CONNECTIONS)
        ]
        begun_s = time.monotonic()
        for connection in slow:
            connection.sendall(begin)
        sites = Sites(server.url, tmp_path)
        answered_s = []
        for _ in range(20):
            asked_s = time.monotonic()
            status(server.url)
            answered_s.append(time.monotonic() - asked_s)
        assert sorted(answered_s)[10] < 1.0
        sites.join()
        for connection in slow:
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):  # an error, if any; then the end
                    pass
        assert time.monotonic() - begun_s < 60
        assert server.process.wait() == 0
    Result(tmp_path).require_same(undisturbed, sites)


@pytest.mark.covers("F37")
def test_sites_that_fail_together_come_back_apart() -> None:
    """200 sites whose server goes away at one moment do not ask again at one moment: each wait is drawn at random.

    The first wait is 0.25 s ± 25 %: from 0.1875 s to 0.3125 s. At most a third of 200 waits are in one eighth of that.
    """
    waits = [_first_wait_s() for _ in range(200)]
    assert 0.1875 <= min(waits) < 0.21
    assert 0.29 < max(waits) <= 0.3125
    assert max(Counter(int((wait - 0.1875) / (0.125 / 8)) for wait in waits).values()) < 200 / 3


def _first_wait_s() -> float:
    """How long a site waits after its first failed attempt."""
    waited: list[float] = []
    patient = SimpleNamespace(most_s=3600.0, seconds=0.0, patience="", was_answered=True)
    site: Any = SimpleNamespace(
        silence=patient,
        site="a",
        reconnections=0,
        http=SimpleNamespace(lease="1"),
        look_for_server=lambda: None,
        _closing=SimpleNamespace(wait=waited.append),
        _failed=lambda error: None,
        _fatal=None,
    )
    attempts = session._Attempts(site, 5, "ask")
    attempts.begin()
    attempts.failed(ServerUnreachable("It does not answer."))
    attempts.begin()
    return waited[0]
