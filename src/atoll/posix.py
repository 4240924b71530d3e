"""Functions for files: open, read or write all bytes of a range, share a descriptor among threads, lock, replace.

Atoll's own files are in its own folders: a site's folder and a state directory, with all that is in them. They are for
their owner alone, whatever the umask is. In them, no symbolic link is followed, and no file that has another name (a
hard link) is changed: otherwise Atoll would overwrite a file somewhere else. A file that a user names may be a link,
and its mode follows the umask. Neither may be a named pipe, a socket or a device, which could block its reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import secrets
import shutil
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from atoll.errors import DiskFull, StoreError, UsageError
from atoll.system_calls import lock, nameless_file, read_into

LOG = logging.getLogger("atoll")

FULL = {errno.ENOSPC, errno.EDQUOT}
"""The errno values for a full disk or an exceeded quota."""

OWN_FILE, OWN_FOLDER = 0o600, 0o700
"""The modes of Atoll's own files and folders."""
NAMED_FILE = 0o666
"""The mode of a file that a user names, before the umask."""
_OTHERS = 0o077
LINK = "it is a symbolic link"


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
    if error.errno == errno.ELOOP:
        return file_error(error, error.filename or folder)
    what = "written" if os.path.isdir(folder) else "made"  # Path.is_dir may raise PermissionError
    return StoreError(f"The folder {folder} cannot be {what} ({error.strerror}).", remedy)


_REMEDIES = {
    errno.EISDIR: "A file is needed there: move the folder away.",
    errno.ENOENT: "Restore it from a backup, or connect the disk that it is on.",
    errno.ELOOP: "Atoll follows no link in its own folders. Put there what the link leads to, or move the link away.",
    errno.EMLINK: "A change would also change the file under its other name. Put a copy of the file there.",
    errno.ENXIO: "A file is needed there: move it away.",
    errno.EMFILE: "Nothing is damaged. Let this process open more files (ulimit -n).",
} | dict.fromkeys(
    (errno.EACCES, errno.EPERM, errno.EROFS),
    "Run the command as the owner of the files, or let this user read and write them and their folders.",
)


def file_error(error: OSError, path: Path | str) -> StoreError:
    """Return the error to raise after an OSError about the file `path`. The message names the file and the remedy."""
    if error.errno in FULL:
        return DiskFull(f"The disk of {os.path.dirname(path)} is full.", "Free disk space; nothing was lost.")
    return StoreError(f"{path} cannot be used ({error.strerror}).", remedy_of(error, "Check the disk."))


def remedy_of(error: OSError, otherwise: str) -> str:
    """Return advice after an OSError about a file. If its cause is not a known one, return `otherwise`."""
    return _REMEDIES.get(error.errno or 0, otherwise)


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


# -- open files


