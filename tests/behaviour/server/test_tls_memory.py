"""What a TLS connection costs the server before it shows a token: any machine that reaches the port can open many."""

from __future__ import annotations

import contextlib
import socket
import ssl
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from kit import FederatedSites, serve
from kit.tls import write_certificate

import atoll

CONNECTIONS = 50
MOST_BYTES = 105_000
"""Of Python's memory, for each connection; asyncio's own buffer has 262,144."""


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of a server with a certificate that sites accept, and a token."""
    monkeypatch.setenv("ATOLL_TLS_CA", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("ATOLL_TOKEN", "t0ken")
    return write_certificate(tmp_path, "127.0.0.1")


def shaken(server: atoll.Server, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection behind its handshake, on which nothing was asked."""
    return context.wrap_socket(
        socket.create_connection(("127.0.0.1", server.port), timeout=30), server_hostname="127.0.0.1"
    )


def test_keeps_a_small_buffer_for_a_tls_connection_that_asked_nothing(tmp_path: Path, tls: dict[str, Any]) -> None:
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with serve(tmp_path, **tls) as server, contextlib.ExitStack() as opened:
        opened.enter_context(shaken(server, context))
        tracemalloc.start()
        opened.callback(tracemalloc.stop)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(CONNECTIONS):
            opened.enter_context(shaken(server, context))
        after, _ = tracemalloc.get_traced_memory()
        each = (after - before) / CONNECTIONS
    assert 2**14 < each <= MOST_BYTES, each


def test_a_peer_that_speaks_no_tls_or_leaves_does_not_disturb_the_others(tmp_path: Path, tls: dict[str, Any]) -> None:
    with serve(tmp_path, **tls) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain:
            plain.sendall(b"GET /v1/run HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while plain.recv(2**16):
                pass
        socket.create_connection(("127.0.0.1", server.port), timeout=30).close()
        FederatedSites(server.url, tmp_path).join()
        assert server.status().finished
