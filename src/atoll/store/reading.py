"""What is read beside a version: what goes down of it, and the outer state; held so that nobody rewrites it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from atoll.errors import Gone
from atoll.store.file_slots import DELTA, PULL, READER, STATE, VERSION
from atoll.store.handles import PinnedDelta
from atoll.store.versions import Versions


class Reading(Versions):
    """Part of `Store`."""

    def pin_delta(self, fragment: int, version: int) -> PinnedDelta:
        """Hold what goes down of a version for reading, and with it the version, until `release`.

        Raises:
            Gone: it is not kept.
        """
        with self.lock:
            pin, row = self.pin_version(fragment, version), self.delta(fragment, version)
            if row is None:
                pin.release()
                raise Gone(f"Version {version} of fragment {fragment} has no delta.", "Pull it whole.")
            pool = self.pool(DELTA, fragment)
            slot = pool[row.slot]
            pool.hold(slot, PULL)
        return PinnedDelta(row, pin, slot, lambda: pool.drop(slot, PULL))

    @contextmanager
    def pinned(self, fragment: int, version: int) -> Iterator[tuple[int, int | None]]:
        """As `reading`, of the version alone."""
        with self.pin_version(fragment, version) as pin:
            yield pin.fd, None

    @contextmanager
    def reading(self, fragment: int, version: int) -> Iterator[tuple[int, int | None]]:
        """Within, a version and the outer state beside it stay as they are; their descriptors.

        Raises:
            Gone: they are not kept; of the first version there is no outer state.
        """
        with self.lock:
            row = self.version(fragment, version)
            if row.state_digests and row.state_slot is None:
                raise Gone(f"The outer state of version {version} is not kept.", "Take the newest version.")
            kinds = [(VERSION, row.slot)] + ([] if row.state_slot is None else [(STATE, row.state_slot)])
            held = [(self.pool(kind, fragment), self.pool(kind, fragment)[number]) for kind, number in kinds]
            for pool, slot in held:
                pool.hold(slot, READER)
        try:
            yield held[0][1].fd, held[1][1].fd if len(held) > 1 else None
        finally:
            for pool, slot in held:
                pool.drop(slot, READER)
