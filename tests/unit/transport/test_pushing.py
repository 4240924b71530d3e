"""Parts that are sent while the file is still being written, to a server that says yes, no, or nothing for a while."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from harness.processes import wait_until
from kit.peers import Connection, Peer, Request

from atoll.codecs import NoneCodec
from atoll.errors import AtollError, PartCorrupt, TicketClosed
from atoll.tensors.layout import Layout, Part, update_layout
from atoll.tensors.schema import TensorSpec
from atoll.transport.http_client import Http
from atoll.transport.part_transfer import PART_ATTEMPTS, HttpTransfer, Pushing, transfer_pool

PARTS = 6
LAYOUT: Layout = update_layout([TensorSpec("w", "F32", (PARTS * 4096,))], lambda spec: NoneCodec(), 4096 * 4)


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
    """A file that grows part by part, and who sends it."""

    def __init__(self, folder: Path, url: str, connections: int = 1) -> None:
        self.fd = os.open(folder / "outbox", os.O_RDWR | os.O_CREAT)
        os.ftruncate(self.fd, LAYOUT.nbytes)
        self.http = Http(url)
        self.parts = HttpTransfer(self.http, connections, 10.0)

    def write(self, part: Part) -> bytes:
        content = bytes([part.index + 1]) * part.nbytes
        os.pwrite(self.fd, content, part.start)
        return blake3(content).digest()

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
def test_a_part_arrives_before_the_next_one_is_written(tmp_path: Path, receiver: Receiver, connections: int) -> None:
    writer = Writer(tmp_path, receiver.url, connections)
    told: list[int] = []
    with writer.pushing(on_bytes=told.append) as pushing:
        for part in LAYOUT.parts:
            pushing.add(part, writer.write(part))
            wait_until(functools.partial(pushing.sent.issuperset, [part.index]), f"the arrival of part {part.index}")
    assert pushing.error is None
    assert pushing.sent == set(range(PARTS))
    assert receiver.bodies == {part.index: [body_of(part)] for part in LAYOUT.parts}
    assert sum(told) == writer.http.counters.bytes_up == LAYOUT.nbytes
    writer.close()


def test_adding_never_waits_and_leaving_waits_for_what_was_added(writer: Writer, receiver: Receiver) -> None:
    receiver.open.clear()
    with writer.pushing() as pushing:
        for part in LAYOUT.parts:
            pushing.add(part, writer.write(part))
        assert pushing.sent == set()
        receiver.open.set()
    assert pushing.sent == set(range(PARTS))


def test_an_error_ends_the_sending_and_is_kept_not_raised(writer: Writer, receiver: Receiver) -> None:
    receiver.answers = {2: [TicketClosed("The round is over.")]}
    with writer.pushing() as pushing:
        for part in LAYOUT.parts[:4]:  # over one connection: 3 is in the queue, or not even that, when 2 fails
            pushing.add(part, writer.write(part))
        wait_until(lambda: pushing.error is not None, "an error")
        assert pushing.ended.is_set()
        for part in LAYOUT.parts[4:]:
            pushing.add(part, writer.write(part))
    assert isinstance(pushing.error, TicketClosed)
    assert pushing.sent == {0, 1}
    assert set(receiver.bodies) == {0, 1, 2}


def test_a_part_that_arrives_damaged_is_sent_again_alone(writer: Writer, receiver: Receiver) -> None:
    receiver.answers = {1: [PartCorrupt("damaged")] * (PART_ATTEMPTS - 1)}
    with writer.pushing() as pushing:
        for part in LAYOUT.parts:
            pushing.add(part, writer.write(part))
    assert pushing.error is None
    assert pushing.sent == set(range(PARTS))
    assert {part: len(bodies) for part, bodies in receiver.bodies.items()} == {
        part.index: PART_ATTEMPTS if part.index == 1 else 1 for part in LAYOUT.parts
    }


def test_damage_that_lasts_ends_the_sending(writer: Writer, receiver: Receiver) -> None:
    receiver.answers = {0: [PartCorrupt("damaged")] * PART_ATTEMPTS}
    with writer.pushing() as pushing:
        for part in LAYOUT.parts:
            pushing.add(part, writer.write(part))
    assert isinstance(pushing.error, PartCorrupt)
    assert pushing.sent == set()
    assert len(receiver.bodies[0]) == PART_ATTEMPTS


def test_sends_no_more_after_a_failed_write(writer: Writer, receiver: Receiver) -> None:
    receiver.open.clear()
    used = []

    def interrupted() -> None:
        with writer.pushing() as pushing:
            used.append(pushing)
            for part in LAYOUT.parts[:3]:
                pushing.add(part, writer.write(part))
            wait_until(lambda: 0 in receiver.bodies, "the first request")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert used[0].error is None
    assert used[0].sent == set()
    assert set(receiver.bodies) == {0}


def test_a_connection_that_was_cut_is_not_kept(writer: Writer) -> None:
    with transfer_pool(1) as pool:
        writer.parts._once(lambda connection, _: connection.cut(), LAYOUT.parts[0], pool, lambda: None)
        assert writer.parts._idle == []
        writer.parts._once(lambda connection, _: None, LAYOUT.parts[0], pool, lambda: None)
        assert len(writer.parts._idle) == 1
