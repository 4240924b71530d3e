"""Bytes between a non-blocking socket and memory, by pool threads that nobody can hold up.

A thread moves what the socket has or takes, waits a moment for more, and gives the socket back to the event loop: a
stalled peer costs no thread, and every connection has its turn.

Tensor bytes between a socket and memory without the HTTP parser: what the server's large transfers go through.

aiohttp's parser and its streams cost more than everything else that is done with the bytes of a part (0.3 CPU-seconds
a GB, one thread, two copies). So a `Bypass` stands between the transport and aiohttp's protocol. Everything passes
through it unchanged, but for the body of a part's upload: aiohttp is told that the request has none, and the handler
has the bytes received by a pool thread, straight into the memory where they are hashed and written from. Downloads
use the same socket the other way round, once aiohttp has sent the head of its answer.

It holds back a body only where it knows for certain where requests begin and end: from the first byte of a
connection, as long as that brings nothing but GETs without a body and parts with a Content-Length, in the plainest
HTTP/1.1. Anything else makes it a mere wire for the rest of the connection. Under TLS the bytes are not on the
socket: there aiohttp's own streams do the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from aiohttp import web

from atoll.protocol import routes
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


Fill = Callable[[memoryview], int]
"""Fills memory from its start, and returns how many bytes it brought; 0: no more for now."""

HEAD_S = 10.0
"""How long a peer may take for the head of a request."""
DISCARD_S = 10.0
"""How long the rest of a refused part is read away, so that the peer gets to read why."""

_PART = re.compile(re.sub(r"\\\{\w+\\\}", "[0-9]+", re.escape(routes.PART)).encode())
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n\x00]*)")
_LONE_LF = re.compile(rb"(?<!\r)\n")
_BEGIN = re.compile(rb"[A-Z]{1,16}(?: |\Z)")
_NOT_PLAIN = frozenset(
    {b"transfer-encoding", b"upgrade", b"expect", b"connection", b"te", b"trailer", b"content-encoding"}
)
"""Headers that may change where a request ends, what comes after it, or what its body is."""


class Body(Protocol):
    """Where bytes of a request go."""

    @property
    def complete(self) -> bool:
        """Whether it has all it wants."""
        ...

    def take(self, fill: Fill) -> None:
        """Have memory filled until there is no more for now, or until it is complete."""
        ...


class Bypass(asyncio.Protocol):
    """Stands between a plain TCP transport and aiohttp's protocol.

    Args:
        inner: aiohttp's protocol for this connection.
        direct: whether the bytes of the connection are those on its socket; not so under TLS.
        idle_timeout_s: a peer that takes none of an answer for so long is gone.

    Attributes:
        made: whether there was a connection; under TLS not before its handshake.
        on_lost: called when it is over.
    """

    def __init__(self, inner: asyncio.Protocol, *, direct: bool = True, idle_timeout_s: float = 60.0) -> None:
        self._inner, self.direct, self._idle_timeout_s = inner, direct, idle_timeout_s
        self.made = False
        self.on_lost: Callable[[], None] = lambda: None
        self._transport: asyncio.Transport | None = None
        self._held = b""  # of a head that is not all there, or behind a body
        self._wire = False  # passes everything on, for the rest of the connection
        self._part = False  # is being answered; nothing behind it is read before
        self._discarding = False  # what is left of its body, once it is answered
        self._full = False  # aiohttp wants nothing more for now
        self._body_left = 0  # of its body, which is held back
        self._early = b""  # its first bytes, where they came with the head
        self._timer: asyncio.TimerHandle | None = None  # until a head is there, or a refused part read away
        self._written = asyncio.Event()
        self._written.set()
        self._reader_timer: asyncio.TimerHandle | None = None  # while the peer does not take what is written

    # -- between transport and aiohttp

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.made = transport, True
        self._give_up_after(HEAD_S)
        self._inner.connection_made(cast(asyncio.Transport, _Facade(transport, self._hold)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._written.set()
        self._stop_timer()
        self._stop_reader_timer()
        self._inner.connection_lost(exc)
        self.on_lost()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._written.clear()
        self._look_after_reader(left_bytes=None)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._written.set()
        self._stop_reader_timer()
        self._inner.resume_writing()

    def _look_after_reader(self, left_bytes: int | None) -> None:
        """End a peer that has taken nothing since `left_bytes` were left, or look again after the idle timeout."""
        if self._transport is None:
            return
        now_bytes = self._transport.get_write_buffer_size()
        if now_bytes == left_bytes:
            self._give_up()
            return
        again = asyncio.get_running_loop().call_later
        self._reader_timer = again(self._idle_timeout_s, self._look_after_reader, now_bytes)

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def data_received(self, data: bytes) -> None:
        if self._wire:
            self._inner.data_received(data)
        elif self._discarding:
            self._discard(data)
        elif self._part:  # bytes that a thread is to receive: whoever had them read, the body is no longer whole
            self._give_up()
        else:
            self._heads(self._held + data)

    def _hold(self, full: bool) -> None:
        """aiohttp wants nothing more for now, or wants to go on."""
        self._full = full
        self._read_or_not()
        if not full and not self._part and self._transport is not None:
            self._heads(self._held)

    def _read_or_not(self) -> None:
        """Have the transport read only while neither aiohttp nor a part wants it not to."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._full or (self._part and not self._discarding):
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _heads(self, data: bytes) -> None:
        """Pass on whole heads, as long as aiohttp takes them, and up to one whose body is held back."""
        self._held = b""
        while data and not self._part:
            if self._full:
                self._held = data
                return
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(data) <= routes.HEADER_BYTES and _BEGIN.match(data) and not _LONE_LF.search(data):
                    self._held = data
                    self._give_up_after(HEAD_S)
                else:
                    self._become_wire(data)
                return
            self._stop_timer()
            body_bytes = _body_bytes(data[:end]) if end <= routes.HEADER_BYTES and self.direct else None
            if body_bytes is None:
                self._become_wire(data)
                return
            head, data = data[:end], data[end:]
            if body_bytes:
                self._part = True
                self._read_or_not()
                self._body_left, self._early, data = body_bytes, data[:body_bytes], data[body_bytes:]
                self._held = data
                head = _without_body(head)
            self._inner.data_received(head)

    def _become_wire(self, data: bytes) -> None:
        self._stop_timer()
        self._wire = True
        self._inner.data_received(data)

    # -- a part

    @property
    def body_bytes(self) -> int:
        """Not received yet, of the body that is held back; 0 where none is."""
        return self._body_left

    async def receive(self, body: Body, pool: Executor, idle: Idle) -> None:
        """Receive of the body that is held back until `body` is complete, or there is no more.

        Args:
            body: takes it in threads of `pool`.
            idle: told that bytes have moved.

        Raises:
            ConnectionError: the peer went away.
        """
        with self._socket() as sock:
            idle.on_end = lambda: shut(sock)
            while not body.complete and (before := self._body_left):
                await in_thread(pool, lambda: body.take(self._filler(sock)))
                if not idle.add(before - self._body_left):
                    await ready(sock, writable=False)

    def _filler(self, sock: socket.socket) -> Fill:
        """Brings what is there, and waits a moment for more; nothing when others should have their turn."""
        until_s = time.monotonic() + SLICE_S

        def fill(room: memoryview) -> int:
            room = room[: self._body_left]
            count = 0
            if self._early:
                count = min(len(room), len(self._early))
                room[:count] = self._early[:count]
                self._early = self._early[count:]
            elif room and time.monotonic() < until_s:
                count = receive(sock, room)
            self._body_left -= count
            return count

        return fill

    def end_part(self) -> None:
        """The request for the part is answered: what is left of its body is read away, then come other requests."""
        if not self._part or self._transport is None:
            return
        self._body_left -= len(self._early)
        self._early = b""
        if self._body_left:
            self._give_up_after(DISCARD_S)
            self._discarding = True
            self._read_or_not()
        else:
            self._next()

    def _discard(self, data: bytes) -> None:
        count = min(self._body_left, len(data))
        self._body_left -= count
        self._held += data[count:]
        if not self._body_left:
            self._next()

    def _next(self) -> None:
        """The part is over: the next bytes are a head."""
        self._part = self._discarding = False
        self._stop_timer()
        self._read_or_not()
        if self._transport is not None and not self._transport.is_closing():
            self._heads(self._held)

    def _give_up_after(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- a file

    async def send(
        self, fd: int, start: int, stop: int, pool: Executor, idle: Idle, revoked: Callable[[], bool]
    ) -> bool:
        """Send bytes [start, stop) of a file as the body of an answer whose head is written.

        Returns:
            Whether all was sent; not if `revoked` said that the bytes may no longer be read.

        Raises:
            OSError: the peer went away.
            EOFError: the file ends early.
        """
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high=0)
        await self._written.wait()
        sent = told = 0  # by threads, and of it to `idle`: a peer that has all may close before the last is told

        def move(at: int) -> int:
            nonlocal sent
            moved = send(sock, fd, at, stop, revoked)
            sent += moved
            return moved

        with self._socket() as sock:
            idle.on_end = lambda: shut(sock)
            try:
                while start < stop and not revoked():
                    count = idle.add(await in_thread(pool, partial(move, start)))
                    start, told = start + count, told + count
                    if not count and start < stop and not revoked():
                        await ready(sock, writable=True)
            finally:
                idle.add(sent - told)
        if self._transport is not None:
            self._transport.set_write_buffer_limits()
        return start == stop

    def _socket(self) -> socket.socket:
        """The connection's socket once more, so that a thread can use it whatever becomes of the transport."""
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        found: socket.socket = self._transport.get_extra_info("socket")
        return found.dup()


