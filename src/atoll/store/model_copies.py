"""What people open: a copy of a version with an inode of its own, complete or not there, never rewritten."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from atoll.blobs.model_file import replace_file
from atoll.errors import DiskFull
from atoll.runtime import failpoint
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
            temp.parent.mkdir(parents=True, exist_ok=True)
            runs: Iterator[bytes | memoryview] = itertools.chain([header], _failing(contents(files)))
            replace_file(target, runs, temporary=temp, sync=lambda fd: store.sync(fd, str(temp)))
            store.sync_folder(temp.parent)
        except OSError as error:
            raise disk_error(error, target) from error
        finally:
            with contextlib.suppress(DiskFull), store.transaction():  # else the next start does it
                store.journal.execute("DELETE FROM exports_under_way WHERE path = ?", str(temp))


def _failing(runs: Iterator[memoryview]) -> Iterator[memoryview]:
    for run in runs:
        failpoint("export.write")
        yield run


def remove_half_written(store: Versions) -> None:
    """Remove the copies that a killed process was writing."""
    with store.transaction():
        for (path,) in store.journal.rows("SELECT path FROM exports_under_way"):
            Path(path).unlink(missing_ok=True)
        store.journal.execute("DELETE FROM exports_under_way")
