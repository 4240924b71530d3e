"""Functions for files: read or write all bytes of a range, share a descriptor among threads, lock, replace."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import DiskFull, StoreError, UsageError

FULL = {errno.ENOSPC, errno.EDQUOT}
"""The errno values for a full disk or an exceeded quota."""


class FolderTaken(Exception):
    """Another process, or another part of this process, has locked the file or folder. `str()` names the process."""


def folder_error(error: OSError, folder: Path, remedy: str) -> StoreError:
    """Return the error to raise when making a folder, or writing into it, has raised an OSError.

    Args:
        error: the OSError.
        folder: the folder.
        remedy: advice for the message; not used if the disk is full.
    """
    if error.errno in FULL:
        return DiskFull(f"The disk of {folder} is full.", "Free disk space; nothing was lost.")
    what = "written" if os.path.isdir(folder) else "made"  # Path.is_dir may raise PermissionError
    return StoreError(f"The folder {folder} cannot be {what} ({error.strerror}).", remedy)


_REMEDIES = {
    errno.EISDIR: "A file is needed there: move the folder away.",
    errno.ENOENT: "Restore it from a backup, or connect the disk that it is on.",
} | dict.fromkeys(
    (errno.EACCES, errno.EPERM, errno.EROFS),
    "Run the command as the owner of the files, or let this user read and write them and their folders.",
)


def file_error(error: OSError, path: Path | str) -> StoreError:
    """Return the error to raise after an OSError about the file `path`. The message names the file and the remedy."""
    if error.errno in FULL:
        return DiskFull(f"The disk of {os.path.dirname(path)} is full.", "Free disk space; nothing was lost.")
    return StoreError(f"{path} cannot be used ({error.strerror}).", _REMEDIES.get(error.errno or 0, "Check the disk."))


@contextmanager
def usable(*folders: Path) -> Iterator[None]:
    """Within the `with` block, replace an OSError about a file in one of these folders by the error from `file_error`.

    Raises:
        StoreError: the file, or its folder, cannot be used.
    """
    try:
        yield
    except OSError as error:
        path = error.filename2 or error.filename
        if not isinstance(path, str | Path) or not any(Path(path).is_relative_to(folder) for folder in folders):
            raise
        raise file_error(error, path) from error


def require_no_pipes(*folders: Path) -> None:
    """Check that these folders contain no named pipe, socket or device, which could block a process that reads it.

    Raises:
        StoreError: a folder contains one; the message has its path.
    """
    for folder in folders:
        with usable(folder), os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_file() and not entry.is_dir() and os.path.exists(entry):
                    raise StoreError(
                        f"{entry.path} is neither a file nor a folder, but a named pipe, a socket or a device.",
                        "Move it away, then start again.",
                    )


def require_writable_folder(folder: Path, remedy: str) -> None:
    """Make the folder if it is missing, and try to write into it.

    Raises:
        StoreError: the folder cannot be made or written. The message ends with `remedy`, unless the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(nameless_file(folder))
    except OSError as error:
        raise folder_error(error, folder, remedy) from error


class OwnedFile:
    """Base class of objects that own an open file descriptor, `fd`. `close`, or deletion of the object, closes it."""

    fd: int = -1

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        """Close the descriptor if `close` was not called, for example because a request was cancelled."""
        self.close()


class Descriptor:
    """An open file descriptor that several threads share. It is closed when its owner and all users are done.

    After a close, the system can give the descriptor's number to another file of this process. A thread that still
    uses the number would then read or change that file.

    Args:
        fd: the open descriptor, which this object closes.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._users, self._closed = fd, 1, False
        self._lock = threading.Lock()

    @property
    def number(self) -> int:
        """The descriptor's number; −1 after `close`. Only for the owner: other threads call `used`."""
        return -1 if self._closed else self._fd

    @contextmanager
    def used(self) -> Iterator[int]:
        """Yield the descriptor's number, and keep it open until the end of the block, even if `close` is called.

        Raises:
            UsageError: the descriptor is already closed.
        """
        with self._lock:
            if self._closed:
                raise UsageError("The file was closed while parts of it were being transferred.")
            self._users += 1
        try:
            yield self._fd
        finally:
            self._drop()

    def close(self) -> None:
        """Close the descriptor as soon as no thread is inside a `used` block. Idempotent."""
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
    """Fill `memory` with the file's bytes from `offset` on.

    Raises:
        EOFError: the file is too short.
    """
    done = 0
    while done < len(memory):
        count = os.preadv(fd, [memory[done:]], offset + done)
        if not count:
            raise EOFError(f"the file ends at byte {offset + done}")
        done += count


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` into the file, from byte `offset` on."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def nameless_file(folder: Path | None) -> int:
    """Return the descriptor of a new file without a name.

    The system deletes the file when its last descriptor is closed, also if the process is killed.

    Args:
        folder: any folder on the disk that will hold the file; None: the folder of temporary files.
    """
    with tempfile.TemporaryFile(dir=folder, prefix="atoll-") as file:
        return os.dup(file.fileno())


def remove_left_behind(temporary: str, prefix: str) -> None:
    """Remove the temporary folders of processes that no longer run. On systems without `/proc`, do nothing.

    Args:
        temporary: the folder in which to look.
        prefix: the prefix of the folders' names; a process id follows, then `-`.
    """
    for path in Path(temporary).glob(f"{prefix}*-*"):
        owner = path.name.removeprefix(prefix).partition("-")[0]
        if owner.isdecimal() and Path("/proc/self").exists() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)


class Lock(OwnedFile):
    """A lock on an open file or folder. It lasts until `close`, or until the process ends, also by a kill.

    A forked child process closes its copies of the descriptors at once, because each open copy would keep the lock.

    Args:
        fd: the open descriptor, which this object closes.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        _locks.add(self)


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _close_locks() -> None:
    for lock in _locks:
        lock.close()


os.register_at_fork(after_in_child=_close_locks)


def take_lock(path: Path) -> Lock:
    """Lock the file `path`, and write this process's name into it. If the file does not exist, create it.

    Symbolic links are not followed.

    Raises:
        FolderTaken: another process has the lock.
        FileNotFoundError: the folder does not exist, or the lock's last holder removed the file at the same moment.
        OSError: `path` is not a regular file, or is not writable.
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
    return Lock(fd)


NO_FOLDER_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP}
"""The errno values from file systems that cannot lock a folder, such as NFS."""


def take_folder(folder: Path) -> Lock:
    """Lock a folder, and write this process's name into the file `lock` in it.

    The lock is on the folder itself, so it lasts even if the file `lock` is removed. If the file system cannot lock
    folders, lock the file instead. Returns and raises the same as `take_lock`.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), folder.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        take_lock(folder / "lock").close()
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
    return Lock(fd)


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
    """Replace the file `target` in one step. If that fails, the old file stays and no temporary file is left.

    Args:
        target: path of the file.
        runs: the new content, in pieces.
        temporary: path of the incomplete file; by default a new name next to `target`.
        sync: a function that writes the file to disk; it gets the descriptor, and is called before the renaming.

    Raises:
        OSError: writing or renaming failed.
    """
    path = temporary or target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o666)
        try:
            offset = 0
            for run in runs:
                write_at(fd, run, offset)
                offset += len(run)
            sync(fd)
        finally:
            os.close(fd)
        os.rename(path, target)
    finally:
        path.unlink(missing_ok=True)
