"""The server's end of tensor bytes: a range of a pinned file out, a part of an update in.

Bytes are copied between socket and page cache in runs of about 1 MiB. `sendfile` is not used: it would queue
references to pages, and a slot may be rewritten once its last reader is done, while such pages are still on their way.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from concurrent.futures import Executor

from aiohttp import web

from atoll.errors import BadRequest
from atoll.tensors.chunks import CHUNK_BYTES
from atoll.wire.routes import DIGEST_BYTES

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class RangeNotSatisfiable(Exception):
    """The range lies outside the file."""


def parse_range(header: str | None, nbytes: int) -> tuple[int, int] | None:
    """`Range` → [start, stop); None for the whole file, also where HTTP lets a server ignore the header's form.

    Raises:
        RangeNotSatisfiable: it names no byte of the file.
    """
    match = _RANGE.fullmatch(header.replace(" ", "")) if header else None
    if match is None or match.group(0) == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        start, stop = max(0, nbytes - int(last)), nbytes
    else:
        start, stop = int(first), min(int(last) + 1, nbytes) if last else nbytes
        if last and int(last) < start:
            return None
    if start >= nbytes or start >= stop:
        raise RangeNotSatisfiable
    return start, stop


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
    loop = asyncio.get_running_loop()
    watch = _Watch(request, idle_timeout_s)
    scratch = memoryview(bytearray(min(CHUNK_BYTES, stop - start)))
    try:
        while start < stop:
            data = _read_cached(fd, scratch[: stop - start], start)
            if data is None:
                data = memoryview(await loop.run_in_executor(pool, os.pread, fd, min(CHUNK_BYTES, stop - start), start))
            if revoked() or not data:
                _break_off(request)
                return response
            await response.write(data)
            start += len(data)
            watch.moved = True
            on_bytes(len(data))
            if request.transport is None or request.transport.get_write_buffer_size():
                scratch = memoryview(bytearray(len(scratch)))  # the old one is still queued
        await response.write_eof()
    finally:
        watch.end()
    return response


async def receive_part(
    request: web.Request,
    sink: Callable[[memoryview], None],
    nbytes: int,
    *,
    pool: Executor,
    idle_timeout_s: float,
    on_bytes: Callable[[int], None],
) -> bytes:
    """Give a part's bytes to `sink`, in order and in a thread of `pool`; returns the BLAKE3 that followed them.

    Raises:
        BadRequest: the Content-Length is not that of the part and its digest.
        ConnectionError: no byte came for the idle timeout, or the other side went away.
    """
    require_length(request, nbytes)
    loop = asyncio.get_running_loop()
    left, trailer = nbytes, b""
    held: list[bytes] = []
    held_bytes = 0

    def flush(chunks: list[bytes]) -> None:
        for chunk in chunks:
            sink(memoryview(chunk))

    watch = _Watch(request, idle_timeout_s)
    try:
        while len(trailer) < DIGEST_BYTES:
            data, _ = await request.content.readchunk()  # as it came; readany would copy runs together
            if not data:
                raise BadRequest("The body ended before the part did.", "Send the part again.")
            watch.moved = True
            on_bytes(len(data))
            if len(data) > left:
                trailer += data[left:]
                data = data[:left]
            left -= len(data)
            if data:
                held.append(data)
                held_bytes += len(data)
            if held and (held_bytes >= CHUNK_BYTES or left == 0):
                await loop.run_in_executor(pool, flush, held)
                held, held_bytes = [], 0
    finally:
        watch.end()
    return trailer


def require_length(request: web.Request, nbytes: int) -> None:
    """Refuse a part of another size before a byte of it is read."""
    expected = nbytes + DIGEST_BYTES
    if request.content_length != expected:
        raise BadRequest(
            f"The part has a Content-Length of {request.content_length}, not {expected} ({nbytes} and its digest).",
            "Cut the update as the ticket's layout says.",
        )


def _read_cached(fd: int, scratch: memoryview, offset: int) -> memoryview | None:
    """What the page cache has of a range, in `scratch`, without waiting for the disk; None where it has nothing."""
    try:
        done = os.preadv(fd, [scratch], offset, os.RWF_NOWAIT)
    except OSError:  # not cached (EAGAIN), or a file system that cannot say
        return None
    return scratch[:done] if done else None


class _Watch:
    """Breaks a connection off when no byte has moved for a while: one timer a transfer, not one a run of bytes."""

    def __init__(self, request: web.Request, idle_timeout_s: float) -> None:
        self.moved = False
        self._request, self._idle_timeout_s = request, idle_timeout_s
        self._timer = asyncio.get_running_loop().call_later(idle_timeout_s, self._look)

    def _look(self) -> None:
        if not self.moved:
            _break_off(self._request)
            return
        self.moved = False
        self._timer = asyncio.get_running_loop().call_later(self._idle_timeout_s, self._look)

    def end(self) -> None:
        self._timer.cancel()


def _break_off(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
