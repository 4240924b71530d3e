"""What a faulty site can make the server hold: so many parts at once, and little of what nobody asked for."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme
from aiohttp import web
from harness.processes import wait_until
from kit.servers import new_server
from safetensors import safe_open
from torch import nn

import atoll
from atoll.protocol import messages, routes
from atoll.protocol.values import UpdateInfo
from atoll.server.http.receive_parts import PARTS_PER_CONNECTION
from atoll.tensors.module_tensors import named_tensors
from atoll.transport import receive_upload, serve_range
from atoll.transport.http_client import Http
from atoll.worker.exchange.participation import take_part

PART_BYTES, DIGEST_BYTES = 2**16, routes.DIGEST_BYTES


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "rounds.sites": 1,
        "network.part_bytes": PART_BYTES,
        "disk.min_free_bytes": 0,
        "network.connections": 1,
    }
    with new_server(
        nn.Linear(300, 300),
        **{"network.port": 0, "algorithm.name": "fedavg", "disk.state_dir": tmp_path / "state"},
        **options,
    ) as server:
        yield server


@contextlib.contextmanager
def begun(server: atoll.Server, lease: str, ticket: int, part: int) -> Iterator[socket.socket]:
    """A part of which one byte is sent."""
    path = routes.PART.format(ticket=ticket, part=part)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20.0) as raw:
        raw.sendall(
            f"PUT {path} HTTP/1.1\r\nHost: localhost\r\n{routes.LEASE_HEADER}: {lease}\r\n"
            f"Content-Length: {PART_BYTES + routes.DIGEST_BYTES}\r\n\r\nx".encode()
        )
        yield raw


@pytest.mark.covers("D1", "F37")
def test_a_site_sends_only_so_many_parts_at_once(server: atoll.Server, tmp_path: Path) -> None:
    place = take_part(server.url, "a", folder=tmp_path / "w")
    granted = place.exchange.ask().ticket
    assert granted is not None
    lease, ticket = place.session.http.lease, granted.id
    with contextlib.ExitStack() as ends:
        first = [ends.enter_context(begun(server, lease, ticket, part)) for part in range(PARTS_PER_CONNECTION)]
        wait_until(lambda: server.status().bytes_up == len(first), "their first bytes")
        with begun(server, lease, ticket, PARTS_PER_CONNECTION) as refused:
            told = refused.recv(2**16)
        assert told.startswith(b"HTTP/1.1 429 ")
        assert "a has 4 parts on their way" in json.loads(told.partition(b"\r\n\r\n")[2])["message"]
        ends.enter_context(begun(server, lease, ticket, 0))  # again: it takes the place of the one before
        with contextlib.suppress(ConnectionResetError):
            assert first[0].recv(1) == b""
        wait_until(lambda: server.status().bytes_up == len(first) + 1, "its first byte")
    # nothing of it is in the way of an update
    tensors = named_tensors(nn.Linear(300, 300))[0]
    place.exchange.pull(granted.base, tensors)
    place.exchange.form(granted, tensors, UpdateInfo(1.0, 1, {}))
    place.exchange.deliver()
    wait_until(lambda: server.status().fragments[0].version == 1, "the round")
    place.leave()


@pytest.mark.parametrize("nbytes", [1, PART_BYTES, 2 * (PART_BYTES + DIGEST_BYTES)])
def test_a_request_brings_one_whole_part(server: atoll.Server, tmp_path: Path, nbytes: int) -> None:
    place = take_part(server.url, "a", folder=tmp_path / "w")
    granted = place.exchange.ask().ticket
    assert granted is not None
    with socket.create_connection(("127.0.0.1", server.port), timeout=20.0) as raw:
        raw.sendall(
            f"PUT {routes.PART.format(ticket=granted.id, part=0)} HTTP/1.1\r\nHost: localhost\r\n"
            f"{routes.LEASE_HEADER}: {place.session.http.lease}\r\nContent-Length: {nbytes}\r\n\r\n".encode()
        )
        told = raw.recv(2**16)
    assert told.startswith(b"HTTP/1.1 400 ")
    message = json.loads(told.partition(b"\r\n\r\n")[2])["message"]
    assert f"a Content-Length of {nbytes}, not {PART_BYTES + DIGEST_BYTES}" in message
    place.leave()


@pytest.mark.covers("D1")
def test_holds_little_of_an_unread_body(server: atoll.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against buffers that are large for every request, since those of parts under TLS have to be."""
    limits: list[int] = []
    serve = serve_range.serve_file

    async def spied(request: web.Request, *arguments: Any, **options: Any) -> web.StreamResponse:
        limits.append(request.content.get_read_buffer_limits()[1])
        return await serve(request, *arguments, **options)

    monkeypatch.setattr("atoll.server.http.byte_routes.serve_file", spied)
    http = Http(server.url)
    manifest = http.get(routes.MANIFEST.format(fragment=0, version=0), messages.Manifest)
    http.close()
    path = routes.VERSION_DATA.format(fragment=0, version=0, digest=manifest.digest)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20.0) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n".encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 200 ")
    assert limits == [2**17]


