"""One HTTP connection that uploads parts from a file, and downloads parts into a reused buffer.

It uses the standard library's HTTP client, which gives access to the socket: uploads and downloads use the socket
directly. `sendfile` is not used: it queues pages of 4 KiB, which costs both sides more than the copy that `sendfile`
saves.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from urllib3.util.wait import wait_for_read

from atoll.protocol.routes import PROBLEM_BYTES
from atoll.system_calls import read_into
from atoll.tensors.chunks import CHUNK_BYTES
from atoll.transport.answer import BadAnswer, Pace, Response
from atoll.transport.http_proxy import Proxy
from atoll.transport.tls import ContextMaker


class PartConnection:
    """A reusable HTTP connection for parts of files. Only one thread at a time may use it. Any thread may call `cut`.

    Args:
        host: host of the server.
        port: port of the server.
        context: returns the TLS context for a new connection; None for plain HTTP.
        idle_timeout_s: seconds without a byte after which a call raises `TimeoutError`.
        proxy: the proxy to connect through; None: connect to the server.
        require_ip: called with the IP address that a direct connection has reached, before the first byte is sent. If
            it raises an error, the connection ends.

    Attributes:
        is_cut: whether `cut` was called.
        on_move: callback each time that bytes of a body were sent or received.
    """

    def __init__(
        self,
        host: str,
        port: int,
        context: ContextMaker | None,
        idle_timeout_s: float,
        proxy: Proxy | None = None,
        require_ip: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._connection = (
            http.client.HTTPSConnection(host, port, timeout=idle_timeout_s, context=context())
            if context
            else http.client.HTTPConnection(host, port, timeout=idle_timeout_s)
        )
        self._connection.response_class = Response
        self._context, self._idle_timeout_s, self._proxy = context, idle_timeout_s, proxy
        self._require_ip = require_ip
        self._shown: ssl.SSLContext | None = None  # that of the open connection
        self._scratch = bytearray(CHUNK_BYTES)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None  # the connection's socket; set before it connects
        self._answer_begun: Response | None = None  # it keeps the socket open after the connection has closed
        self.is_cut = False
        self.on_move: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Close the socket. The next `put` or `get` connects again, unless the connection was cut."""
        with self._lock:
            self._socket = None
        self._connection.close()
        if self._answer_begun is not None:
            self._answer_begun.close()
            self._answer_begun = None

    def cut(self) -> None:
        """End the connection, from any thread. A running `put` or `get` fails at once."""
        with self._lock:
            self.is_cut = True
            if self._socket is not None:
                with suppress(OSError):  # raised if the socket is not connected yet
                    # the shutdown method of a TLS socket would drop TLS state that another thread is using
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def put(
        self,
        path: str,
        headers: Mapping[str, str],
        fd: int,
        span: tuple[int, int],
        trailer: bytes,
        on_bytes: Callable[[int], None],
    ) -> tuple[int, bytearray]:
        """PUT a byte range of a file, followed by `trailer`.

        Args:
            path: path of the request, or with a proxy the whole address.
            headers: headers of the request, without Content-Length.
            fd: descriptor of the file; it must stay open until this method returns.
            span: the byte range [start, stop) of the file.
            trailer: bytes to send after the range.
            on_bytes: callback with the number of bytes sent, every few MiB. If it raises, the request ends.

        Returns:
            Status and body of the answer.
        """
        start, stop = span
        connection = self._ready()
        connection.putrequest("PUT", path, skip_accept_encoding=True)
        for name, value in {**headers, "Content-Length": str(stop - start + len(trailer))}.items():
            connection.putheader(name, value)
        pace = Pace(self._idle_timeout_s)
        try:
            connection.endheaders()
            for offset in range(start, stop, CHUNK_BYTES):
                count = min(CHUNK_BYTES, stop - offset)
                self._send(fd, offset, count, pace)
                on_bytes(count)
            connection.sock.sendall(trailer)
        except (BrokenPipeError, ConnectionResetError):
            # the server may have sent an error before it closed the connection
            return self._answer()
        return self._answer()

    def get(
        self,
        path: str,
        headers: Mapping[str, str],
        most_bytes: int,
        room: Callable[[memoryview], memoryview] = lambda scratch: scratch,
    ) -> tuple[int, bytearray, Iterator[memoryview]]:
        """GET a path, and return the body of the answer piece by piece.

        Args:
            path: path of the request, or with a proxy the whole address.
            headers: headers of the request.
            most_bytes: maximum size of the body.
            room: function that chooses the buffer for the next bytes of the body. Its argument is the connection's
                scratch buffer. It returns the start of this buffer, or other memory of at most the same size.

        Returns:
            The status; the body if the status is 300 or above; and the pieces of the body if the status is below 300.
            Each piece is valid only until the next one.

        Raises:
            BadAnswer: the body is longer than `most_bytes`, or its length is not given.
        """
        connection = self._ready()
        connection.request("GET", path, headers=dict(headers))
        response = self._response()
        if response.status >= 300:
            return response.status, response.body(PROBLEM_BYTES), iter(())
        if response.status != 206 and "Range" in headers:
            return response.status, bytearray(), iter(())  # the caller refuses it
        if response.length is None:
            raise BadAnswer("sends a file without saying how long it is")
        response.allow(most_bytes)
        return response.status, bytearray(), self._runs(response, room)

    def _runs(self, response: Response, room: Callable[[memoryview], memoryview]) -> Iterator[memoryview]:
        # `response.readinto` would block until the buffer is full, and would not report a slow connection's progress
        scratch, body, remaining = memoryview(self._scratch), response.fp, response.length or 0
        while remaining > 0:
            run, filled = room(scratch[:remaining]), 0
            while filled < len(run):  # fill the whole buffer, because each piece must consist of whole elements
                self._require_whole()  # after `cut`, return no bytes, even if they arrived before
                count = body.readinto1(run[filled:])
                if not count:
                    raise http.client.IncompleteRead(b"", remaining - filled)
                filled += count
                self.on_move()
            self._require_whole()
            remaining -= len(run)
            yield run
        response.close()  # required before the next request on this connection

    def _answer(self) -> tuple[int, bytearray]:
        response = self._response()
        return response.status, response.body(PROBLEM_BYTES)

    def _response(self) -> Response:
        response = self._connection.getresponse()
        assert isinstance(response, Response)
        self._answer_begun = response
        return response

    def _ready(self) -> http.client.HTTPConnection:
        """Return the open connection. If it is not open, or the server has closed it, connect first."""
        connection = self._connection
        is_old = self._context is not None and self._context() is not self._shown  # a certificate was renewed
        if connection.sock is not None and (is_old or wait_for_read(connection.sock, timeout=0.0)):
            self.close()  # no request is open, so the socket is readable only if the server has closed it
        if connection.sock is None:
            self._connect()
        return connection

    def _connect(self) -> None:
        """Connect as http.client does, but store the socket first, so that `cut` can end an attempt that hangs."""
        host = self._connection.host
        proxy = self._proxy
        try:
            sock = self._connected(*(proxy.host, proxy.port) if proxy else (host, self._connection.port))
        except OSError as error:
            if proxy is None or self.is_cut:
                raise
            raise proxy.unreachable(error) from error
        try:
            if proxy is not None:
                proxy.open_tunnel(sock)
            if self._context:
                self._shown = self._context()
                sock = self._shown.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
                self._hold(sock)
                sock.do_handshake()
        except BaseException:
            sock.close()
            raise
        self._connection.sock = sock

    def _connected(self, host: str, port: int) -> socket.socket:
        error: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                self._hold(sock)
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._proxy is None:
                    self._require_ip(sock.getpeername()[0])
                return sock
            except OSError as refused:
                sock.close()
                error = refused
            except BaseException:
                sock.close()
                raise
        raise error or OSError(f"{host} has no address")

    def _hold(self, sock: socket.socket) -> None:
        sock.settimeout(self._idle_timeout_s)
        with self._lock:
            self._socket = sock
        self._require_whole()

    def _require_whole(self) -> None:
        if self.is_cut:
            raise ConnectionAbortedError("the transfer was ended by another thread")

    def _send(self, fd: int, offset: int, nbytes: int, pace: Pace) -> None:
        run = memoryview(self._scratch)[:nbytes]
        run = run[: read_into(fd, [run], offset)]
        while run:  # not `sendall`, because its timeout is for the whole buffer
            count = self._connection.sock.send(run)
            run = run[count:]
            self.on_move()
            pace.moved(count)
