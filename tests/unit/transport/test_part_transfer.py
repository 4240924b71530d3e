"""Parts on their way: while the file is written, behind a silent peer, with Ctrl-C, and without a network."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from harness.processes import free_port, wait_until
from kit.folders import open_paths
from kit.peers import Connection, Peer, Request

from atoll.codecs import NoneCodec
from atoll.errors import (
    AtollError,
    DiskFull,
    PartCorrupt,
    ServerUnreachable,
    TicketClosed,
    TransferStalled,
    UsageError,
)
from atoll.posix import Descriptor
from atoll.protocol import routes
from atoll.tensors.layout import Layout, Part, update_layout
from atoll.tensors.schema import TensorSpec
from atoll.transport import answer, part_transfer
from atoll.transport.answer import TooSlow
from atoll.transport.http_client import Http
from atoll.transport.object_server import unnamed_file_error
from atoll.transport.part_connection import PartConnection
from atoll.transport.part_transfer import PART_ATTEMPTS, HttpTransfer, Pushing, TransferPool, transfer_pool

# -- parts that are sent while the file is still being written


COUNT = 6
LAYOUT: Layout = update_layout([TensorSpec("w", "F32", (COUNT * 4096,))], lambda spec: NoneCodec(), 4096 * 4)


@contextlib.contextmanager
def transfer(url: str, idle_s: float, connections: int = 2) -> Iterator[HttpTransfer]:
    with contextlib.closing(Http(url)) as http, contextlib.closing(HttpTransfer(http, connections, idle_s)) as parts:
        yield parts


class Receiver:
    """Takes parts; `answers` has what it says to a part beside yes, one after the other."""

    def __init__(self) -> None:
        self.bodies: dict[int, list[bytes]] = {}
        self.answers: dict[int, list[AtollError]] = {}
        self.open = threading.Event()
        self.open.set()
        self.url = ""

    def answer(self, connection: Connection, request: Request) -> None:
        part = int(request.path.rpartition("/")[2])
        self.bodies.setdefault(part, []).append(connection.body(request))
        self.open.wait(10.0)
        errors = self.answers.get(part)
        if errors:
            error = errors.pop(0)
            if isinstance(error, ServerUnreachable):
                raise ConnectionResetError
            connection.answer(409, json.dumps({"code": error.code, "message": str(error)}).encode())
        else:
            connection.answer(200, b"{}")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    with Peer.answering(receiver.answer) as peer:
        receiver.url = peer.url
        yield receiver
        receiver.open.set()


class Writer:
    """A file that grows part by part, and its transfer."""

    def __init__(self, folder: Path, url: str, connections: int = 1) -> None:
        self.fd = os.open(folder / "outbox", os.O_RDWR | os.O_CREAT)
        os.ftruncate(self.fd, LAYOUT.nbytes)
        self.http = Http(url)
        self.parts = HttpTransfer(self.http, connections, 10.0)

    def write(self, part: Part) -> bytes:
        content = bytes([part.index + 1]) * part.nbytes
        os.pwrite(self.fd, content, part.start)
        return blake3(content).digest()

    def add(self, pushing: Pushing, *parts: Part) -> None:
        """Write parts, and have each sent."""
        for part in parts:
            pushing.add(part, self.write(part))

    def pushing(self, **more: Any) -> contextlib.AbstractContextManager[Pushing]:
        return self.parts.pushing(path_of, self.fd, **more)

    def close(self) -> None:
        self.parts.close()
        self.http.close()
        os.close(self.fd)


@pytest.fixture
def writer(tmp_path: Path, receiver: Receiver) -> Iterator[Writer]:
    writer = Writer(tmp_path, receiver.url)
    yield writer
    writer.close()


def path_of(part: int) -> str:
    return f"/parts/{part}"


def body_of(part: Part) -> bytes:
    content = bytes([part.index + 1]) * part.nbytes
    return content + blake3(content).digest()


@pytest.mark.parametrize("connections", [1, 3])
def test_parts_arrive_while_others_are_written(tmp_path: Path, receiver: Receiver, connections: int) -> None:
    """A part of a file arrives at the server before the next part is written."""
    writer = Writer(tmp_path, receiver.url, connections)
    told: list[int] = []
    with writer.pushing(on_bytes=told.append) as pushing:
        for part in LAYOUT.parts:
            writer.add(pushing, part)
            wait_until(functools.partial(pushing.sent.issuperset, [part.index]), f"the arrival of part {part.index}")
    assert pushing.error is None
    assert pushing.sent == set(range(COUNT))
    assert receiver.bodies == {part.index: [body_of(part)] for part in LAYOUT.parts}
    assert sum(told) == writer.http.counters.bytes_up == LAYOUT.nbytes
    writer.close()


def test_adding_parts_never_waits(writer: Writer, receiver: Receiver) -> None:
    """Adding parts to an upload returns at once. The end of the upload waits until all parts are sent."""
    receiver.open.clear()
    with writer.pushing() as pushing:
        writer.add(pushing, *LAYOUT.parts)
        assert pushing.sent == set()
        receiver.open.set()
    assert pushing.sent == set(range(COUNT))


def test_an_error_ends_an_upload(writer: Writer, receiver: Receiver) -> None:
    """If a part of an upload fails, no further part is sent, and the caller gets the error at the end."""
    receiver.answers = {2: [TicketClosed("The round is over.")]}
    with writer.pushing() as pushing:
        writer.add(pushing, *LAYOUT.parts[:4])  # over one connection: 3 is in the queue, or not even that, when 2 fails
        wait_until(lambda: pushing.error is not None, "an error")
        assert pushing.ended.is_set()
        writer.add(pushing, *LAYOUT.parts[4:])
    assert isinstance(pushing.error, TicketClosed)
    assert pushing.sent == {0, 1}
    assert set(receiver.bodies) == {0, 1, 2}


def test_a_damaged_part_is_sent_again(writer: Writer, receiver: Receiver) -> None:
    """If a part arrives damaged, only this part is sent again."""
    receiver.answers = {1: [PartCorrupt("damaged")] * (PART_ATTEMPTS - 1)}
    with writer.pushing() as pushing:
        writer.add(pushing, *LAYOUT.parts)
    assert pushing.error is None
    assert pushing.sent == set(range(COUNT))
    assert {part: len(bodies) for part, bodies in receiver.bodies.items()} == {
        part.index: PART_ATTEMPTS if part.index == 1 else 1 for part in LAYOUT.parts
    }


def test_damage_and_lost_connections_are_counted_apart(writer: Writer, receiver: Receiver) -> None:
    """A part may be lost and arrive damaged `PART_ATTEMPTS` - 1 times each: neither is lasting."""
    lost, damaged = ServerUnreachable("the connection was reset"), PartCorrupt("damaged")
    receiver.answers = {1: [lost, damaged] * (PART_ATTEMPTS - 1)}
    with writer.pushing() as pushing:
        writer.add(pushing, *LAYOUT.parts)
    assert pushing.error is None
    assert len(receiver.bodies[1]) == 2 * (PART_ATTEMPTS - 1) + 1


def test_lasting_damage_ends_an_upload(writer: Writer, receiver: Receiver) -> None:
    """If a part arrives damaged at each of its `PART_ATTEMPTS` attempts, the upload ends with this error."""
    receiver.answers = {0: [PartCorrupt("damaged")] * PART_ATTEMPTS}
    with writer.pushing() as pushing:
        writer.add(pushing, *LAYOUT.parts)
    assert isinstance(pushing.error, PartCorrupt)
    assert pushing.sent == set()
    assert len(receiver.bodies[0]) == PART_ATTEMPTS


def test_an_interrupted_write_ends_an_upload(writer: Writer, receiver: Receiver) -> None:
    """If the code that writes the file raises, no further part is sent."""
    receiver.open.clear()
    used = []

    def interrupted() -> None:
        with writer.pushing() as pushing:
            used.append(pushing)
            writer.add(pushing, *LAYOUT.parts[:3])
            wait_until(lambda: 0 in receiver.bodies, "the first request")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert used[0].error is None
    assert used[0].sent == set()
    assert set(receiver.bodies) == {0}


def test_a_connection_that_was_cut_is_not_kept(writer: Writer) -> None:
    """After a part, a connection that was cut is not kept, and an intact one is."""
    with transfer_pool(1) as pool:
        writer.parts._once(lambda connection, _: connection.cut(), LAYOUT.parts[0], pool, lambda: None)
        assert writer.parts._idle == []
        writer.parts._once(lambda connection, _: None, LAYOUT.parts[0], pool, lambda: None)
        assert len(writer.parts._idle) == 1


def test_a_connection_beside_a_timeout_is_dropped(writer: Writer) -> None:
    """If another connection timed out while a connection was in use, this one is not used again, since the network may
    have lost it.
    """
    # The network may have lost the connection, although the part's answer came. The next part would wait for it.
    with transfer_pool(1) as pool:
        writer.parts._once(lambda connection, _: writer.http.drop_idle(), LAYOUT.parts[0], pool, lambda: None)
        assert writer.parts._idle == []


def test_a_closed_idle_connection_is_no_failure(tmp_path: Path) -> None:
    """If the server has closed an idle connection, the next part begins with a new one, and no failed attempt is
    counted.

    A server closes idle connections between two rounds.
    """
    answered = threading.Semaphore(0)

    def serve(connection: Connection) -> None:
        request = connection.request()
        assert request is not None
        connection.body(request)
        connection.answer(200, b"{}")
        connection.sock.shutdown(socket.SHUT_RDWR)
        answered.release()

    with Peer(serve) as peer:
        writer = Writer(tmp_path, peer.url)
        with contextlib.closing(writer):
            for part in LAYOUT.parts[:3]:
                writer.parts.push(path_of, writer.fd, [part], {part.index: writer.write(part)})
                assert answered.acquire(timeout=60)
            assert writer.http.counters.retries == 0
        assert len(peer.connections) == 3


def test_a_transfer_leaves_no_descriptor_open(writer: Writer) -> None:
    """After uploads and downloads, no file descriptor of theirs is open."""
    for _ in range(3):
        with writer.pushing() as pushing:
            writer.add(pushing, *LAYOUT.parts)
        writer.parts.push(path_of, writer.fd, LAYOUT.parts, [writer.write(part) for part in LAYOUT.parts])
    assert sum(path.endswith("/outbox") for path in open_paths()) == 1  # the writer's own


# -- connections that stand still
#
# A file of two parts of 16 MiB over two connections: each part is one request, and a slow peer brings 4 KiB at a time.


LARGE, RUN = 2**24, 2**12
DATA = bytes(range(256)) * (2 * LARGE // 256)
BOTH = [Part(0, 0, LARGE, ()), Part(1, LARGE, 2 * LARGE, ())]
DIGESTS = [blake3(DATA[part.start : part.stop]).digest() for part in BOTH]


def says_nothing() -> Peer:
    """It reads the head of each request, and nothing else."""
    peer: Peer = Peer.answering(lambda *_: peer.ended.wait(60))
    return peer


def moves_slowly() -> Peer:
    """Says nothing to the first request, and brings the second one slowly until a third comes."""
    third = threading.Event()

    def answer(connection: Connection, request: Request) -> None:
        number = len(peer.requests)
        if number == 1:
            peer.ended.wait(60)
            return
        body, at = DATA[request.range], 0
        connection.answer(206, nbytes=len(body))
        if number > 2:
            third.set()
        while at < LARGE and not third.wait(0.1):
            connection.sock.sendall(body[at : at + RUN])
            at += RUN
        connection.sock.sendall(body[at:])

    peer = Peer.answering(answer)
    return peer


class Held:
    def __init__(self) -> None:
        self.data = bytearray(2 * LARGE)

    def write(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data


@pytest.mark.covers("P5")
def test_a_stalled_part_is_requested_again() -> None:
    """If one connection stalls while another one moves bytes, the stalled part is requested again."""
    held = Held()
    with moves_slowly() as peer, transfer(peer.url, 2.0) as parts:
        parts.pull("/data", DIGESTS, BOTH, [held])
        assert held.data == DATA
        assert len(peer.requests) == 3
        assert parts._http.counters.retries == 1


@pytest.mark.covers("P5")
def test_a_silent_peer_is_asked_once() -> None:
    """A peer that sends nothing gets one request on each connection, and then the download is given up."""
    with says_nothing() as peer, transfer(peer.url, 0.2) as parts:
        with pytest.raises(TransferStalled, match=r"No byte .* for 0\.2 s"):
            parts.pull("/data", DIGESTS, BOTH, [Held()])
        assert len(peer.requests) == 2


@pytest.mark.covers("P5")
def test_bytes_in_buffers_are_no_progress(tmp_path: Path) -> None:
    """Bytes that only fill network buffers on the way to a silent peer do not count as progress of a transfer."""
    # Each of the two connections puts some MB into the buffers between the two. The first one to stall may be tried
    # again, as the other has moved later.
    (tmp_path / "file").write_bytes(DATA)
    with says_nothing() as peer, transfer(peer.url, 0.2) as parts, (tmp_path / "file").open("rb") as file:
        with pytest.raises(TransferStalled):
            parts.push(lambda index: f"/parts/{index}", file.fileno(), BOTH, DIGESTS)
        assert len(peer.requests) <= 3


@pytest.mark.covers("P5")
def test_a_slow_upload_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a peer reads an upload very slowly, the upload is given up.

    An hour passes before the connection takes the eight bytes of the part.
    """
    now_s = [0.0]
    monkeypatch.setattr(answer.time, "monotonic", lambda: now_s[0])
    (tmp_path / "file").write_bytes(b"x" * 8)
    with (
        Peer.answering(lambda connection, _: connection.answer(200)) as peer,
        (tmp_path / "file").open("rb") as file,
        contextlib.closing(PartConnection("127.0.0.1", peer.port, None, 60.0)) as connection,
    ):
        connection.on_move = lambda: now_s.append(now_s.pop() + 3600.0)
        with pytest.raises(TooSlow, match=r"only 8 bytes moved in 3600\.0 s"):
            connection.put("/", {}, file.fileno(), (0, 8), b"", lambda _: None)


