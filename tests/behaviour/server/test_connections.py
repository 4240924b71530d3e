"""Connections that are too many, break off, stall or send too much: they disturb no other and take little memory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import json
import logging
import os
import resource
import socket
import ssl
import struct
import tracemalloc
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from harness.processes import wait_until
from kit.manual_site import ManualSite
from kit.requests import answer, begin_request, version_path
from kit.servers import plain_server
from kit.tls import write_certificate
from kit.wire import DIGEST_BYTES, WireSite
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.transport import listener


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers take 20 connections."""
    monkeypatch.setattr(
        "atoll.server.serve.raise_files_limit", lambda: listener.RESERVED_FILES + 20 * listener.FILES_OF_ONE
    )


def healthy(connection: http.client.HTTPConnection) -> bool:
    connection.request("GET", "/healthz")
    return connection.getresponse().read() == b"ok\n"


def wait_until_let_in(connect: Callable[[], http.client.HTTPConnection]) -> None:
    def let_in() -> bool:
        with contextlib.closing(connect()) as late, contextlib.suppress(OSError, http.client.HTTPException):
            return healthy(late)
        return False

    wait_until(let_in, "a connection")


def test_clients_stay_connected_at_the_limit(few: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server with its maximum of 20 connections closes every further one, and logs this once."""
    # The connected worker is still answered. Once other clients have closed their connections, the server accepts new
    # ones.
    with plain_server(tmp_path, nn.Linear(2, 2)) as server, contextlib.ExitStack() as stack:
        worker = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        stack.callback(worker.close)
        assert healthy(worker)
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(30)]
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


def test_accepts_connections_after_a_failed_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the event loop once cannot watch a new socket, because a limit is reached, the server logs it and accepts the
    connection later.
    """
    # This happens when a user's limit of epoll watches is reached.
    add_reader, failed = asyncio.SelectorEventLoop.add_reader, list[int]()

    def fails_once(loop: asyncio.SelectorEventLoop, file: Any, *call: Any) -> None:
        if not failed:
            failed.append(errno.ENOSPC)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add_reader(loop, file, *call)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_reader", fails_once)
    with plain_server(tmp_path, nn.Linear(2, 2)) as server:
        worker = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        assert healthy(worker)
        worker.close()
    assert "a connection could not be accepted: No space left on device" in caplog.text


def test_the_server_raises_its_limit_of_open_files() -> None:
    """The server raises its soft limit of open files to the hard limit, or to `MOST_FILES` if that is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = listener.MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, listener.MOST_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1, hard))
        assert listener.raise_files_limit() == most
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_unfinished_tls_handshake_frees_its_connection(few: None, tmp_path: Path) -> None:
    """If clients go away before they finish the TLS handshake, their connections do not count against the limit for
    ever. A new client is accepted.
    """
    context = ssl._create_unverified_context()
    with plain_server(tmp_path, nn.Linear(2, 2), **write_certificate(tmp_path)) as server:
        for word in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
            for one in silent:
                one.sendall(word)
                one.close()
        port = server.port
        wait_until_let_in(lambda: http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=context))


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


ENDS: tuple[Callable[[socket.socket], None], ...] = (socket.socket.close, reset)


def test_a_worker_may_disconnect_during_an_upload(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a worker disconnects in the middle of an upload, the server logs no warning, and accepts the part when it is
    sent again.
    """
    # The two kinds of headers take two ways through the server: one past the HTTP parser, one through aiohttp's
    # streams.
    with quiet_server(tmp_path, caplog) as server:
        update = WireSite(server.url).train()
        for headers, end in product(({}, {"Connection": "keep-alive"}), ENDS):
            had = server.status().bytes_up
            raw = update.begin(0, update.body(0)[:BEGUN], **headers)
            wait_until(lambda: server.status().bytes_up == had + BEGUN, "the bytes")  # noqa: B023
            end(raw)
            assert update.put(0)[0] == 204  # nothing of the first request is in its way


def test_a_worker_may_disconnect_during_a_download(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a worker disconnects in the middle of a download, the server logs no warning and no error, and stays
    healthy.
    """
    with quiet_server(tmp_path, caplog) as server:
        path = version_path(server.url)
        for headers, end, _ in product(({}, {"Range": "bytes=0-900000"}), ENDS, range(3)):
            raw = begin_request(server.port, f"GET {path}", **headers)
            raw.recv(100)
            end(raw)


def test_answers_other_protocols_with_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a client sends TLS, SSH or malformed HTTP to the plain HTTP port, the server answers in HTTP and logs no
    warning.
    """
    with quiet_server(tmp_path, caplog) as server:
        for words in (b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"SSH-2.0-x\r\n"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
                raw.sendall(words)
                assert raw.recv(100).startswith(b"HTTP/1.")


PART_BYTES, MOST_PARTS = 2**16, 4
"""Parts of one site that the server takes at a time over one connection."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    settings = {"network.part_bytes": PART_BYTES, "network.connections": 1}
    with plain_server(tmp_path, nn.Linear(300, 300), **settings) as server:
        yield server


@pytest.mark.covers("D1", "F37")
def test_a_site_may_upload_four_parts_at_once(server: atoll.Server) -> None:
    """While a site uploads four parts, the server answers a fifth with 429 (busy)."""
    # A new upload of one of the four replaces the earlier one.
    update = WireSite(server.url).train()
    with contextlib.ExitStack() as ends:
        first = [ends.enter_context(update.begin(part, b"x")) for part in range(MOST_PARTS)]
        wait_until(lambda: server.status().bytes_up == len(first), "their first bytes")
        status, told = answer(update.begin(MOST_PARTS, b"x"))
        assert status == 429
        assert "4 uploads by a are running already" in told["message"]
        ends.enter_context(update.begin(0, b"x"))  # again: it takes the place of the one before
        with contextlib.suppress(ConnectionResetError):
            assert first[0].recv(1) == b""
        wait_until(lambda: server.status().bytes_up == len(first) + 1, "its first byte")
    update.submit()  # nothing of it is in the way of an update
    wait_until(lambda: server.status().fragments[0].version == 1, "the round")


@pytest.mark.parametrize("nbytes", [1, PART_BYTES, 2 * (PART_BYTES + DIGEST_BYTES)])
def test_an_upload_must_be_one_whole_part(server: atoll.Server, nbytes: int) -> None:
    """If the Content-Length of an upload differs from the length of one part with its digest, the server answers
    400.
    """
    status, told = answer(WireSite(server.url).train().begin(0, nbytes=nbytes))
    assert status == 400
    assert f"The Content-Length is {nbytes} bytes, not {PART_BYTES + DIGEST_BYTES}" in told["message"]


@pytest.mark.covers("L9")
def test_an_uploaded_part_counts_as_a_heartbeat(tmp_path: Path) -> None:
    """If a site has sent no heartbeat but uploads a part, the status no longer says that its heartbeat is missing."""
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
def test_an_unread_request_body_gets_a_small_buffer(server: atoll.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a GET request announces a body that is never read, the server's read buffer for it stays at 128 KiB.

    Only uploads of parts under TLS need larger buffers.
    """
    from atoll.transport import serve_range

    limits: list[int] = []
    serve = serve_range.serve_file

    async def spied(request: web.Request, *arguments: Any, **options: Any) -> web.StreamResponse:
        limits.append(request.content.get_read_buffer_limits()[1])
        return await serve(request, *arguments, **options)

    monkeypatch.setattr("atoll.server.http.byte_routes.serve_file", spied)
    path = version_path(server.url)
    with begin_request(server.port, f"GET {path}", Content_Length=1000000) as raw:
        assert raw.recv(100).startswith(b"HTTP/1.1 200 ")
    assert limits == [2**17]


@pytest.mark.covers("D1")
@pytest.mark.parametrize("wide", [0, 1])
def test_tls_transfers_models_and_updates_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide: int) -> None:
    """The model and the update arrive unchanged over TLS, and the buffers of each connection keep to their limit."""
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

    monkeypatch.setattr("atoll.server.http.byte_routes.receive_part", spied)
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


def rest_of(raw: socket.socket, got: bytes) -> bytes:
    everything = bytearray(got)  # megabytes in thousands of pieces: bytes would be copied for each
    with raw, contextlib.suppress(ConnectionResetError):
        while chunk := raw.recv(1 << 16):
            everything += chunk
    return bytes(everything.partition(b"\r\n\r\n")[2])


@pytest.mark.covers("P3")
def test_the_oldest_stalled_download_is_cut_off(tmp_path: Path) -> None:
    """If stalled downloads keep too many old versions alive, the server cuts off the oldest download."""
    # More than `disk.max_pinned_versions`. Three downloads stall, of versions 0, 1 and 2, and two old versions may be
    # pinned. The other two downloads arrive whole.
    model = nn.Linear(3000, 1000, bias=False)  # 12 MB: more than the sockets between the two can hold
    readers: list[tuple[socket.socket, bytes]] = []
    versions: list[bytes] = []
    with plain_server(tmp_path, model, **{"disk.keep_versions": 1, "disk.max_pinned_versions": 2}) as server:
        with ManualSite(server.url, site="a", folder=tmp_path / "w") as client:
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
def test_a_client_that_never_reads_is_disconnected(tmp_path: Path, tls: bool) -> None:
    """If a client sends requests but never reads the answers, the server closes its connection after
    `network.idle_timeout_s`.
    """
    options = write_certificate(tmp_path) if tls else {}
    with plain_server(tmp_path, nn.Linear(2, 2), **{"network.idle_timeout_s": 0.2}, **options) as server:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(30)
        raw.connect(("127.0.0.1", server.port))
        talk = ssl._create_unverified_context().wrap_socket(raw) if tls else raw
        with talk, pytest.raises((ConnectionError, ssl.SSLError)):
            ask_for_ever(talk)


CONNECTIONS, MOST_BYTES = 50, 105_000
"""Of Python's memory, for each connection; asyncio's own buffer has 262,144."""


def test_an_idle_tls_connection_has_small_buffers(tmp_path: Path) -> None:
    """After the handshake, an idle TLS connection takes at most `MOST_BYTES` of the server's memory.

    Any machine that reaches the port can open many such connections before it shows a token.
    """
    context = ssl._create_unverified_context()
    with plain_server(tmp_path, nn.Linear(2, 2), **write_certificate(tmp_path)) as server:
        with contextlib.ExitStack() as opened:

            def shake() -> None:
                raw = socket.create_connection(("127.0.0.1", server.port), timeout=30)
                opened.enter_context(context.wrap_socket(raw))

            shake()
            tracemalloc.start()
            opened.callback(tracemalloc.stop)
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(CONNECTIONS):
                shake()
            each = (tracemalloc.get_traced_memory()[0] - before) / CONNECTIONS
    assert 2**13 < each <= MOST_BYTES, each
