"""Receives the body of an upload from the socket directly into the buffer that is hashed and written to disk.

aiohttp's parser and streams cost more than all other work on the bytes of a part (0.3 CPU-seconds per GB, one thread,
two copies). So a `BodyInterceptor` stands between the connection and aiohttp. It passes all bytes to aiohttp, except
the body of a part: to aiohttp, this request has no body, and a pool thread receives the body from the socket. The
thread receives the bytes that have arrived, waits a moment for more, and returns the socket to the event loop. So a
stalled peer blocks no thread, and all connections are served in turn.

A body bypasses aiohttp only if it is certain where each request ends. That requires that the connection has sent
only GETs without a body and parts with a Content-Length, in plain HTTP/1.1. After any other request, all bytes of the
connection go to aiohttp. With TLS the socket carries encrypted bytes, so bodies come from aiohttp's streams.
`receive_part` handles both cases alike, through the protocol `RequestBody`.
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
from atoll.protocol.routes import DIGEST_BYTES, LEAST_BYTES_PER_S

T = TypeVar("T")

SLICE_S = 0.05
"""Maximum seconds that one part uses a pool thread. Then another connection gets the thread."""
PATIENCE_S = 0.002
"""Seconds that a pool thread waits for bytes before it returns the socket to the event loop."""
MOST_HEAD_BYTES = 4 * routes.HEADER_BYTES
"""Maximum number of bytes in an incomplete head. aiohttp limits a line to `HEADER_BYTES / 2`, but not their number."""
HEAD_S = 10.0
"""Maximum seconds that a peer may take to send the head (request line and headers) of a request."""
DISCARD_S = 10.0
"""Maximum seconds for which the server reads and drops the rest of a refused part, so that the peer gets the answer."""

WIDE_BYTES, NARROW_BYTES = 2**20, 2**17
"""Number of bytes to read from aiohttp at a time: for up to `WIDE` parts at once, and for further parts.

A TLS connection keeps buffers of the size of its largest read until it closes.
"""
WIDE = 16
"""Maximum number of parts that are read with `WIDE_BYTES` at the same time. Further parts are read with `NARROW_BYTES`,
so that memory grows little with the number of workers."""

Fill = Callable[[memoryview], int]
"""Function that copies received bytes to the start of a buffer, and returns their number; 0 if there are none now."""


class PartSink(Protocol):
    """The destination of one part. It gets the bytes of the part in order."""

    @property
    def complete(self) -> bool:
        """Whether the sink has all bytes of the part."""
        ...

    def take(self, fill: Fill) -> None:
        """Call `fill` to get bytes, until it returns 0 or the part is complete. This runs in a pool thread."""
        ...


class RequestBody(Protocol):
    """The body of an upload's request, received from the socket or from aiohttp."""

    async def give(self, sink: PartSink, pool: Executor, idle: Idle) -> None:
        """Wait for bytes of the body, and pass them to the sink in a thread of the pool.

        Raises:
            BadRequest: the body ended before the part was complete.
            ConnectionError: the peer closed the connection.
        """
        ...


async def receive_part(
    request: web.Request,
    sink: PartSink,
    *,
    pool: Executor,
    idle_timeout_s: float,
    on_bytes: Callable[[int], None],
    rest_bytes: int = DIGEST_BYTES,
) -> bytes:
    """Receive the part in a request's body, and return what the peer sends after it: its BLAKE3, maybe a message.

    Args:
        request: the request.
        sink: destination of the part's bytes, which come in order.
        pool: threads that receive the bytes and call `sink`.
        idle_timeout_s: seconds without a byte after which the connection is closed.
        on_bytes: callback with the number of bytes received.
        rest_bytes: number of bytes after the part.

    Raises:
        BadRequest: the body ends before the part is complete.
        ConnectionError: no byte came for `idle_timeout_s`, or the peer closed the connection.
    """
    part = _WithRest(sink, rest_bytes)
    with Idle(request, idle_timeout_s, on_bytes) as idle:
        async with _body_of(request) as body:
            while not part.complete:
                await body.give(part, pool, idle)
    return bytes(part.rest)