@pytest.mark.covers("P5")
def test_silence_counts_from_the_last_movement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer times out by the time since its last bytes moved, not by the time since its start."""
    now = [100.0]
    monkeypatch.setattr(part_transfer.time, "monotonic", lambda: now[0])
    hands = TransferPool(1)
    now[0] = 159.0
    assert not hands.is_silent(60.0)
    now[0] = 160.0
    assert hands.is_silent(60.0)
    hands.moved()
    assert not hands.is_silent(60.0)
    hands.wait()


# -- Ctrl-C while parts are on their way
#
# The network stands still in all of these; what a thread that was left behind would do shows once it moves again.


PART_BYTES = 8 * 2**20
LARGE_LAYOUT: Layout = update_layout([TensorSpec("w", "F32", (PART_BYTES,))], lambda spec: NoneCodec(), PART_BYTES)
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
    with transfer(f"http://127.0.0.1:{peer.port}", IDLE_S) as parts:
        yield parts


@contextlib.contextmanager
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
    path.write_bytes((content * (LARGE_LAYOUT.nbytes // len(content) + 1))[: LARGE_LAYOUT.nbytes])
    return os.open(path, os.O_RDWR)


def becomes(fd: int, path: Path, content: bytes) -> None:
    """The number is closed, and the next file that is opened has it; other threads' files do not come in between."""
    other = opened(path, content)
    os.dup2(other, fd)
    os.close(other)


