"""A connection that stands still while others move is tried again; a peer that is silent ends the transfer at once.

A file of two parts of 16 MiB over two connections: each part is one request, and a slow peer brings 4 KiB at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from blake3 import blake3
from kit.peers import Connection, Peer, Request

from atoll.errors import TransferStalled
from atoll.tensors.layout import Part
from atoll.transport import part_transfer
from atoll.transport.http_client import Http
from atoll.transport.part_transfer import HttpTransfer, TransferPool

PART, RUN = 2**24, 2**12
DATA = bytes(range(256)) * (2 * PART // 256)
PARTS = [Part(0, 0, PART, ()), Part(1, PART, 2 * PART, ())]
DIGESTS = [blake3(DATA[part.start : part.stop]).digest() for part in PARTS]


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
        while at < PART and not third.wait(0.1):
            connection.sock.sendall(body[at : at + RUN])
            at += RUN
        connection.sock.sendall(body[at:])

    peer = Peer.answering(answer)
    return peer


class Held:
    def __init__(self) -> None:
        self.data = bytearray(2 * PART)

    def write(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data


@contextmanager
def transfer(peer: Peer, idle_s: float) -> Iterator[HttpTransfer]:
    http = Http(peer.url)
    parts = HttpTransfer(http, 2, idle_s)
    try:
        yield parts
    finally:
        parts.close()
        http.close()


@pytest.mark.covers("P5")
def test_what_stands_still_is_tried_again_as_long_as_others_move() -> None:
    held = Held()
    with moves_slowly() as peer, transfer(peer, 2.0) as parts:
        parts.pull("/data", DIGESTS, PARTS, [held])
        assert held.data == DATA
        assert len(peer.requests) == 3
        assert parts._http.counters.retries == 1


@pytest.mark.covers("P5")
def test_a_peer_that_says_nothing_is_asked_once_over_each_connection() -> None:
    with says_nothing() as peer, transfer(peer, 0.2) as parts:
        with pytest.raises(TransferStalled, match=r"moved no byte for 0\.2 s"):
            parts.pull("/data", DIGESTS, PARTS, [Held()])
        assert len(peer.requests) == 2


@pytest.mark.covers("P5")
def test_what_buffers_take_for_a_silent_peer_does_not_keep_a_transfer_alive(tmp_path: Path) -> None:
    """Each of the two connections gets some MB into the buffers between the two. The first that stands still may be
    tried again, as the other has moved later; what the buffers take of that does not count."""
    (tmp_path / "file").write_bytes(DATA)
    with says_nothing() as peer, transfer(peer, 0.2) as parts, (tmp_path / "file").open("rb") as file:
        with pytest.raises(TransferStalled):
            parts.push(lambda index: f"/parts/{index}", file.fileno(), PARTS, DIGESTS)
        assert len(peer.requests) <= 3


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
