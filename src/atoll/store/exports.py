"""What people open: a copy of a version with an inode of its own, complete or not there, never rewritten."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from atoll.errors import DiskFull, StoreError
from atoll.failpoints import failpoint
from atoll.posix import write_at
from atoll.store.slots import READ_BYTES, disk_error
from atoll.store.versions import Versions


class Exports(Versions):
    """Part of `Store`."""

    def export(
        self,
        target: Path,
        *,
        fragment: int = 0,
        version: int | None = None,
        header: bytes | None = None,
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> Path:
        """Write a version to `target`, replacing what is there in one step.

        Args:
            version: by default the head.
            header: written first, in place of the slot's own bytes; then come `ranges` (offset, nbytes) of the slot, in
                that order, some of them perhaps twice (tied tensors). By default the slot as it is.

        Raises:
            Gone: the version is not kept.
            DiskFull: nothing is left behind.
            SyncFailed: fsync failed; the server must end.
        """
        with self.pin_version(fragment, self.head(fragment).version if version is None else version) as pin:
            whole = [(0, self.shapes_of(fragment).version.nbytes)]
            temp = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp").absolute()
            with self.transaction():  # so that a start after a kill can remove it
                self.journal.execute("INSERT INTO exports_under_way VALUES (?)", str(temp))
            try:
                self._copy(pin.fd, temp, header or b"", whole if ranges is None else ranges)
                os.rename(temp, target)
                self.sync_folder(temp.parent)
            except OSError as error:
                raise disk_error(error, target) from error
            finally:
                temp.unlink(missing_ok=True)
                with contextlib.suppress(DiskFull), self.transaction():  # else the next start does it
                    self.journal.execute("DELETE FROM exports_under_way WHERE path = ?", str(temp))
        return target

    def _copy(self, source: int, temp: Path, header: bytes, ranges: Sequence[tuple[int, int]]) -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        temp.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_at(fd, header, 0)
            at = len(header)
            for offset, nbytes in ranges:
                while nbytes:
                    count = os.preadv(source, [buffer[: min(READ_BYTES, nbytes)]], offset)
                    if not count:
                        raise StoreError(
                            f"A version's file ends at byte {offset}.", "Restart the server; it verifies its files."
                        )
                    failpoint("export.write")
                    write_at(fd, buffer[:count], at)
                    at, offset, nbytes = at + count, offset + count, nbytes - count
            self.sync(fd, str(temp))
        finally:
            os.close(fd)

    def remove_exports_under_way(self) -> None:
        """Remove what a killed process left half written."""
        with self.transaction():
            for (path,) in self.journal.rows("SELECT path FROM exports_under_way"):
                Path(path).unlink(missing_ok=True)
            self.journal.execute("DELETE FROM exports_under_way")
