"""A TCP proxy that breaks one HTTP message at one byte: resets, cuts, stalls, or flips a bit.

    with Proxy(server_port) as proxy:
        proxy.faults.append(Fault("PUT .*/parts/2", "up", at=65535, action="reset"))
        worker = atoll.join(proxy.url, ...)
        assert proxy.count("PUT .*/parts/2") == 2      # it alone was sent again

It reads HTTP/1.1 only so far as to know where a message's body begins. `cut` or `silence`, and `heal`, make a
partition of it. With a `Pace` it is a long and lossy line, on which each connection is slow, however many there are.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

_READ_BYTES = 64 * 2**10
_PACED_BYTES = 4 * 2**10
_LOOK_S = 0.5
BEFORE_HEADER = -1


@dataclass(eq=False)
class Fault:
    """What is to happen, once, to a message.

    Attributes:
        request: regular expression for its request line, such as `PUT .*/parts/2 `.
        direction: `up` breaks the request, `down` its answer.
        at: so many bytes of the body pass first; `BEFORE_HEADER`: not even the header does.
        action: `reset` (RST to both sides), `close` (an orderly end to both), `stall` (the connection stays and moves
            nothing more), `flip` (the lowest bit of byte `at`; the message goes on), `hold` (the message goes on after
            `wait`).
        reached: set when it happens.
        wait: called before it happens, when the bytes before it are on their way; may wait for what becomes of them.
        in_header: with `BEFORE_HEADER`, says how many bytes of the header that it is given pass first; else none do.
    """

    request: str
    direction: Literal["up", "down"]
    at: int
    action: Literal["reset", "close", "stall", "flip", "hold"]
    reached: threading.Event = field(default_factory=threading.Event)
    wait: Callable[[], None] = lambda: None
    in_header: Callable[[bytes], int] | None = None


def lost_receipt() -> list[Fault]:
    """Faults after which a site does not know that its update of one part is in, though it asks three times."""
    asked = [Fault(r"GET /v1/tickets/\d+ ", "down", at=BEFORE_HEADER, action="reset") for _ in range(3)]
    return [Fault("PUT .*/parts/0 ", "down", at=BEFORE_HEADER, action="reset"), *asked]


@dataclass(frozen=True)
class Pace:
    """What TCP leaves to one connection of a line on which packets are lost; others have as much for themselves.

    Attributes:
        delay_s: before what a side sends behind a pause reaches the other one.
        bytes_per_s: each way. Reno and CUBIC come to about 1.2 · 1460 bytes/(round trip · √loss) where that is little.
    """

    delay_s: float
    bytes_per_s: float


class Broken(Exception):
    """This connection is over."""


class Proxy:
    """Listens on a port of 127.0.0.1 and passes everything on to another one.

    Args:
        port: the other one.
        pace: of every connection; None: as fast as they go.
        at: address and port on which it listens itself.

    Attributes:
        faults: waiting to happen; each is removed when it does.
        requests: request lines in the order in which they came.
        posted: line and body of every POST.
        moved_bytes: up and down, one pair for every connection there was.
    """

    def __init__(self, port: int, pace: Pace | None = None, *, at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._target, self._pace = port, pace
        self.moved_bytes: list[dict[str, int]] = []
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.posted: list[tuple[str, bytearray]] = []
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._cut = self._silent = False
        self._closing = threading.Event()
        self._listener = socket.create_server(at)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def count(self, request: str) -> int:
        """How many requests had a line that matches."""
        with self._lock:
            return sum(re.search(request, line) is not None for line in self.requests)

    def cut(self) -> None:
        """A partition: reset every connection, and every new one."""
        with self._lock:
            self._cut = True
            links = list(self._links)
        for link in links:
            link.end(reset=True)

    def freeze(self) -> None:
        """Half-open connections: those that are there stay, and move nothing more."""
        with self._lock:
            for link in self._links:
                link.frozen = True

    def silence(self) -> None:
        """A network that drops every packet: connections stay, also new ones, and nothing moves over them."""
        with self._lock:
            self._silent = True
        self.freeze()

    def heal(self) -> None:
        """New connections are passed on again; those that were silent stay so."""
        with self._lock:
            self._cut = self._silent = False

    def close(self) -> None:
        """End every connection and every thread."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for link in list(self._links):
            link.end(reset=True)
            link.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target), timeout=10.0)
                server.settimeout(None)
            except OSError:
                _end(client, reset=True)
                continue
            with self._lock:
                link = _Link(self, client, server)
                link.frozen = self._silent
                self._links.add(link)
                self.moved_bytes.append(link.moved_bytes)
                cut = self._cut
            if cut:
                link.end(reset=True)
            link.start()

    def _fault(self, request: str, direction: str, start: int, stop: int) -> Fault | None:
        """The fault that hits bytes [start, stop) of this message; it will not happen again."""
        with self._lock:
            for fault in self.faults:
                hit = fault.direction == direction and start <= fault.at < stop
                if hit and re.search(fault.request, request):
                    self.faults.remove(fault)
                    return fault
        return None


