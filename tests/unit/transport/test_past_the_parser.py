"""Parts that go past the HTTP parser, and what does not: real sockets on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from blake3 import blake3

from atoll.tensors.chunks import CHUNK_BYTES
from atoll.transport import request_body, serve_range
from atoll.transport.request_body import SLICE_S, BodyInterceptor, Fill, in_thread, interceptor_of, receive_part
from atoll.transport.serve_range import serve_file

PATH = b"/v1/tickets/7/parts/3"


def head(method: bytes, path: bytes, *lines: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    return b"\r\n".join((b" ".join((method, path, version)), b"Host: here", *lines)) + b"\r\n\r\n"


class Sink:
    """Memory for one part, filled a few bytes at a time."""

    def __init__(self, nbytes: int) -> None:
        self.content, self.filled = bytearray(nbytes), 0

    @property
    def complete(self) -> bool:
        return self.filled == len(self.content)

    def take(self, fill: Fill) -> None:
        while not self.complete:
            count = fill(memoryview(self.content)[self.filled : self.filled + 1000])
            if not count:
                return
            self.filled += count


class Host:
    """A server with a `BodyInterceptor`: takes parts, serves a file, answers POSTs with their bodies."""

    def __init__(
        self,
        folder: Path,
        take: Callable[[web.Request, Host], Awaitable[web.StreamResponse]],
        part_bytes: int = 0,
        file: bytes = b"file",
        idle_s: float = 30.0,
    ) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.part_bytes, self.idle_s = part_bytes, idle_s
        self.sinks: list[Sink] = []
        self.bypassed: list[bool] = []
        self.errors: list[BaseException] = []
        self.revoked = False
        self.file = folder / "file"
        self.file.write_bytes(file)
        self._take = take

    async def put(self, request: web.Request) -> web.StreamResponse:
        front = interceptor_of(request)
        self.bypassed.append(front.body_bytes > 0)
        try:
            return await self._take(request, self)
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            front.end_part()

    async def get(self, request: web.Request) -> web.StreamResponse:
        with self.file.open("rb") as file:
            return await serve_file(
                request, file.fileno(), self.file.stat().st_size, "d", pool=self.pool, idle_timeout_s=self.idle_s,
                revoked=lambda: self.revoked, on_bytes=lambda _: None,
            )  # fmt: skip

    async def post(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"posted " + await request.read())

    async def receive(self, request: web.Request) -> bytes:
        sink = Sink(self.part_bytes)
        self.sinks.append(sink)
        return await receive_part(request, sink, pool=self.pool, idle_timeout_s=self.idle_s, on_bytes=lambda _: None)


async def keep(request: web.Request, host: Host) -> web.StreamResponse:
    digest = await host.receive(request)
    return web.Response(text="good" if digest == blake3(host.sinks[-1].content).digest() else "damaged")


async def refuse(_: web.Request, __: Host) -> web.StreamResponse:
    return web.Response(status=409, text="refused")


@contextlib.asynccontextmanager
async def served(host: Host) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_put("/v1/tickets/{ticket}/parts/{part}", host.put)
    app.router.add_get("/file", host.get)
    app.router.add_post("/post", host.post)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    make = runner.server
    assert make is not None
    server = await asyncio.get_running_loop().create_server(lambda: BodyInterceptor(make()), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await runner.cleanup()
        host.pool.shutdown()


def part(content: bytes) -> bytes:
    body = content + blake3(content).digest()
    return head(b"PUT", PATH, b"Content-Length: %d" % len(body)) + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
    length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
    return int(lines[0].split()[1]), await reader.readexactly(length)


async def ended(reader: asyncio.StreamReader) -> None:
    """Wait for the end of the connection; nothing more comes."""
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""


def talk(host: Host, *turns: tuple[bytes, list[tuple[int, bytes]]], ends: bool = False) -> None:
    """Send bytes over one connection, and await the answers to them, turn by turn; then its end, if it is to end."""

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for data, answers in turns:
            writer.write(data)
            await writer.drain()
            assert [await answer(reader) for _ in answers] == answers
        if ends:
            await ended(reader)

    run(host, story)


def run(host: Host, story: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]) -> None:
    async def main() -> None:
        async with served(host) as port, asyncio.timeout(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                await story(reader, writer)
            finally:
                writer.close()

    asyncio.run(main())


def content_of(nbytes: int) -> bytes:
    return bytes(index * 7 % 251 for index in range(nbytes))


class Plain(asyncio.Transport):
    """A transport of which a test says what is left to be written; its socket is `sock`."""

    sock: socket.socket
    aborted = False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.sock if name == "socket" else default

    def abort(self) -> None:
        self.aborted = True


# -- which requests go past the parser


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (head(b"PUT", PATH, b"Content-Length: 48"), 48),
        (head(b"PUT", PATH, b"content-length:48", b"Authorization: Bearer x"), 48),
        (head(b"GET", b"/v1/run", b"Range: bytes=0-9"), 0),
        # a body that is not one number of bytes, named once
        (head(b"PUT", PATH), None),
        (head(b"PUT", PATH, b"Content-Length: 0"), None),
        (head(b"PUT", PATH, b"Content-Length: +48"), None),
        (head(b"PUT", PATH, b"Content-Length: 0x30"), None),
        (head(b"PUT", PATH, b"Content-Length: 48, 48"), None),
        (head(b"PUT", PATH, b"Content-Length: 48", b"Content-Length: 48"), None),
        (head(b"PUT", PATH, b"Content-Length: 48", b"Transfer-Encoding: chunked"), None),
        (head(b"PUT", PATH, b"Content-Length: 48", b"Expect: 100-continue"), None),
        (head(b"PUT", PATH, b"Content-Length: 48", b"Connection: close"), None),
        (head(b"PUT", PATH, b"Content-Length: 48", b"Content-Encoding: gzip"), None),
        # headers that two parsers may read in two ways
        (head(b"PUT", PATH, b"Content-Length : 48"), None),
        (head(b"PUT", PATH, b"X: y", b" Content-Length: 48", b"Content-Length: 9"), None),
        (head(b"PUT", PATH, b"Content-Length: 48", b"X: a\nY: b"), None),
        (head(b"PUT", PATH, b"Content-Length: 48", b"X: a\rY: b"), None),
        (head(b"PUT", PATH, b"Content-Length: 48", b"no colon"), None),
        (head(b"PUT", PATH, b"Content-Length: 48", version=b"HTTP/1.0"), None),
        # other requests
        (head(b"GET", b"/v1/run", b"Content-Length: 5"), None),
        (head(b"POST", b"/v1/heartbeat", b"Content-Length: 5"), None),
        (head(b"PUT", b"/v1/tickets/7/complete", b"Content-Length: 5"), None),
        (head(b"PUT", PATH + b"/x", b"Content-Length: 5"), None),
        (head(b"put", PATH, b"Content-Length: 5"), None),
    ],
)
def test_only_simple_requests_bypass_the_parser(data: bytes, expected: int | None) -> None:
    """Only a plain upload of a part, or a GET without a body, is handled past aiohttp's HTTP parser. All other requests
    go to aiohttp.
    """
    assert request_body._body_bytes(data) == expected


@pytest.mark.parametrize("cuts", ["whole", "bytes", "head"])
def test_parts_and_downloads_may_alternate_on_one_connection(tmp_path: Path, cuts: str) -> None:
    """Uploads of parts and downloads may alternate on one connection, however their bytes are cut."""
    host = Host(tmp_path, keep, 3001, content_of(3 * CHUNK_BYTES + 5))

    turns: list[tuple[bytes, list[tuple[int, bytes]]]] = []
    for data, expected in [(part(content_of(3001)), b"good"), (head(b"GET", b"/file"), host.file.read_bytes())] * 3:
        end = data.index(b"\r\n\r\n") + 4
        pieces = {"whole": [data], "bytes": [bytes([byte]) for byte in data], "head": [data[:end], data[end:]]}[cuts]
        turns += [(piece, []) for piece in pieces] + [(b"", [(200, expected)])]
    talk(host, *turns)
    assert host.bypassed == [True] * 3


def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    """If a client sends several requests without waiting for the answers, the server answers them in order."""
    host = Host(tmp_path, keep, 10, content_of(2 * CHUNK_BYTES))

    both = head(b"GET", b"/file") + part(content_of(10))
    talk(host, (both * 2, [(200, host.file.read_bytes()), (200, b"good")] * 2))
    assert host.bypassed == [True, True]


def test_a_part_waits_for_its_turn(tmp_path: Path) -> None:
    """Nothing of a part is read before the requests that came before it are answered."""
    # 40 requests come before the part at once. aiohttp holds the connection at 32 of them and lets it go on at 16.
    seen: list[tuple[int, int, bool]] = []

    async def wait(request: web.Request, host: Host) -> web.StreamResponse:
        front = interceptor_of(request)
        before, port = front.body_bytes, request.transport.get_extra_info("sockname")[1]
        arrived.set()
        await sent_all.wait()
        # anything that would read does so in the passes of the loop in which other connections are answered
        for _ in range(3):
            other_reader, other = await asyncio.open_connection("127.0.0.1", port)
            other.write(head(b"GET", b"/file"))
            assert await answer(other_reader) == (200, b"file")
            other.close()
        seen.append((before, front.body_bytes, request.transport.is_reading()))
        return await keep(request, host)

    host = Host(tmp_path, wait, 3001)
    sent = part(content_of(3001))
    arrived, sent_all = asyncio.Event(), asyncio.Event()

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head(b"GET", b"/file") * 40 + sent[:200])
        for _ in range(40):
            assert await answer(reader) == (200, b"file")
        await arrived.wait()
        writer.write(sent[200:] + head(b"GET", b"/file"))
        sent_all.set()
        assert await answer(reader) == (200, b"good")
        assert await answer(reader) == (200, b"file")

    run(host, story)
    assert seen == [(3033, 3033, False)]


def test_the_end_of_a_part_respects_aiohttps_pause(tmp_path: Path) -> None:
    """If aiohttp has paused the reading of a connection, the end of an uploaded part does not resume it."""
    reading: list[bool] = []

    async def hold(request: web.Request, host: Host) -> web.StreamResponse:
        front, transport = interceptor_of(request), request.transport
        front._body_left, front._early = 0, b""
        transport.pause_reading()
        front.end_part()
        reading.append(transport.is_reading())
        transport.resume_reading()
        reading.append(transport.is_reading())
        return web.Response(text="held")

    talk(Host(tmp_path, hold), (part(content_of(10)), [(200, b"held")]))
    assert reading == [False, True]


def test_another_request_leaves_the_fast_path(tmp_path: Path) -> None:
    """After any other request, all bytes of a connection go through aiohttp's HTTP parser."""
    # A body that looks like the head of a part stays a body.
    host = Host(tmp_path, keep, 3001)

    smuggled = part(b"x" * 5)  # a body that looks like the head of a part stays a body
    talk(
        host,
        (head(b"POST", b"/post", b"Content-Length: %d" % len(smuggled)), []),
        (smuggled, [(200, b"posted " + smuggled)]),
        (part(content_of(3001)), [(200, b"good")]),
    )
    assert host.bypassed == [False]
    assert len(host.sinks) == 1


