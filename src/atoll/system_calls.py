"""System calls that not every system has, each with what takes its place: macOS lacks some of Linux's, Windows more.

What a fallback does less well: files are not reserved in advance, so a full disk shows at a later write; memory files
are nameless files in the folder of temporary files; without `fcntl`, files and folders are not locked.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence

try:
    import fcntl as _fcntl
except ImportError:  # Windows
    _fcntl = None  # type: ignore[assignment]
try:
    import resource as _resource
except ImportError:
    _resource = None  # type: ignore[assignment]

USUAL_FILES = 1024
"""Number of open files that a process may have, where the system does not tell."""


def allocate(fd: int, offset: int, nbytes: int) -> None:
    """Reserve a range of a file on its disk, and make the file at least as long.

    Raises:
        OSError: there is no space.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, nbytes)
    elif os.fstat(fd).st_size < offset + nbytes:
        os.ftruncate(fd, offset + nbytes)


def nameless_file(folder: str | os.PathLike[str] | None = None) -> int:
    """Return the descriptor of a new file without a name.

    The system deletes the file when its last descriptor is closed, also if the process is killed.

    Args:
        folder: any folder on the disk that will hold the file; None: the folder of temporary files.
    """
    with tempfile.TemporaryFile(dir=folder, prefix="atoll-") as file:
        return os.dup(file.fileno())


def memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory, with this name for debugging."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    return nameless_file()


def pipe_without_blocking() -> tuple[int, int]:
    """Return the ends of a pipe, for reading and writing, which no child process inherits."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


def read_into(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Read a file from `offset` on into buffers, one after the other. Return the number of bytes; 0 at its end."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, buffers, offset)
    done = 0
    for buffer in buffers:
        data = os.pread(fd, len(buffer), offset + done)
        buffer[: len(data)] = data
        done += len(data)
        if len(data) < len(buffer):
            break
    return done


def read_cached(fd: int, buffer: memoryview, offset: int) -> int:
    """Read bytes that are in the page cache, as `read_into` does. Return 0 if there are none, or none are known."""
    try:
        return os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
    except (OSError, AttributeError):  # not cached (EAGAIN); or not supported by file system or system
        return 0


def sync_data(fd: int) -> None:
    """Write a file's bytes to its disk; its times may stay behind."""
    getattr(os, "fdatasync", os.fsync)(fd)


def lock(fd: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file or folder until it is closed, or `unlock` is called.

    Raises:
        BlockingIOError: another process has the lock, and `wait` is false.
        OSError: the file system does not support locks.
    """
    if _fcntl is not None:
        kind = _fcntl.LOCK_SH if shared else _fcntl.LOCK_EX
        _fcntl.flock(fd, kind if wait else kind | _fcntl.LOCK_NB)


def unlock(fd: int) -> None:
    """End the lock of `lock`."""
    if _fcntl is not None:
        _fcntl.flock(fd, _fcntl.LOCK_UN)


def files_limits() -> tuple[int, int]:
    """Return how many files this process may open, and to how many it may raise this; no limit is `sys.maxsize`."""
    if _resource is None:
        return USUAL_FILES, USUAL_FILES
    soft, hard = (
        sys.maxsize if each == _resource.RLIM_INFINITY else each
        for each in _resource.getrlimit(_resource.RLIMIT_NOFILE)
    )
    return soft, hard


def set_files_limit(soft: int) -> None:
    """Let this process open `soft` files.

    Raises:
        OSError, ValueError: the system refuses.
    """
    if _resource is not None:
        _resource.setrlimit(_resource.RLIMIT_NOFILE, (soft, _resource.getrlimit(_resource.RLIMIT_NOFILE)[1]))


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the bytes of memory that are available; `sys.maxsize` where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return sys.maxsize