def require_part_bytes(request: web.Request, nbytes: int, message_bytes: int = 0) -> int:
    """Check that a request's body, which is not read yet, is as long as a part and its digest together.

    Return how many bytes follow the part: its digest, and the message after it if there is one.

    Args:
        request: the request.
        nbytes: size of the part in bytes, without its digest.
        message_bytes: maximum size of a message after the digest.

    Raises:
        BadRequest: the Content-Length is not the size of the part plus the digest.
    """
    interceptor = interceptor_of(request)
    length = (interceptor.body_bytes if interceptor else 0) or request.content_length or 0
    if not nbytes + DIGEST_BYTES <= length <= nbytes + DIGEST_BYTES + message_bytes:
        raise BadRequest(
            f"The Content-Length is {length} bytes, not {nbytes + DIGEST_BYTES} (a part of {nbytes}, then its digest).",
            "Divide the update into parts as the ticket's layout says.",
        )
    return length - nbytes


class _WithRest:
    """Passes the bytes of a part to a sink, and keeps the bytes that follow the part."""

    def __init__(self, sink: PartSink, rest_bytes: int) -> None:
        self._sink, self.rest, self._left = sink, bytearray(rest_bytes), rest_bytes

    def take(self, fill: Fill) -> None:
        if not self._sink.complete:
            self._sink.take(fill)
        while self._sink.complete and self._left:
            count = fill(memoryview(self.rest)[-self._left :])
            if not count:
                return
            self._left -= count

    @property
    def complete(self) -> bool:
        return self._sink.complete and not self._left


class Idle:
    """A context manager that aborts a request's connection if hardly a byte is sent or received for a while.

    It checks every `timeout_s` seconds, so it aborts after `timeout_s` to `2 * timeout_s` seconds with fewer than
    `LEAST_BYTES_PER_S`.

    Args:
        request: the request.
        timeout_s: seconds between two checks.
        on_bytes: callback with the number of bytes that were sent or received.

    Attributes:
        on_end: callback after the connection was aborted.
    """

    def __init__(self, request: web.Request, timeout_s: float, on_bytes: Callable[[int], None]) -> None:
        self.on_end: Callable[[], None] = lambda: None
        self._request, self._timeout_s, self._on_bytes, self._moved_bytes = request, timeout_s, on_bytes, 0
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._check)

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def add(self, nbytes: int) -> int:
        """Record that `nbytes` bytes were sent or received, and return `nbytes`."""
        if nbytes:
            self._moved_bytes += nbytes
            self._on_bytes(nbytes)
        return nbytes

    def _check(self) -> None:
        if self._moved_bytes < max(1.0, LEAST_BYTES_PER_S * self._timeout_s):
            break_off(self._request)
            self.on_end()
            return
        self._moved_bytes = 0
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._check)


def break_off(request: web.Request) -> None:
    """Close the connection of a request at once, without an answer."""
    if request.transport is not None:
        request.transport.abort()


@asynccontextmanager
async def _body_of(request: web.Request) -> AsyncIterator[RequestBody]:
    """Yield the body of a request: from the socket if the body bypasses aiohttp, else from aiohttp's stream."""
    interceptor = interceptor_of(request)
    if interceptor is not None and interceptor.body_bytes:
        with interceptor.dup_socket() as sock:
            yield _SocketBody(interceptor, sock)
    else:
        with _run_bytes() as run_bytes:
            yield _StreamBody(request, run_bytes)


# -- Bodies from aiohttp: with TLS, and on connections that have sent other requests.