def push_all(parts: HttpTransfer, fd: int) -> None:
    parts.push(path_of, fd, LARGE_LAYOUT.parts, [bytes(32)] * len(LARGE_LAYOUT.parts))


def push_while_written(parts: HttpTransfer, fd: int) -> None:
    with parts.pushing(path_of, fd) as pushing:
        for part in LARGE_LAYOUT.parts:
            pushing.add(part, bytes(32))


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("push", [push_all, push_while_written])
def test_ctrl_c_stops_sending(
    tmp_path: Path, peer: StandingStill, parts: HttpTransfer, push: Callable[[HttpTransfer, int], None]
) -> None:
    """After Ctrl-C, an upload sends nothing more, and no thread is left."""
    # Guards against a pool that is left before its threads end: they sent another file that was opened under the number
    # of the outbox.
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
def test_a_second_ctrl_c_sends_no_other_file(
    tmp_path: Path,
    peer: StandingStill,
    parts: HttpTransfer,
    monkeypatch: pytest.MonkeyPatch,
    push: Callable[[HttpTransfer, int], None],
) -> None:
    """After a second Ctrl-C, threads that are still sending go on with the outbox and send no other file.

    The second Ctrl-C comes at the worst moment, before any connection was cut.
    """
    fd = opened(tmp_path / "outbox.bin", b"update\n")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PartConnection, "cut", interrupted)
    with ctrl_c_when(lambda: peer.accepted == 2):
        push(parts, fd)
    assert left_behind() != []
    becomes(fd, tmp_path / "other.csv", SECRET)
    peer.go.set()  # what is on its way arrives; no answer comes, so it takes the end of the peer to end the wait
    # all of it: a peer that ends with a closed window leaves the sender to its idle timeout
    wait_until(lambda: peer.nbytes >= 2 * PART_BYTES, "the rest of the two parts")
    monkeypatch.undo()
    for connection in peer.connections:
        connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: not left_behind(), "the end of the threads")
    assert not any(SECRET in sent for sent in peer.received)
    assert peer.accepted == 2
    os.close(fd)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_downloading(peer: StandingStill, parts: HttpTransfer) -> None:
    """After Ctrl-C, a download sends no further request, and no thread is left."""
    with ctrl_c_when(lambda: peer.accepted == 2):
        parts.pull("/v1/fragments/0/versions/0", [bytes(32)] * len(LARGE_LAYOUT.parts), LARGE_LAYOUT.parts, [])
    assert left_behind() == []
    peer.all_received()
    assert peer.accepted == 2


