"""Slots: preallocated files for tensors. A new version is written into a free slot, not into a new file.

Each use of a slot adds a hold (a counted reference). A slot with a hold is never rewritten or removed. Kinds of holds:

    journal    a row of the journal (the server's database) refers to the slot, or will once a part has arrived
    writer     the slot is being written
    pull       the slot is being read, for example to send the version in it to a worker
    reader     the slot is being read at a worker of a swarm; such workers have slots of their own
    aggregator the slot is being read by the user's aggregator, which runs in a process of its own
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from atoll.errors import ConfigError, UsageError
from atoll.format_text import of_fragment
from atoll.posix import file_error, open_own, usable, write_at
from atoll.runtime import failpoint
from atoll.store.journal import Journal
from atoll.system_calls import allocate, memory_file, read_into

JOURNAL, WRITER, PULL, READER = "journal", "writer", "pull", "reader"
VERSION, STATE, SPOOL, DELTA = "version", "state", "spool", "delta"
_NAME = re.compile(r"(version|state|spool|delta)-\d+-\d+\.(safetensors|bin)")
READ_BYTES = 2**20
STATE_SLOTS = 4
"""Number of slots for states of the outer optimizer: one each for the head, the version before it, the newest version
that survives a power loss, and the version that is being written."""
_ROWS = {
    VERSION: ("versions", "slot"),
    STATE: ("versions", "state_slot"),
    DELTA: ("deltas", "slot"),
    SPOOL: ("tickets", "slot"),
}
"""Kind of slot → journal table and column with the numbers of slots of this kind."""

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class FileShape:
    """Size, header and hashed regions of a tensor file. All files of one kind and fragment have the same shape.

    Attributes:
        nbytes: file size in bytes.
        header: first bytes of every such file; written when the file is created.
        regions: regions of the file, each with a digest of its own in the journal (the server's database). A region
            consists of one or more byte ranges (offset, nbytes).
        elsewhere: whether the workers store the tensors, as in a swarm. Then the server's file is empty, and the
            digests in the journal come from the workers.
    """

    nbytes: int
    header: bytes
    regions: tuple[Ranges, ...]
    elsewhere: bool = False

    @property
    def header_digest(self) -> bytes:
        """BLAKE3 of the header. The journal stores it, so that a run cannot be continued with another model."""
        return blake3(self.header).digest()


@dataclass(frozen=True)
class FragmentShapes:
    """Sizes, headers and hashed regions of the files of one fragment.

    Attributes:
        version: shape of a version's file.
        state: shape of the file with the outer optimizer's state; None if the outer optimizer has no state.
        update_bytes: size of an encoded update in bytes.
        update_parts: (offset, nbytes) of each part of an update.
        delta: shape of the file with the encoded difference between two versions; None if workers always download
            whole versions.
    """

    version: FileShape
    state: FileShape | None
    update_bytes: int
    update_parts: Ranges
    delta: FileShape | None = None

    def elsewhere(self) -> FragmentShapes:
        """Return the shapes for the server of a swarm, where the workers aggregate and have the tensors.

        The server's files are empty, and updates have no parts. Versions, states and deltas keep their number of
        regions, because the journal has a digest for each region in a swarm, too.
        """

        def empty(shape: FileShape | None) -> FileShape | None:
            return shape and FileShape(0, b"", tuple(() for _ in shape.regions), elsewhere=True)

        version = empty(self.version)
        assert version is not None
        return FragmentShapes(version, empty(self.state), self.update_bytes, (), empty(self.delta))

    def by_kind(self) -> dict[str, FileShape]:
        """Return the shapes of the files that the run needs, by kind: version, state, delta, spool (for updates)."""
        nbytes = 0 if self.version.elsewhere else self.update_bytes
        spool = FileShape(nbytes, b"", tuple((part,) for part in self.update_parts))
        shapes = {VERSION: self.version, SPOOL: spool, STATE: self.state, DELTA: self.delta}
        return {kind: shape for kind, shape in shapes.items() if shape is not None}


@dataclass(eq=False)
class Slot:
    """One slot: a preallocated file, and its holds (references). While it has a hold, it is not rewritten or removed.

    Attributes:
        fd: descriptor of the file, open as long as this object lives.
        holds: kind of hold, such as "writer" → number of holds.
        one_writes: lock for writes to this file. The kernel lets only one thread at a time write to a file; with this
            lock, the other threads wait without using CPU time.
        is_kept: whether the file stays as it is under another name. Then the slot is removed, not rewritten.
    """

    number: int
    path: Path
    fd: int
    holds: Counter[str] = field(default_factory=Counter)
    one_writes: threading.Lock = field(default_factory=threading.Lock)
    is_kept: bool = False

    def __post_init__(self) -> None:
        self.close = weakref.finalize(self, os.close, self.fd)

    @property
    def free(self) -> bool:
        """Whether the slot has no hold (reference), so that it may be rewritten or removed."""
        return not self.holds


def slot_path(folder: Path, kind: str, fragment: int, number: int) -> Path:
    """Return the path of the slot (preallocated tensor file) with this kind, fragment and number."""
    return folder / f"{kind}-{fragment}-{number}.{'bin' if kind in (SPOOL, DELTA) else 'safetensors'}"


class SlotPool:
    """The slots of one kind and fragment, for example for the versions of fragment 0.

    Args:
        folder: folder of the files.
        lock: the journal's lock. It also guards the holds (references) of slots, which change with the journal's rows.
        most: if there are more slots than this, a slot that becomes free is removed. None: only `trim` removes slots.
        in_memory: keep the slots in memory (memfd) instead of on disk. They are lost when this process ends.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        fragment: int,
        shape: FileShape,
        lock: threading.RLock,
        most: int | None = None,
        in_memory: bool = False,
    ) -> None:
        self.folder, self.kind, self.fragment, self.shape = folder, kind, fragment, shape
        self.lock, self._most = lock, most
        self._in_memory = in_memory
        self._slots: dict[int, Slot] = {}
        self._free: set[int] = set()  # slots that nothing holds
        self._reserved: set[int] = set()

    def path(self, number: int) -> Path:
        """Return the path of a slot's file. If slots are in memory, there is no file; the path only names the slot."""
        return slot_path(self.folder, self.kind, self.fragment, number)

    def take(self, why: str) -> Slot:
        """Add a hold (a reference) to a free slot, and return the slot. If no slot is free, create one.

        Args:
            why: kind of hold, such as `WRITER`. `drop` ends the hold.

        Raises:
            DiskFull: the disk has no space for another slot; no partial file is left behind.
            StoreError: the file cannot be created.
        """
        with self.lock:
            if self._free:
                slot = self._slots[min(self._free)]
                self.hold(slot, why)
                return slot
            used = self._slots.keys() | self._reserved
            number = next(n for n in range(len(used) + 1) if n not in used)
            self._reserved.add(number)
        try:
            slot = self._create(number)  # without the lock, because creating a file may be slow
            with self.lock:
                self._slots[number] = slot
                self.hold(slot, why)
        finally:
            with self.lock:
                self._reserved.discard(number)
        return slot

    def _create(self, number: int) -> Slot:
        path = self.path(number)
        if self._in_memory:
            fd = memory_file(path.name)
        else:
            try:
                path.unlink(missing_ok=True)  # no row of the journal refers to it; it may be a link
                fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except OSError as error:
                raise file_error(error, path) from error
        slot = Slot(number, path, fd)
        try:
            failpoint("slot.create")
            if self.shape.nbytes:
                allocate(slot.fd, 0, self.shape.nbytes)
            write_at(slot.fd, self.shape.header, 0)
        except OSError as error:
            slot.close()
            path.unlink(missing_ok=True)
            raise file_error(error, path) from error
        return slot

    def adopt(self, number: int) -> Slot | None:
        """After a restart, open a slot that a row of the journal refers to, and add a hold for the journal.

        Returns:
            The slot; None if its file is missing or has the wrong size.

        Raises:
            StoreError: the file cannot be opened, for example because it is a link.
        """
        with self.lock:
            slot = self._slots.get(number)
            if slot is None:
                try:
                    slot = Slot(number, self.path(number), open_own(self.path(number), os.O_RDWR))
                except FileNotFoundError:
                    return None
                except OSError as error:
                    raise file_error(error, self.path(number)) from error
                if os.fstat(slot.fd).st_size != self.shape.nbytes:
                    return None
                self._slots[number] = slot
            slot.holds[JOURNAL] = 1
            self._free.discard(number)
            return slot

    def avoid(self, number: int) -> None:
        """Create no slot with this number: another file has its name, and may still be needed."""
        with self.lock:
            self._reserved.add(number)

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def hold(self, slot: Slot, why: str) -> None:
        """Add a hold (a reference) of kind `why` to a slot. Until `drop`, the slot is not rewritten or removed."""
        with self.lock:
            slot.holds[why] += 1
            if self._slots.get(slot.number) is slot:  # if this slot was removed, another may have its number
                self._free.discard(slot.number)

    def drop(self, slot: Slot, why: str) -> None:
        """End one hold of kind `why`. A slot without holds becomes free; above `most` slots, it is removed."""
        with self.lock:
            slot.holds[why] -= 1
            slot.holds += Counter()  # removes entries that have come to zero
            if not slot.free or self._slots.get(slot.number) is not slot:
                return
            self._free.add(slot.number)
            if slot.is_kept or (self._most is not None and len(self._slots) > self._most):
                self._remove(slot)

    def keep(self, slot: Slot, path: Path) -> None:
        """Give a slot's file another name, under which the file stays as it is until `path` is removed.

        Raises:
            StoreError: the file cannot have another name.
        """
        try:
            path.unlink(missing_ok=True)
            os.link(slot.path, path)
        except OSError as error:
            raise file_error(error, path) from error
        slot.is_kept = True

    @contextmanager
    def held(self, slot: Slot, why: str) -> Iterator[None]:
        """Hold a slot during the `with` block, so that it is not rewritten or removed. `why` is the kind of hold."""
        self.hold(slot, why)
        try:
            yield
        finally:
            self.drop(slot, why)

    def retain(self, numbers: Collection[int]) -> None:
        """End the journal's holds on all slots except those in `numbers`."""
        with self.lock:
            for slot in list(self._slots.values()):
                if JOURNAL in slot.holds and slot.number not in numbers:
                    self.drop(slot, JOURNAL)

    def trim(self, keep: int = 0) -> None:
        """Remove free slots until at most `keep` free slots are left."""
        with self.lock:
            for number in sorted(self._free)[keep:]:
                self._remove(self._slots[number])

    def _remove(self, slot: Slot) -> None:
        self._free.discard(slot.number)
        if self._slots.pop(slot.number, None) is slot:
            with usable(self.folder):
                slot.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files that are not being read or written. The others close when Python deletes their `Slot`."""
        with self.lock:
            for slot in self._slots.values():
                if not slot.holds.keys() - {JOURNAL}:
                    slot.close()
            self._slots.clear()
            self._free.clear()

    def holds(self) -> dict[str, dict[str, int]]:
        """Return the number of holds of each kind, for each slot: file name → (kind → number). Free slots have {}."""
        with self.lock:
            return {slot.path.name: dict(slot.holds) for _, slot in sorted(self._slots.items())}


class Slots:
    """All slots of a run: one pool for each kind and fragment.

    Args:
        folder: folder of the slot files.
        versions: maximum number of versions per fragment that are kept at the same time.
        in_memory: keep the slots in memory (memfd) instead of on disk. They are lost when this process ends.
    """

    def __init__(self, journal: Journal, folder: Path, versions: int, *, in_memory: bool = False) -> None:
        self.folder, self.in_memory = folder, in_memory
        self._journal, self._versions = journal, versions
        self._shapes: tuple[FragmentShapes, ...] = ()
        self._pools: dict[tuple[str, int], SlotPool] = {}

    def reshape(self, fragments: Sequence[FragmentShapes], changed: int) -> None:
        """Set other sizes and headers of one fragment's files than the run began with. Call it inside a transaction.

        Args:
            fragments: the shapes of all fragments.
            changed: the fragment that has other shapes.
        """
        for kind, shape in fragments[changed].by_kind().items():
            self._journal.execute(
                "UPDATE shapes SET nbytes = ?, header_digest = ? WHERE fragment = ? AND kind = ?",
                shape.nbytes,
                shape.header_digest,
                changed,
                kind,
            )
        self.shape(fragments)

    def shape(self, fragments: Sequence[FragmentShapes]) -> None:
        """Set sizes, headers and hashed regions of the run's files. Call it at every start, before `Store.recover`.

        Raises:
            ConfigError: the run in this directory was started with other file sizes or headers.
        """
        self._shapes = tuple(fragments)
        shapes = {(f, kind): shape for f, each in enumerate(fragments) for kind, shape in each.by_kind().items()}
        wanted = {key: (shape.nbytes, shape.header_digest) for key, shape in shapes.items()}
        rows = self._journal.rows("SELECT fragment, kind, nbytes, header_digest FROM shapes ORDER BY fragment, kind")
        known = {(fragment, kind): (nbytes, header) for fragment, kind, nbytes, header in rows}
        if known:
            self._require_same(known, wanted)
        else:
            with self._journal.transaction():
                self._journal.execute_many(
                    "INSERT INTO shapes (fragment, kind, nbytes, header_digest) VALUES (?, ?, ?, ?)",
                    [(*key, *value) for key, value in wanted.items()],
                )
                self._journal.execute_many(
                    "INSERT INTO heads (fragment) VALUES (?)", [(fragment,) for fragment in range(len(fragments))]
                )
        most = {VERSION: self._versions + 1, DELTA: self._versions + 1, STATE: STATE_SLOTS, SPOOL: None}
        self._pools = {
            (kind, fragment): SlotPool(
                self.folder, kind, fragment, shape, self._journal.lock, most[kind], self.in_memory
            )
            for (fragment, kind), shape in shapes.items()
        }

    def _require_same(
        self, known: dict[tuple[int, str], tuple[int, bytes]], wanted: dict[tuple[int, str], tuple[int, bytes]]
    ) -> None:
        for fragment, kind in sorted(known.keys() | wanted.keys()):
            before, after = known.get((fragment, kind)), wanted.get((fragment, kind))
            if before != after:
                of = of_fragment(fragment if len({each for each, _ in known}) > 1 else None)
                sizes = [f"{value[0]} bytes" if value else "no file" for value in (before, after)]
                raise ConfigError(
                    f"The run in {self.folder.parent} was started with another model, codec or outer optimizer. "
                    f"Its files of kind {kind!r}{of}: {sizes[0]}. With these settings: "
                    f"{sizes[1]}{', but other tensors' if sizes[0] == sizes[1] else ''}.",
                    "Use the settings that the run was started with, or set another disk.state_dir for a new run.",
                )

    @property
    def fragments(self) -> range:
        """Numbers of the run's fragments; empty before `shape` is called."""
        return range(len(self._shapes))

    def shapes_of(self, fragment: int) -> FragmentShapes:
        """Return sizes, headers and hashed regions of a fragment's files."""
        return self._shapes[fragment]

    def pool(self, kind: str, fragment: int) -> SlotPool:
        """Return the pool of slots (preallocated files) of one kind and fragment.

        Raises:
            UsageError: the fragment has no slots of this kind, or `shape` was not called.
        """
        if (kind, fragment) not in self._pools:
            raise UsageError(
                f"The store has no {kind} files of fragment {fragment}.", "Call slots.shape() and recover() first."
            )
        return self._pools[kind, fragment]

    def drop_after_commit(self, kind: str, fragment: int, number: int | None) -> None:
        """End the journal's hold on slot `number` when the current transaction is committed.

        If `number` is None, do nothing.
        """
        if number is not None:
            pool = self.pool(kind, fragment)
            self._journal.after_commit(lambda: pool.drop(pool[number], JOURNAL))

    def remove_unreferenced(self) -> None:
        """Remove every slot file that no journal row refers to."""
        for (kind, fragment), pool in self._pools.items():
            table, column = _ROWS[kind]
            rows = self._journal.rows(
                f"SELECT {column} FROM {table} WHERE fragment = ? AND {column} IS NOT NULL", fragment
            )
            pool.retain({number for (number,) in rows})
            pool.trim()
        known = self.holds().keys()
        for path in self.folder.iterdir():
            if is_slot_name(path.name) and path.name not in known:
                path.unlink()

    def holds(self) -> dict[str, dict[str, int]]:
        """Return the number of holds of each kind, for each slot: file name → (kind → number)."""
        return {name: holds for pool in self._pools.values() for name, holds in pool.holds().items()}

    def close(self) -> None:
        """Remove the files of free slots, and close the other files."""
        for pool in self._pools.values():
            pool.trim()
            pool.close()