class _StreamBody:
    """A body that is read from aiohttp's stream, at most `run_bytes` at a time."""

    def __init__(self, request: web.Request, run_bytes: int) -> None:
        self._content, self._run_bytes = request.content, run_bytes
        self._left_bytes = request.content_length or 0
        self._waiting: deque[memoryview] = deque()  # received, but not passed to the sink yet
        self._content.set_read_chunk_size(run_bytes // 2)

    async def give(self, sink: PartSink, pool: Executor, idle: Idle) -> None:
        while not self._waiting or (sum(map(len, self._waiting)) < self._run_bytes and self._left_bytes):
            data, _ = await self._content.readchunk()  # `readany` would copy all chunks into one
            if not data:
                raise BadRequest("The body ended in the middle of the part.", "Send the part again.")
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
    """Yield how many bytes to read at once: `WIDE_BYTES` for up to `WIDE` parts, `NARROW_BYTES` for further parts."""
    global _wide
    if _wide >= WIDE:
        yield NARROW_BYTES
        return
    _wide += 1
    try:
        yield WIDE_BYTES
    finally:
        _wide -= 1


# -- Bodies from the socket, by pool threads.


class _SocketBody:
    """A body that bypasses aiohttp: it is received directly from the socket."""

    def __init__(self, interceptor: BodyInterceptor, sock: socket.socket) -> None:
        self._interceptor, self._socket = interceptor, sock

    async def give(self, sink: PartSink, pool: Executor, idle: Idle) -> None:
        idle.on_end = lambda: shut(self._socket)
        before = self._interceptor.body_bytes
        if not before:
            raise BadRequest("The body ended in the middle of the part.", "Send the part again.")
        await in_thread(pool, lambda: sink.take(self._interceptor.filler(self._socket)))
        if not idle.add(before - self._interceptor.body_bytes):
            await readable(self._socket)


def receive(sock: socket.socket, room: memoryview) -> int:
    """Receive available bytes into `room`, and return their number. If there are none, wait up to `PATIENCE_S` seconds.

    Raises:
        ConnectionError: the peer has closed the connection, or the network failed.
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
        except OSError as error:  # a network failure, for example no route or a system timeout
            raise ConnectionResetError(error.errno, error.strerror) from error
        if not count:
            raise ConnectionResetError("the peer closed the connection within a part")
        return count
    return 0


async def readable(sock: socket.socket) -> None:
    """Wait until the socket has bytes to read, without blocking the event loop."""
    loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock.fileno(), is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(sock.fileno())


async def in_thread(pool: Executor, work: Callable[[], T]) -> T:
    """Run `work` in the pool, and return its result. If the caller is cancelled, first wait until `work` has ended."""
    future = asyncio.get_running_loop().run_in_executor(pool, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        future.exception()  # mark the exception as retrieved
        raise


def shut(sock: socket.socket) -> None:
    """Shut down a socket that another thread may be using."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


_PART = re.compile(re.sub(r"\\\{\w+\\\}", "[0-9]+", re.escape(routes.PART)).encode())
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n\x00]*)")
_LONE_LF = re.compile(rb"(?<!\r)\n")
_BEGIN = re.compile(rb"[A-Z]{1,16}(?: |\Z)")
_NOT_PLAIN = frozenset(
    {b"transfer-encoding", b"upgrade", b"expect", b"connection", b"te", b"trailer", b"content-encoding"}
)
"""Headers that may change where a request ends, which protocol follows it, or what its body means."""


def _nothing() -> None:
    """Do nothing: the default of a callback."""


NO_INNER = asyncio.Protocol()
"""The inner protocol before the first byte of a connection, and after its end."""


