"""The other end of connections, of which a test says what it does."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """The head of a request. Names of headers are in lower case."""

    method: str
    path: str
    headers: dict[str, str]

    @property
    def range(self) -> slice:
        """The bytes that are asked for."""
        first, last = (int(text) for text in self.headers["range"].removeprefix("bytes=").split("-"))
        return slice(first, last + 1)


class Connection:
    """One connection of a peer."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._file = sock.makefile("rb")

    def request(self) -> Request | None:
        """Read the head of the next request; None where the other side has ended."""
        line = self._file.readline()
        headers = {}
        while text := self._file.readline().decode("latin-1").strip():
            name, _, value = text.partition(":")
            headers[name.lower()] = value.strip()
        return Request(*line.decode().split()[:2], headers) if line else None

    def body(self, request: Request) -> bytes:
        """Read the body of a request."""
        return self._file.read(int(request.headers["content-length"]))

    def answer(self, status: int, body: bytes = b"", nbytes: int | None = None) -> None:
        """Send an answer, or its beginning: `nbytes` is the length of the whole body."""
        head = f"HTTP/1.1 {status} So\r\nContent-Length: {len(body) if nbytes is None else nbytes}\r\n\r\n"
        self.sock.sendall(head.encode() + body)

    def close_file(self) -> None:
        """Close what reads from the socket: it would keep the socket open after its end."""
        self._file.close()

    def reset(self) -> None:
        """End the connection with RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_file()
        self.sock.close()


class Peer:
    """Listens on a port of 127.0.0.1. A thread serves each connection, which ends with it.

    Args:
        serve: what to do with a connection.
        receive_bytes: of the buffers of its sockets; 0: as large as usual.
        port: 0: any free one.

    Attributes:
        connections: all that there were.
        requests: heads of all requests, in the order in which they came; `each_request` fills it.
        ended: set when the peer ends. What stands still waits for it.
    """

    def __init__(self, serve: Callable[[Connection], Any], receive_bytes: int = 0, port: int = 0) -> None:
        self._serve = serve
        self.connections: list[Connection] = []
        self.requests: list[Request] = []
        self.ended = threading.Event()
        self._listener = socket.socket()
        if receive_bytes:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen()
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @classmethod
    def answering(cls, answer: Callable[[Connection, Request], Any]) -> Peer:
        """A peer that calls `answer` for each request, after it has noted it."""

        def serve(connection: Connection) -> None:
            while not peer.ended.is_set() and (request := connection.request()):
                peer.requests.append(request)
                answer(connection, request)

        peer = cls(serve)
        return peer

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._run, args=(sock,), daemon=True))
                self._threads[-1].start()

    def _run(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            connection = Connection(sock)
            self.connections.append(connection)
            try:
                self._serve(connection)
            finally:
                connection.close_file()
                sock.shutdown(socket.SHUT_RDWR)
