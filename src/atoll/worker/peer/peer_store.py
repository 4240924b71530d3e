"""The versions that a worker of a swarm holds, and the updates that it has collected: files that are rewritten.

They are the same files as a server's: slots, with the same layouts and digests. A note says which slot holds what, so
that a worker that was started again still has what it had.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from atoll.aggregation.plan import Plan
from atoll.aggregation.result_file import split
from atoll.errors import StoreError
from atoll.store.file_slots import JOURNAL, READER, SPOOL, STATE, VERSION, Slot, SlotPool, verify
from atoll.worker.json_notes import read_note, write_note

NOTE = "held.json"


@dataclass(frozen=True)
class Version:
    """A version that is whole, and the outer state beside it.

    Attributes:
        state: None where there is none yet.
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
    """An update that was collected: where it lies, and BLAKE3 of each of its parts."""

    fragment: int
    slot: Slot
    part_digests: tuple[bytes, ...]


@dataclass
class _Note:
    """Of each version: fragment, version, digest, slots, digests of parts and of state regions in hex."""

    run: str
    versions: list[list[object]] = field(default_factory=list)


class PeerStore:
    """Where it all lies. Thread-safe.

    Args:
        folder: of the worker in the run; locked by the caller.
        run: id of the run.
    """

    def __init__(self, plan: Plan, folder: Path, run: str) -> None:
        self._plan, self._path, self._run = plan, folder / NOTE, run
        self._lock = threading.RLock()
        in_memory = not plan.settings.download_to_disk
        self._pools: dict[tuple[str, int], SlotPool] = {}
        for fragment, planned in enumerate(plan.fragments):
            for kind, shape in planned.shapes().by_kind().items():
                most = None if kind == SPOOL else 4
                self._pools[kind, fragment] = SlotPool(folder, kind, fragment, shape, self._lock, most, in_memory)
        self._versions: dict[tuple[int, int], Version] = {}
        if not in_memory:
            self._adopt()

    def _adopt(self) -> None:
        """Take up what an earlier process had, where it still is what its digests say."""
        note: _Note | None = read_note(self._path, _Note)
        for row in note.versions if note is not None and note.run == self._run else ():
            try:
                fragment, version, digest, number, state, parts, states = row
                found = self._adopted(
                    int(str(fragment)), int(str(version)), str(digest), number, state, _bytes(parts), _bytes(states)
                )
            except (ValueError, TypeError, KeyError):
                continue
            if found is not None:
                self._versions[found.fragment, found.version] = found
        for (kind, fragment), pool in self._pools.items():
            slots = [each.slot if kind == VERSION else each.state for each in self._versions.values()]
            mine = [each.fragment for each in self._versions.values()]
            pool.retain({slot.number for slot, at in zip(slots, mine, strict=True) if slot and at == fragment})
            pool.trim()  # what is not whole goes with its slot
            for path in self._path.parent.glob(f"{kind}-{fragment}-*"):
                if path not in {slot.path for slot in slots if slot is not None}:
                    path.unlink()

    def _adopted(
        self,
        fragment: int,
        version: int,
        digest: str,
        number: object,
        state: object,
        parts: tuple[bytes, ...],
        states: tuple[bytes, ...],
    ) -> Version | None:
        slot, beside = self._taken(VERSION, fragment, number, parts), None
        if slot is None or self._plan.fragments[fragment].version.update_digest(parts) != digest:
            return None
        if states:
            beside = self._taken(STATE, fragment, state, states)
            if beside is None:
                return None
        return Version(fragment, version, digest, slot, beside, parts, states)

    def _taken(self, kind: str, fragment: int, number: object, digests: tuple[bytes, ...]) -> Slot | None:
        pool = self._pools[kind, fragment]
        slot = pool.adopt(int(str(number)))
        return slot if slot is not None and verify(slot.fd, pool.shape, digests) else None

    # -- versions

    def versions(self) -> list[Version]:
        """All that are whole, in order."""
        with self._lock:
            return [version for _, version in sorted(self._versions.items())]

    def get(self, fragment: int, version: int) -> Version | None:
        with self._lock:
            return self._versions.get((fragment, version))

    def put(self, version: Version) -> None:
        """One is whole: its slots, which the caller has taken, are its own from here on.

        Raises:
            StoreError: that cannot be written down; it is not here, and its slots are the caller's.
        """
        with self._lock:
            self._versions[version.fragment, version.version] = version
            try:
                self._write()
            except BaseException:
                del self._versions[version.fragment, version.version]
                raise

    def drop(self, version: Version) -> None:
        """It is not needed any more; its slots may be rewritten once nobody reads them."""
        with self._lock:
            if self._versions.pop((version.fragment, version.version), None) is not None:
                with contextlib.suppress(StoreError):  # a note that still has it is not believed without its digests
                    self._write()
                self.give_back(VERSION, version.fragment, version.slot)
                self.give_back(STATE, version.fragment, version.state)

    def _write(self) -> None:
        if self._plan.settings.download_to_disk:
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
        """Where they lie."""
        return self._path.parent

    def take(self, kind: str, fragment: int) -> Slot | None:
        """A slot to write into; None where the fragment has no such files.

        Raises:
            DiskFull: no space for another.
        """
        pool = self._pools.get((kind, fragment))
        return None if pool is None else pool.take(JOURNAL)

    def give_back(self, kind: str, fragment: int, slot: Slot | None) -> None:
        """The slot may be rewritten."""
        if slot is not None:
            self._pools[kind, fragment].drop(slot, JOURNAL)

    @contextmanager
    def reading(self, kind: str, fragment: int, slots: Sequence[Slot | None]) -> Iterator[None]:
        """Within, these slots stay as they are."""
        held = [slot for slot in slots if slot is not None]
        pool = self._pools.get((kind, fragment))
        for slot in held:
            assert pool is not None
            pool.hold(slot, READER)
        try:
            yield
        finally:
            for slot in held:
                assert pool is not None
                pool.drop(slot, READER)

    def close(self) -> None:
        """Let go of the files; what they hold stays for a next start."""
        with self._lock:
            for (kind, _), pool in self._pools.items():
                if kind == SPOOL:
                    pool.retain(())
                pool.trim()
                pool.close()


def _bytes(text: object) -> tuple[bytes, ...]:
    return split(bytes.fromhex(str(text)))
