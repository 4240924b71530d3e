"""Messages between the server and the process of an aggregator: JSON, and at most one open file with each.

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


class Channel:
    """One end of a Unix socket pair. `send` may be called by any thread, `receive` by one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any], fd: int | None = None) -> None:
        """Send a message; the file is duplicated, and stays the sender's.

        Raises:
            OSError: the other side is gone.
        """
        text = json.dumps(message).encode()
        length = len(text).to_bytes(LENGTH_BYTES, "little")
        data = length + text  # in one go: the other side wakes up once
        with self._lock:
            sent = socket.send_fds(self._socket, [data], [] if fd is None else [fd])
            if sent < len(data):
                self._socket.sendall(data[sent:])

    def receive(self) -> tuple[dict[str, Any], int | None]:
        """The next message and its file, which is the receiver's from now on.

        Raises:
            EOFError: the other side is gone.
        """
        try:
            length, fds, _, _ = socket.recv_fds(self._socket, LENGTH_BYTES, 1)
            fd = fds[0] if fds else None
            if fd is not None:
                os.set_inheritable(fd, False)
            if not length:
                raise EOFError
            length += self._exactly(LENGTH_BYTES - len(length))
            return json.loads(self._exactly(int.from_bytes(length, "little"))), fd
        except ConnectionError as error:
            raise EOFError from error

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            more = self._socket.recv(nbytes - len(data))
            if not more:
                raise EOFError
            data += more
        return bytes(data)

    def close(self) -> None:
        """Let the other side see the end; idempotent. A `receive` under way ends, too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
