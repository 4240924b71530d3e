"""What callers hold of a version: a draft while it is written, a pin while it is read."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

from atoll.store.file_slots import Slot
from atoll.store.rows import DeltaRow, VersionRow


class VersionDraft:
    """The files of a version that does not exist yet. Ends with `Store.commit_version` or `abandon`."""

    def __init__(
        self,
        fragment: int,
        version: int,
        slot: Slot,
        state: Slot | None,
        delta: Slot | None,
        drop: Callable[[], None],
    ) -> None:
        self.fragment, self.version = fragment, version
        self.slot, self.state, self.delta = slot, state, delta
        self._drop = drop
        self.ended = False

    @property
    def version_fd(self) -> int:
        return self.slot.fd

    @property
    def state_fd(self) -> int | None:
        return self.state.fd if self.state else None

    @property
    def delta_fd(self) -> int | None:
        return self.delta.fd if self.delta else None

    def abandon(self) -> None:
        """Give the slots back; nothing happens after a commit, or the second time."""
        if not self.ended:
            self.ended = True
            self._drop()


class PinnedVersion:
    """A version that is not rewritten before `release`.

    Attributes:
        fd: to be read by this holder alone.
        row: what it is.
        revoked: set when the slot is wanted back; the holder stops reading and releases. Until it does, it still
            reads this version and no other.
    """

    def __init__(self, row: VersionRow, slot: Slot, drop: Callable[[PinnedVersion], None]) -> None:
        self.row, self.slot = row, slot
        self.fd = os.dup(slot.fd)
        self.revoked = threading.Event()
        self._drop = drop
        self._close = weakref.finalize(self, os.close, self.fd)

    def release(self) -> None:
        """Let go; again does nothing."""
        if self._close.detach():
            os.close(self.fd)
            self._drop(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class PinnedDelta:
    """What goes down of a version, and that version; neither is rewritten before `release`.

    Attributes:
        fd: to be read by this holder alone.
        row: what it is.
    """

    def __init__(self, row: DeltaRow, version: PinnedVersion, slot: Slot, drop: Callable[[], None]) -> None:
        self.row, self._version = row, version
        self.revoked = version.revoked
        self.fd = os.dup(slot.fd)
        self._drop = drop
        self._close = weakref.finalize(self, os.close, self.fd)

    def release(self) -> None:
        """Let go; again does nothing."""
        if self._close.detach():
            os.close(self.fd)
            self._drop()
            self._version.release()
