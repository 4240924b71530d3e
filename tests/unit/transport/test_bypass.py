"""What goes past the HTTP parser, and what does not: real sockets on both sides."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from bypass_world import PATH, Host, answer, content_of, head, keep, part, refuse, run

from atoll.tensors.chunks import CHUNK_BYTES
from atoll.transport import request_body
from atoll.transport.request_body import BodyInterceptor, interceptor_of


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
def test_only_the_plainest_heads_are_understood(data: bytes, expected: int | None) -> None:
    assert request_body._body_bytes(data) == expected


@pytest.mark.parametrize("cuts", ["whole", "bytes", "head"])
def test_parts_and_downloads_take_turns_on_one_connection(tmp_path: Path, cuts: str) -> None:
    host = Host(tmp_path, keep)
    host.part_bytes = 3001
    host.file.write_bytes(content_of(3 * CHUNK_BYTES + 5))

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send(data: bytes) -> None:
            end = data.index(b"\r\n\r\n") + 4
            for piece in {
                "whole": [data],
                "bytes": [data[at : at + 1] for at in range(len(data))],
                "head": [data[:end], data[end:]],
            }[cuts]:
                writer.write(piece)
                await writer.drain()

        for _ in range(3):
            await send(part(content_of(3001)))
            assert await answer(reader) == (200, b"good")
            await send(head(b"GET", b"/file"))
            assert await answer(reader) == (200, host.file.read_bytes())

    run(host, story)
    assert host.bypassed == [True] * 3


def test_requests_that_come_behind_one_another_at_once_are_answered_in_order(tmp_path: Path) -> None:
    host = Host(tmp_path, keep)
    host.part_bytes = 10
    host.file.write_bytes(content_of(2 * CHUNK_BYTES))

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head(b"GET", b"/file") + part(content_of(10)) + head(b"GET", b"/file") + part(content_of(10)))
        for _ in range(2):
            assert await answer(reader) == (200, host.file.read_bytes())
            assert await answer(reader) == (200, b"good")

    run(host, story)
    assert host.bypassed == [True, True]


def test_nothing_of_a_part_is_read_before_its_turn(tmp_path: Path) -> None:
    """40 requests come before it at once: aiohttp holds the connection at 32 of them, and lets it go at 16."""
    seen: list[tuple[int, int, bool]] = []

    async def wait(request: web.Request, host: Host) -> web.StreamResponse:
        front = interceptor_of(request)
        assert front is not None
        assert request.transport is not None
        before, port = front.body_bytes, request.transport.get_extra_info("sockname")[1]
        arrived.set()
        await sent_all.wait()
        # whoever would read does so in the passes of the loop in which other connections are answered
        for _ in range(3):
            other_reader, other = await asyncio.open_connection("127.0.0.1", port)
            other.write(head(b"GET", b"/file"))
            assert await answer(other_reader) == (200, b"file")
            other.close()
        seen.append((before, front.body_bytes, request.transport.is_reading()))
        return await keep(request, host)

    host = Host(tmp_path, wait)
    host.part_bytes = 3001
    host.file.write_bytes(b"file")
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


def test_what_aiohttp_holds_back_stays_held_back_after_a_part(tmp_path: Path) -> None:
    """The end of a part says nothing about what aiohttp can take."""
    host = Host(tmp_path, refuse)
    reading: list[bool] = []

    async def hold(request: web.Request, host: Host) -> web.StreamResponse:
        front, transport = interceptor_of(request), request.transport
        assert front is not None
        assert transport is not None
        front._body_left, front._early = 0, b""
        transport.pause_reading()
        front.end_part()
        reading.append(transport.is_reading())
        transport.resume_reading()
        reading.append(transport.is_reading())
        return web.Response(text="held")

    host._take = hold

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(part(content_of(10)))
        assert await answer(reader) == (200, b"held")

    run(host, story)
    assert reading == [False, True]


def test_after_any_other_request_the_connection_is_a_passes(tmp_path: Path) -> None:
    host = Host(tmp_path, keep)
    host.part_bytes = 3001

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # its body looks like the head of a part: it stays a body
        smuggled = part(b"x" * 5)
        writer.write(head(b"POST", b"/post", b"Content-Length: %d" % len(smuggled)))
        await writer.drain()
        writer.write(smuggled)
        assert await answer(reader) == (200, b"posted " + smuggled)
        writer.write(part(content_of(3001)))
        assert await answer(reader) == (200, b"good")

    run(host, story)
    assert host.bypassed == [False]
    assert len(host.sinks) == 1


@pytest.mark.parametrize("begin", [b"GET /file HTTP/1.1\nHost: here\n\n", b"GET /file HTTP/1.1\r\nHost: here\n"])
def test_line_ends_that_are_not_http_are_left_to_aiohttp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    """It says at once what it thinks of them; the bypass would wait for the end of a head that never comes."""
    monkeypatch.setattr(request_body, "HEAD_S", 3600.0)
    host = Host(tmp_path, keep)
    host.file.write_bytes(b"file")

    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        assert (await reader.read(100)).startswith(b"HTTP/1.")

    run(host, story)


@pytest.mark.parametrize("together", [True, False])
def test_a_head_that_is_too_large_is_left_to_aiohttp(tmp_path: Path, together: bool) -> None:
    """However it arrives."""
    host = Host(tmp_path, keep)
    host.part_bytes = 3001
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
