"""The bytes of one update on their way in: a slot, cut into parts, with at most one writer each.

A retry of a part replaces its writer. The old writer is cancelled and joined, its pwrite included, before the new one
exists; so no late byte of a lost connection can overwrite what a newer request has written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from atoll.errors import AtollError, BadRequest, StoreError
from atoll.posix import write_at
from atoll.runtime import failpoint
from atoll.store.file_slots import WRITER, Ranges, Slot, SlotPool, disk_error


class WriterCancelled(StoreError):
    """Another request writes this part now; the old request needs no answer."""


class PartWriter:
    """Writes the bytes of one part in order. Made by `Spool.begin_part`; end it with `abandon`."""

    def __init__(self, spool: Spool, part: int, lock: threading.Lock) -> None:
        self.part = part
        self._offset, self.nbytes = spool.ranges[part]
        self.written = 0
        self._spool = spool
        self._lock = lock  # shared by every writer of the part: held during a pwrite
        self._cancelled: AtollError | None = None
        self._holds = True
        spool.pool.hold(spool.slot, WRITER)

    @property
    def complete(self) -> bool:
        """Whether every byte of the part is written, and no other writer has begun it since."""
        return self.written == self.nbytes and self._cancelled is None

    def write(self, data: bytes | memoryview) -> None:
        """Append to the part. With durability `power` the part is on disk when its last bytes are written.

        Raises:
            WriterCancelled: a newer writer has the part, or it was given up.
            TicketClosed: the ticket was refused or has expired.
            BadRequest: more bytes than the part has.
            DiskFull: nothing is lost; the part can be sent again.
            SyncFailed: fsync failed; the server must end.
        """
        try:
            with self._lock:
                if self._cancelled:
                    raise self._cancelled
                self._write(data)
        finally:
            if self._cancelled:
                self._release()

    def _write(self, data: bytes | memoryview) -> None:
        if self.written + len(data) > self.nbytes:
            raise BadRequest(
                f"Part {self.part} has {self.nbytes} bytes, more were sent.",
                "Cut the update as the ticket's layout says.",
            )
        try:
            failpoint("spool.write")
            with self._spool.slot.one_writes:
                write_at(self._spool.fd, data, self._offset + self.written)
        except OSError as error:
            raise disk_error(error, self._spool.slot.path) from error
        self.written += len(data)
        if self.written == self.nbytes and self._spool.sync:
            self._spool.sync()

    def abandon(self) -> None:
        """Write no further byte; a part that was not recorded by now cannot be. Never fails."""
        self.cancel(WriterCancelled(f"Part {self.part} was given up."))

    def cancel(self, reason: AtollError) -> None:
        """Let every later write raise `reason`. A write under way goes on to its end: see `join`."""
        self._cancelled = self._cancelled or reason
        if self._lock.acquire(blocking=False):  # else a write is under way, and lets go of the slot at its end
            self._lock.release()
            self._release()

    def join(self) -> None:
        """Wait until no write of this part, by this writer or one before it, is under way."""
        with self._lock:
            pass

    def _release(self) -> None:
        with self._spool.pool.lock:
            if self._holds:
                self._holds = False
                self._spool.pool.drop(self._spool.slot, WRITER)


class Spool:
    """The spool of one open or accepted ticket. `Tickets.spool` gives it.

    Args:
        ranges: (offset, nbytes) of each part.
        forget: called with ticket and part, under the lock, before new bytes of a part are written.
        sync: fsyncs the slot, once a part is written; None with durability `process`.
    """

    def __init__(
        self,
        ticket: int,
        pool: SlotPool,
        slot: Slot,
        ranges: Ranges,
        *,
        forget: Callable[[int, int], None],
        sync: Callable[[], None] | None,
    ) -> None:
        self.ticket, self.pool, self.slot, self.ranges, self.sync = ticket, pool, slot, ranges, sync
        self._forget = forget
        self._writers: dict[int, PartWriter] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._closed: AtollError | None = None

    @property
    def fd(self) -> int:
        """Of the slot; it belongs to the store. Hold the slot if the ticket may end meanwhile."""
        return self.slot.fd

    def begin_part(self, part: int) -> PartWriter:
        """Write a part, from its first byte. Its earlier writer is cancelled, and has stopped when this returns.

        Raises:
            TicketClosed: the ticket is no longer open.
            BadRequest: the update has no such part.
        """
        if not 0 <= part < len(self.ranges):
            raise BadRequest(f"Part {part} does not exist; the update has {len(self.ranges)}.")
        with self.pool.lock:
            if self._closed:
                raise self._closed
            self._forget(self.ticket, part)
            old = self._writers.get(part)
            if old:
                old.cancel(WriterCancelled(f"Another request sends part {part} of ticket {self.ticket}."))
            lock = self._locks.setdefault(part, threading.Lock())
            writer = self._writers[part] = PartWriter(self, part, lock)
        writer.join()
        return writer

    def require_written(self, part: int, writer: PartWriter | None) -> None:
        """Refuse to record a part while its bytes may be changing.

        Raises:
            WriterCancelled: a newer writer than `writer` has begun it, or it was never completed.
        """
        current = self._writers.get(part)
        if (writer is not None and current is not writer) or (current is not None and not current.complete):
            raise WriterCancelled(f"Part {part} of ticket {self.ticket} is being written again.")

    def close(self, reason: AtollError) -> None:
        """Take no further byte: cancel every writer."""
        self._closed = reason
        for writer in self._writers.values():
            writer.cancel(reason)
        self._writers.clear()
