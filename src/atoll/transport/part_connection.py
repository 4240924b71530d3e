"""One connection for parts: bytes go from a file into the socket, and from the socket into a scratch that is kept.

It uses the standard library's HTTP client, because both ways need the socket itself: `send` upwards, `readinto`
downwards. `sendfile` is not used: queued pages of 4 KiB cost more on both sides than the copy that they save.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from urllib3.util.wait import wait_for_read

from atoll.tensors.chunks import CHUNK_BYTES
from atoll.transport.http_client import Response


class PartConnection:
    """A connection for many parts, used by one thread at a time; another thread may cut it.

    Args:
        secure: TLS context; None for plain HTTP.
        idle_timeout_s: a call that moves no byte for so long raises `TimeoutError`.

    Attributes:
        on_move: called whenever bytes of a body have moved.
    """

    def __init__(self, host: str, port: int, secure: ssl.SSLContext | None, idle_timeout_s: float) -> None:
        self._connection = (
            http.client.HTTPSConnection(host, port, timeout=idle_timeout_s, context=secure)
            if secure
            else http.client.HTTPConnection(host, port, timeout=idle_timeout_s)
        )
        self._connection.response_class = Response
        self._secure, self._idle_timeout_s = secure, idle_timeout_s
        self._scratch = bytearray(CHUNK_BYTES)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None  # the connection's, from before it is connected
        self.is_cut = False
        self.on_move: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Close the socket; the next call of `put` or `get` connects anew, unless the connection was cut."""
        with self._lock:
            self._socket = None
        self._connection.close()

    def cut(self) -> None:
        """End the connection from another thread: a call that waits in it fails at once."""
        with self._lock:
            self.is_cut = True
            if self._socket is not None:
                with suppress(OSError):  # it was not connected
                    # not a TLS socket's own, which takes the keys away from the thread that uses them
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def put(
        self,
        path: str,
        headers: Mapping[str, str],
        fd: int,
        span: tuple[int, int],
        trailer: bytes,
        on_bytes: Callable[[int], None],
    ) -> tuple[int, bytes]:
        """PUT a span of a file, and `trailer` behind it; return status and body of the answer.

        Args:
            fd: of the file; it must stay open until this returns.
            span: the bytes [start, stop) of the file.
            on_bytes: called with the count of what was sent, every few MiB; what it raises ends the request.
        """
        start, stop = span
        connection = self._ready()
        connection.putrequest("PUT", path, skip_accept_encoding=True)
        for name, value in {**headers, "Content-Length": str(stop - start + len(trailer))}.items():
            connection.putheader(name, value)
        try:
            connection.endheaders()
            for offset in range(start, stop, CHUNK_BYTES):
                count = min(CHUNK_BYTES, stop - offset)
                self._send(fd, offset, count)
                on_bytes(count)
            connection.sock.sendall(trailer)
        except (BrokenPipeError, ConnectionResetError):
            # it may have said why before it stopped listening
            return self._answer()
        return self._answer()

    def get(
        self,
        path: str,
        headers: Mapping[str, str],
        room: Callable[[memoryview], memoryview] = lambda scratch: scratch,
    ) -> tuple[int, bytes, Iterator[memoryview]]:
        """GET a path; return status, the body of an answer that is not 2xx, and the runs of one that is.

        Args:
            room: asked before every run for the memory to fill, of at most as many bytes as the scratch that it is
                given: that one, some of it, or another. All runs share the scratch, so that what is in it is gone when
                the next run is asked for.
        """
        connection = self._ready()
        connection.request("GET", path, headers=dict(headers))
        response = connection.getresponse()
        if response.status >= 300:
            return response.status, response.read(), iter(())
        return response.status, b"", self._runs(response, room)

    def _runs(
        self, response: http.client.HTTPResponse, room: Callable[[memoryview], memoryview]
    ) -> Iterator[memoryview]:
        # not by `response.readinto`, which waits until all is full, and so does not see a slow connection move
        scratch, body, left = memoryview(self._scratch), response.fp, response.length or 0
        while left > 0:
            run, filled = room(scratch[:left]), 0
            while filled < len(run):  # whole runs, so that they end at borders of elements
                self._require_whole()  # what had arrived before the cut is not handed out after it
                count = body.readinto1(run[filled:])
                if not count:
                    raise http.client.IncompleteRead(b"", left - filled)
                filled += count
                self.on_move()
            self._require_whole()
            left -= len(run)
            yield run
        response.close()  # else nothing more can be asked over this connection

    def _answer(self) -> tuple[int, bytes]:
        response = self._connection.getresponse()
        return response.status, response.read()

    def _ready(self) -> http.client.HTTPConnection:
        """The connection; made anew where the other side has closed it meanwhile."""
        connection = self._connection
        if connection.sock is not None and wait_for_read(connection.sock, timeout=0.0):
            self.close()  # nothing was asked, so what can be read is its end
        if connection.sock is None:
            self._connect()
        return connection

    def _connect(self) -> None:
        """As the connection itself would; but a cut reaches the socket while it is being connected, too."""
        host, port = self._connection.host, self._connection.port
        error: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                self._hold(sock)
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                break
            except OSError as refused:
                sock.close()
                error = refused
            except BaseException:
                sock.close()
                raise
        else:
            raise error or OSError(f"{host} has no address")
        try:
            if self._secure:
                sock = self._secure.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
                self._hold(sock)
                sock.do_handshake()
        except BaseException:
            sock.close()
            raise
        self._connection.sock = sock

    def _hold(self, sock: socket.socket) -> None:
        sock.settimeout(self._idle_timeout_s)
        with self._lock:
            self._socket = sock
        self._require_whole()

    def _require_whole(self) -> None:
        if self.is_cut:
            raise ConnectionAbortedError("the transfer was cut off")

    def _send(self, fd: int, offset: int, nbytes: int) -> None:
        run = memoryview(self._scratch)[:nbytes]
        run = run[: os.preadv(fd, [run], offset)]
        while run:  # not sendall, which has one timeout for all of the run
            run = run[self._connection.sock.send(run) :]
            self.on_move()