def test_a_connecting_socket_can_be_cut(peer: StandingStill) -> None:
    """A connection can be cut while it is being made.

    The peer accepts the connection and never answers the TLS handshake.
    """
    connection = PartConnection("127.0.0.1", peer.port, ssl.create_default_context, IDLE_S)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(connection.get, "/", {}, 0)
        wait_until(lambda: peer.accepted == 1, "the handshake")
        connection.cut()
        assert isinstance(asked.exception(), OSError)
    with pytest.raises(ConnectionAbortedError):
        connection.get("/", {}, 0)
    assert peer.accepted == 1
    connection.close()


def test_a_descriptor_in_use_stays_open(tmp_path: Path) -> None:
    """A file descriptor stays open while it is in use, even if it is closed meanwhile. After its use, the descriptor is
    closed.
    """
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


# -- calls that time out


def test_calls_after_a_timeout_use_new_connections() -> None:
    """After a timeout, calls use new connections.

    A firewall may have forgotten all older connections, and a call on each of them would time out too.
    """
    both = threading.Barrier(2)

    def answer(connection: Connection, request: Request) -> None:
        if request.path == "/both":
            both.wait(60)
        if request.path == "/silent":
            peer.ended.wait(60)
        connection.answer(200, b"{}")

    with Peer.answering(answer) as peer, contextlib.closing(Http(peer.url)) as http:

        def ask_twice() -> None:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda _: http.reach("/both", timeout_s=60.0), range(2)))

        ask_twice()
        with pytest.raises(TransferStalled, match=r"No byte .* for 0\.2 s"):
            http.reach("/silent", timeout_s=0.2)
        assert len(peer.connections) == 2
        ask_twice()
        assert len(peer.connections) == 4