@pytest.mark.parametrize("begin", [b"GET /file HTTP/1.1\nHost: here\n\n", b"GET /file HTTP/1.1\r\nHost: here\n"])
def test_odd_line_ends_are_left_to_aiohttp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    """If a request head has unusual line ends, aiohttp gets its bytes and answers at once.

    The bypass would wait for the end of a head that never comes.
    """
    monkeypatch.setattr(request_body, "HEAD_S", 3600.0)
    host = Host(tmp_path, keep)

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        assert (await reader.read(100)).startswith(b"HTTP/1.")

    run(host, story)


@pytest.mark.parametrize("together", [True, False])
def test_a_large_head_is_left_to_aiohttp(tmp_path: Path, together: bool) -> None:
    """A large request head is left to aiohttp, whether it arrives at once or in pieces."""
    host = Host(tmp_path, keep, 3001)
    lines = [b"X-%d: %s" % (index, b"y" * 1000) for index in range(20)]
    sent = part(content_of(3001)).replace(b"Host: here", b"Host: here\r\n" + b"\r\n".join(lines))

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not together:
            writer.write(sent[:17_000])
            await writer.drain()
            while not fronts[0]._passes:
                await asyncio.sleep(0.01)
            sent_rest = sent[17_000:]
        writer.write(sent if together else sent_rest)
        assert await answer(reader) == (200, b"good")

    fronts: list[BodyInterceptor] = []
    made = BodyInterceptor.connection_made

    def remember(self: BodyInterceptor, transport: asyncio.BaseTransport) -> None:
        fronts.append(self)
        made(self, transport)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BodyInterceptor, "connection_made", remember)
        run(host, story)
    assert host.bypassed == [False]


