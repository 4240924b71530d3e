"""Sends a file, or a byte range of it, as the answer to a request. Every download from a server uses this module.

Bytes are copied from the file to aiohttp's stream, `RUN_BYTES` at a time. `sendfile` is not used: it would queue the
file's own pages in the socket, and the server may rewrite the file while these pages are still queued.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import Executor

from aiohttp import web

from atoll import system_calls
from atoll.protocol import messages
from atoll.protocol.openapi import STATUS_OF
from atoll.transport.request_body import Idle, break_off

RUN_BYTES, TLS_RUN_BYTES = 2**21, 2**17
"""Number of bytes written to aiohttp at a time, on plain and on TLS connections.

A TLS connection keeps buffers of the size of its largest write until it closes, so its writes are smaller.
"""

BEYOND_BYTES = 10**18
"""A file offset in bytes that is beyond the end of every file."""

_RANGE = re.compile(r"bytes=([0-9]*)-([0-9]*)")


class RangeNotSatisfiable(Exception):
    """Raised if a request asks for a range that contains no byte of the file."""


def parse_range(header: str | None, nbytes: int) -> tuple[int, int] | None:
    """Return the byte range [start, stop) of a `Range` header.

    Args:
        header: value of the header; None if the request has none.
        nbytes: size of the file in bytes.

    Returns:
        The range; None if the whole file is to be sent, because there is no header, or because the header has a form
        that a server may ignore.

    Raises:
        RangeNotSatisfiable: the range contains no byte of the file.
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
    """Return the number in `digits`, or `BEYOND_BYTES` if it is larger. Python refuses to convert very long texts."""
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) < len(str(BEYOND_BYTES)) else BEYOND_BYTES


async def serve_file(  # noqa: PLR0913 (options, by keyword)
    request: web.Request,
    fd: int,
    nbytes: int,
    digest: str,
    *,
    pool: Executor,
    idle_timeout_s: float,
    revoked: Callable[[], bool],
    on_bytes: Callable[[int], None],
    before: Callable[[int], None] | None = None,
) -> web.StreamResponse:
    """Answer a GET request for a file, or for a range of it.

    Args:
        request: the request.
        fd: descriptor of the file. It must stay open until this function returns.
        nbytes: size of the file in bytes.
        digest: digest of the content, sent as the ETag.
        pool: threads for reads of bytes that are not in the page cache.
        idle_timeout_s: seconds without a byte after which the connection is closed.
        revoked: function that returns whether the file may have been rewritten. It is called before every write. If it
            returns True, the connection is closed, so that no wrong bytes are sent.
        on_bytes: callback with the number of bytes sent.
        before: called in `pool` with the number of bytes that are about to be sent; an error ends the request.
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
    if before is not None:
        await asyncio.get_running_loop().run_in_executor(pool, before, stop - start)
    if chosen is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{nbytes}"
    response = web.StreamResponse(status=206 if chosen is not None else 200, headers=headers)
    response.content_length = stop - start
    await response.prepare(request)
    if not request.secure and request.transport is not None:
        request.transport.set_write_buffer_limits(0)  # a write returns only when none of its bytes are queued
    scratch = memoryview(bytearray(min(TLS_RUN_BYTES if request.secure else RUN_BYTES, stop - start)))
    with Idle(request, idle_timeout_s, on_bytes) as idle:
        while start < stop:
            run = read_cached(fd, scratch[: stop - start], start)
            if run is None:
                most = min(len(scratch), stop - start)
                run = memoryview(await asyncio.get_running_loop().run_in_executor(pool, os.pread, fd, most, start))
            if revoked() or not run:
                break_off(request)
                return response
            await response.write(run)
            start += idle.add(len(run))
            if request.transport is None or request.transport.get_write_buffer_size():
                scratch = memoryview(bytearray(len(scratch)))  # the transport still uses the old buffer
        await response.write_eof()
    return response


def read_cached(fd: int, scratch: memoryview, offset: int) -> memoryview | None:
    """Read bytes of a file, from `offset` on, into `scratch`, but only bytes that are in the page cache.

    Returns:
        The filled start of `scratch`; None if the byte at `offset` is not in the page cache, or if the file system does
        not support such reads.
    """
    done = system_calls.read_cached(fd, scratch, offset)
    return scratch[:done] if done else None


def problem(code: str, message: str, remedy: str = "", retry_after_s: float | None = None) -> web.Response:
    """Return the HTTP response for an error.

    Args:
        code: code of the error, such as "gone"; it determines the HTTP status.
        message: text of the error.
        remedy: advice to the user.
        retry_after_s: seconds after which the client should retry; sent as a header, too.
    """
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