class BodyInterceptor(asyncio.Protocol):
    """Stands between a connection and aiohttp. The bodies of parts bypass aiohttp: pool threads receive them.

    Args:
        inner: aiohttp's protocol for this connection.
        direct: whether the socket carries plain bytes. With TLS it is False, and every body goes to aiohttp.
        idle_timeout_s: seconds after which a peer that reads no byte of an answer is disconnected.
        later: makes `inner` at the first byte, so that a silent connection takes less memory.

    Attributes:
        direct: the argument of this name.
        is_connected: whether the connection is established (with TLS: after the handshake).
        is_proven: whether the peer has shown a credential.
        on_lost: callback at the end of the connection.
        on_proven: callback when the peer has shown a credential.
        on_widen: callback then, too, after which a TLS connection takes more memory.
    """

    def __init__(
        self,
        inner: asyncio.Protocol,
        *,
        direct: bool = True,
        idle_timeout_s: float = 60.0,
        later: Callable[[], asyncio.Protocol] | None = None,
    ) -> None:
        self._later = later
        self._inner, self.direct, self._idle_timeout_s = inner, direct, idle_timeout_s
        self.is_connected = False
        self.on_lost: Callable[[], None] = _nothing
        self.on_proven: Callable[[], None] = _nothing
        self.on_widen: Callable[[], None] = _nothing
        self.is_proven = False
        self._head_bytes = 0  # number of bytes of a head that aiohttp has, but which is not complete
        self._heard_s = 0.0  # when aiohttp got bytes last
        self._transport: asyncio.Transport | None = None
        self._unparsed = b""  # bytes of an incomplete head, or bytes that follow a body
        self._passes = False  # whether all further bytes of the connection go to aiohttp
        self._part = False  # whether a part is being received or answered; meanwhile no later request is read
        self._discarding = False  # whether the rest of a part's body is being dropped, after the answer
        self._full = False  # whether aiohttp has paused reading
        self._body_left = 0  # number of bytes of the part's body that are not received yet
        self._early = b""  # the first bytes of the part's body, if they came together with the head
        self._timer: asyncio.TimerHandle | None = None  # deadline for a complete head, or for dropping a refused part
        self._reader_timer: asyncio.TimerHandle | None = None  # runs while the peer does not read the answer

    def prove(self) -> None:
        """Note that the peer has shown a credential, so that the connection is not closed for a newer one."""
        if not self.is_proven:
            self.is_proven = True
            self.on_proven()
            self.on_widen()

    @property
    def has_begun(self) -> bool:
        """Whether the peer has sent a byte."""
        return self._later is None

    def abort(self) -> None:
        """End the connection at once."""
        self._give_up()

    # -- between transport and aiohttp

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect aiohttp to this connection. The client has `HEAD_S` seconds to send a request's line and headers."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_connected = transport, True
        self._give_up_after(HEAD_S)
        if self._later is None:
            self._inner.connection_made(cast(asyncio.Transport, _Facade(transport, self._hold)))

    def _begin(self) -> None:
        assert self._later is not None
        self._inner, self._later = self._later(), None
        if self._transport is not None:
            self._inner.connection_made(cast(asyncio.Transport, _Facade(self._transport, self._hold)))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, tell aiohttp, and call `on_lost`."""
        self._transport = None
        self._stop_timer()
        self._stop_reader_timer()
        self._inner.connection_lost(exc)
        self.on_lost()
        # break the circles through these, so that the memory of the connection is free at once
        self.on_lost = self.on_proven = self.on_widen = _nothing
        self._inner = NO_INNER

    def eof_received(self) -> bool | None:
        """When the client has stopped sending, let aiohttp decide whether the connection stays open for an answer."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Tell aiohttp to pause writing. Begin to check whether the client still reads the answer."""
        self._look_after_reader(left_bytes=None)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Tell aiohttp to resume writing.

        Stop checking whether the client reads the answer, because the client reads again.
        """
        self._stop_reader_timer()
        self._inner.resume_writing()

    def _look_after_reader(self, left_bytes: int | None) -> None:
        """Check after each idle timeout whether the client reads the answer. If it does not, abort the connection.

        Args:
            left_bytes: number of unsent bytes at the previous check; None at the first check.
        """
        if self._transport is None:
            return
        now_bytes = self._transport.get_write_buffer_size()
        if left_bytes is not None and left_bytes - now_bytes < max(1.0, LEAST_BYTES_PER_S * self._idle_timeout_s):
            self._give_up()
            return
        again = asyncio.get_running_loop().call_later
        self._reader_timer = again(self._idle_timeout_s, self._look_after_reader, now_bytes)

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def data_received(self, data: bytes) -> None:
        """Handle received bytes: pass them to aiohttp, drop them, or search them for the headers of requests."""
        if self._later is not None:
            self._begin()
        if self._passes:
            self._pass(data)
        elif self._discarding:
            self._discard(data)
        elif self._part:  # a thread should have received these bytes, so the body is incomplete
            self._give_up()
        else:
            self._heads(self._unparsed + data)

    def _hold(self, full: bool) -> None:
        """Record that aiohttp pauses (`full`) or resumes reading.

        If it resumes, handle the bytes that have arrived meanwhile.
        """
        self._full = full
        self._read_or_not()
        if not full and not self._part and self._transport is not None:
            self._heads(self._unparsed)

    def _read_or_not(self) -> None:
        """Pause reading from the connection if aiohttp wants a pause or a thread receives a part. If not, resume."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._full or (self._part and not self._discarding):
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _heads(self, data: bytes) -> None:
        """Pass complete request heads (line and headers) to aiohttp, until it pauses or the body of a part begins."""
        self._unparsed = b""
        while data and not self._part:
            if self._full:
                self._unparsed = data
                return
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(data) <= routes.HEADER_BYTES and _BEGIN.match(data) and not _LONE_LF.search(data):
                    self._unparsed = data
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
                self._unparsed = data
                head = _without_body(head)
            self._inner.data_received(head)

    def _pass_all(self, data: bytes) -> None:
        self._passes = True
        self._pass(data)

    def _pass(self, data: bytes) -> None:
        """Pass bytes to aiohttp. It has no limit of time for the head of a request, so this sets one.

        Bytes that come together with the end of a request may begin another one, which cannot be seen. So while the
        peer has shown no credential, its connection is not left open between requests for longer than this limit.
        """
        is_ahead = _has_whole_request(self._inner)  # then these bytes are of a later request
        self._inner.data_received(data)
        self._heard_s = time.monotonic()
        if not getattr(self._inner, "_messages", ()) and (is_ahead or _waits_for_head(self._inner)):
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._give_up()
        elif getattr(self._inner, "_messages", ()) or not _is_between(self._inner):
            self._head_bytes = 0
            self._stop_timer()
        if self._timer is None and (self._head_bytes or not self.is_proven):
            self._timer = asyncio.get_running_loop().call_later(HEAD_S, self._give_up_head)

    def _give_up_head(self) -> None:
        """End the connection if it has waited for the head of a request for too long, or for the rest of it."""
        self._timer = None
        left_s = self._heard_s + HEAD_S - time.monotonic()
        if self._transport is None or (self.is_proven and not self._head_bytes):
            return
        if _waits_for_head(self._inner) and left_s <= 0:
            self._give_up()
        else:
            again_s = left_s if left_s > 0 else HEAD_S
            self._timer = asyncio.get_running_loop().call_later(again_s, self._give_up_head)

    # -- a part

    @property
    def body_bytes(self) -> int:
        """Number of bytes of a part's body that a thread still has to receive; 0 if no body bypasses aiohttp."""
        return self._body_left

    def dup_socket(self) -> socket.socket:
        """Return a duplicate of the connection's socket, which a thread can use even if the connection closes.

        Raises:
            ConnectionResetError: the connection is closed.
        """
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        found: socket.socket = self._transport.get_extra_info("socket")
        return found.dup()

    def filler(self, sock: socket.socket) -> Fill:
        """Return a function that receives bytes of a part. After `SLICE_S` seconds it returns 0: others get a turn."""
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
        """After the answer to a part's request, drop the rest of the body, then read the next request."""
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
        self._unparsed += data[count:]
        if not self._body_left:
            self._next()

    def _next(self) -> None:
        """A request with a part has ended: begin to read the next request on this connection."""
        self._part = self._discarding = False
        self._stop_timer()
        self._read_or_not()
        if self._transport is not None and not self._transport.is_closing():
            self._heads(self._unparsed)

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


