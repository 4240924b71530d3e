"""Errors of the server that pass, such as a full disk; and whether there is room for what comes."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from atoll.config import Settings
from atoll.errors import DiskFull, RunFailed, StoreError, SyncFailed, causes
from atoll.store.store import Store

_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)


def no_more_files(error: BaseException) -> bool:
    """Return whether a file could not be opened because too many are open."""
    for cause in causes(error):
        if isinstance(cause, SyncFailed):
            return False
        if isinstance(cause, OSError) and cause.errno in _NO_MORE_FILES:
            return True
    return False


def journal_failed(error: StoreError) -> bool:
    """Return whether an fsync failed, or SQLite for more than lack of space: only a new start tells what is left."""
    return isinstance(error, SyncFailed) or (isinstance(error.__cause__, sqlite3.Error) and passing(error) is None)


def directory_gone(state_dir: Path) -> StoreError | None:
    """Return the error to report if the state directory or one of its files is gone: it explains any other failure."""
    for path in (state_dir, state_dir / "slots", state_dir / "journal.sqlite"):
        if not path.exists():
            return StoreError(
                f"The state directory {state_dir} was removed while the server ran."
                if path == state_dir
                else f"{path} was removed while the server ran.",
                "Bring it back (its disk, or a copy) and start the server again: workers go on from there. Without it, "
                "a new run can begin from the last export.",
            )
    return None


def passing(error: BaseException) -> str | None:
    """Return in words what is lacking; None for an error that waiting does not mend."""
    if isinstance(error, DiskFull):
        return f"the disk is full: {error}"
    if no_more_files(error):
        return "too many files are open: the server may not open another; raise its limit (ulimit -n)."
    return None


def out_of_memory(error: BaseException | None) -> RunFailed | None:
    """Return the error that ends a server without memory for an object or a thread; None for other errors."""
    no_thread = isinstance(error, RuntimeError) and str(error) == "can't start new thread"
    if not no_thread and not isinstance(error, MemoryError):
        return None
    return RunFailed(
        "The server has run out of memory.",
        "Give it more, or lower max_pins or threads. Start it again: what was acknowledged is not lost.",
    )


# -- The server keeps some of its disk free.


RETRY_S = 2.0
"""When a refused request is made again."""


def require_space(store: Store, settings: Settings) -> None:
    """Refuse a request that takes disk (or memory, in runs in memory) while little of it is left.

    Raises:
        DiskFull: it can be asked for again later.
    """
    free = store.free_bytes()
    if free < settings.min_free_bytes:
        what = "memory left" if store.slots.in_memory else "disk left"
        error = DiskFull(
            f"The server has {free / 1e6:.0f} MB of {what}, and keeps {settings.min_free_bytes / 1e6:.0f} MB free.",
            "It goes on when there is space; nothing is lost.",
        )
        error.retry_after_s = RETRY_S
        raise error
