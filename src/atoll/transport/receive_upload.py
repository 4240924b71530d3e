"""Receive the body of an upload: straight from the socket into the memory where it is hashed and written from.

aiohttp's parser and its streams cost more than everything else that is done with the bytes of a part (0.3 CPU-seconds
a GB, one thread, two copies). So a `BodyInterceptor` stands between the transport and aiohttp's protocol. Everything
passes through it unchanged but the body of a part: aiohttp is told that the request has none, and a thread of the
pool receives the body from the socket. It moves what is there, waits a moment for more, and gives the socket back to
the event loop: a stalled peer costs no thread, and every connection has its turn.

A body is held back only where it is certain where requests begin and end: from the first byte of a connection, as
long as that brings nothing but GETs without a body and parts with a Content-Length, in the plainest HTTP/1.1. After
anything else all bytes of the connection pass through. Under TLS the bytes are not on the socket: there the body
comes through aiohttp's streams. `receive_part` does not see the difference: both are a `Body`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import select
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar, cast

from aiohttp import web

from atoll.errors import BadRequest
from atoll.protocol import routes
from atoll.protocol.routes import DIGEST_BYTES

T = TypeVar("T")

SLICE_S = 0.05
"""The longest that a part keeps a pool thread, so that every connection has its turn."""
PATIENCE_S = 0.002
"""How long a pool thread waits for a peer before it gives the socket back to the event loop."""
HEAD_S = 10.0
"""How long a peer may take for the head of a request."""
DISCARD_S = 10.0
"""How long the rest of a refused part is read away, so that the peer gets to read why."""

WIDE_BYTES, NARROW_BYTES = 2**20, 2**17
"""Bytes of a run through aiohttp. TLS keeps buffers of the largest run for as long as a connection lasts."""
WIDE = 16
"""Parts at a time that come through aiohttp in runs of `WIDE_BYTES`; every further one comes in runs of `NARROW_BYTES`:
memory hardly grows with the number of workers."""

Fill = Callable[[memoryview], int]
"""Fills memory from its start, and returns how many bytes it brought; 0: no more for now."""


class PartSink(Protocol):
    """Where the bytes of a part go."""

    @property
    def complete(self) -> bool:
        """Whether it has all of them."""
        ...

    def take(self, fill: Fill) -> None:
        """Have memory filled until there is no more for now, or until it is complete; in a pool thread."""
        ...


class Body(Protocol):
    """The body of one upload: where its bytes come from."""

    async def give(self, sink: PartSink, pool: Executor, idle: Idle) -> None:
        """Wait for bytes, and have the sink take them in a thread of the pool.

        Raises:
            BadRequest: the body has ended.
            ConnectionError: the peer went away.
        """
        ...


async def receive_part(
    request: web.Request,
    sink: PartSink,
    *,
    pool: Executor,
    idle_timeout_s: float,
    on_bytes: Callable[[int], None],
) -> bytes:
    """Give the part in a request's body to `sink`, in order; return the BLAKE3 that follows it.

    Args:
        pool: its threads take the bytes.
        on_bytes: called with the count of what came.

    Raises:
        BadRequest: the body ends early.
        ConnectionError: no byte came for the idle timeout, or the peer went away.
    """
    part = _WithDigest(sink)
    with Idle(request, idle_timeout_s, on_bytes) as idle:
        async with _body_of(request) as body:
            while not part.complete:
                await body.give(part, pool, idle)
    return bytes(part.digest)


def require_part_bytes(request: web.Request, nbytes: int) -> None:
    """Refuse a request with a body other than a part of `nbytes` and its digest, before a byte of it is read.

    Raises:
        BadRequest: its Content-Length differs.
    """
    interceptor = interceptor_of(request)
    length = (interceptor.body_bytes if interceptor else 0) or request.content_length or 0
    if length != nbytes + DIGEST_BYTES:
        raise BadRequest(
            f"The part has a Content-Length of {length}, not {nbytes + DIGEST_BYTES} ({nbytes} and its digest).",
            "Cut it as its layout says.",
        )


class _WithDigest:
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
        """Note that so many bytes have moved; return them."""
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


@asynccontextmanager
async def _body_of(request: web.Request) -> AsyncIterator[Body]:
    """Where the body of a request comes from."""
    interceptor = interceptor_of(request)
    if interceptor is not None and interceptor.body_bytes:
        with interceptor.dup_socket() as sock:
            yield _SocketBody(interceptor, sock)
    else:
        with _run_bytes() as run_bytes:
            yield _StreamBody(request, run_bytes)


# -- Through aiohttp: under TLS, and on connections that pass through.


class _StreamBody:
    """A body that aiohttp's parser has read."""

    def __init__(self, request: web.Request, run_bytes: int) -> None:
        self._content, self._run_bytes = request.content, run_bytes
        self._left_bytes = request.content_length or 0
        self._waiting: deque[memoryview] = deque()  # not taken yet
        self._content.set_read_chunk_size(run_bytes // 2)

    async def give(self, sink: PartSink, pool: Executor, idle: Idle) -> None:
        while not self._waiting or (sum(map(len, self._waiting)) < self._run_bytes and self._left_bytes):
            data, _ = await self._content.readchunk()  # as it came; readany would copy runs together
            if not data:
                raise BadRequest("The body ended before the part did.", "Send the part again.")
            self._left_bytes -= idle.add(len(data))
            self._waiting.append(memoryview(data))
        await asyncio.get_running_loop().run_in_executor(pool, sink.take, self._fill)

    def _fill(self, room: memoryview) -> int:
        if not self._waiting:
            return 0
        rest = self._waiting.popleft()
        count = min(len(room), len(rest))
        room[:count] = rest[:count]
        if count < len(rest):
            self._waiting.appendleft(rest[count:])
        return count


_wide = 0


@contextmanager
def _run_bytes() -> Iterator[int]:
    """Bytes of a run, for the part that is received in the block: the fewer, the more parts there are."""
    global _wide
    if _wide >= WIDE:
        yield NARROW_BYTES
        return
    _wide += 1
    try:
        yield WIDE_BYTES
    finally:
        _wide -= 1


# -- From the socket, by pool threads.


class _SocketBody:
    """A body that an interceptor has held back."""

    def __init__(self, interceptor: BodyInterceptor, sock: socket.socket) -> None:
        self._interceptor, self._socket = interceptor, sock

    async def give(self, sink: PartSink, pool: Executor, idle: Idle) -> None:
        idle.on_end = lambda: shut(self._socket)
        before = self._interceptor.body_bytes
        if not before:
            raise BadRequest("The body ended before the part did.", "Send the part again.")
        await in_thread(pool, lambda: sink.take(self._interceptor.filler(self._socket)))
        if not idle.add(before - self._interceptor.body_bytes):
            await readable(self._socket)


def receive(sock: socket.socket, room: memoryview) -> int:
    """Receive what is there into `room`, after a moment's wait where nothing is; return how many bytes came.

    Raises:
        ConnectionResetError: the peer has closed the connection.
    """
    for _ in range(2):
        try:
            count = sock.recv_into(room)
        except BlockingIOError:
            waiting = select.poll()
            waiting.register(sock, select.POLLIN)
            if not waiting.poll(PATIENCE_S * 1000):
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


async def readable(sock: socket.socket) -> None:
    """Wait, without a thread, until the socket has something to read."""
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock.fileno(), came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(sock.fileno())


async def in_thread(pool: Executor, work: Callable[[], T]) -> T:
    """Run `work` in the pool; a cancelled caller waits until it is over, for it uses the caller's socket."""
    future = asyncio.get_running_loop().run_in_executor(pool, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        future.exception()  # its caller is gone
        raise


def shut(sock: socket.socket) -> None:
    """End the connection under the thread that uses it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


_PART = re.compile(re.sub(r"\\\{\w+\\\}", "[0-9]+", re.escape(routes.PART)).encode())
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n\x00]*)")
_LONE_LF = re.compile(rb"(?<!\r)\n")
_BEGIN = re.compile(rb"[A-Z]{1,16}(?: |\Z)")
_NOT_PLAIN = frozenset(
    {b"transfer-encoding", b"upgrade", b"expect", b"connection", b"te", b"trailer", b"content-encoding"}
)
"""Headers that may change where a request ends, what comes after it, or what its body is."""


class BodyInterceptor(asyncio.Protocol):
    """Stands between a transport and aiohttp's protocol, and keeps the bodies of parts for a thread.

    Args:
        inner: aiohttp's protocol for this connection.
        direct: whether the socket carries the bytes as they are: not under TLS, where every body passes through.
        idle_timeout_s: a peer that takes none of an answer for so long is gone.

    Attributes:
        made: whether there was a connection; under TLS only after the handshake.
        on_lost: called when it is over.
    """

    def __init__(self, inner: asyncio.Protocol, *, direct: bool = True, idle_timeout_s: float = 60.0) -> None:
        self._inner, self.direct, self._idle_timeout_s = inner, direct, idle_timeout_s
        self.made = False
        self.on_lost: Callable[[], None] = lambda: None
        self._transport: asyncio.Transport | None = None
        self._held = b""  # of a head that is not complete, or behind a body
        self._passes = False  # everything, for the rest of the connection
        self._part = False  # one is being answered; nothing behind it is read before
        self._discarding = False  # the rest of its body, once it is answered
        self._full = False  # aiohttp wants nothing more for now
        self._body_left = 0  # bytes of the body that is held back
        self._early = b""  # the first of them, where they came with the head
        self._timer: asyncio.TimerHandle | None = None  # until a head is there, or a refused part read away
        self._reader_timer: asyncio.TimerHandle | None = None  # while the peer does not take what is written

    # -- between transport and aiohttp

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give aiohttp a facade of the transport, and the peer `HEAD_S` seconds to send a complete head."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.made = transport, True
        self._give_up_after(HEAD_S)
        self._inner.connection_made(cast(asyncio.Transport, _Facade(transport, self._hold)))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, tell aiohttp, and call `on_lost`."""
        self._transport = None
        self._stop_timer()
        self._stop_reader_timer()
        self._inner.connection_lost(exc)
        self.on_lost()

    def eof_received(self) -> bool | None:
        """Let aiohttp decide whether the transport stays open for its answer."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Begin to watch whether the peer takes what is written, and tell aiohttp."""
        self._look_after_reader(left_bytes=None)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """End the watch on the peer, which takes bytes again, and tell aiohttp."""
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
        """Pass bytes on, discard them or look for heads; abort the connection if they belong to a thread."""
        if self._passes:
            self._inner.data_received(data)
        elif self._discarding:
            self._discard(data)
        elif self._part:  # bytes that a thread should receive: the body is no longer complete
            self._give_up()
        else:
            self._heads(self._held + data)

    def _hold(self, full: bool) -> None:
        """Note that aiohttp wants nothing more for now, or wants to go on."""
        self._full = full
        self._read_or_not()
        if not full and not self._part and self._transport is not None:
            self._heads(self._held)

    def _read_or_not(self) -> None:
        """Have the transport read, unless aiohttp or a part wants it to pause."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._full or (self._part and not self._discarding):
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _heads(self, data: bytes) -> None:
        """Pass on complete heads while aiohttp takes them, up to one with a body that is held back."""
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
                    self._pass_all(data)
                return
            self._stop_timer()
            body_bytes = _body_bytes(data[:end]) if end <= routes.HEADER_BYTES and self.direct else None
            if body_bytes is None:
                self._pass_all(data)
                return
            head, data = data[:end], data[end:]
            if body_bytes:
                self._part = True
                self._read_or_not()
                self._body_left, self._early, data = body_bytes, data[:body_bytes], data[body_bytes:]
                self._held = data
                head = _without_body(head)
            self._inner.data_received(head)

    def _pass_all(self, data: bytes) -> None:
        self._stop_timer()
        self._passes = True
        self._inner.data_received(data)

    # -- a part

    @property
    def body_bytes(self) -> int:
        """Bytes not received yet of the body that is held back; 0 where none is."""
        return self._body_left

    def dup_socket(self) -> socket.socket:
        """Return the connection's socket once more, so that a thread can use it whatever becomes of the transport.

        Raises:
            ConnectionResetError: the connection is closed.
        """
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        found: socket.socket = self._transport.get_extra_info("socket")
        return found.dup()

    def filler(self, sock: socket.socket) -> Fill:
        """Return what brings bytes of the body for one turn: what is there, and what comes within a moment."""
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
        """The request for the part is answered: read away the rest of its body; then other requests come."""
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


class _Facade:
    """The transport as aiohttp sees it; the interceptor decides whether it is read."""

    def __init__(self, transport: asyncio.Transport, hold: Callable[[bool], None]) -> None:
        self._transport, self._hold = transport, hold
        self.write, self.is_closing = transport.write, transport.is_closing  # found at once: used for every answer

    def pause_reading(self) -> None:
        self._hold(True)

    def resume_reading(self) -> None:
        self._hold(False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def interceptor_of(request: web.Request) -> BodyInterceptor | None:
    """Return what may hold back the body of this request; None under TLS."""
    protocol = request.transport.get_protocol() if request.transport is not None else None
    return protocol if isinstance(protocol, BodyInterceptor) and protocol.direct else None


def _body_bytes(head: bytes) -> int | None:
    """Return how many bytes of a part follow this head; 0 after a GET; None for anything else, or where in doubt."""
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
