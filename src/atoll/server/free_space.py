"""Whether there is room for what a server is about to write: it keeps some of its disk free."""

from __future__ import annotations

from atoll.config import Settings
from atoll.errors import DiskFull
from atoll.store.store import Store

RETRY_S = 2.0
"""After which somebody who was refused asks again."""


def require_space(store: Store, settings: Settings) -> None:
    """Refuse what takes disk, or memory in runs without a disk, while little of it is left.

    Raises:
        DiskFull: it can be asked for again later.
    """
    free = store.free_bytes()
    if free < settings.min_free_bytes:
        what = "memory left" if store.in_memory else "disk left"
        error = DiskFull(
            f"The server has {free / 1e6:.0f} MB of {what}, and keeps {settings.min_free_bytes / 1e6:.0f} MB free.",
            "It goes on when there is space; nothing is lost.",
        )
        error.retry_after_s = RETRY_S
        raise error