class _Link:
    """One connection: two sockets, and a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._ended = threading.Event()
        self.moved_bytes = {"up": 0, "down": 0}
        self.frozen = False
        self.request, self.posted = "", bytearray()
        self._threads = [
            threading.Thread(target=self._pump, args=(client, server, "up"), daemon=True),
            threading.Thread(target=self._pump, args=(server, client, "down"), daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(1.0)  # one that sends to a peer that reads nothing may stay; it is a daemon

    def end(self, *, reset: bool) -> None:
        self._ended.set()
        for side in (self._client, self._server):
            _end(side, reset=reset)

    def _pump(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        messages, pace, free_s = _Messages(), self._proxy._pace, 0.0
        try:
            while data := self._read(source):
                if pace is not None:
                    now_s = time.monotonic()
                    paused = now_s - free_s > pace.delay_s
                    free_s = now_s + pace.delay_s * paused + len(data) / pace.bytes_per_s
                    self._ended.wait(free_s - now_s)
                self.moved_bytes[direction] += len(data)
                for begins, offset, piece in messages.split(data):
                    if begins and direction == "up":
                        self.request = piece.split(b"\r\n", 1)[0].decode("latin-1")
                        with self._proxy._lock:
                            self._proxy.requests.append(self.request)
                        self.posted = bytearray()
                        if self.request.startswith("POST "):
                            self._proxy.posted.append((self.request, self.posted))
                    elif direction == "up" and self.request.startswith("POST "):
                        self.posted += piece
                    self._pass(target, direction, offset, piece)
            if self.frozen:
                self._stay()  # the other side does not learn that this one has gone
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)
            if direction == "down":
                self.end(reset=False)
        except (OSError, ValueError, Broken):  # ValueError: the other thread has closed the sockets
            self.end(reset=True)
        finally:
            if direction == "down":
                with self._proxy._lock:
                    self._proxy._links.discard(self)

    def _read(self, source: socket.socket) -> bytes:
        """What there is next. Looks now and then: a socket that closes before the wait begins does not end it."""
        waiting = select.poll()  # select() knows no descriptor above 1,023
        waiting.register(source, select.POLLIN)
        while not waiting.poll(_LOOK_S * 1000):
            if self._ended.is_set():
                raise Broken
        if self._ended.is_set():
            raise Broken
        return source.recv(_READ_BYTES if self._proxy._pace is None else _PACED_BYTES)

    def _pass(self, target: socket.socket, direction: str, offset: int, piece: bytes) -> None:
        """Send a piece of a message on: its header (offset −1) or bytes of its body."""
        if self.frozen:
            self._stay()
        stop = 0 if offset == BEFORE_HEADER else offset + len(piece)
        fault = self._proxy._fault(self.request, direction, offset, stop)
        if fault is None:
            target.sendall(piece)
            return
        index = fault.at - offset if offset != BEFORE_HEADER else fault.in_header(piece) if fault.in_header else 0
        if fault.action == "flip":
            target.sendall(piece[:index] + bytes([piece[index] ^ 1]) + piece[index + 1 :])
            fault.reached.set()
            return
        target.sendall(piece[:index])
        fault.wait()
        fault.reached.set()
        if fault.action == "hold":
            target.sendall(piece[index:])
            return
        if fault.action == "stall":
            self._stay()
        self.end(reset=fault.action == "reset")
        raise Broken

    def _stay(self) -> None:
        self.frozen = True
        self._ended.wait()
        raise Broken


class _Messages:
    """Splits one direction of a connection into headers and bodies."""

    def __init__(self) -> None:
        self._header = b""
        self._left = 0
        self._offset = 0

    def split(self, data: bytes) -> Iterator[tuple[bool, int, bytes]]:
        """(whether a message begins, offset in its body or −1 for the header, bytes)."""
        while data:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                yield False, self._offset, piece
                self._offset += len(piece)
                self._left -= len(piece)
                continue
            header, end, data = (self._header + data).partition(b"\r\n\r\n")
            if not end:
                self._header, data = header, b""
                continue
            self._header = b""
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", header)
            self._left, self._offset = int(length[1]) if length else 0, 0
            yield True, BEFORE_HEADER, header + end


def _end(side: socket.socket, *, reset: bool) -> None:
    with contextlib.suppress(OSError):
        if reset:
            side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        side.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)  # ends another thread's wait, as closing does not
    with contextlib.suppress(OSError):
        side.close()
