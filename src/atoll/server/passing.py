"""Troubles that pass: the server waits for them to be over, and loses nothing meanwhile."""

from __future__ import annotations

import errno

from atoll.errors import DiskFull, SyncFailed

_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)


def no_more_files(error: BaseException) -> bool:
    """Whether this came of a file that could not be opened because too many are."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, SyncFailed):
        if isinstance(cause, OSError) and cause.errno in _NO_MORE_FILES:
            return True
        cause = cause.__cause__
    return False


def passing(error: BaseException) -> str | None:
    """What there is too little of, in words; None for an error that waiting does not mend."""
    if isinstance(error, DiskFull):
        return f"the disk is full: {error}"
    if no_more_files(error):
        return "too many files are open: the server may not open another; raise its limit (ulimit -n)."
    return None