def is_slot_name(name: str) -> bool:
    """Return whether a file name is the name of a slot of any kind."""
    return _NAME.fullmatch(name) is not None


def verify(fd: int, shape: FileShape, digests: tuple[bytes, ...]) -> bool:
    """Return whether a file has the header of `shape`, and the regions of `shape` have these digests.

    In a swarm (`shape.elsewhere`) the file is empty, and only the number of digests is checked.
    """
    if shape.elsewhere:
        return len(digests) == len(shape.regions)
    if len(digests) != len(shape.regions) or os.pread(fd, len(shape.header), 0) != shape.header:
        return False
    return all(region_digest(fd, ranges) == digest for ranges, digest in zip(shape.regions, digests, strict=True))


def region_digest(fd: int, ranges: Ranges) -> bytes:
    """Return the BLAKE3 digest of the concatenated byte ranges of a file.

    If the file is too short, the missing bytes are left out.

    Args:
        fd: descriptor of the file.
        ranges: (offset, nbytes) of each range.
    """
    hasher = blake3()
    buffer = memoryview(bytearray(READ_BYTES))
    for offset, nbytes in ranges:
        stop = offset + nbytes
        while offset < stop:
            count = read_into(fd, [buffer[: min(READ_BYTES, stop - offset)]], offset)
            if count == 0:
                break
            hasher.update(buffer[:count])
            offset += count
    return hasher.digest()
