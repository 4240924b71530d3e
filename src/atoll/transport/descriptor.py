"""The number of an open file, safe to use from several threads.

A number that one thread closes while another still uses it may by then name another file of this machine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.errors import UsageError


class Descriptor:
    """Owns a number: it is closed when its owner has closed it, and the last of those who use it is done.

    Args:
        fd: taken over.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._users, self._closed = fd, 1, False
        self._lock = threading.Lock()

    @property
    def number(self) -> int:
        """For its owner, who knows that it is open; −1 once it is closed."""
        return -1 if self._closed else self._fd

    @contextmanager
    def used(self) -> Iterator[int]:
        """The number, which names this file until the block is left, whoever closes it meanwhile.

        Raises:
            UsageError: it is closed.
        """
        with self._lock:
            if self._closed:
                raise UsageError("The file was closed while parts of it were on their way.")
            self._users += 1
        try:
            yield self._fd
        finally:
            self._drop()

    def close(self) -> None:
        """Nobody begins to use it any more. Idempotent."""
        with self._lock:
            done, self._closed = self._closed, True
        if not done:
            self._drop()

    def _drop(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            os.close(self._fd)
