"""Downloads of the page: a version as a model file, and the table of all updates. Of a server, and of a directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

from aiohttp import web

from atoll.transport.request_body import Idle, break_off

CSV = "text/csv; charset=utf-8"
IDLE_S = 60.0
"""Seconds without a byte after which the connection of a download from a state directory is closed."""


async def send_pieces(
    request: web.Request,
    pieces: Iterator[bytes | memoryview],
    kind: str,
    *,
    pool: Executor,
    nbytes: int | None = None,
    idle_timeout_s: float = IDLE_S,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> web.StreamResponse:
    """Answer a request with pieces that are read one after the other in a pool's thread.

    If reading one fails, the connection is closed before the end.

    Args:
        request: the request.
        pieces: the pieces; each is sent before the next is read.
        kind: type of the answer's content.
        pool: has the thread in which the pieces are read.
        nbytes: size of all pieces; None: not known. A download that ends early is then an error at the client, too.
        idle_timeout_s: seconds without a byte after which the connection is closed.
        on_bytes: called with the number of bytes sent.
    """
    response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-store"})
    response.content_length = nbytes
    await response.prepare(request)
    loop = asyncio.get_running_loop()
    try:
        with Idle(request, idle_timeout_s, on_bytes) as idle:
            while (piece := await loop.run_in_executor(pool, next, pieces, None)) is not None:
                await response.write(piece)
                idle.add(len(piece))
    except Exception:
        break_off(request)  # the answer has begun: only its missing end can tell the client
        raise
    await response.write_eof()
    return response
