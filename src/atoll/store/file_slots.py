"""Slots: preallocated files that are rewritten, not recreated, and who holds them.

A slot is rewritten only when nobody holds it. Holders say what they are:

    journal    a row of the journal refers to its bytes
    writer     somebody writes it
    pull       a response, or whoever else pinned a version
    reader     the server itself reads it (inspection, fsync)
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from atoll.errors import DiskFull, StoreError
from atoll.posix import FULL, write_at
from atoll.runtime import failpoint

JOURNAL, WRITER, PULL, READER = "journal", "writer", "pull", "reader"
VERSION, STATE, SPOOL, DELTA = "version", "state", "spool", "delta"
_NAME = re.compile(r"(version|state|spool|delta)-\d+-\d+\.(safetensors|bin)")
READ_BYTES = 2**20

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class FileShape:
    """What every slot of a kind looks like.

    Attributes:
        nbytes: its size.
        header: its first bytes; the same in every slot, written when it is made.
        regions: per digest of a row the ranges (offset, nbytes) that it covers, in order.
        elsewhere: whether its bytes lie with workers: the file here is empty, and its digests are theirs.
    """

    nbytes: int
    header: bytes
    regions: tuple[Ranges, ...]
    elsewhere: bool = False

    @property
    def header_digest(self) -> bytes:
        return blake3(self.header).digest()


@dataclass(frozen=True)
class FragmentShapes:
    """The files of one fragment.

    Attributes:
        version: a version's.
        state: the outer state's beside it; None where the outer optimizer keeps nothing.
        update_bytes: size of an encoded update.
        update_parts: (offset, nbytes) of each of its parts.
        delta: of what goes down in place of a version; None where versions are pulled whole.
    """

    version: FileShape
    state: FileShape | None
    update_bytes: int
    update_parts: Ranges
    delta: FileShape | None = None

    def elsewhere(self) -> FragmentShapes:
        """Of a run whose tensors lie with its workers: files without a byte, rows as ever, and no parts to come."""

        def empty(shape: FileShape | None) -> FileShape | None:
            return shape and FileShape(0, b"", tuple(() for _ in shape.regions), elsewhere=True)

        version = empty(self.version)
        assert version is not None
        return FragmentShapes(version, empty(self.state), self.update_bytes, (), empty(self.delta))

    def by_kind(self) -> dict[str, FileShape]:
        nbytes = 0 if self.version.elsewhere else self.update_bytes
        spool = FileShape(nbytes, b"", tuple((part,) for part in self.update_parts))
        shapes = {VERSION: self.version, SPOOL: spool, STATE: self.state, DELTA: self.delta}
        return {kind: shape for kind, shape in shapes.items() if shape is not None}


@dataclass(eq=False)
class Slot:
    """One file. `fd` stays open as long as the slot object lives, so that it never means another file.

    Attributes:
        one_writes: held while it is written: the kernel lets one write at a time, and lets the others spin.
    """

    number: int
    path: Path
    fd: int
    holds: Counter[str] = field(default_factory=Counter)
    one_writes: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.close = weakref.finalize(self, os.close, self.fd)

    @property
    def free(self) -> bool:
        return not self.holds


class SlotPool:
    """The slots of one kind and fragment. `lock` is the journal's: rows and holds change together."""

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
        """
        Args:
            most: a slot that becomes free while there are more is removed; None: free ones stay until `trim`.
            in_memory: slots are files without a disk, which nobody but this process can open, and which end with it.
        """
        self.folder, self.kind, self.fragment, self.shape = folder, kind, fragment, shape
        self.lock, self._most = lock, most
        self._in_memory = in_memory
        self._slots: dict[int, Slot] = {}
        self._free: set[int] = set()  # those of them that nobody holds
        self._reserved: set[int] = set()

    def path(self, number: int) -> Path:
        suffix = "bin" if self.kind in (SPOOL, DELTA) else "safetensors"
        return self.folder / f"{self.kind}-{self.fragment}-{number}.{suffix}"

    def take(self, why: str) -> Slot:
        """A slot that nobody held, held now; a new file only where there is none.

        Raises:
            DiskFull: no space for another; no part of it is left behind. StoreError: it cannot be made.
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
            slot = self._create(number)  # without the lock: a file system may take its time
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
            fd = os.memfd_create(path.name, os.MFD_CLOEXEC)
        else:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise disk_error(error, path) from error
        slot = Slot(number, path, fd)
        try:
            failpoint("slot.create")
            if self.shape.nbytes:
                os.posix_fallocate(slot.fd, 0, self.shape.nbytes)
            write_at(slot.fd, self.shape.header, 0)
        except OSError as error:
            slot.close()
            path.unlink(missing_ok=True)
            raise disk_error(error, path) from error
        return slot

    def adopt(self, number: int) -> Slot | None:
        """Hold, for the journal, a slot that a row refers to; None where the file is not there in full."""
        with self.lock:
            slot = self._slots.get(number)
            if slot is None:
                try:
                    slot = Slot(number, self.path(number), os.open(self.path(number), os.O_RDWR | os.O_CLOEXEC))
                except FileNotFoundError:
                    return None
                if os.fstat(slot.fd).st_size != self.shape.nbytes:
                    return None
                self._slots[number] = slot
            slot.holds[JOURNAL] = 1
            self._free.discard(number)
            return slot

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def hold(self, slot: Slot, why: str) -> None:
        with self.lock:
            slot.holds[why] += 1
            if self._slots.get(slot.number) is slot:  # else it was removed, and its number may be another one's
                self._free.discard(slot.number)

    def drop(self, slot: Slot, why: str) -> None:
        """End one hold; the slot may be rewritten once it was the last."""
        with self.lock:
            slot.holds[why] -= 1
            slot.holds += Counter()  # forgets what has come to zero
            if not slot.free or self._slots.get(slot.number) is not slot:
                return
            self._free.add(slot.number)
            if self._most is not None and len(self._slots) > self._most:
                self._remove(slot)

    def retain(self, numbers: Collection[int]) -> None:
        """Let the journal hold exactly these of the slots it holds."""
        with self.lock:
            for slot in list(self._slots.values()):
                if JOURNAL in slot.holds and slot.number not in numbers:
                    self.drop(slot, JOURNAL)

    def trim(self, keep: int = 0) -> None:
        """Remove free slots but for `keep`."""
        with self.lock:
            for number in sorted(self._free)[keep:]:
                self._remove(self._slots[number])

    def _remove(self, slot: Slot) -> None:
        self._free.discard(slot.number)
        if self._slots.pop(slot.number, None) is slot:
            slot.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close every slot that only the journal holds; the others close with their last holder."""
        with self.lock:
            for slot in self._slots.values():
                if not slot.holds.keys() - {JOURNAL}:
                    slot.close()
            self._slots.clear()
            self._free.clear()

    def holds(self) -> dict[str, dict[str, int]]:
        """File name → holder → how many times; {} for a free slot."""
        with self.lock:
            return {slot.path.name: dict(slot.holds) for _, slot in sorted(self._slots.items())}