def _waits_for_head(inner: Any) -> bool:
    """Return whether aiohttp waits for the head of a request, or for the rest of it."""
    waiter = getattr(inner, "_waiter", None)
    return waiter is not None and not waiter.done() and not getattr(inner, "_messages", ())


def _is_between(inner: Any) -> bool:
    """Return whether aiohttp answers no request: it waits for one, begins to, or drops what follows a refused one."""
    waiter = getattr(inner, "_waiter", None)
    return getattr(inner, "_current_request", None) is None and not (waiter is not None and waiter.done())


def _has_whole_request(inner: Any) -> bool:
    """Return whether aiohttp answers a request of which it has all bytes."""
    request = getattr(inner, "_current_request", None)
    return request is not None and request.content.is_eof()


class _Facade:
    """The asyncio transport that aiohttp gets: `pause_reading` and `resume_reading` go to the interceptor.

    Everything else goes to the real transport.
    """

    def __init__(self, transport: asyncio.Transport, hold: Callable[[bool], None]) -> None:
        self._transport, self._hold = transport, hold
        self.write, self.is_closing = transport.write, transport.is_closing  # faster than by `__getattr__`

    def pause_reading(self) -> None:
        self._hold(True)

    def resume_reading(self) -> None:
        self._hold(False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def interceptor_of(request: web.Request) -> BodyInterceptor | None:
    """Return the `BodyInterceptor` of a request's connection; None with TLS, or if there is none."""
    protocol = request.transport.get_protocol() if request.transport is not None else None
    return protocol if isinstance(protocol, BodyInterceptor) and protocol.direct else None


def prove(request: web.Request) -> None:
    """Note that a request has shown a credential. See `BodyInterceptor.prove`."""
    protocol = request.transport.get_protocol() if request.transport is not None else None
    if isinstance(protocol, BodyInterceptor):
        protocol.prove()


def _body_bytes(head: bytes) -> int | None:
    """Return the length of a request's body, according to its head: 0 for a GET; for a part, the Content-Length.

    For every other request, and for a head with unusual syntax, return None.
    """
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
