"""The versions that virtual workers train from, each pinned while anybody does."""

from __future__ import annotations

from atoll.store.handles import PinnedVersion
from atoll.store.store import Store


class Bases:
    """Of one run; the newest stays pinned between two virtual workers."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._users: dict[PinnedVersion, int] = {}

    def take(self, version: int) -> PinnedVersion:
        """The version, for one more who trains from it; others are let go of, unless somebody still does."""
        base = next((pin for pin in self._users if pin.row.version == version), None)
        if base is None:
            for idle in [pin for pin, count in self._users.items() if not count]:
                del self._users[idle]
                idle.release()
            base = self._store.pin_version(0, version)
            self._users[base] = 0
        self._users[base] += 1
        return base

    def give_back(self, base: PinnedVersion) -> None:
        """One does not train from it any more."""
        self._users[base] -= 1

    def release(self) -> None:
        """Nobody trains any more."""
        for base in self._users:
            base.release()
        self._users.clear()
