"""What people open: a copy of a version with an inode of its own, complete or not there, never rewritten."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.errors import DiskFull, StoreError
from atoll.failpoints import failpoint
from atoll.posix import write_at
from atoll.store.slots import READ_BYTES, disk_error
from atoll.store.versions import Versions


def write_copy(
    store: Versions, target: Path, versions: Mapping[int, int], header: bytes, ranges: Sequence[tuple[int, int, int]]
) -> None:
    """See `Store.export_model`."""
    with contextlib.ExitStack() as stack:
        sources = {f: stack.enter_context(store.pin_version(f, version)).fd for f, version in versions.items()}
        temp = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp").absolute()
        with store.transaction():  # so that a start after a kill can remove it
            store.journal.execute("INSERT INTO exports_under_way VALUES (?)", str(temp))
        try:
            _copy(store, sources, temp, header, ranges)
            os.rename(temp, target)
            store.sync_folder(temp.parent)
        except OSError as error:
            raise disk_error(error, target) from error
        finally:
            temp.unlink(missing_ok=True)
            with contextlib.suppress(DiskFull), store.transaction():  # else the next start does it
                store.journal.execute("DELETE FROM exports_under_way WHERE path = ?", str(temp))


def _copy(
    store: Versions, sources: Mapping[int, int], temp: Path, header: bytes, ranges: Sequence[tuple[int, int, int]]
) -> None:
    buffer = memoryview(bytearray(READ_BYTES))
    temp.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_at(fd, header, 0)
        at = len(header)
        for fragment, offset, nbytes in ranges:
            while nbytes:
                count = os.preadv(sources[fragment], [buffer[: min(READ_BYTES, nbytes)]], offset)
                if not count:
                    raise StoreError(
                        f"A version's file ends at byte {offset}.", "Restart the server; it verifies its files."
                    )
                failpoint("export.write")
                write_at(fd, buffer[:count], at)
                at, offset, nbytes = at + count, offset + count, nbytes - count
        store.sync(fd, str(temp))
    finally:
        os.close(fd)


def remove_half_written(store: Versions) -> None:
    """Remove the copies that a killed process was writing."""
    with store.transaction():
        for (path,) in store.journal.rows("SELECT path FROM exports_under_way"):
            Path(path).unlink(missing_ok=True)
        store.journal.execute("DELETE FROM exports_under_way")
