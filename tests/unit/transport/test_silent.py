"""A connection that stands still while others move is tried again; a peer that is silent ends the transfer at once.

A file of two parts of 16 MiB over two connections: each part is one request, and a slow peer brings 4 KiB at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from blake3 import blake3

from atoll.errors import TransferStalled
from atoll.tensors.layout import Part
from atoll.transport import part_transfer
from atoll.transport.http_client import Http
from atoll.transport.part_transfer import HttpTransfer, TransferPool

PART, RUN = 2**24, 2**12
DATA = bytes(range(256)) * (2 * PART // 256)
PARTS = [Part(0, 0, PART, ()), Part(1, PART, 2 * PART, ())]
DIGESTS = [blake3(DATA[part.start : part.stop]).digest() for part in PARTS]


class Peer(ThreadingHTTPServer):
    """Says nothing to the first request, brings the second one slowly until a third comes; or says nothing at all."""

    daemon_threads = True

    def __init__(self, *, moves: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.moves = moves
        self.lock, self.requests = threading.Lock(), 0
        self.third, self.ended = threading.Event(), threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Peer

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.requests += 1
            number = self.server.requests
        if number == 1 or not self.server.moves:
            self.server.ended.wait(60)
            self.close_connection = True
            return
        first, last = (int(text) for text in self.headers["Range"].removeprefix("bytes=").split("-"))
        body = DATA[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        at = 0
        if number > 2:
            self.server.third.set()
        while at < PART and not self.server.third.wait(0.1):
            self.wfile.write(body[at : at + RUN])
            at += RUN
        self.wfile.write(body[at:])

    def do_PUT(self) -> None:
        with self.server.lock:
            self.server.requests += 1
        self.server.ended.wait(60)
        self.close_connection = True

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(params=[True, False], ids=["moves", "silent"])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    server = Peer(moves=request.param)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


class Held:
    def __init__(self) -> None:
        self.data = bytearray(2 * PART)

    def write(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data


@pytest.mark.covers("P5")
def test_what_stands_still_is_tried_again_as_long_as_others_move(peer: Peer) -> None:
    http, held = Http(f"http://127.0.0.1:{peer.server_address[1]}"), Held()
    parts = HttpTransfer(http, 2, 2.0 if peer.moves else 0.2)
    if peer.moves:
        parts.pull("/data", DIGESTS, PARTS, [held])
        assert held.data == DATA
        assert peer.requests == 3
        assert http.counters.retries == 1
    else:
        with pytest.raises(TransferStalled, match=r"moved no byte for 0\.2 s"):
            parts.pull("/data", DIGESTS, PARTS, [held])
        assert peer.requests == 2  # neither of the two is asked for again
    parts.close()
    http.close()


@pytest.mark.covers("P5")
@pytest.mark.parametrize("peer", [False], indirect=True)
def test_what_buffers_take_for_a_silent_peer_does_not_keep_a_transfer_alive(peer: Peer, tmp_path: Path) -> None:
    """Each of the two connections gets some MB into the buffers between the two. The first that stands still may be
    tried again, as the other has moved later; what the buffers take of that does not count."""
    (tmp_path / "file").write_bytes(DATA)
    http = Http(f"http://127.0.0.1:{peer.server_address[1]}")
    parts = HttpTransfer(http, 2, 0.2)
    with (tmp_path / "file").open("rb") as file, pytest.raises(TransferStalled):
        parts.push(lambda index: f"/parts/{index}", file.fileno(), PARTS, DIGESTS)
    assert peer.requests <= 3
    parts.close()
    http.close()


@pytest.mark.covers("P5")
def test_silence_is_counted_from_what_moved_last(monkeypatch: pytest.MonkeyPatch) -> None:
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
