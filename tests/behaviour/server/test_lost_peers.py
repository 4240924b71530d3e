"""What peers do to their connections is not the operator's business: no traceback, no error in the log."""

from __future__ import annotations

import logging
import socket
import struct
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from harness.processes import wait_until
from kit.by_hand import put_part
from kit.requests import begin_request
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.protocol import routes
from atoll.store.file_slots import PULL, WRITER
from atoll.worker.exchange.participation import Participation, take_part

BEGUN = 300_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    torch.manual_seed(0)
    with plain_server(tmp_path, nn.Linear(4000, 2000)) as server:
        yield server


@pytest.fixture
def place(server: atoll.Server, tmp_path: Path) -> Participation:
    return take_part(server.url, "a", folder=tmp_path / "w")


def reset(raw: socket.socket) -> None:
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


def require_quiet(server: atoll.Server, log: pytest.LogCaptureFixture) -> None:
    """After one more request: whatever was logged about those before is in the log by then."""
    with urllib.request.urlopen(f"{server.url}{routes.HEALTH}") as answer:
        assert answer.read() == b"ok\n"
    assert [record for record in log.records if record.levelno >= logging.WARNING or record.exc_info] == []


ENDS = pytest.mark.parametrize("end", [socket.socket.close, reset])


@ENDS
@pytest.mark.parametrize("more", [{}, {"Connection": "keep-alive"}])  # the bypass, and aiohttp's streams
def test_a_worker_that_goes_away_within_a_part(
    server: atoll.Server,
    place: Participation,
    caplog: pytest.LogCaptureFixture,
    more: dict[str, str],
    end: Callable[[socket.socket], None],
) -> None:
    caplog.set_level(logging.INFO)
    ticket = place.exchange.ask().ticket
    assert ticket is not None
    nbytes = place.exchange.outbox.layout.parts[0].nbytes + routes.DIGEST_BYTES
    run = server._require_run()
    raw = put_part(server.port, place.session.http.lease, ticket.id, 0, nbytes, bytes(BEGUN), **more)
    wait_until(lambda: run.bytes_up == BEGUN, "the bytes")
    end(raw)
    slot = run.store.tickets.spool(ticket.id).slot
    wait_until(lambda: not slot.holds[WRITER], "the end of the request")
    require_quiet(server, caplog)


@ENDS
@pytest.mark.parametrize("more", [{}, {"Range": "bytes=0-900000"}])
def test_a_worker_that_goes_away_within_a_download(
    server: atoll.Server,
    place: Participation,
    caplog: pytest.LogCaptureFixture,
    more: dict[str, str],
    end: Callable[[socket.socket], None],
) -> None:
    caplog.set_level(logging.INFO)
    ticket = place.exchange.ask().ticket
    assert ticket is not None
    path = routes.VERSION_DATA.format(fragment=0, version=0, digest=ticket.base.digest)
    for _ in range(3):
        raw = begin_request(server.port, f"GET {path}", **more)
        raw.recv(100)
        end(raw)
    slots = server._require_run().store.slots
    wait_until(lambda: not any(who[PULL] for who in slots.holds().values() if PULL in who), "the end")
    require_quiet(server, caplog)


@pytest.mark.parametrize(
    "words", [b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"SSH-2.0-x\r\n"]
)
def test_answers_other_protocols_with_an_http_error_and_goes_on(
    server: atoll.Server, caplog: pytest.LogCaptureFixture, words: bytes
) -> None:
    caplog.set_level(logging.INFO)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
        raw.sendall(words)
        assert raw.recv(100).startswith(b"HTTP/1.")
    require_quiet(server, caplog)