def is_slot_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def verify(fd: int, shape: FileShape, digests: tuple[bytes, ...]) -> bool:
    """Whether a file has the shape's header, and bytes of these digests."""
    if shape.elsewhere:
        return len(digests) == len(shape.regions)
    if len(digests) != len(shape.regions) or os.pread(fd, len(shape.header), 0) != shape.header:
        return False
    return all(region_digest(fd, ranges) == digest for ranges, digest in zip(shape.regions, digests, strict=True))


def region_digest(fd: int, ranges: Ranges) -> bytes:
    """BLAKE3 of ranges of a file; bytes behind its end count as none."""
    hasher = blake3()
    buffer = memoryview(bytearray(READ_BYTES))
    for offset, nbytes in ranges:
        stop = offset + nbytes
        while offset < stop:
            count = os.preadv(fd, [buffer[: min(READ_BYTES, stop - offset)]], offset)
            if count == 0:
                break
            hasher.update(buffer[:count])
            offset += count
    return hasher.digest()


def disk_error(error: OSError, path: Path) -> StoreError:
    """What an OSError means to whoever runs the server."""
    if error.errno in FULL:
        return DiskFull(f"The disk of {path.parent} is full.", "Make space; nothing was lost.")
    return StoreError(f"{path}: {error.strerror}.", "Look at the disk.")
