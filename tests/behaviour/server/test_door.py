"""Connections beyond what the server has descriptors for are closed, and leave it able to work."""

from __future__ import annotations

import contextlib
import http.client
import resource
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.processes import wait_until
from kit.servers import plain_server
from kit.tls import write_certificate
from torch import nn

from atoll.server import serve
from atoll.transport import listener

SILENT = 30


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers take 20 connections."""
    monkeypatch.setattr(serve, "raise_files_limit", lambda: listener.RESERVED_FILES + 20 * listener.FILES_OF_ONE)


def healthy(connection: http.client.HTTPConnection) -> bool:
    connection.request("GET", "/healthz")
    return connection.getresponse().read() == b"ok\n"


def wait_until_let_in(connect: Callable[[], http.client.HTTPConnection]) -> None:
    def let_in() -> bool:
        with contextlib.closing(connect()) as late, contextlib.suppress(OSError, http.client.HTTPException):
            return healthy(late)
        return False

    wait_until(let_in, "a connection")


def trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_connected_clients_stay_and_others_come_in_when_there_is_room(
    few: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with plain_server(tmp_path, nn.Linear(2, 2)) as server, contextlib.ExitStack() as stack:
        worker = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        stack.callback(worker.close)
        assert healthy(worker)
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(SILENT)]
        for turned_away in silent[19:]:
            turned_away.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                assert turned_away.recv(1) == b""
        assert healthy(worker)
        said = [record for record in caplog.records if "ulimit -n" in record.getMessage()]
        assert [record.getMessage().partition(",")[0] for record in said] == ["there are 20 connections"]
        for one in silent:
            one.close()
        wait_until_let_in(lambda: http.client.HTTPConnection("127.0.0.1", server.port, timeout=30))


def test_as_many_files_as_the_system_allows_may_be_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = listener.MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, listener.MOST_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1, hard))
        assert listener.raise_files_limit() == most
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_unfinished_handshake_takes_no_place_for_ever(few: None, tmp_path: Path) -> None:
    context = trusting()
    with plain_server(tmp_path, nn.Linear(2, 2), **write_certificate(tmp_path)) as server:
        for word in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
            for one in silent:
                one.sendall(word)
                one.close()
        port = server.port
        wait_until_let_in(lambda: http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=context))
