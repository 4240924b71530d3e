"""Messages between a process and one that it has started: JSON, and at most one open file with each.

message  | length (4 bytes, little endian) + the file | JSON |
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from typing import Any

LENGTH_BYTES = 4
AHEAD_BYTES = 2**16
"""Asked for at a time where no files come."""


class Channel:
    """One end of a Unix socket pair. `send` may be called by any thread, `receive` by one.

    Args:
        end: of the pair; belongs to the channel.
        files: whether some come to this end; where none do, many short messages are received at once.
    """

    def __init__(self, end: socket.socket, *, files: bool = True) -> None:
        self._socket = end
        self._lock = threading.Lock()
        self._files = files
        self._ahead = bytearray()  # what was received beyond a message

    def send(self, message: dict[str, Any], fd: int | None = None) -> None:
        """Send a message; the file is duplicated, and stays the sender's.

        Raises:
            OSError: the other side is gone.
        """
        text = json.dumps(message).encode()
        length = len(text).to_bytes(LENGTH_BYTES, "little")
        data = length + text  # in one go: the other side wakes up once
        with self._lock:
            sent = self._socket.send(data) if fd is None else socket.send_fds(self._socket, [data], [fd])
            if sent < len(data):
                self._socket.sendall(data[sent:])

    def receive(self) -> tuple[dict[str, Any], int | None]:
        """The next message and its file, which is the receiver's from now on.

        Raises:
            EOFError: the other side is gone.
        """
        try:
            fd = self._file() if self._files else None
            try:
                length = int.from_bytes(self._exactly(LENGTH_BYTES), "little")
                return json.loads(self._exactly(length)), fd
            except BaseException:
                if fd is not None:
                    os.close(fd)
                raise
        except ConnectionError as error:
            raise EOFError from error

    def _file(self) -> int | None:
        """The file of the next message, which comes with its first byte."""
        self._ahead[:], fds, _, _ = socket.recv_fds(self._socket, LENGTH_BYTES, 1)
        if not self._ahead:
            raise EOFError
        if fds:
            os.set_inheritable(fds[0], False)
        return fds[0] if fds else None

    def _exactly(self, nbytes: int) -> bytes:
        ahead = self._ahead
        while len(ahead) < nbytes:
            missing = nbytes - len(ahead)
            more = self._socket.recv(missing if self._files else max(missing, AHEAD_BYTES))
            if not more:
                raise EOFError
            ahead += more
        data = bytes(ahead[:nbytes])
        del ahead[:nbytes]
        return data

    def close(self) -> None:
        """Let the other side see the end; idempotent. A `receive` under way ends, too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
