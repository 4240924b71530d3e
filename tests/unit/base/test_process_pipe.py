"""Messages between two processes arrive whole, with their files, whatever their length."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.child_processes import ProcessPipe


@pytest.fixture
def ends() -> Iterator[tuple[ProcessPipe, ProcessPipe]]:
    pair = ProcessPipe.pair()
    for end in pair:
        end.settimeout(30.0)
    one, other = map(ProcessPipe, pair)
    yield one, other
    one.close()
    other.close()


def taken(channel: ProcessPipe) -> tuple[dict[str, Any], bytes | None]:
    """The next message, and what its file holds."""
    message, fd = channel.receive()
    if fd is None:
        return message, None
    assert not os.get_inheritable(fd)
    data = os.pread(fd, 100, 0)
    os.close(fd)
    return message, data


def test_messages_of_any_length_arrive_with_their_files_and_leave_none(
    ends: tuple[ProcessPipe, ProcessPipe], tmp_path: Path
) -> None:
    one, other = ends
    path = tmp_path / "file"
    path.write_bytes(b"tensors")
    before = set(os.listdir("/proc/self/fd"))
    for nbytes in (0, 2**16 - 12, 2**16, 500_000):  # with {"text": ""} one of them has just the length of a message
        for with_file in (False, True):
            message = {"text": "x" * nbytes}
            with path.open("rb") as file:
                one.send(message, file.fileno() if with_file else None)
            assert taken(other) == (message, b"tensors" if with_file else None)
    assert set(os.listdir("/proc/self/fd")) == before
    for number in range(5):
        one.send({"number": number})
    one.close()
    assert [taken(other)[0]["number"] for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(OSError, match=r"pipe|closed|reset"):
        other.send({"what": "done"})
