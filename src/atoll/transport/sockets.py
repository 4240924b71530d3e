"""Bytes between a non-blocking socket and memory, by pool threads that nobody can hold up.

A thread moves what the socket has or takes, waits a moment for more, and gives the socket back to the event loop: a
stalled peer costs no thread, and every connection has its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from aiohttp import web

from atoll.tensors.chunks import CHUNK_BYTES

T = TypeVar("T")

SLICE_S = 0.05
"""The longest that a transfer keeps a pool thread, so that every connection has its turn."""
PATIENCE_S = 0.002
"""How long a pool thread waits for a peer before it gives the socket back to the event loop."""

_local = threading.local()


class Idle:
    """Ends a transfer that has not moved a byte for a while: one timer a transfer, not one a run of bytes.

    Attributes:
        on_end: also called when it ends the transfer.
    """

    def __init__(self, request: web.Request, timeout_s: float, on_bytes: Callable[[int], None]) -> None:
        self.on_end: Callable[[], None] = lambda: None
        self._request, self._timeout_s, self._on_bytes, self._moved = request, timeout_s, on_bytes, False
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._look)

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def add(self, nbytes: int) -> int:
        """So many bytes have moved; returns them."""
        if nbytes:
            self._moved = True
            self._on_bytes(nbytes)
        return nbytes

    def _look(self) -> None:
        if not self._moved:
            break_off(self._request)
            self.on_end()
            return
        self._moved = False
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._look)


def break_off(request: web.Request) -> None:
    """End a connection without another byte."""
    if request.transport is not None:
        request.transport.abort()


def receive(sock: socket.socket, room: memoryview) -> int:
    """Receive what is there into `room`, and wait a moment where nothing is; returns how many bytes came.

    Raises:
        ConnectionResetError: the peer has closed the connection.
    """
    for _ in range(2):
        try:
            count = sock.recv_into(room)
        except BlockingIOError:
            if not _poll(sock, select.POLLIN):
                return 0
            continue
        except ConnectionError:
            raise
        except OSError as error:  # no route, a timeout of the system: nothing of this machine's
            raise ConnectionResetError(error.errno, error.strerror) from error
        if not count:
            raise ConnectionResetError("the peer closed the connection within a part")
        return count
    return 0


def send(sock: socket.socket, fd: int, start: int, stop: int, revoked: Callable[[], bool]) -> int:
    """Send what the socket takes, and wait a moment for it to take more; returns how many bytes it took."""
    scratch = _scratch()
    until_s, offset = time.monotonic() + SLICE_S, start
    while offset < stop and time.monotonic() < until_s:
        count = os.preadv(fd, [scratch[: min(len(scratch), stop - offset)]], offset)
        if not count:
            raise EOFError(f"the file ends at {offset}")
        run = scratch[:count]
        while run:
            if revoked():
                return offset - start
            try:
                sent = sock.send(run)
            except BlockingIOError:
                if not _poll(sock, select.POLLOUT):
                    return offset - start
                continue
            offset, run = offset + sent, run[sent:]
    return offset - start


def _scratch() -> memoryview:
    """`CHUNK_BYTES` that the calling thread keeps."""
    if not hasattr(_local, "scratch"):
        _local.scratch = memoryview(bytearray(CHUNK_BYTES))
    scratch: memoryview = _local.scratch
    return scratch


def _poll(sock: socket.socket, event: int) -> bool:
    waiting = select.poll()
    waiting.register(sock, event)
    return bool(waiting.poll(PATIENCE_S * 1000))


async def ready(sock: socket.socket, *, writable: bool) -> None:
    """Wait, without a thread, until the socket has something to read, or takes something."""
    loop, fd = asyncio.get_running_loop(), sock.fileno()
    waiter: asyncio.Future[None] = loop.create_future()

    def told() -> None:
        if not waiter.done():
            waiter.set_result(None)

    add, remove = (loop.add_writer, loop.remove_writer) if writable else (loop.add_reader, loop.remove_reader)
    add(fd, told)
    try:
        await waiter
    finally:
        remove(fd)


async def in_thread(pool: Executor, work: Callable[[], T]) -> T:
    """Run `work` in the pool; whoever is cancelled meanwhile waits until it is over, for it uses his socket."""
    future = asyncio.get_running_loop().run_in_executor(pool, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        future.exception()  # nobody is left to be told
        raise


def shut(sock: socket.socket) -> None:
    """End the connection under whoever uses it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
