"""A reader that stalls in the middle of a version while rounds go on: the version's own bytes, or none."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.wire import routes


def stalled_get(server: atoll.Server, path: str, *, first_bytes: int) -> tuple[socket.socket, bytes]:
    """Ask for a path over a socket with a small buffer, read a little, and stop reading."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(30.0)
    raw.connect(("127.0.0.1", server.port))
    raw.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    got = b""
    while len(got) < first_bytes:
        got += raw.recv(first_bytes - len(got))
    return raw, got


def rest_of(raw: socket.socket, got: bytes) -> bytes:
    try:
        while chunk := raw.recv(1 << 16):
            got += chunk
    except ConnectionResetError:
        pass
    finally:
        raw.close()
    return got.partition(b"\r\n\r\n")[2]


def rounds(server: atoll.Server, folder: Path, count: int) -> None:
    with atoll.Client(server.url, site="a", folder=folder) as client:
        for _ in range(count):
            assert client.next_round() is not None
            state = client.pull()
            client.submit({name: tensor + 1.0 for name, tensor in state.items()})
        client.next_round()


@pytest.mark.covers("P3", "F24")
@pytest.mark.parametrize(("rounds_meanwhile", "whole"), [(2, True), (8, False)])
def test_a_stalled_reader_gets_its_own_version_or_is_cut_off(
    tmp_path: Path, rounds_meanwhile: int, whole: bool
) -> None:
    """Two versions are kept and two more may be pinned: after eight rounds the oldest pull is revoked."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"algorithm": "fedavg", "keep_versions": 2, "max_pins": 2, "idle_timeout_s": 60.0}
    model = nn.Linear(3000, 1000, bias=False)  # 12 MB: more than the sockets between the two can hold
    with atoll.Server(model, port=0, state_dir=tmp_path / "state", **options) as server:
        with atoll.Client(server.url, site="a", folder=tmp_path / "w") as client:
            client.next_round()
            client.pull()
        base = next((tmp_path / "w").rglob("base.safetensors")).read_bytes()
        session_digest = next((tmp_path / "w").rglob("base.json")).read_text()
        digest = session_digest.split('"digest": "')[1][:64]
        path = routes.VERSION_DATA.format(fragment=0, version=0, digest=digest)
        raw, got = stalled_get(server, path, first_bytes=1000)
        rounds(server, tmp_path / "w", rounds_meanwhile)
        body = rest_of(raw, got)
    assert base.startswith(body), "bytes of another version arrived"
    assert (body == base) is whole
