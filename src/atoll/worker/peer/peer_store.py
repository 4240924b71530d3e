"""Storage of a worker in a swarm: the versions that the worker serves, and the updates that it has downloaded.

The files are slots: files of a fixed size that are reused. They have the same layouts and digests as the files of a
server. The file `held.json` says which slot holds which version, so that a restarted worker still has its versions.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.aggregation.plan import AggregationPlan
from atoll.blobs.manifest import Manifest
from atoll.errors import StoreError
from atoll.json_files import read_note, write_note
from atoll.posix import usable
from atoll.protocol.swarm_messages import Source, split
from atoll.store.file_slots import JOURNAL, READER, SPOOL, STATE, VERSION, Slot, SlotPool, region_digest, verify
from atoll.tensors.reference import TensorRef
from atoll.worker.peer.peer_transfers import PeerServer, PulledUpdate, Version, state_cuts

NOTE = "held.json"


@dataclass
class _Note:
    """The content of `held.json`: the versions that the worker has.

    Attributes:
        run: id of the run.
        versions: a row for each version: [fragment, version number, digest, number of the version's slot, number of the
            slot of the outer optimizer's state or None, digests of the version's parts in hex, digests of the state's
            regions in hex].
    """

    run: str
    versions: list[list[Any]] = field(default_factory=list)


class PeerStore:
    """The versions of a worker in a swarm, and the files of the updates that it downloads. Thread-safe.

    Args:
        plan: the run's plan, as for `SwarmPeer`.
        folder: the worker's folder in the run; locked by the caller.
        run: id of the run.
        peer_server: serves versions to other workers.

    Raises:
        StoreError: a file in the folder cannot be used.
    """

    def __init__(self, plan: AggregationPlan, folder: Path, run: str, peer_server: PeerServer) -> None:
        self.folder, self._plan, self._run, self._peer_server = folder, plan, run, peer_server
        self._lock = threading.RLock()
        in_memory = not plan.values.in_files
        self._pools: dict[tuple[str, int], SlotPool] = {}
        for fragment, planned in enumerate(plan.fragments):
            for kind, shape in planned.shapes().by_kind().items():
                most = None if kind == SPOOL else 4
                self._pools[kind, fragment] = SlotPool(folder, kind, fragment, shape, self._lock, most, in_memory)
        self._versions: dict[tuple[int, int], Version] = {}
        if not in_memory:
            with usable(folder):
                self._adopt()

    def _adopt(self) -> None:
        """Serve the versions that an earlier process left, if they match their digests. Remove all other files."""
        note: _Note | None = read_note(self.folder / NOTE, _Note)
        for row in note.versions if note is not None and note.run == self._run else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # another version of Atoll wrote the row
                if (found := self._adopted(*row)) is not None:
                    self._versions[found.fragment, found.version] = self.served(found)
        for (kind, fragment), pool in self._pools.items():
            versions = [each for each in self._versions.values() if each.fragment == fragment]
            slots = [slot for each in versions for of, slot in each.slots() if of == kind]
            pool.retain({slot.number for slot in slots})
            pool.trim()  # remove slots that hold no complete version
            for path in set(self.folder.glob(f"{kind}-{fragment}-*")) - {slot.path for slot in slots}:
                path.unlink()

    def _adopted(
        self, fragment: int, version: int, digest: str, slot: int, state: int | None, *hexes: str
    ) -> Version | None:
        """Return the version that a row of `held.json` describes; None if the files do not match the digests.

        Args:
            fragment: the fragment's number.
            version: the version's number.
            digest: the version's digest.
            slot: number of the version's slot.
            state: number of the slot of the outer optimizer's state; None: there is no state.
            hexes: the digests of the version's parts, then those of the state's regions, each joined to one hex string.
        """
        parts, states = (split(bytes.fromhex(text)) for text in hexes)
        version_slot, state_slot = self._verified(VERSION, fragment, slot, parts), None
        if version_slot is None or self._plan.fragments[fragment].version.blob_id(parts) != digest:
            return None
        if state is not None and (state_slot := self._verified(STATE, fragment, state, states)) is None:
            return None
        return Version(fragment, version, digest, version_slot, state_slot, parts, states)

    def _verified(self, kind: str, fragment: int, number: int, digests: tuple[bytes, ...]) -> Slot | None:
        pool = self._pools[kind, fragment]
        slot = pool.adopt(number)
        return slot if slot is not None and verify(slot.fd, pool.shape, digests) else None

    # -- versions

    def versions(self) -> list[Version]:
        """Return all versions in the store, ordered by fragment and number."""
        with self._lock:
            return [version for _, version in sorted(self._versions.items())]

    def get(self, fragment: int, version: int) -> Version | None:
        """Return the version of a fragment with this number; None if this worker does not have it."""
        with self._lock:
            return self._versions.get((fragment, version))

    def served(self, version: Version) -> Version:
        """Start to serve a version to other workers. Return a copy of it, with its references in the field `source`.

        Do not hold a lock during the call: it may read the outer optimizer's whole state to compute digests.
        """
        layout, state_url, parts = self._plan.fragments[version.fragment].version, None, version.state_parts
        address = self._peer_server.serve(version.slot.fd, Manifest.of_layout(layout, version.part_digests))
        if version.state is not None:
            fd, cuts = version.state.fd, state_cuts(self._pools[STATE, version.fragment].shape)
            parts = parts or tuple(region_digest(fd, ((part.start, part.nbytes),)) for part in cuts.parts())
            state_url = str(self._peer_server.serve(fd, Manifest.of_cuts(cuts, parts)))
        return replace(version, state_parts=parts, source=Source(version=str(address), state=state_url))

    def withdraw(self, version: Version) -> None:
        """Stop serving a version to other workers."""
        source = version.source
        for text in (source.version, source.state) if source is not None else ():
            if text is not None:
                self._peer_server.withdraw(TensorRef.parse(text))

    def put(self, version: Version) -> None:
        """Add a version to the store. Its slots, which the caller got from `new_slots`, then belong to the store.

        Raises:
            StoreError: the file `held.json` cannot be written. The version is not added, and the caller keeps the
                slots.
        """
        with self._lock:
            self._versions[version.fragment, version.version] = version
            try:
                self._write()
            except BaseException:
                del self._versions[version.fragment, version.version]
                self.withdraw(version)
                raise

    def drop(self, version: Version) -> None:
        """Remove a version from the store and stop serving it. Its slots are reused as soon as no thread reads them."""
        with self._lock:
            if self._versions.pop((version.fragment, version.version), None) is not None:
                self.withdraw(version)
                with contextlib.suppress(StoreError):  # an outdated note is harmless: `_adopt` checks digests
                    self._write()
                self.give_back(version)

    def _write(self) -> None:
        if not self._plan.values.in_files:
            return
        note = _Note(self._run)
        for each in self._versions.values():
            digests = (b"".join(each.part_digests).hex(), b"".join(each.state_digests).hex())
            slots = (each.slot.number, each.state.number if each.state else None)
            note.versions.append([each.fragment, each.version, each.digest, *slots, *digests])
        write_note(self.folder / NOTE, note)

    # -- slots

    @contextmanager
    def new_slots(self, fragment: int, *kinds: str) -> Iterator[list[Slot | None]]:
        """Yield free slots (files) to write into. If the `with` block raises an error, give the slots back.

        Args:
            fragment: the fragment's number.
            kinds: what each slot is for: `VERSION`, `STATE` of the outer optimizer, or `SPOOL` for an update.

        Yields:
            One slot for each kind; None for a kind that has no files in this run.

        Raises:
            DiskFull: the disk has no space for another slot.
        """
        slots: list[Slot | None] = []
        try:
            for kind in kinds:
                pool = self._pools.get((kind, fragment))
                slots.append(pool.take(JOURNAL) if pool is not None else None)
            yield slots
        except BaseException:
            for kind, slot in zip(kinds, slots, strict=False):
                if slot is not None:
                    self._pools[kind, fragment].drop(slot, JOURNAL)
            raise

    def give_back(self, file: Version | PulledUpdate) -> None:
        """Give back the slots of a version or of a downloaded update, so that they can be reused."""
        for kind, slot in file.slots():
            self._pools[kind, file.fragment].drop(slot, JOURNAL)

    @contextmanager
    def reading(self, *files: Version | PulledUpdate) -> Iterator[None]:
        """During the `with` block, keep the slots of these versions and updates from being reused."""
        with ExitStack() as stack:
            for each in files:
                for kind, slot in each.slots():
                    stack.enter_context(self._pools[kind, each.fragment].held(slot, READER))
            yield

    def close(self) -> None:
        """Close the files, and remove the downloaded updates. The versions stay on disk for the next start."""
        with self._lock:
            for (kind, _), pool in self._pools.items():
                if kind == SPOOL:
                    pool.retain(())
                pool.trim()
                pool.close()