def test_only_so_many_transfers_move_large_runs() -> None:
    with contextlib.ExitStack() as ends:
        wide = [ends.enter_context(receive_upload._run_bytes()) for _ in range(receive_upload.WIDE)]
        with receive_upload._run_bytes() as one_more:
            assert (set(wide), one_more) == ({receive_upload.WIDE_BYTES}, receive_upload.NARROW_BYTES)
    with receive_upload._run_bytes() as later:
        assert later == receive_upload.WIDE_BYTES


@pytest.mark.covers("D1")
@pytest.mark.parametrize("wide", [0, 1])
def test_under_tls_the_bytes_are_the_same_in_runs_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide: int
) -> None:
    """And what is held for each of them keeps to it."""
    monkeypatch.setattr(receive_upload, "WIDE", wide)
    limits: set[int] = set()
    receive = receive_upload.receive_part

    async def spied(request: web.Request, *arguments: Any, **options: Any) -> bytes:
        digest = await receive(request, *arguments, **options)
        limits.add(request.content.get_read_buffer_limits()[1])
        return digest

    written: set[int] = set()
    write = web.StreamResponse.write

    async def spied_write(response: web.StreamResponse, data: memoryview) -> None:
        written.add(len(data))
        await write(response, data)

    monkeypatch.setattr("atoll.server.http.receive_parts.receive_part", spied)
    monkeypatch.setattr(web.StreamResponse, "write", spied_write)
    authority = trustme.CA()
    cert = authority.issue_cert("localhost")
    cert.private_key_pem.write_to_path(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(0o600)
    (tmp_path / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("ATOLL_TLS_CA", str(tmp_path / "ca.pem"))
    torch.manual_seed(0)
    model = nn.Linear(1000, 1000)
    options: dict[str, Any] = {
        "rounds.total": 1,
        "rounds.sites": 1,
        "network.part_bytes": 2**20 + 2**10,
        "network.connections": 1,
    }
    options |= {
        "network.tls_cert": tmp_path / "cert.pem",
        "network.tls_key": tmp_path / "key.pem",
        "algorithm.outer_optimizer.lr": 1.0,
    }
    with new_server(
        model, **{"network.port": 0, "algorithm.name": "fedavg", "disk.state_dir": tmp_path / "state"}, **options
    ) as server:
        with atoll.join(f"https://localhost:{server.port}", site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                copy = nn.Linear(1000, 1000)
                fl_round.load_into(copy)
                assert torch.equal(copy.weight, model.weight)
                with torch.no_grad():
                    copy.weight.zero_()
                fl_round.submit(copy)
        server.run()
        with safe_open(server.exports / "model.safetensors", "pt") as file:
            assert file.get_tensor("weight").count_nonzero() == 0
    assert max(written) == serve_range.RUN_BYTES
    assert limits == ({receive_upload.WIDE_BYTES} if wide else {2 * 2**16})
