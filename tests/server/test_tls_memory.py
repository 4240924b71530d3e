"""What a TLS connection costs the server before it shows a token: anyone who reaches the port can open many."""

from __future__ import annotations

import contextlib
import socket
import ssl
import tracemalloc
from pathlib import Path

import pytest
import trustme
from kit import FederatedSites, serve

import atoll

CONNECTIONS = 50
MOST_BYTES = 105_000
"""Of Python's memory, for each connection; asyncio's own buffer has 262,144."""


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    """A certificate for 127.0.0.1 in `tmp_path`, which sites accept, and a token."""
    authority = trustme.CA()
    cert = authority.issue_cert("127.0.0.1")
    cert.private_key_pem.write_to_path(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(0o600)
    (tmp_path / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("ATOLL_TLS_CA", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("ATOLL_TOKEN", "t0ken")
    return authority


def shaken(server: atoll.Server, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection behind its handshake, on which nothing was asked."""
    return context.wrap_socket(
        socket.create_connection(("127.0.0.1", server.port), timeout=30), server_hostname="127.0.0.1"
    )


def test_keeps_a_small_buffer_for_a_tls_connection_that_asked_nothing(tmp_path: Path, authority: trustme.CA) -> None:
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with (
        serve(
            tmp_path, **{"network.tls_cert": tmp_path / "cert.pem", "network.tls_key": tmp_path / "key.pem"}
        ) as server,
        contextlib.ExitStack() as opened,
    ):
        opened.enter_context(shaken(server, context))
        tracemalloc.start()
        opened.callback(tracemalloc.stop)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(CONNECTIONS):
            opened.enter_context(shaken(server, context))
        after, _ = tracemalloc.get_traced_memory()
        each = (after - before) / CONNECTIONS
    assert 2**14 < each <= MOST_BYTES, each


def test_trains_over_tls_with_that_buffer(tmp_path: Path, authority: trustme.CA) -> None:
    """Parts of several buffers, up and down."""
    with serve(
        tmp_path,
        **{
            "network.tls_cert": tmp_path / "cert.pem",
            "network.tls_key": tmp_path / "key.pem",
            "network.part_bytes": 2**20,
        },
    ) as server:
        sites = FederatedSites(server.url, tmp_path)
        sites.join()
        assert server.status().finished
        assert set(sites.trained.values()) == {1}


def test_a_peer_that_speaks_no_tls_or_leaves_does_not_disturb_the_others(tmp_path: Path, authority: trustme.CA) -> None:
    with serve(
        tmp_path, **{"network.tls_cert": tmp_path / "cert.pem", "network.tls_key": tmp_path / "key.pem"}
    ) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain:
            plain.sendall(b"GET /v1/run HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while plain.recv(2**16):
                pass
        socket.create_connection(("127.0.0.1", server.port), timeout=30).close()
        FederatedSites(server.url, tmp_path).join()
        assert server.status().finished
