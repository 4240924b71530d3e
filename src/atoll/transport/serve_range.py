"""The server's end of tensor bytes: a range of a pinned file out, a part of an update in.

Bytes are copied between socket and page cache in runs of at most `CHUNK_BYTES`: by pool threads on the socket itself
where a `Bypass` stands in front of aiohttp, else (TLS) through aiohttp's streams. `sendfile` is not used: it would
queue pages, and a slot may be rewritten once its last reader is done, while its pages are still under way.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Protocol

from aiohttp import web

from atoll.errors import BadRequest
from atoll.protocol import messages
from atoll.protocol.openapi import STATUS_OF
from atoll.protocol.routes import DIGEST_BYTES
from atoll.tensors.chunks import CHUNK_BYTES
from atoll.transport.receive_upload import Bypass, Fill, Idle, break_off, bypass_of

FIRST_BYTES = 2**16
"""Of a body that goes past aiohttp: sent through it, so that the head of the answer is on its way before."""

WIDE_BYTES, NARROW_BYTES = 2**20, 2**17
"""Written to aiohttp in one run. TLS keeps buffers of the largest run for as long as a connection lasts."""
WIDE = 16
"""Parts at a time that are received through aiohttp in runs of `WIDE_BYTES`, and may hold a few of them; every further
one comes in runs of `NARROW_BYTES`: memory hardly grows with the number of workers."""

BEYOND_BYTES = 10**18
"""An offset behind the end of every file."""

_RANGE = re.compile(r"bytes=([0-9]*)-([0-9]*)")


class RangeNotSatisfiable(Exception):
    """The range lies outside the file."""


def parse_range(header: str | None, nbytes: int) -> tuple[int, int] | None:
    """`Range` → [start, stop); None for the whole file, also where HTTP lets a server ignore the header's form.

    Raises:
        RangeNotSatisfiable: it names no byte of the file.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match.group(0) == "bytes=-":
        return None
    first, last = (_bounded(text) if text else None for text in match.groups())
    if first is None:
        start, stop = max(0, nbytes - (last or 0)), nbytes
    else:
        start, stop = first, nbytes if last is None else min(last + 1, nbytes)
        if last is not None and last < start:
            return None
    if start >= nbytes or start >= stop:
        raise RangeNotSatisfiable
    return start, stop


def _bounded(digits: str) -> int:
    """The number; `BEYOND_BYTES` where it is larger: Python refuses to convert thousands of digits."""
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) < len(str(BEYOND_BYTES)) else BEYOND_BYTES


class Runs:
    """How large the runs of a part may be, by how many are being received."""

    def __init__(self) -> None:
        self._wide = 0

    @contextmanager
    def taken(self) -> Iterator[int]:
        """Bytes of a run, for the part that is received in the block."""
        if self._wide >= WIDE:
            yield NARROW_BYTES
            return
        self._wide += 1
        try:
            yield WIDE_BYTES
        finally:
            self._wide -= 1


_runs = Runs()


async def serve_file(
    request: web.Request,
    fd: int,
    nbytes: int,
    digest: str,
    *,
    pool: Executor,
    idle_timeout_s: float,
    revoked: Callable[[], bool],
    on_bytes: Callable[[int], None],
) -> web.StreamResponse:
    """Answer a GET of a pinned file.

    Args:
        fd: stays open and unchanged until this returns.
        digest: names the content; it is the ETag.
        pool: where a read goes that the page cache cannot answer at once.
        revoked: asked before every run of bytes; true breaks the connection off, never sends other bytes.
        on_bytes: told what was sent.
    """
    etag = f'"{digest}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    if request.headers.get("If-None-Match") in (etag, "*"):
        return web.Response(status=304, headers=headers)
    condition = request.headers.get("If-Range")
    wanted = request.headers.get("Range") if condition in (None, etag) else None
    try:
        chosen = parse_range(wanted, nbytes)
    except RangeNotSatisfiable:
        return web.Response(status=416, headers={**headers, "Content-Range": f"bytes */{nbytes}"})
    start, stop = chosen or (0, nbytes)
    if chosen is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{nbytes}"
    response = web.StreamResponse(status=206 if chosen is not None else 200, headers=headers)
    response.content_length = stop - start
    await response.prepare(request)
    with Idle(request, idle_timeout_s, on_bytes) as idle:
        bypass = bypass_of(request)
        if bypass is not None and stop - start > CHUNK_BYTES:
            first = await _write(request, response, fd, start, start + FIRST_BYTES, pool, idle, revoked)
            sent = first and await _send(request, bypass, fd, (start + FIRST_BYTES, stop), pool, idle, revoked)
        else:
            sent = await _write(request, response, fd, start, stop, pool, idle, revoked)
        if sent:
            await response.write_eof()
    return response


async def _send(
    request: web.Request,
    bypass: Bypass,
    fd: int,
    span: tuple[int, int],
    pool: Executor,
    idle: Idle,
    revoked: Callable[[], bool],
) -> bool:
    try:
        sent = await bypass.send(fd, *span, pool, idle, revoked)
    except (OSError, EOFError):
        sent = False
    if not sent:
        break_off(request)
    return sent


async def _write(
    request: web.Request,
    response: web.StreamResponse,
    fd: int,
    start: int,
    stop: int,
    pool: Executor,
    idle: Idle,
    revoked: Callable[[], bool],
) -> bool:
    """Send bytes [start, stop) through aiohttp; False, and the connection broken off, where they cannot be had."""
    loop = asyncio.get_running_loop()
    scratch = memoryview(bytearray(min(NARROW_BYTES, stop - start)))
    while start < stop:
        data = _read_cached(fd, scratch[: stop - start], start)
        if data is None:
            data = memoryview(await loop.run_in_executor(pool, os.pread, fd, min(NARROW_BYTES, stop - start), start))
        if revoked() or not data:
            break_off(request)
            return False
        await response.write(data)
        start += idle.add(len(data))
        if request.transport is None or request.transport.get_write_buffer_size():
            scratch = memoryview(bytearray(len(scratch)))  # the old one is still queued
    return True


