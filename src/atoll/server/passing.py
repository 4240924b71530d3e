"""What a trouble of the server comes of: too little of something, which passes, or a directory that is gone."""

from __future__ import annotations

import errno
from pathlib import Path

from atoll.errors import DiskFull, StoreError, SyncFailed

_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)


def no_more_files(error: BaseException) -> bool:
    """Whether this came of a file that could not be opened because too many are."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, SyncFailed):
        if isinstance(cause, OSError) and cause.errno in _NO_MORE_FILES:
            return True
        cause = cause.__cause__
    return False


def directory_gone(state_dir: Path) -> StoreError | None:
    """What to say of a failure where the state directory is no longer there: nothing else about it matters."""
    if state_dir.exists():
        return None
    return StoreError(
        f"The state directory {state_dir} was removed while the server ran.",
        "Bring it back (its disk, or a copy) and start the server again: workers go on from there. Without it, a new "
        "run can begin from the last export.",
    )


def passing(error: BaseException) -> str | None:
    """What there is too little of, in words; None for an error that waiting does not mend."""
    if isinstance(error, DiskFull):
        return f"the disk is full: {error}"
    if no_more_files(error):
        return "too many files are open: the server may not open another; raise its limit (ulimit -n)."
    return None
