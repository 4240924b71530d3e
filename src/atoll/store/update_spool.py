"""The spool: the file into which the server writes one arriving update. Each part has at most one writer.

If a worker sends a part again, a new writer replaces the part's old writer. The old writer is cancelled, and its last
write ends, before the new writer begins. So a late byte of a lost connection cannot overwrite a newer request's bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from atoll.errors import AtollError, BadRequest, StoreError
from atoll.format_text import number_of
from atoll.posix import file_error, write_at
from atoll.runtime import failpoint
from atoll.store.file_slots import WRITER, Ranges, Slot, SlotPool


class WriterCancelled(StoreError):
    """A newer request has begun to write the same part, so the older request is dropped without an answer."""


class PartWriter:
    """Writes the bytes of one part of an update to the update's file, in order.

    `Spool.begin_part` returns a writer. Call `abandon` when the writer is no longer needed.
    """

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
        """Whether all bytes of the part are written, and this writer was not cancelled."""
        return self.written == self.nbytes and self._cancelled is None

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes to the part. With durability `power`, the call with the part's last bytes also fsyncs the file.

        Raises:
            WriterCancelled: a newer writer has begun the part, or this writer was abandoned.
            TicketClosed, UpdateRefused: the ticket is no longer open.
            BadRequest: the part would get too many bytes.
            DiskFull: the disk is full; the part can be sent again later.
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
                f"Part {self.part} has {self.nbytes} bytes, but more were sent.",
                "Divide the update into parts as the ticket's layout says.",
            )
        try:
            failpoint("spool.write")
            with self._spool.slot.one_writes:
                write_at(self._spool.fd, data, self._offset + self.written)
        except OSError as error:
            raise file_error(error, self._spool.slot.path) from error
        self.written += len(data)
        if self.written == self.nbytes and self._spool.sync:
            self._spool.sync()

    def abandon(self) -> None:
        """Cancel this writer. If its part is not recorded yet, the part must be written again. Never raises."""
        self.cancel(WriterCancelled(f"Part {self.part} is no longer wanted."))

    def cancel(self, reason: AtollError) -> None:
        """Make every later `write` raise `reason`. A running write finishes."""
        self._cancelled = self._cancelled or reason
        if self._lock.acquire(blocking=False):  # if a write is running, it releases the slot at its end
            self._lock.release()
            self._release()

    def _release(self) -> None:
        with self._spool.pool.lock:
            if self._holds:
                self._holds = False
                self._spool.pool.drop(self._spool.slot, WRITER)


class Spool:
    """The file of the update that arrives for one ticket. `Tickets.spool` returns it.

    Args:
        ticket: number of the ticket.
        pool: pool that the slot belongs to.
        slot: slot (preallocated file) for the bytes.
        ranges: (offset, nbytes) of each part in the file.
        forget: function that deletes the record of a part, given the numbers of ticket and part. It is called under the
            journal's lock, before the part is written again.
        sync: function that fsyncs the file, called after each part; None with durability `process`.
        is_named: whether the ticket's row in the journal has the number of the slot.
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
        is_named: bool,
    ) -> None:
        self.ticket, self.pool, self.slot, self.ranges, self.sync = ticket, pool, slot, ranges, sync
        self.is_named = is_named
        self._forget = forget
        self._writers: dict[int, PartWriter] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._closed: AtollError | None = None

    @property
    def fd(self) -> int:
        """Descriptor of the file. Do not close it.

        If the ticket may end while the descriptor is in use, call `SlotPool.hold`, so that the file is not reused.
        """
        return self.slot.fd

    def begin_part(self, part: int) -> PartWriter:
        """Cancel a part's earlier writer, if there is one, and return a new writer that starts at the first byte.

        The first write of the new writer waits for a running write of the earlier one.

        Raises:
            TicketClosed, UpdateRefused: the ticket is no longer open.
            BadRequest: the update has no part with this number.
        """
        if not 0 <= part < len(self.ranges):
            raise BadRequest(
                f"The update has no part {part}: it has {number_of(len(self.ranges), 'part')}, numbered from 0."
            )
        with self.pool.lock:
            if self._closed:
                raise self._closed
            self._forget(self.ticket, part)
            old = self._writers.get(part)
            if old:
                old.cancel(WriterCancelled(f"Another request is sending part {part} of ticket {self.ticket}."))
            lock = self._locks.setdefault(part, threading.Lock())
            writer = self._writers[part] = PartWriter(self, part, lock)
        return writer

    def require_written(self, part: int, writer: PartWriter | None) -> None:
        """Raise an error unless the whole part is written, and `writer` is its newest writer.

        With `writer=None`, any writer may have written the part.

        Raises:
            WriterCancelled: the part is incomplete, or a newer writer has begun it.
        """
        current = self._writers.get(part)
        if (writer is not None and current is not writer) or (current is not None and not current.complete):
            raise WriterCancelled(f"Another request is now sending part {part} of ticket {self.ticket}.")

    def close(self, reason: AtollError) -> None:
        """Cancel all writers, and make later writes and `begin_part` raise `reason`."""
        self._closed = reason
        for writer in self._writers.values():
            writer.cancel(reason)
        self._writers.clear()
