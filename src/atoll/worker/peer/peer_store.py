"""The versions that a worker of a swarm holds, and the updates that it has collected: files that are rewritten.

They are the same files as a server's: slots, with the same layouts and digests. A note says which slot holds what, so
that a worker that is started again still has what it had.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from atoll.aggregation.plan import Plan
from atoll.errors import StoreError
from atoll.json_files import read_note, write_note
from atoll.protocol.swarm_messages import split
from atoll.store.file_slots import JOURNAL, READER, SPOOL, STATE, VERSION, Slot, SlotPool, verify

NOTE = "held.json"


@dataclass(frozen=True)
class Version:
    """A complete version, with its outer state.

    Attributes:
        state: None if there is no outer state yet.
        state_digests: BLAKE3 of the regions of the outer state.
    """

    fragment: int
    version: int
    digest: str
    slot: Slot
    state: Slot | None
    part_digests: tuple[bytes, ...]
    state_digests: tuple[bytes, ...]


@dataclass(frozen=True)
class Spool:
    """An update that was collected: its slot, and BLAKE3 of each of its parts."""

    fragment: int
    slot: Slot
    part_digests: tuple[bytes, ...]


@dataclass
class _Note:
    """Of each version: fragment, version, digest, slots, digests of parts and of state regions in hex."""

    run: str
    versions: list[list[object]] = field(default_factory=list)


class PeerStore:
    """The files of a worker. Thread-safe.

    Args:
        folder: of the worker in the run; locked by the caller.
        run: id of the run.
    """

    def __init__(self, plan: Plan, folder: Path, run: str) -> None:
        self._plan, self._path, self._run = plan, folder / NOTE, run
        self._lock = threading.RLock()
        in_memory = not plan.settings.disk.in_files
        self._pools: dict[tuple[str, int], SlotPool] = {}
        for fragment, planned in enumerate(plan.fragments):
            for kind, shape in planned.shapes().by_kind().items():
                most = None if kind == SPOOL else 4
                self._pools[kind, fragment] = SlotPool(folder, kind, fragment, shape, self._lock, most, in_memory)
        self._versions: dict[tuple[int, int], Version] = {}
        if not in_memory:
            self._adopt()

    def _adopt(self) -> None:
        """Take over the versions of an earlier process that still have their digests; remove the rest."""
        note: _Note | None = read_note(self._path, _Note)
        for row in note.versions if note is not None and note.run == self._run else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                if (found := self._adopted(*row)) is not None:
                    self._versions[found.fragment, found.version] = found
        for (kind, fragment), pool in self._pools.items():
            held = [each for each in self._versions.values() if each.fragment == fragment]
            slots = [slot for each in held if (slot := each.slot if kind == VERSION else each.state)]
            pool.retain({slot.number for slot in slots})
            pool.trim()  # an incomplete version goes with its slot
            for path in set(self._path.parent.glob(f"{kind}-{fragment}-*")) - {slot.path for slot in slots}:
                path.unlink()

    def _adopted(
        self,
        fragment: object,
        version: object,
        digest: object,
        slot: object,
        state: object,
        parts: object,
        states: object,
    ) -> Version | None:
        """Return the version of a row of the note; None if its bytes changed.

        Raises:
            ValueError, TypeError, KeyError: the row is damaged.
        """
        at, part_digests, state_digests = int(str(fragment)), _bytes(parts), _bytes(states)
        mine, beside = self._verified(VERSION, at, slot, part_digests), None
        if mine is None or self._plan.fragments[at].version.blob_id(part_digests) != digest:
            return None
        if state_digests:
            beside = self._verified(STATE, at, state, state_digests)
            if beside is None:
                return None
        return Version(at, int(str(version)), str(digest), mine, beside, part_digests, state_digests)

    def _verified(self, kind: str, fragment: int, number: object, digests: tuple[bytes, ...]) -> Slot | None:
        pool = self._pools[kind, fragment]
        slot = pool.adopt(int(str(number)))
        return slot if slot is not None and verify(slot.fd, pool.shape, digests) else None

    # -- versions

    def versions(self) -> list[Version]:
        """Return all complete versions, in order."""
        with self._lock:
            return [version for _, version in sorted(self._versions.items())]

    def get(self, fragment: int, version: int) -> Version | None:
        """Return a version; None if it is not here."""
        with self._lock:
            return self._versions.get((fragment, version))

    def put(self, version: Version) -> None:
        """Keep a version; its slots, which the caller has taken, belong to the store from now on.

        Raises:
            StoreError: the note cannot be written; the version is not kept, and the slots stay the caller's.
        """
        with self._lock:
            self._versions[version.fragment, version.version] = version
            try:
                self._write()
            except BaseException:
                del self._versions[version.fragment, version.version]
                raise

    def drop(self, version: Version) -> None:
        """Keep a version no longer; its slots are rewritten once no reader is left."""
        with self._lock:
            if self._versions.pop((version.fragment, version.version), None) is not None:
                with contextlib.suppress(StoreError):  # an old note is checked against the digests
                    self._write()
                self.give_back(VERSION, version.fragment, version.slot)
                self.give_back(STATE, version.fragment, version.state)

    def _write(self) -> None:
        if self._plan.settings.disk.in_files:
            rows: list[list[object]] = [
                [
                    each.fragment,
                    each.version,
                    each.digest,
                    each.slot.number,
                    each.state.number if each.state else None,
                    b"".join(each.part_digests).hex(),
                    b"".join(each.state_digests).hex(),
                ]
                for each in self._versions.values()
            ]
            write_note(self._path, _Note(self._run, rows))

    # -- slots

    @property
    def folder(self) -> Path:
        """The folder of all files."""
        return self._path.parent

    def take(self, kind: str, fragment: int) -> Slot | None:
        """Return a slot to write into; None if the fragment has no files of this kind.

        Raises:
            DiskFull: no space for another.
        """
        pool = self._pools.get((kind, fragment))
        return None if pool is None else pool.take(JOURNAL)

    def give_back(self, kind: str, fragment: int, slot: Slot | None) -> None:
        """Let a slot be rewritten."""
        if slot is not None:
            self._pools[kind, fragment].drop(slot, JOURNAL)

    @contextmanager
    def reading(self, kind: str, fragment: int, slots: Sequence[Slot | None]) -> Iterator[None]:
        """Keep these slots unchanged within the block."""
        held = [(self._pools[kind, fragment], slot) for slot in slots if slot is not None]
        for pool, slot in held:
            pool.hold(slot, READER)
        try:
            yield
        finally:
            for pool, slot in held:
                pool.drop(slot, READER)

    def close(self) -> None:
        """Close the files; the versions stay for the next start."""
        with self._lock:
            for (kind, _), pool in self._pools.items():
                if kind == SPOOL:
                    pool.retain(())
                pool.trim()
                pool.close()


def _bytes(text: object) -> tuple[bytes, ...]:
    return split(bytes.fromhex(str(text)))
