"""Messages over a socket pair arrive whole, with their files, however the kernel cuts them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atoll.aggregation.aggregator_process import Channel


@pytest.fixture
def ends() -> Any:
    pair = socket.socketpair()
    for end in pair:
        end.settimeout(30.0)  # what does not arrive whole is waited for no longer
    one, other = map(Channel, pair)
    yield one, other
    one.close()
    other.close()


def taken(channel: Channel) -> tuple[dict[str, Any], bytes | None]:
    """The next message, and what its file holds."""
    message, fd = channel.receive()
    if fd is None:
        return message, None
    data = os.pread(fd, 100, 0)
    os.close(fd)
    return message, data


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 20])
def test_a_message_that_the_kernel_takes_in_two_pieces(
    ends: tuple[Channel, Channel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    one, other = ends
    send = socket.send_fds

    def send_some(end: socket.socket, buffers: Sequence[bytes], fds: Sequence[int]) -> int:
        return send(end, [buffers[0][:cut]], list(fds))

    monkeypatch.setattr(socket, "send_fds", send_some)
    (tmp_path / "file").write_bytes(b"tensors")
    with (tmp_path / "file").open("rb") as file:
        one.send({"what": "version", "digest": "a" * 50}, file.fileno())
    one.send({"what": "next"})
    assert taken(other) == ({"what": "version", "digest": "a" * 50}, b"tensors")
    assert taken(other) == ({"what": "next"}, None)


def test_more_than_the_socket_holds(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    sent = [{"number": number, "text": "x" * (300_000 * (number % 2))} for number in range(6)]
    sending = threading.Thread(target=lambda: [one.send(message) for message in sent])
    sending.start()
    assert [taken(other)[0] for _ in sent] == sent
    sending.join()
    one.close()
    with pytest.raises(EOFError):
        other.receive()


def test_gives_back_a_file_without_its_message(tmp_path: Path) -> None:
    mine, theirs = socket.socketpair()
    other = Channel(mine)
    (tmp_path / "file").write_bytes(b"tensors")
    with (tmp_path / "file").open("rb") as file:
        socket.send_fds(theirs, [b"\5"], [file.fileno()])
        theirs.close()
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(EOFError):
            other.receive()
        assert set(os.listdir("/proc/self/fd")) == before
    other.close()


def test_where_no_files_come_many_messages_are_received_at_once() -> None:
    mine, theirs = socket.socketpair()
    reads: list[int] = []

    class Counted(socket.socket):
        def recv(self, *asked: Any) -> bytes:
            data = super().recv(*asked)
            reads.append(len(data))
            return data

    counted = Counted(fileno=mine.detach())
    counted.settimeout(30.0)
    one, other = Channel(theirs), Channel(counted, files=False)
    sent = [{"number": number, "text": "x" * number} for number in range(100)] + [{"text": "x" * 500_000}]
    for message in sent[:-1]:
        one.send(message)
    sending = threading.Thread(target=one.send, args=[sent[-1]])
    sending.start()
    assert [taken(other) for _ in sent[:-1]] == [(message, None) for message in sent[:-1]]
    assert len(reads) == 1
    assert taken(other) == (sent[-1], None)
    sending.join()
    theirs.sendall(b"\5\0\0\0ab")  # it ends in the middle of one
    one.close()
    with pytest.raises(EOFError):
        other.receive()
    other.close()
