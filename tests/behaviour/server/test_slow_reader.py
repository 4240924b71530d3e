"""Readers that stall: in the middle of a version while rounds go on, or at answers that they never read."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from pathlib import Path

import pytest
from harness.processes import wait_until
from kit.client import Client
from kit.requests import begin_request
from kit.servers import plain_server
from kit.tls import write_certificate
from torch import nn


def rest_of(raw: socket.socket, got: bytes) -> bytes:
    with raw, contextlib.suppress(ConnectionResetError):
        while chunk := raw.recv(1 << 16):
            got += chunk
    return got.partition(b"\r\n\r\n")[2]


@pytest.mark.covers("P3")
def test_a_stalled_reader_gets_its_own_version_or_is_cut_off(tmp_path: Path) -> None:
    """Readers stall in versions 0, 1 and 2; two may be pinned beyond those that are kept: the oldest is revoked."""
    model = nn.Linear(3000, 1000, bias=False)  # 12 MB: more than the sockets between the two can hold
    readers: list[tuple[socket.socket, bytes]] = []
    versions: list[bytes] = []
    with plain_server(tmp_path, model, **{"disk.keep_versions": 1, "disk.max_pinned_versions": 2}) as server:
        with Client(server.url, site="a", folder=tmp_path / "w") as client:
            for number in range(8):
                assert client.next_round() == number + 1
                state = client.pull()
                if number < 3:
                    (base,) = (tmp_path / "w").rglob("base.safetensors")
                    note = json.loads(base.with_suffix(".json").read_text())
                    versions.append(base.read_bytes())
                    path = f"/v1/fragments/0/versions/{number}/{note['digest']}"
                    raw = begin_request(server.port, f"GET {path}", receive_bytes=4096, Connection="close")
                    readers.append((raw, raw.recv(1000)))
                client.submit({name: tensor + 1.0 for name, tensor in state.items()})
                # a version that is kept because the next is not durable yet would take the place of a pull
                wait_until(lambda: server.status().durable_version == number + 1, "it to be durable")  # noqa: B023
            client.next_round()
            bodies = [rest_of(*reader) for reader in readers]
    for body, version in zip(bodies, versions, strict=True):
        assert version.startswith(body), "bytes of another version arrived"
    assert [body == version for body, version in zip(bodies, versions, strict=True)] == [False, True, True]


def ask_for_ever(talk: socket.socket) -> None:
    while True:
        talk.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)


@pytest.mark.parametrize("tls", [False, True])
def test_ends_a_client_that_never_reads_its_answers(tmp_path: Path, tls: bool) -> None:
    options = write_certificate(tmp_path) if tls else {}
    with plain_server(tmp_path, nn.Linear(2, 2), **{"network.idle_timeout_s": 0.2}, **options) as server:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(30)
        raw.connect(("127.0.0.1", server.port))
        talk = ssl._create_unverified_context().wrap_socket(raw) if tls else raw
        with talk, pytest.raises((ConnectionError, ssl.SSLError)):
            ask_for_ever(talk)
