"""Ctrl-C while parts are on their way: nothing of another file is ever sent or written, and nobody is left waiting.

The network stands still in all of these; what a thread that was left behind would do shows once it moves again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.processes import wait_until
from kit.peers import Connection, Peer

from atoll.codecs import NoneCodec
from atoll.errors import UsageError
from atoll.posix import Descriptor
from atoll.tensors.layout import Layout, update_layout
from atoll.tensors.schema import TensorSpec
from atoll.transport.http_client import Http
from atoll.transport.part_connection import PartConnection
from atoll.transport.part_transfer import HttpTransfer

PART_BYTES = 8 * 2**20
LAYOUT: Layout = update_layout([TensorSpec("w", "F32", (PART_BYTES,))], lambda spec: NoneCodec(), PART_BYTES)
"""Four parts, each more than the buffers between two sockets hold."""
IDLE_S = 300.0
SECRET = b"a row of another file\n"


class StandingStill:
    """Accepts connections and reads a little; the rest only when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.received: list[bytes] = []
        self.nbytes = 0  # of all connections
        self._lock = threading.Lock()
        self.connections: list[socket.socket] = []
        self.port = 0

    def read(self, connection: Connection) -> None:
        sock, got = connection.sock, bytearray()

        def take(data: bytes) -> bool:
            got.extend(data)
            with self._lock:
                self.nbytes += len(data)
            return bool(data)

        take(sock.recv(1000))
        self.connections.append(sock)
        self.go.wait(60.0)
        with contextlib.suppress(OSError):
            while take(sock.recv(2**20)):
                pass
        self.received.append(bytes(got))

    @property
    def accepted(self) -> int:
        """Connections that have brought something."""
        return len(self.connections)

    def all_received(self) -> list[bytes]:
        """What every connection brought, once all of them have ended."""
        self.go.set()
        wait_until(lambda: len(self.received) == self.accepted, "the end of every connection")
        return self.received


@pytest.fixture
def peer() -> Iterator[StandingStill]:
    standing = StandingStill()
    with Peer(standing.read, receive_bytes=2**16) as peer:
        standing.port = peer.port
        yield standing
        standing.go.set()


@pytest.fixture
def parts(peer: StandingStill) -> Iterator[HttpTransfer]:
    http = Http(f"http://127.0.0.1:{peer.port}")
    parts = HttpTransfer(http, 2, IDLE_S)
    yield parts
    parts.close()
    http.close()


@contextmanager
def ctrl_c_when(condition: Callable[[], bool]) -> Iterator[None]:
    """A real one: it has to end the wait of the main thread."""
    assert threading.current_thread() is threading.main_thread()

    def press() -> None:
        wait_until(condition, "the moment for Ctrl-C")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()


def left_behind() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("atoll-part")]


def opened(path: Path, content: bytes) -> int:
    path.write_bytes((content * (LAYOUT.nbytes // len(content) + 1))[: LAYOUT.nbytes])
    return os.open(path, os.O_RDWR)


def becomes(fd: int, path: Path, content: bytes) -> None:
    """The number is closed, and the next file that is opened has it; other threads' files do not come in between."""
    other = opened(path, content)
    os.dup2(other, fd)
    os.close(other)


def path_of(part: int) -> str:
    return f"/v1/tickets/1/parts/{part}"


def push_all(parts: HttpTransfer, fd: int) -> None:
    parts.push(path_of, fd, LAYOUT.parts, [bytes(32)] * len(LAYOUT.parts))


def push_while_written(parts: HttpTransfer, fd: int) -> None:
    with parts.pushing(path_of, fd) as pushing:
        for part in LAYOUT.parts:
            pushing.add(part, bytes(32))


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("push", [push_all, push_while_written])
def test_after_ctrl_c_nothing_is_sent_any_more(
    tmp_path: Path, peer: StandingStill, parts: HttpTransfer, push: Callable[[HttpTransfer, int], None]
) -> None:
    """Guards against a pool that is left before its threads are: they sent what was opened under its file's number."""
    fd = opened(tmp_path / "outbox.bin", b"update\n")
    with ctrl_c_when(lambda: peer.accepted == 2):
        push(parts, fd)
    assert left_behind() == []
    becomes(fd, tmp_path / "other.csv", SECRET)
    assert not any(SECRET in sent for sent in peer.all_received())
    assert peer.accepted == 2, "the parts in the queue were not begun"
    os.close(fd)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("push", [push_all, push_while_written])
def test_a_second_ctrl_c_leaves_threads_that_send_the_outbox_alone(
    tmp_path: Path,
    peer: StandingStill,
    parts: HttpTransfer,
    monkeypatch: pytest.MonkeyPatch,
    push: Callable[[HttpTransfer, int], None],
) -> None:
    """The worst of moments: before any connection was cut."""
    fd = opened(tmp_path / "outbox.bin", b"update\n")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PartConnection, "cut", interrupted)
    with ctrl_c_when(lambda: peer.accepted == 2):
        push(parts, fd)
    assert left_behind() != []
    becomes(fd, tmp_path / "other.csv", SECRET)
    peer.go.set()  # what is on its way arrives; nobody answers, so it takes the end of the peer to end the wait
    # all of it: a peer that ends with a closed window leaves the sender to its idle timeout
    wait_until(lambda: peer.nbytes >= 2 * PART_BYTES, "the rest of the two parts")
    monkeypatch.undo()
    peer_ends(peer)
    wait_until(lambda: not left_behind(), "the end of the threads")
    assert not any(SECRET in sent for sent in peer.received)
    assert peer.accepted == 2
    os.close(fd)


def peer_ends(peer: StandingStill) -> None:
    for connection in peer.connections:
        connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.usefixtures("interruptible")
def test_after_ctrl_c_in_a_pull_nothing_is_asked_for_any_more(peer: StandingStill, parts: HttpTransfer) -> None:
    with ctrl_c_when(lambda: peer.accepted == 2):
        parts.pull("/v1/fragments/0/versions/0", [bytes(32)] * len(LAYOUT.parts), LAYOUT.parts, [])
    assert left_behind() == []
    peer.all_received()
    assert peer.accepted == 2


def test_a_connection_is_cut_while_it_is_being_made(peer: StandingStill) -> None:
    """A peer that takes the connection and never answers the TLS handshake."""
    connection = PartConnection("127.0.0.1", peer.port, ssl.create_default_context(), IDLE_S)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(connection.get, "/", {})
        wait_until(lambda: peer.accepted == 1, "the handshake")
        connection.cut()
        assert isinstance(asked.exception(), OSError)
    with pytest.raises(ConnectionAbortedError):
        connection.get("/", {})
    assert peer.accepted == 1
    connection.close()


def test_a_descriptor_names_its_file_while_it_is_in_use(tmp_path: Path) -> None:
    fd = opened(tmp_path / "file", b"mine")
    file = Descriptor(fd)
    with file.used() as number:
        file.close()
        file.close()
        assert os.pread(number, 4, 0) == b"mine"
        assert file.number == -1
        with pytest.raises(UsageError, match="was closed"), file.used():
            pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
