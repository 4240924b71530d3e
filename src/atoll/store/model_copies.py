"""What people open: a copy of a version with an inode of its own, complete or not there, never rewritten."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from atoll.errors import DiskFull
from atoll.failpoints import failpoint
from atoll.posix import write_at
from atoll.store.file_slots import disk_error
from atoll.store.versions import Versions

Files = Sequence[tuple[int, int | None]]
"""Of each fragment, the descriptors of a version and of the outer state beside it."""

Held = AbstractContextManager[tuple[int, int | None]]
"""Within, a version and the outer state beside it stay as they are; their descriptors."""

Contents = Callable[[Files], Iterator[memoryview]]
"""What to write, in order."""


def write_copy(store: Versions, target: Path, held: Sequence[Held], header: bytes, contents: Contents) -> None:
    """See `Store.export`."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(each) for each in held]
        temp = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp").absolute()
        with store.transaction():  # so that a start after a kill can remove it
            store.journal.execute("INSERT INTO exports_under_way VALUES (?)", str(temp))
        try:
            _copy(store, temp, header, contents(files))
            os.rename(temp, target)
            store.sync_folder(temp.parent)
        except OSError as error:
            raise disk_error(error, target) from error
        finally:
            temp.unlink(missing_ok=True)
            with contextlib.suppress(DiskFull), store.transaction():  # else the next start does it
                store.journal.execute("DELETE FROM exports_under_way WHERE path = ?", str(temp))


def _copy(store: Versions, temp: Path, header: bytes, contents: Iterator[memoryview]) -> None:
    temp.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_at(fd, header, 0)
        at = len(header)
        for run in contents:
            failpoint("export.write")
            write_at(fd, run, at)
            at += len(run)
        store.sync(fd, str(temp))
    finally:
        os.close(fd)


def remove_half_written(store: Versions) -> None:
    """Remove the copies that a killed process was writing."""
    with store.transaction():
        for (path,) in store.journal.rows("SELECT path FROM exports_under_way"):
            Path(path).unlink(missing_ok=True)
        store.journal.execute("DELETE FROM exports_under_way")
