"""Many at once: connections that never finish a request, and sites that try again at the same moment."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fault_world import Result, ServerProcess, Sites
from harness.processes import Nursery, wait_until

from atoll.errors import AtollError, ServerUnreachable, TransferStalled
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


@pytest.mark.covers("F37", "F14")
def test_a_cut_connection_that_worked_costs_no_long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a connection that worked for 30 s was cut, a site asks again within 0.25 s, each time, also in a crowd."""
    waits = [_waits_s([30.0, 30.0, 30.0, 30.0], monkeypatch) for _ in range(50)]
    cut = [wait for each in waits for wait in each]
    assert 0 <= min(cut) < 0.05
    assert 0.2 < max(cut) <= 0.25
    assert max(Counter(int(wait / (0.25 / 8)) for wait in cut).values()) < 200 / 3


@pytest.mark.covers("F37")
def test_pauses_grow_while_attempts_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the next attempts fail at once, or get no answer, each pause is twice the last one, up to 8 s ± 25 %."""
    cut, *refused = _waits_s([30.0] + [0.0] * 8, monkeypatch)
    assert cut <= 0.25
    for wait, expected in zip(refused, (0.25, 0.5, 1, 2, 4, 8, 8, 8), strict=True):
        assert 0.75 * expected <= wait <= 1.25 * expected
    silent = _waits_s([30.0] * 3, monkeypatch, TransferStalled("It is silent."))
    for wait, expected in zip(silent, (0.25, 0.5, 1), strict=True):
        assert 0.75 * expected <= wait <= 1.25 * expected


@pytest.mark.covers("F37", "F14")
def test_the_end_of_a_silence_costs_no_long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a site looks for a silent server, pauses grow; when its connection breaks, they begin anew."""
    silent, broken = TransferStalled("It is silent."), ServerUnreachable("It was cut.")
    looks: list[AtollError | None] = [silent, silent, silent, broken, broken, None]
    waits = _waits_s([30.0], monkeypatch, silent, looks)
    # after the attempt, after three looks in vain, then after two broken connections
    for wait, expected in zip(waits, (0.25, 0.5, 1, 2, 0.25, 0.5), strict=True):
        assert 0.75 * expected <= wait <= 1.25 * expected


def _first_wait_s() -> float:
    """How long a site waits after its first failed attempt."""
    with pytest.MonkeyPatch.context() as patch:
        return _waits_s([0.0], patch)[0]


def _waits_s(
    lasted_s: list[float],
    patch: pytest.MonkeyPatch,
    error: AtollError | None = None,
    looks: Sequence[AtollError | None] = (),
) -> list[float]:
    """How long a site waits after each attempt, of which each fails after so many seconds, and each look in vain."""
    waited, now_s, ends = list[float](), 100.0, iter([None, *looks])

    def look() -> None:
        if (end := next(ends, None)) is not None:
            raise end

    patch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now_s))
    patient = SimpleNamespace(
        most_s=3600.0, seconds=0.0, patience="", was_answered=True, is_too_long=False, require_patience=lambda *_: None
    )
    site: Any = SimpleNamespace(
        silence=patient,
        site="a",
        reconnections=0,
        http=SimpleNamespace(lease="1"),
        look_for_server=look,
        _closing=SimpleNamespace(wait=waited.append),
        _failed=lambda error: None,
        _fatal=None,
    )
    attempts = session._Attempts(site, None, "ask")
    attempts.begin()
    for seconds in lasted_s:
        now_s += seconds
        attempts.failed(error or ServerUnreachable("The connection was cut."))
        attempts.begin()
    return waited
