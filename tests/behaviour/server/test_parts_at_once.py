"""What a faulty site can make the server hold: so many parts at once, and little of what no request asked for."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from harness.processes import wait_until
from kit.requests import answer, begin_request, get
from kit.servers import plain_server
from kit.tls import write_certificate
from kit.wire import DIGEST_BYTES, WireSite
from safetensors.torch import load_file
from torch import nn

import atoll

PART_BYTES, MOST_PARTS = 2**16, 4
"""Parts of one site that the server takes at a time over one connection."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    settings = {"network.part_bytes": PART_BYTES, "network.connections": 1}
    with plain_server(tmp_path, nn.Linear(300, 300), **settings) as server:
        yield server


@pytest.mark.covers("D1", "F37")
def test_a_site_sends_only_so_many_parts_at_once(server: atoll.Server) -> None:
    update = WireSite(server.url).train()
    with contextlib.ExitStack() as ends:
        first = [ends.enter_context(update.begin(part, b"x")) for part in range(MOST_PARTS)]
        wait_until(lambda: server.status().bytes_up == len(first), "their first bytes")
        status, told = answer(update.begin(MOST_PARTS, b"x"))
        assert status == 429
        assert "a is sending 4 parts already" in told["message"]
        ends.enter_context(update.begin(0, b"x"))  # again: it takes the place of the one before
        with contextlib.suppress(ConnectionResetError):
            assert first[0].recv(1) == b""
        wait_until(lambda: server.status().bytes_up == len(first) + 1, "its first byte")
    update.submit()  # nothing of it is in the way of an update
    wait_until(lambda: server.status().fragments[0].version == 1, "the round")


@pytest.mark.parametrize("nbytes", [1, PART_BYTES, 2 * (PART_BYTES + DIGEST_BYTES)])
def test_a_request_brings_one_whole_part(server: atoll.Server, nbytes: int) -> None:
    status, told = answer(WireSite(server.url).train().begin(0, nbytes=nbytes))
    assert status == 400
    assert f"a Content-Length of {nbytes} bytes, not {PART_BYTES + DIGEST_BYTES}" in told["message"]


@pytest.mark.covers("L9")
def test_a_part_that_has_arrived_is_a_sign_of_life(tmp_path: Path) -> None:
    """The request for it is one, too; the site sends nothing else. A second of silence is worth a word here."""
    settings = {"network.heartbeat_interval_s": 0.4, "network.heartbeat_timeout_s": 0}
    with plain_server(tmp_path, nn.Linear(64, 64), **settings) as server:

        def silent() -> bool:
            return "no heartbeat from a" in server.status().fragments[0].reason

        update = WireSite(server.url).train()
        raw = update.begin(0)
        wait_until(silent, "the word")
        raw.sendall(update.body(0))
        assert answer(raw)[0] == 204
        assert not silent()


@pytest.mark.covers("D1")
def test_holds_little_of_an_unread_body(server: atoll.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against buffers that are large for every request, since those of parts under TLS have to be."""
    from atoll.transport import serve_range

    limits: list[int] = []
    serve = serve_range.serve_file

    async def spied(request: web.Request, *arguments: Any, **options: Any) -> web.StreamResponse:
        limits.append(request.content.get_read_buffer_limits()[1])
        return await serve(request, *arguments, **options)

    monkeypatch.setattr("atoll.server.http.byte_routes.serve_file", spied)
    path = "/v1/fragments/0/versions/0"
    digest = get(server.url, path)[1]["digest"]
    with begin_request(server.port, f"GET {path}/{digest}", Content_Length=1000000) as raw:
        assert raw.recv(100).startswith(b"HTTP/1.1 200 ")
    assert limits == [2**17]


def test_only_so_many_transfers_move_large_runs() -> None:
    from atoll.transport import request_body

    with contextlib.ExitStack() as ends:
        wide = [ends.enter_context(request_body._run_bytes()) for _ in range(request_body.WIDE)]
        with request_body._run_bytes() as one_more:
            assert (set(wide), one_more) == ({request_body.WIDE_BYTES}, request_body.NARROW_BYTES)
    with request_body._run_bytes() as later:
        assert later == request_body.WIDE_BYTES


@pytest.mark.covers("D1")
@pytest.mark.parametrize("wide", [0, 1])
def test_under_tls_the_bytes_are_the_same_in_runs_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide: int
) -> None:
    """And what is held for each of them keeps to it."""
    from atoll.transport import request_body, serve_range

    monkeypatch.setattr(request_body, "WIDE", wide)
    limits: set[int] = set()
    receive = request_body.receive_part

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
    assert limits == ({request_body.WIDE_BYTES} if wide else {2 * 2**16})