def open_own(path: Path, flags: int = os.O_RDONLY, mode: int = OWN_FILE) -> int:
    """Open a file of Atoll's own, and return its descriptor. Links are not followed.

    If an earlier release has given the file a wider mode than `OWN_FILE`, narrow it, unless `mode` is wider, too.

    Args:
        path: path of the file.
        flags: as for `os.open`.
        mode: mode of a new file.

    Raises:
        OSError: the path is a link, a folder or another thing that is no file; or the file is opened for writing and
            has another name; or the system's reason. Nothing was changed.
    """
    fd = _opened(path, flags | os.O_NOFOLLOW, mode)
    try:
        found = os.fstat(fd)
        if found.st_nlink > 1 and flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EMLINK, "it is a hard link: the file has another name, too", str(path))
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
        if found.st_nlink == 1 and not mode & _OTHERS:
            _narrow(path, found, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_named(path: str | os.PathLike[str]) -> int:
    """Open a file that a user names, for reading, and return its descriptor.

    Raises:
        OSError: the path is no file, such as a named pipe, or cannot be read.
    """
    return _opened(path, os.O_RDONLY)


def read_own(path: Path, mode: int = OWN_FILE) -> bytes:
    """Return the content of a file of Atoll's own. `mode`, and what this raises, are as for `open_own`."""
    with open(open_own(path, mode=mode), "rb") as file:
        return file.read()


def read_secret(path: Path, remedy: str) -> bytes:
    """Return the content of a secret file. Refuse a file of another user, because that user knows the secret.

    Such a file is possible in a folder like `/tmp`.

    Args:
        path: path of the file.
        remedy: what to do if it belongs to another user.

    Raises:
        FileNotFoundError: there is no file.
        StoreError: it belongs to another user, or cannot be read, or is something else than a file.
    """
    try:
        with open(open_own(path), "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise StoreError(f"{path} belongs to another user.", remedy)
            return file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise file_error(error, path) from error


def read_named(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file that a user names. Raises the same as `open_named`."""
    with open(open_named(path), "rb") as file:
        return file.read()


def require_regular(path: str | os.PathLike[str], *, own: bool = False) -> None:
    """Check that a library may open `path`: it is a regular file, so that opening it does not block.

    Args:
        path: path of the file.
        own: whether it is a file of Atoll's own, and therefore no link.

    Raises:
        OSError: it is something else, or is missing.
    """
    _refuse_others(os.stat(path, follow_symlinks=not own), path)


def _opened(path: str | os.PathLike[str], flags: int, mode: int = 0) -> int:
    """Open a regular file. O_NONBLOCK: opening a named pipe waits for its other end; a regular file ignores it."""
    try:
        fd = os.open(path, flags & ~os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode)
    except OSError:
        with suppress(FileNotFoundError):  # the system says "Too many levels of symbolic links"
            require_regular(path, own=bool(flags & os.O_NOFOLLOW))
        raise
    try:
        _refuse_others(os.fstat(fd), path)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse_others(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, LINK, os.fspath(path))
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.ENXIO, "it is a named pipe, a socket or a device", os.fspath(path))


def mode_in(folder: Path, path: Path) -> int:
    """Return the mode of a new file: that of Atoll's own files in `folder`, else that of a file that a user names."""
    return OWN_FILE if Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder)) else NAMED_FILE


# -- folders


def own_folder(folder: Path, within: Path | None = None) -> None:
    """Make a folder of Atoll's own, for its owner alone, if it is missing. Narrow the mode of an existing one.

    Args:
        folder: the folder. What a user names may be a link; what Atoll has made in it may not.
        within: the folder that the user has named, if `folder` is in it; its mode stays. None: the user has named
            `folder` itself.

    Raises:
        OSError: a folder cannot be made, or is a link or a file.
    """
    path = folder if within is None else within
    _make(path)
    if within is None:
        _narrow(path, os.stat(path))
    for name in folder.relative_to(path).parts:
        path = path / name
        if path.is_symlink():
            raise OSError(errno.ELOOP, LINK, str(path))
        _make(path)
        _narrow(path, os.lstat(path))


def _make(folder: Path) -> None:
    """Make a folder and the missing ones above it. An existing folder, or a link to one, stays as it is."""
    try:
        os.mkdir(folder, OWN_FOLDER)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        _make(folder.parent)
        _make(folder)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None


def _narrow(path: Path, found: os.stat_result, fd: int | None = None) -> None:
    """Take the rights of others on a file or folder away, if it belongs to this user.

    A folder with the sticky bit stays as it is: like `/tmp`, it is meant for several users.

    Args:
        path: path of the file or folder.
        found: its state.
        fd: descriptor of a file; None: `path` is a folder.
    """
    mode = stat.S_IMODE(found.st_mode)
    if not mode & _OTHERS or mode & stat.S_ISVTX or found.st_uid != os.geteuid():
        return
    try:
        os.chmod(path if fd is None else fd, mode & ~_OTHERS)
    except OSError as error:  # some file systems have no modes
        LOG.debug("%s keeps mode %04o: %s", path, mode, error.strerror)
        return
    if fd is None:
        LOG.info("%s had mode %04o; it has %04o now, for its owner alone", path, mode, mode & ~_OTHERS)


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
        count = read_into(fd, [memory[done:]], offset + done)
        if not count:
            raise EOFError(f"the file ends at byte {offset + done}")
        done += count


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` into the file, from byte `offset` on."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def return_free_memory() -> None:
    """Return memory that the process does not use to the system, where the C library can do that."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


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
    for each in _locks:
        each.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks)


def take_lock(path: Path) -> Lock:
    """Lock the file `path`, and write this process's name into it. If the file does not exist, create it.

    Symbolic links are not followed.

    Raises:
        FolderTaken: another process has the lock.
        FileNotFoundError: the folder does not exist, or the lock's last holder removed the file at the same moment.
        OSError: `path` is not a regular file, or is not writable.
    """
    fd = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        lock(fd)
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
        _lock_unless_held(fd)
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


def keep_file(path: Path, content: bytes) -> None:
    """Replace one of Atoll's own files. What a killed process has left of it is replaced by the next one.

    Only the process that has locked the folder may call this.

    Raises:
        StoreError: the file cannot be written; DiskFull if there is no space for it.
    """
    try:
        replace_file(path, [content], temporary=path.with_name(f"{path.name}.tmp"))
    except OSError as error:
        raise file_error(error, path) from error


def is_locked(folder: Path) -> bool:
    """Return whether a process has locked a folder. False if there is no folder, or if locks are not supported."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        lock(fd, shared=True)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


LOOKS, LOOK_S = 5, 0.02
"""How often, and after which pause, `take_folder` tries again: `is_locked` of another process holds a lock briefly."""


def _lock_unless_held(fd: int) -> None:
    for tries_left in reversed(range(LOOKS)):
        try:
            lock(fd)
            return
        except BlockingIOError:
            if not tries_left:
                raise
        time.sleep(LOOK_S)


def _named_in(path: Path) -> str:
    try:
        return read_own(path)[:512].decode(errors="replace").strip() or "another process"
    except OSError:
        return "another process"


def replace_file(
    target: Path,
    runs: Iterable[bytes | memoryview],
    *,
    temporary: Path | None = None,
    sync: Callable[[int], None] = os.fsync,
    mode: int = OWN_FILE,
) -> None:
    """Replace the file `target` in one step. If that fails, the old file stays and no temporary file is left.

    If `target` or `temporary` is a link, the link itself is replaced.

    Args:
        target: path of the file.
        runs: the new content, in pieces.
        temporary: path of the incomplete file, which an earlier process may have left; by default a new name next to
            `target`.
        sync: a function that writes the file to disk; it gets the descriptor, and is called before the renaming.
        mode: mode of the file, before the umask: `OWN_FILE`, or `NAMED_FILE` if a user has named it.

    Raises:
        OSError: writing or renaming failed.
    """
    path = temporary or target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOCTTY | os.O_CLOEXEC  # a new file, never a link
    try:
        fd = os.open(path, flags, mode)
    except FileExistsError:
        path.unlink()
        fd = os.open(path, flags, mode)
    try:
        try:
            offset = 0
            for run in runs:
                write_at(fd, run, offset)
                offset += len(run)
            sync(fd)
        finally:
            os.close(fd)
        os.replace(path, target)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def no_sync(fd: int) -> None:
    """Leave it to the system when a file's bytes get to the disk: the argument `sync` of `replace_file`."""