# -- peers that are refused, stand still, go away or are slow


@pytest.mark.parametrize("together", [True, False])
def test_a_refused_part_is_discarded(tmp_path: Path, together: bool) -> None:
    """The bytes of a refused part are read and discarded, and the connection can be used for the next request."""
    host = Host(tmp_path, refuse)
    sent = part(content_of(200_000))
    end = sent.index(b"\r\n\r\n") + 4

    refused, file = (409, b"refused"), (200, b"file")
    rest = head(b"GET", b"/file")
    talk(
        host,
        *([(sent + rest, [refused, file])] if together else [(sent[:end], [refused]), (sent[end:] + rest, [file])]),
    )


def test_a_failing_sink_leaves_the_connection_usable(tmp_path: Path) -> None:
    """If storing a part fails before its end, the connection can still be used for the next request."""

    class Full(Exception):
        pass

    async def fail(request: web.Request, host: Host) -> web.StreamResponse:
        front = interceptor_of(request)
        assert front is not None

        class Failing:
            complete = False

            def take(self, fill: Fill) -> None:
                if fill(memoryview(bytearray(1000))):
                    raise Full

        with contextlib.suppress(Full):
            await receive_part(request, Failing(), pool=host.pool, idle_timeout_s=30.0, on_bytes=lambda _: None)
        return web.Response(status=507, text="full")

    host = Host(tmp_path, fail)

    talk(host, (part(content_of(50_000)) + head(b"GET", b"/file"), [(507, b"full"), (200, b"file")]))


