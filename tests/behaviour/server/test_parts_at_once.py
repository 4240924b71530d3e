"""What a faulty site can make the server hold: so many parts at once, and little of what no request asked for."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from harness.processes import wait_until
from kit.by_hand import formed, part_body, put_part
from kit.requests import answer, begin_request
from kit.servers import plain_server
from kit.tls import write_certificate
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.protocol import messages, routes
from atoll.server.http.receive_parts import PARTS_PER_CONNECTION
from atoll.transport import receive_upload, serve_range
from atoll.transport.http_client import Http
from atoll.worker.exchange.participation import Participation, take_part

PART_BYTES, DIGEST_BYTES = 2**16, routes.DIGEST_BYTES


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    settings = {"network.part_bytes": PART_BYTES, "network.connections": 1}
    with plain_server(tmp_path, nn.Linear(300, 300), **settings) as server:
        yield server


@pytest.fixture
def place(server: atoll.Server, tmp_path: Path) -> Iterator[Participation]:
    place = take_part(server.url, "a", folder=tmp_path / "w")
    yield place
    place.leave()


@pytest.mark.covers("D1", "F37")
def test_a_site_sends_only_so_many_parts_at_once(server: atoll.Server, place: Participation) -> None:
    lease, ticket = place.session.http.lease, formed(place).id

    def begun(part: int) -> socket.socket:
        return put_part(server.port, lease, ticket, part, PART_BYTES + DIGEST_BYTES, b"x")

    with contextlib.ExitStack() as ends:
        first = [ends.enter_context(begun(part)) for part in range(PARTS_PER_CONNECTION)]
        wait_until(lambda: server.status().bytes_up == len(first), "their first bytes")
        status, told = answer(begun(PARTS_PER_CONNECTION))
        assert status == 429
        assert "a has 4 parts on their way" in told["message"]
        ends.enter_context(begun(0))  # again: it takes the place of the one before
        with contextlib.suppress(ConnectionResetError):
            assert first[0].recv(1) == b""
        wait_until(lambda: server.status().bytes_up == len(first) + 1, "its first byte")
    place.exchange.deliver()  # nothing of it is in the way of an update
    wait_until(lambda: server.status().fragments[0].version == 1, "the round")


@pytest.mark.parametrize("nbytes", [1, PART_BYTES, 2 * (PART_BYTES + DIGEST_BYTES)])
def test_a_request_brings_one_whole_part(server: atoll.Server, place: Participation, nbytes: int) -> None:
    status, told = answer(put_part(server.port, place.session.http.lease, formed(place).id, 0, nbytes))
    assert status == 400
    assert f"a Content-Length of {nbytes}, not {PART_BYTES + DIGEST_BYTES}" in told["message"]


@pytest.mark.covers("L9")
def test_a_part_that_has_arrived_is_a_sign_of_life(tmp_path: Path) -> None:
    """The request for it is one, too; the site sends nothing else meanwhile."""
    silent = {"network.heartbeat_interval_s": 0, "network.heartbeat_timeout_s": 0}
    with plain_server(tmp_path, nn.Linear(64, 64), **silent) as server:
        place = take_part(server.url, "a", folder=tmp_path / "w")
        ticket, body = formed(place), part_body(place, 0)
        run = server._require_run()
        before_s = run.state.seen_s["a"]
        raw = put_part(server.port, place.session.http.lease, ticket.id, 0, len(body))
        wait_until(lambda: run.state.seen_s["a"] > before_s, "the sign of life that every request is")
        asked_s = run.state.seen_s["a"]
        raw.sendall(body)
        wait_until(lambda: run.state.seen_s["a"] > asked_s, "the sign of life of the part", 15.0)
        assert answer(raw)[0] == 204
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
    with begin_request(server.port, f"GET {path}", Content_Length=1000000) as raw:
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
    tls = write_certificate(tmp_path)
    monkeypatch.setenv("ATOLL_TLS_CA", str(tmp_path / "ca.pem"))
    model = nn.Linear(1000, 1000)
    options: dict[str, Any] = {"rounds.total": 1, "network.part_bytes": 2**20 + 2**10, "network.connections": 1}
    with plain_server(tmp_path, model, **options, **tls) as server:
        with atoll.join(f"https://localhost:{server.port}", site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                copy = fl_round.load_into(nn.Linear(1000, 1000))
                assert torch.equal(copy.weight, model.weight)
                nn.init.zeros_(copy.weight)
                fl_round.submit(copy)
        server.run()
        assert load_file(server.exports / "model.safetensors")["weight"].count_nonzero() == 0
    assert max(written) == serve_range.TLS_RUN_BYTES
    assert limits == ({receive_upload.WIDE_BYTES} if wide else {2 * 2**16})