class Incoming:
    """The body of a request that brings parts, one behind the other.

    Args:
        pool: whose threads take what comes.
        on_bytes: told what came.
    """

    def __init__(
        self, request: web.Request, *, pool: Executor, idle_timeout_s: float, on_bytes: Callable[[int], None]
    ) -> None:
        self.request = request
        self._pool, self._idle_timeout_s, self._on_bytes = pool, idle_timeout_s, on_bytes
        self._chunks = _Chunks()
        self._left_bytes = request.content_length or 0

    async def part(self, sink: PartSink) -> bytes:
        """Give the next part's bytes to `sink`, in order and in a thread; returns the BLAKE3 that followed them.

        Raises:
            BadRequest: the body ends early.
            ConnectionError: no byte came for the idle timeout, or the other side went away.
        """
        body, bypass = _Body(sink), bypass_of(self.request)
        with Idle(self.request, self._idle_timeout_s, self._on_bytes) as idle:
            if bypass is not None and bypass.body_bytes:
                await bypass.receive(body, self._pool, idle)
            else:
                await self._read(body, idle)
        return bytes(body.digest)

    async def _read(self, body: _Body, idle: Idle) -> None:
        """Receive through aiohttp."""
        loop, content = asyncio.get_running_loop(), self.request.content
        with _runs.taken() as run_bytes:
            content.set_read_chunk_size(run_bytes // 2)
            if self._chunks.nbytes:
                await loop.run_in_executor(self._pool, body.take, self._chunks.fill)
            while not body.complete:
                data, _ = await content.readchunk()  # as it came; readany would copy runs together
                if not data:
                    raise BadRequest("The body ended before the part did.", "Send the part again.")
                self._left_bytes -= idle.add(len(data))
                self._chunks.add(data)
                if self._chunks.nbytes >= run_bytes or self._left_bytes == 0:
                    await loop.run_in_executor(self._pool, body.take, self._chunks.fill)


class PartSink(Protocol):
    """Where the bytes of a part go."""

    @property
    def complete(self) -> bool:
        """Whether it has all of them."""
        ...

    def take(self, fill: Fill) -> None:
        """Have memory filled until there is no more for now, or until it is complete."""
        ...


class _Body:
    """A part, and the digest that follows it."""

    def __init__(self, sink: PartSink) -> None:
        self._sink, self.digest, self._digest_left = sink, bytearray(DIGEST_BYTES), DIGEST_BYTES

    def take(self, fill: Fill) -> None:
        if not self._sink.complete:
            self._sink.take(fill)
        while self._sink.complete and self._digest_left:
            count = fill(memoryview(self.digest)[-self._digest_left :])
            if not count:
                return
            self._digest_left -= count

    @property
    def complete(self) -> bool:
        return self._sink.complete and not self._digest_left


class _Chunks:
    """What came through aiohttp and is not taken yet."""

    def __init__(self) -> None:
        self._waiting: deque[memoryview] = deque()
        self.nbytes = 0

    def add(self, chunk: bytes) -> None:
        self._waiting.append(memoryview(chunk))
        self.nbytes += len(chunk)

    def fill(self, room: memoryview) -> int:
        """Fill memory from the first of them; returns how many bytes it brought."""
        if not self._waiting:
            return 0
        rest = self._waiting.popleft()
        count = min(len(room), len(rest))
        room[:count] = rest[:count]
        if count < len(rest):
            self._waiting.appendleft(rest[count:])
        self.nbytes -= count
        return count


def parts_within(request: web.Request, sizes: Sequence[int]) -> int:
    """How many parts a request brings, by its Content-Length.

    Args:
        sizes: bytes of the part that the request names, and of those behind it that may come along.

    Raises:
        BadRequest: it brings something else; no byte of it was read.
    """
    bypass = bypass_of(request)
    told = (bypass.body_bytes if bypass else 0) or request.content_length
    left = told or 0
    for count, nbytes in enumerate(sizes, 1):
        left -= nbytes + DIGEST_BYTES
        if left == 0:
            return count
    raise BadRequest(
        f"The part has a Content-Length of {told}, not {sizes[0] + DIGEST_BYTES} ({sizes[0]} and its digest).",
        "Cut it as its layout says; parts that follow it may come along, whole and each with its digest.",
    )


def _read_cached(fd: int, scratch: memoryview, offset: int) -> memoryview | None:
    """What the page cache has of a range, in `scratch`, without waiting for the disk; None where it has nothing."""
    try:
        done = os.preadv(fd, [scratch], offset, os.RWF_NOWAIT)
    except OSError:  # not cached (EAGAIN), or a file system that cannot say
        return None
    return scratch[:done] if done else None


def problem(code: str, message: str, remedy: str = "", retry_after_s: float | None = None) -> web.Response:
    """An answer that names what went wrong."""
    body = messages.Problem(code=code, message=message, remedy=remedy, retry_after_s=retry_after_s)
    headers = {"Retry-After": str(max(1, round(retry_after_s)))} if retry_after_s is not None else {}
    if code == "auth":
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=STATUS_OF.get(code, 500),
        body=json.dumps(body.model_dump()).encode(),
        content_type="application/json",
        headers=headers,
    )
