"""One server per state directory: an exclusive lock that ends with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from atoll.errors import StateLocked, StoreError


class DirectoryLock:
    """Holds `<directory>/lock` until `release`. The file names the holder, and stays: removing it would be a race."""

    def __init__(self, directory: Path) -> None:
        """Take the lock.

        Raises:
            StateLocked: another process, or another store of this one, has it; it is named.
            StoreError: the directory cannot be written.
        """
        path = directory / "lock"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}.", "Give a state_dir that this user may write.") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 512, 0).decode(errors="replace").strip() or "another process"
            os.close(self._fd)
            raise StateLocked(
                f"The state directory {directory} is in use by {holder}.",
                "Stop that server, or give this one another state_dir.",
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Let another process have the directory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
