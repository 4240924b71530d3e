"""What peers do to their connections is not the operator's business: no traceback, no error in the log."""

from __future__ import annotations

import logging
import socket
import struct
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.processes import wait_until
from kit.requests import begin_request, get
from kit.servers import plain_server
from kit.wire import WireSite
from torch import nn

import atoll

BEGUN = 300_000


@contextmanager
def quiet_server(folder: Path, log: pytest.LogCaptureFixture) -> Iterator[atoll.Server]:
    """A server that logs no warning and no error until it has ended, and with it every request."""
    log.set_level(logging.INFO)
    with plain_server(folder, nn.Linear(4000, 2000)) as server:
        yield server
        with urllib.request.urlopen(f"{server.url}/healthz") as answer:
            assert answer.read() == b"ok\n"
    assert [record for record in log.records if record.levelno >= logging.WARNING or record.exc_info] == []


def reset(raw: socket.socket) -> None:
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


ENDS = pytest.mark.parametrize("end", [socket.socket.close, reset])


@ENDS
@pytest.mark.parametrize("more", [{}, {"Connection": "keep-alive"}])  # the bypass, and aiohttp's streams
def test_a_worker_that_goes_away_within_a_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: dict[str, str], end: Callable[[socket.socket], None]
) -> None:
    with quiet_server(tmp_path, caplog) as server:
        update = WireSite(server.url).train()
        raw = update.begin(0, update.body(0)[:BEGUN], **more)
        wait_until(lambda: server.status().bytes_up == BEGUN, "the bytes")
        end(raw)
        assert update.put(0)[0] == 204  # nothing of the first request is in its way


@ENDS
@pytest.mark.parametrize("more", [{}, {"Range": "bytes=0-900000"}])
def test_a_worker_that_goes_away_within_a_download(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: dict[str, str], end: Callable[[socket.socket], None]
) -> None:
    with quiet_server(tmp_path, caplog) as server:
        path = "/v1/fragments/0/versions/0"
        digest = get(server.url, path)[1]["digest"]
        for _ in range(3):
            raw = begin_request(server.port, f"GET {path}/{digest}", **more)
            raw.recv(100)
            end(raw)


@pytest.mark.parametrize(
    "words", [b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"SSH-2.0-x\r\n"]
)
def test_answers_other_protocols_with_an_http_error_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, words: bytes
) -> None:
    with (
        quiet_server(tmp_path, caplog) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw,
    ):
        raw.sendall(words)
        assert raw.recv(100).startswith(b"HTTP/1.")
