"""Readers that stall in the middle of a version while rounds go on: the version's own bytes, or none."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from kit.servers import new_server
from torch import nn

import atoll
from atoll.protocol import routes


def stalled_get(server: atoll.Server, path: str) -> tuple[socket.socket, bytes]:
    """Ask for a path over a socket with a small buffer, read a little, and stop reading."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(30.0)
    raw.connect(("127.0.0.1", server.port))
    raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    return raw, raw.recv(1000)


def rest_of(raw: socket.socket, got: bytes) -> bytes:
    try:
        while chunk := raw.recv(1 << 16):
            got += chunk
    except ConnectionResetError:
        pass
    finally:
        raw.close()
    return got.partition(b"\r\n\r\n")[2]


def wait_until_durable(server: atoll.Server, version: int) -> None:
    wait_until(lambda: server.status().durable_version == version, f"version {version} to be durable")


@pytest.mark.covers("P3")
def test_a_stalled_reader_gets_its_own_version_or_is_cut_off(tmp_path: Path) -> None:
    """Readers stall in versions 0, 1 and 2; two may be pinned beyond those that are kept: the oldest is revoked."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"algorithm.name": "fedavg", "disk.keep_versions": 1, "disk.max_pinned_versions": 2}
    model = nn.Linear(3000, 1000, bias=False)  # 12 MB: more than the sockets between the two can hold
    readers: list[tuple[socket.socket, bytes]] = []
    versions: list[bytes] = []
    with new_server(model, **{"network.port": 0, "disk.state_dir": tmp_path / "state"}, **options) as server:
        with atoll.functional.Client(server.url, site="a", folder=tmp_path / "w") as client:
            for number in range(8):
                assert client.next_round() == number + 1
                state = client.pull()
                if number < 3:
                    (base,) = (tmp_path / "w").rglob("base.safetensors")
                    note = json.loads(base.with_suffix(".json").read_text())
                    versions.append(base.read_bytes())
                    path = routes.VERSION_DATA.format(fragment=0, version=number, digest=note["digest"])
                    readers.append(stalled_get(server, path))
                client.submit({name: tensor + 1.0 for name, tensor in state.items()})
                # a version that is kept because the next is not durable yet would take the place of a pull
                wait_until_durable(server, number + 1)
            client.next_round()
            bodies = [rest_of(*reader) for reader in readers]
    for body, version in zip(bodies, versions, strict=True):
        assert version.startswith(body), "bytes of another version arrived"
    assert [body == version for body, version in zip(bodies, versions, strict=True)] == [False, True, True]
