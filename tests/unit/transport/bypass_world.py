"""A server whose connections go past the HTTP parser, and what is sent to it: real sockets on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web
from blake3 import blake3

from atoll.transport.request_body import BodyInterceptor, Fill, interceptor_of, receive_part
from atoll.transport.serve_range import serve_file

PATH = b"/v1/tickets/7/parts/3"


def head(method: bytes, path: bytes, *lines: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    return b"\r\n".join((b" ".join((method, path, version)), b"Host: here", *lines)) + b"\r\n\r\n"


class Sink:
    """Memory for one part, filled a few bytes at a time."""

    def __init__(self, nbytes: int, run_bytes: int = 1000) -> None:
        self.content, self.filled, self.run_bytes = bytearray(nbytes), 0, run_bytes

    @property
    def complete(self) -> bool:
        return self.filled == len(self.content)

    def take(self, fill: Fill) -> None:
        while not self.complete:
            count = fill(memoryview(self.content)[self.filled : self.filled + self.run_bytes])
            if not count:
                return
            self.filled += count


class Host:
    """A server with a `BodyInterceptor`: takes parts, serves a file, answers POSTs with their bodies."""

    def __init__(self, folder: Path, take: Callable[[web.Request, Host], Awaitable[web.StreamResponse]]) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.part_bytes, self.idle_s, self.run_bytes = 0, 30.0, 1000
        self.sinks: list[Sink] = []
        self.bypassed: list[bool] = []
        self.errors: list[BaseException] = []
        self.revoked = False
        self.file = folder / "file"
        self._take = take

    async def put(self, request: web.Request) -> web.StreamResponse:
        front = interceptor_of(request)
        assert front is not None
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
        sink = Sink(self.part_bytes, self.run_bytes)
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
