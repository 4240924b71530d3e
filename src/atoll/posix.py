"""What several rooms ask of the system: to read or write all of some bytes, and to own a file."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import UsageError

FULL = {errno.ENOSPC, errno.EDQUOT}
"""What the system says where no space is left."""


class FolderTaken(Exception):
    """Another process, or another part of this one, has the lock: `str()` names it, as the file does."""


class OwnedFile:
    """Has the open file `fd`, and gives it back once: when it is told to, or when nothing refers to it any more."""

    fd: int = -1

    def close(self) -> None:
        """Give the file back. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        """One that no code waits for any more, as its request was broken off."""
        self.close()


class Descriptor:
    """Owns the number of an open file, for several threads: it is closed when its owner and all users are done.

    A number that one thread closes while another still uses it may by then name another file of this machine.

    Args:
        fd: the descriptor that this takes over.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._users, self._closed = fd, 1, False
        self._lock = threading.Lock()

    @property
    def number(self) -> int:
        """Return the number, for the owner that knows that it is open; −1 once it is closed."""
        return -1 if self._closed else self._fd

    @contextmanager
    def used(self) -> Iterator[int]:
        """Give the number, which names this file until the block is left, even if it is closed meanwhile.

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
        """Close the file once the threads that use it are done. Idempotent."""
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


def read_at(fd: int, memory: memoryview, offset: int) -> None:
    """Fill `memory` from the file's byte `offset` on.

    Raises:
        EOFError: the file ends before.
    """
    done = 0
    while done < len(memory):
        count = os.preadv(fd, [memory[done:]], offset + done)
        if not count:
            raise EOFError(f"it ends at byte {offset + done}")
        done += count


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` from the file's byte `offset` on."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def nameless_file(folder: Path | None) -> int:
    """A new file without a name, which is gone when its last descriptor is closed, however the process ends.

    Args:
        folder: of the disk that it lies on; None: that of temporary files.
    """
    with tempfile.TemporaryFile(dir=folder, prefix="atoll-") as file:
        return os.dup(file.fileno())


def take_lock(path: Path) -> int:
    """Own the file `path`, made where there is none; it then names this process. No link is followed.

    Returns:
        A descriptor: the lock ends when it is closed, and so with the process, however that ends.

    Raises:
        FolderTaken: another process has it.
        FileNotFoundError: its folder is not there; or its holder removed the file at that moment.
        OSError: it is no plain file, or may not be written.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), path.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        os.ftruncate(fd, 0)
        write_at(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BlockingIOError:
        holder = os.pread(fd, 512, 0).decode(errors="replace").strip()
        os.close(fd)
        raise FolderTaken(holder or "another process") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


NO_FOLDER_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP}
"""What file systems say that cannot lock a folder, as NFS."""


def take_folder(folder: Path) -> int:
    """Own a folder through its own descriptor; the file `lock` in it only names this process.

    So the lock holds where that file is removed. Where the file system cannot lock a folder, the file is the lock.

    Returns, raises: as `take_lock`.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), folder.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        os.close(take_lock(folder / "lock"))
    except BlockingIOError:
        os.close(fd)
        raise FolderTaken(_named_in(folder / "lock")) from None
    except OSError as error:
        os.close(fd)
        if error.errno in NO_FOLDER_LOCKS:
            return take_lock(folder / "lock")
        raise
    except BaseException:
        os.close(fd)
        raise
    return fd


def _named_in(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(512).decode(errors="replace").strip() or "another process"
    except OSError:
        return "another process"


def replace_file(
    target: Path,
    runs: Iterable[bytes | memoryview],
    *,
    temporary: Path | None = None,
    sync: Callable[[int], None] = os.fsync,
) -> None:
    """Replace `target` by a file of these runs, in one step; a failure leaves what was there, and nothing else.

    Args:
        temporary: where the file lies until it is complete; by default a new name beside `target`.
        sync: brings it to disk before it gets its name.

    Raises:
        OSError: the disk.
    """
    path = temporary or target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o666)
        try:
            at = 0
            for run in runs:
                write_at(fd, run, at)
                at += len(run)
            sync(fd)
        finally:
            os.close(fd)
        os.rename(path, target)
    finally:
        path.unlink(missing_ok=True)