def test_a_timeout_lengthens_the_next_timeout() -> None:
    """After a timeout, the next transfer has the whole idle timeout instead of the shorter first timeout, until one
    transfer is complete.
    """

    def answer(connection: Connection, request: Request) -> None:
        if len(peer.requests) not in (1, 4):
            peer.ended.wait(60)
        connection.answer(200, b"{}")

    with Peer.answering(answer) as peer, contextlib.closing(Http(peer.url)) as http:
        with contextlib.closing(HttpTransfer(http, 1, idle_timeout_s=0.4, first_timeout_s=0.2)) as parts:
            parts.read("/1", 9)
            for seconds in ("0.2", "0.4"):
                with pytest.raises(TransferStalled, match=rf"No byte .* for {seconds} s"):
                    parts.read("/2", 9)
            parts.read("/4", 9)
            with pytest.raises(TransferStalled, match=r"No byte .* for 0\.2 s"):
                parts.read("/5", 9)


def test_a_calls_error_has_its_cause() -> None:
    """The error of a call has the network error as its cause."""
    with contextlib.closing(Http(f"http://127.0.0.1:{free_port()}")) as http:
        with pytest.raises(ServerUnreachable) as told:
            http.reach(routes.HEALTH, timeout_s=10.0)
    assert told.value.__cause__ is not None


def test_a_transfers_error_has_its_cause(tmp_path: Path) -> None:
    """The error of a transfer has the network error as its cause."""
    writer = Writer(tmp_path, f"http://127.0.0.1:{free_port()}")
    part = LAYOUT.parts[0]
    with contextlib.closing(writer), pytest.raises(ServerUnreachable) as told:
        writer.parts.push(path_of, writer.fd, [part], {part.index: writer.write(part)})
    assert told.value.__cause__ is not None


# -- a file that cannot be written


@pytest.mark.parametrize(
    ("folder", "where", "remedy"),
    [
        (None, "the folder of temporary files", "set TMPDIR to another folder"),
        (Path("/data/objects"), "/data/objects", "use another folder"),
    ],
    ids=["temporary", "given"],
)
def test_a_full_disk_suggests_another_folder(folder: Path | None, where: str, remedy: str) -> None:
    """If the disk of a folder is full, the error names the folder and says how to use another one."""
    error = unnamed_file_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder)
    assert isinstance(error, DiskFull)
    assert error.message == f"The disk of {where} is full."
    assert remedy in error.remedy