def test_a_leaving_client_ends_its_part(tmp_path: Path) -> None:
    """If a client closes its connection within a part, the request for this part ends, and the part stays
    incomplete.
    """
    host = Host(tmp_path, keep, 5000)

    async def story(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(part(content_of(5000))[:2000])
        await writer.drain()
        writer.close()
        while not host.errors:
            await asyncio.sleep(0.01)

    run(host, story)
    assert isinstance(host.errors[0], (ConnectionError, asyncio.CancelledError))
    assert not host.sinks[0].complete


def test_a_stalled_part_is_aborted(tmp_path: Path) -> None:
    """If no byte of a part arrives within the idle timeout, the server closes the connection."""
    host = Host(tmp_path, keep, 5000, idle_s=0.05)
    talk(host, (part(content_of(5000))[:2000], []), ends=True)
    assert not host.sinks[0].complete


def test_a_stalled_reader_is_disconnected(tmp_path: Path) -> None:
    """If a client reads nothing of its download within the idle timeout, the server closes the connection."""
    host = Host(tmp_path, keep, file=bytes(64 * CHUNK_BYTES), idle_s=0.05)  # more than any socket buffers

    async def main() -> None:
        async with served(host) as port, asyncio.timeout(30):
            with socket.create_connection(("127.0.0.1", port)) as slow:
                slow.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(slow, head(b"GET", b"/file"))
                while len(asyncio.all_tasks()) > 1:  # the connection's own task ends when it is broken off
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_peer_that_withholds_bytes_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a client does not send the rest of a refused part, the server closes the connection."""
    monkeypatch.setattr(request_body, "DISCARD_S", 0.05)
    talk(Host(tmp_path, refuse, 5000), (part(content_of(5000))[:2000], [(409, b"refused")]), ends=True)


def test_a_part_read_elsewhere_is_aborted(tmp_path: Path) -> None:
    """If other code has read some bytes of a part, the server closes the connection and does not accept the part.

    A body with a gap is never received, whatever makes the transport read again.
    """

    async def meddle(request: web.Request, host: Host) -> web.StreamResponse:
        front = interceptor_of(request)
        front.data_received(b"x")
        return await keep(request, host)

    talk(Host(tmp_path, meddle, 3001), (part(content_of(3001)), []), ends=True)


def test_a_formerly_slow_reader_may_idle() -> None:
    """A client that once read too slowly may be idle later without being disconnected."""
    # Guards against a check of slow readers that goes on when all is written: it would find that nothing moves.

    async def main() -> None:
        transport, front = Plain(), BodyInterceptor(asyncio.Protocol(), idle_timeout_s=0.01)
        front.connection_made(transport)
        front.pause_writing()
        front.resume_writing()
        await asyncio.sleep(0.1)
        assert not transport.aborted
        front.connection_lost(None)

    asyncio.run(main())


def test_a_version_taken_away_is_not_sent_further(tmp_path: Path) -> None:
    """If the server takes an old version away from a download to reuse its file, the rest of the bytes is not sent."""
    host = Host(tmp_path, keep, file=bytes(64 * CHUNK_BYTES))

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head(b"GET", b"/file"))
        got = len(await reader.readexactly(CHUNK_BYTES))
        host.revoked = True
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                got += len(data)
        assert got < 64 * CHUNK_BYTES

    run(host, story)


def test_bytes_in_the_transport_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that the transport has not sent yet are not overwritten."""
    # From Python 3.12 on, asyncio queues the memory that it gets. Before, it copied what it could not send.
    content = bytes(range(256)) * 64
    (tmp_path / "file").write_bytes(content)
    monkeypatch.setattr(serve_range, "RUN_BYTES", 1000)
    queued = list[memoryview]()

    async def write(response: web.StreamResponse, data: memoryview) -> None:
        queued.append(data)

    monkeypatch.setattr(web.StreamResponse, "write", write)

    async def main() -> None:
        request = make_mocked_request("GET", "/")
        request.transport.get_write_buffer_size.side_effect = lambda: 1
        with ThreadPoolExecutor(1) as pool, (tmp_path / "file").open("rb") as file:
            await serve_file(
                request,
                file.fileno(),
                len(content),
                "digest",
                pool=pool,
                idle_timeout_s=60.0,
                revoked=lambda: False,
                on_bytes=lambda nbytes: None,
            )

    asyncio.run(main())
    assert b"".join(queued) == content


@pytest.mark.covers("F24")
@pytest.mark.parametrize("begin", [b"PUT /v1/tic", b"POST /v1/workers HTTP/1.1\r\nHost: here\r\n", b"G", b""])
def test_slow_request_heads_delay_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    """Connections that never finish a request head do not delay other requests, and the server closes these
    connections.
    """
    # There are 500 of them. Requests in between are answered.
    host = Host(tmp_path, keep, 3001)

    async def main() -> None:
        async with served(host) as port, asyncio.timeout(60):
            monkeypatch.setattr(request_body, "HEAD_S", 3600.0)
            for _ in range(20):  # these stay; what they began does not count against the others
                (await asyncio.open_connection("127.0.0.1", port))[1].write(begin)
            monkeypatch.setattr(request_body, "HEAD_S", 0.2)
            slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(500)]
            for _, writer in slow:
                writer.write(begin)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(3):
                writer.write(part(content_of(3001)))
                assert await answer(reader) == (200, b"good")
            for slow_reader, slow_writer in slow:
                await ended(slow_reader)
                slow_writer.close()
            writer.write(part(content_of(3001)))  # the timer was for the head only
            assert await answer(reader) == (200, b"good")
            writer.close()

    asyncio.run(main())