class _Facade:
    """The transport as aiohttp sees it: only whether it is read is not aiohttp's alone to say."""

    def __init__(self, transport: asyncio.Transport, hold: Callable[[bool], None]) -> None:
        self._transport, self._hold = transport, hold
        self.write, self.is_closing = transport.write, transport.is_closing  # found at once: used for every answer

    def pause_reading(self) -> None:
        self._hold(True)

    def resume_reading(self) -> None:
        self._hold(False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def bypass_of(request: web.Request) -> Bypass | None:
    """What can move the bytes of this request past aiohttp; None under TLS."""
    protocol = request.transport.get_protocol() if request.transport is not None else None
    return protocol if isinstance(protocol, Bypass) and protocol.direct else None


def _body_bytes(head: bytes) -> int | None:
    """How many bytes of a part follow this head; 0 after a GET; None where it is not for certain one of them."""
    first, *lines = head[:-4].split(b"\r\n")
    method, _, rest = first.partition(b" ")
    path, _, version = rest.partition(b" ")
    if version != b"HTTP/1.1" or b"\n" in head.replace(b"\r\n", b"") or b"\r" in head.replace(b"\r\n", b""):
        return None
    lengths = []
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None or match[1].lower() in _NOT_PLAIN:
            return None
        if match[1].lower() == b"content-length":
            lengths.append(match[2])
    if method == b"GET" and not lengths:
        return 0
    if (
        method == b"PUT"
        and _PART.fullmatch(path)
        and len(lengths) == 1
        and re.fullmatch(rb"[1-9][0-9]{0,15}", lengths[0])
    ):
        return int(lengths[0])
    return None


def _without_body(head: bytes) -> bytes:
    return re.sub(rb"(?i)\r\ncontent-length:[^\r\n]*", b"\r\nContent-Length: 0", head)
