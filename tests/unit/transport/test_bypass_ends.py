"""Past the HTTP parser: who is refused, stands still, goes away or is slow disturbs nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path

import pytest
from aiohttp import web
from bypass_world import Host, Plain, answer, content_of, head, keep, part, refuse, run, served

from atoll.tensors.chunks import CHUNK_BYTES
from atoll.transport import request_body
from atoll.transport.request_body import SLICE_S, BodyInterceptor, Fill, interceptor_of, receive_part


@pytest.mark.parametrize("together", [True, False])
def test_a_refused_part_is_read_away_and_the_connection_goes_on(tmp_path: Path, together: bool) -> None:
    host = Host(tmp_path, refuse)
    host.file.write_bytes(b"file")
    sent = part(content_of(200_000))
    end = sent.index(b"\r\n\r\n") + 4

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if together:
            writer.write(sent + head(b"GET", b"/file"))
            assert await answer(reader) == (409, b"refused")
        else:
            writer.write(sent[:end])
            assert await answer(reader) == (409, b"refused")
            writer.write(sent[end:] + head(b"GET", b"/file"))
        assert await answer(reader) == (200, b"file")

    run(host, story)


def test_a_sink_that_fails_within_a_part_leaves_the_connection_usable(tmp_path: Path) -> None:
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
    host.file.write_bytes(b"file")

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(part(content_of(50_000)) + head(b"GET", b"/file"))
        assert await answer(reader) == (507, b"full")
        assert await answer(reader) == (200, b"file")

    run(host, story)


def test_a_client_that_leaves_within_a_part_ends_it(tmp_path: Path) -> None:
    host = Host(tmp_path, keep)
    host.part_bytes = 5000

    async def story(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(part(content_of(5000))[:2000])
        await writer.drain()
        writer.close()
        while not host.errors:
            await asyncio.sleep(0.01)

    run(host, story)
    assert isinstance(host.errors[0], (ConnectionError, asyncio.CancelledError))
    assert not host.sinks[0].complete


def test_a_part_that_stands_still_is_broken_off(tmp_path: Path) -> None:
    host = Host(tmp_path, keep)
    host.part_bytes, host.idle_s = 5000, 0.05

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(part(content_of(5000))[:2000])
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""

    run(host, story)
    assert not host.sinks[0].complete


def test_breaks_off_a_reader_that_stands_still(tmp_path: Path) -> None:
    host = Host(tmp_path, keep)
    host.idle_s = 0.05
    host.file.write_bytes(bytes(64 * CHUNK_BYTES))  # more than any socket buffers

    async def main() -> None:
        async with served(host) as port, asyncio.timeout(30):
            with socket.create_connection(("127.0.0.1", port)) as slow:
                slow.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(slow, head(b"GET", b"/file"))
                while len(asyncio.all_tasks()) > 1:  # the connection's own task ends when it is broken off
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_peer_that_withholds_the_rest_of_a_refused_part_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "DISCARD_S", 0.05)
    host = Host(tmp_path, refuse)
    host.part_bytes = 5000

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(part(content_of(5000))[:2000])
        assert (await answer(reader))[0] == 409
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""

    run(host, story)


def test_a_part_of_which_something_else_has_read_is_broken_off(tmp_path: Path) -> None:
    """Whatever makes the transport read again: a body with a hole in it is not received."""

    async def meddle(request: web.Request, host: Host) -> web.StreamResponse:
        front = interceptor_of(request)
        assert front is not None
        front.data_received(b"x")
        return await keep(request, host)

    host = Host(tmp_path, meddle)
    host.part_bytes = 3001

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(part(content_of(3001)))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""

    run(host, story)


def test_a_reader_that_once_fell_behind_may_be_idle_later() -> None:
    """Guards against a look after the reader that goes on when all is written: it would find nothing moving."""

    async def main() -> None:
        transport, front = Plain(), BodyInterceptor(asyncio.Protocol(), idle_timeout_s=0.01)
        front.connection_made(transport)
        front.pause_writing()
        front.resume_writing()
        await asyncio.sleep(0.1)
        assert not transport.aborted
        front.connection_lost(None)

    asyncio.run(main())


def test_revoked_bytes_are_not_sent(tmp_path: Path) -> None:
    host = Host(tmp_path, keep)
    host.file.write_bytes(bytes(64 * CHUNK_BYTES))

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head(b"GET", b"/file"))
        got = len(await reader.readexactly(CHUNK_BYTES))
        host.revoked = True
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                got += len(data)
        assert got < 64 * CHUNK_BYTES

    run(host, story)


@pytest.mark.covers("F24")
@pytest.mark.parametrize("begin", [b"PUT /v1/tic", b"POST /v1/workers HTTP/1.1\r\nHost: here\r\n", b"G", b""])
def test_slow_headers_hold_up_no_others_and_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    """500 connections that never finish a head; requests between them are answered; then they are closed."""
    host = Host(tmp_path, keep)
    host.part_bytes = 3001

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
                with contextlib.suppress(ConnectionError):
                    assert await slow_reader.read() == b""
                slow_writer.close()
            writer.write(part(content_of(3001)))  # the timer was for the head only
            assert await answer(reader) == (200, b"good")
            writer.close()

    asyncio.run(main())


def test_a_turn_ends_after_its_slice_however_much_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one fast peer that keeps a pool thread for its whole part."""
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
    """Two threads, three parts that have begun and stand still: a fourth one goes through."""
    host = Host(tmp_path, keep)
    host.part_bytes = 5000

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