def test_a_fast_upload_shares_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread stops reading from a fast connection after a time slice, so that others get their turn."""
    # Guards against one fast peer that keeps a thread of the pool for its whole part.
    ours, theirs = socket.socketpair()
    front, room, now_s = BodyInterceptor(asyncio.Protocol()), memoryview(bytearray(40)), [0.0]
    front._body_left = 100
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(bytes(100))
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: now_s[0])
            fill = front.filler(ours)
            assert fill(room) == 40
            now_s[0] = SLICE_S
            assert fill(room) == 0  # others have their turn, though there is more
            assert front.filler(ours)(room) == 40
    assert front._body_left == 20


def test_a_slow_part_keeps_no_thread(tmp_path: Path) -> None:
    """A slow part does not keep a thread of the pool."""
    # There are two threads and three parts that have begun and stand still. A fourth part still goes through.
    host = Host(tmp_path, keep, 5000)

    async def main() -> None:
        async with served(host) as port, asyncio.timeout(30):
            slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            for _, writer in slow:
                writer.write(part(content_of(5000))[:2000])
            while sum(sink.filled > 0 for sink in host.sinks) < 3:
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(part(content_of(5000)))
            assert await answer(reader) == (200, b"good")
            for slow_reader, slow_writer in slow:
                slow_writer.write(part(content_of(5000))[2000:])
                assert await answer(slow_reader) == (200, b"good")
                slow_writer.close()
            writer.close()

    asyncio.run(main())


def test_a_cancelled_request_waits_for_its_thread() -> None:
    """A cancelled request ends only when its thread has ended."""
    # The socket of the request is closed next. A thread that still runs would read from another file that gets the
    # socket's descriptor number.
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert may_end.wait(60)

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            task = asyncio.create_task(in_thread(pool, work))
            while not begun.is_set():
                await asyncio.sleep(0.001)
            try:
                for _ in range(2):
                    task.cancel()
                    done, _ = await asyncio.wait([task], timeout=0.05)
                    assert not done
            finally:
                may_end.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
