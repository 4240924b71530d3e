"""Versions: written into a free slot, made real by one UPDATE of the head, kept while somebody reads them.

Which rows stay after a commit: the newest `keep_versions`, `durable_version`, and whatever is pinned. Slow pulls may so
hold `max_pins` further versions; beyond that the oldest is revoked, and its slot rewritten once its readers let go.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from blake3 import blake3

from atoll.errors import DiskFull, Gone, StoreError, UsageError
from atoll.runtime import failpoint
from atoll.store import audit_log
from atoll.store.file_slots import DELTA, JOURNAL, PULL, READER, SPOOL, STATE, VERSION, WRITER, Slot, verify
from atoll.store.journal_tables import DeltaRow, VersionRow, now
from atoll.store.tickets import Tickets

# -- What goes down in place of a version: committed with it, kept and dropped with it.
#
# A version whose delta is lost or damaged is still a version: it is pulled whole.


_COLUMNS = "fragment, version, slot, base_version, base_digest, digest, part_digests"


class Deltas(Tickets):
    """Part of `Store`."""

    def delta(self, fragment: int, version: int) -> DeltaRow | None:
        """What goes down of a version; None where it is pulled whole."""
        found = self.journal.row(f"SELECT {_COLUMNS} FROM deltas WHERE fragment = ? AND version = ?", fragment, version)
        return None if found is None else _to_delta(found)

    def insert_delta(self, row: VersionRow, slot: Slot, base: VersionRow, digest: str, parts: Sequence[bytes]) -> None:
        """What a draft has of a version goes down from `base`; inside the transaction that commits it."""
        self.journal.execute(
            f"INSERT INTO deltas ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
            row.fragment,
            row.version,
            slot.number,
            base.version,
            base.digest,
            digest,
            b"".join(parts),
        )
        self.journal.after_commit(lambda: self.pool(DELTA, row.fragment).hold(slot, JOURNAL))

    def drop_delta(self, fragment: int, version: int) -> None:
        """Forget what goes down of a version, inside a transaction."""
        row = self.delta(fragment, version)
        if row is not None:
            pool = self.pool(DELTA, fragment)
            self.forget_delta(row)
            self.journal.after_commit(lambda: pool.drop(pool[row.slot], JOURNAL))

    def forget_delta(self, row: DeltaRow) -> None:
        """Remove its row alone."""
        self.journal.execute("DELETE FROM deltas WHERE fragment = ? AND version = ?", row.fragment, row.version)

    def recover_deltas(self, fragment: int) -> None:
        """At a start: keep those that are whole and whose version is kept."""
        shape = self.shapes_of(fragment).delta
        found = self.journal.rows(f"SELECT {_COLUMNS} FROM deltas WHERE fragment = ?", fragment)
        kept = {
            version for (version,) in self.journal.rows("SELECT version FROM versions WHERE fragment = ?", fragment)
        }
        with self.transaction():
            for values in found:
                row = _to_delta(values)
                slot = self.pool(DELTA, fragment).adopt(row.slot) if shape and row.version in kept else None
                if slot is None or shape is None or not verify(slot.fd, shape, row.part_digests):
                    self.forget_delta(row)


def split_digests(joined: bytes) -> tuple[bytes, ...]:
    return tuple(joined[start : start + blake3.digest_size] for start in range(0, len(joined), blake3.digest_size))


def _to_delta(row: tuple[Any, ...]) -> DeltaRow:
    values = dict(zip(_COLUMNS.split(", "), row, strict=True))
    return DeltaRow(**{**values, "part_digests": split_digests(values["part_digests"])})


# -- What callers hold of a version: a draft while it is written, a pin while it is read.


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


COLUMNS = "fragment, version, slot, state_slot, digest, part_digests, state_digests, summary_json, created_at"


class Versions(Deltas):
    """Part of `Store`."""

    def begin_version(self, fragment: int, version: int) -> VersionDraft:
        """Slots to write the next version of a fragment into; nobody reads or refers to them.

        Raises:
            DiskFull: no space; nothing is left behind.
            StoreError: `version` is not the next.
        """
        head, shapes = self._require_next(fragment, version), self.shapes_of(fragment)
        self._revoke_oldest(fragment)
        with contextlib.ExitStack() as taken:

            def take(kind: str) -> Slot:
                slot = self.pool(kind, fragment).take(WRITER)
                taken.callback(self.pool(kind, fragment).drop, slot, WRITER)
                return slot

            slot = take(VERSION)
            state = take(STATE) if shapes.state else None
            delta = take(DELTA) if shapes.delta and head is not None else None
            return VersionDraft(fragment, version, slot, state, delta, taken.pop_all().close)

    def commit_version(
        self,
        draft: VersionDraft,
        *,
        digest: str,
        part_digests: Sequence[bytes],
        state_digests: Sequence[bytes] = (),
        delta_digest: str = "",
        delta_digests: Sequence[bytes] = (),
        summary_json: str = "{}",
        tickets: Sequence[int] = (),
    ) -> VersionRow:
        """Make a draft the head, and its tickets counted: all of it or nothing.

        Args:
            digest: of the version, hex.
            part_digests: BLAKE3 of each region of the version's shape.
            state_digests: likewise of the outer state; () where none was written.
            delta_digest, delta_digests: likewise of what goes down from the head, and what names it.
            tickets: exactly those of the frozen round, in its order; none for version 0.

        Raises:
            DiskFull: nothing changed; commit the same draft again, or abandon it.
            SyncFailed: fsync failed; the server must end.
            StoreError: the round is not frozen with these tickets, or the head has moved.
        """
        self._check_digests(draft, part_digests, state_digests, delta_digests)
        if self.durability == "power":
            self._sync_slots(draft.slot, draft.state if state_digests else None)
        fragment, version = draft.fragment, draft.version
        row = VersionRow(
            fragment,
            version,
            draft.slot.number,
            draft.state.number if draft.state and state_digests else None,
            digest,
            tuple(part_digests),
            tuple(state_digests),
            summary_json,
            now(),
        )
        with self.transaction():
            previous = self._require_next(fragment, version)
            self._count(fragment, previous, version, tickets)
            self._insert(row)
            if draft.delta and previous is not None:
                self.insert_delta(row, draft.delta, self.version(fragment, previous), delta_digest, delta_digests)
            audit_log.append(
                self.journal, "committed", fragment=fragment, version=version, digest=digest, tickets=list(tickets)
            )
            failpoint("head.before")
            durable = version if self.durability == "power" else self.durable_version(fragment)
            self.journal.execute(
                "UPDATE heads SET version = ?, durable_version = ? WHERE fragment = ? AND version IS ?",
                version,
                durable,
                fragment,
                previous,
            )
            self.journal.after_commit(lambda: failpoint("head.after"))
            self.journal.after_commit(lambda: self._adopt(draft, row))
            self.drop_old(fragment)
            self.journal.after_commit(lambda: self.pool(SPOOL, fragment).trim(len(tickets)))
        return row

    def _check_digests(
        self, draft: VersionDraft, parts: Sequence[bytes], state: Sequence[bytes], delta: Sequence[bytes]
    ) -> None:
        shapes = self.shapes_of(draft.fragment)
        wanted = (
            len(shapes.version.regions),
            len(shapes.state.regions) if shapes.state and state else 0,
            len(shapes.delta.regions) if shapes.delta and draft.delta else 0,
        )
        if draft.ended or (len(parts), len(state), len(delta)) != wanted:
            raise UsageError(
                f"Version {draft.version} was {'ended before' if draft.ended else 'given the wrong number of digests'}."
            )

    def next_version(self, fragment: int = 0) -> int:
        """The number of the next version: above every one that was ever committed, those included that were lost."""
        newest = self.journal.value(
            "SELECT version FROM history WHERE fragment = ? ORDER BY seq DESC LIMIT 1", fragment
        )
        return 0 if newest is None else int(newest) + 1

    def _require_next(self, fragment: int, version: int) -> int | None:
        head: int | None = self.journal.value("SELECT version FROM heads WHERE fragment = ?", fragment)
        if version != self.next_version(fragment):
            raise StoreError(
                f"Version {version} cannot follow head {head} of fragment {fragment}; the next is "
                f"{self.next_version(fragment)}."
            )
        return head

    def _count(self, fragment: int, head: int | None, version: int, tickets: Sequence[int]) -> None:
        if head is None and not tickets:
            return
        round_ = None if head is None else self.round(fragment, head)
        if round_ is None or round_.state != "frozen" or round_.tickets != tuple(tickets):
            raise StoreError(
                f"Version {version} of fragment {fragment} was made of the tickets {list(tickets)}, but the journal "
                f"has {round_ and (round_.state, list(round_.tickets))}."
            )
        rows = [self.ticket(ticket) for ticket in tickets]
        self.end_tickets(rows, "counted", "", version)
        self.journal.execute_many(
            "UPDATE members SET rounds_counted = rounds_counted + 1 WHERE site = ?", [(row.site,) for row in rows]
        )
        self.journal.execute("DELETE FROM rounds WHERE fragment = ? AND base_version < ?", fragment, head)
        self.journal.execute("UPDATE rounds SET state = 'committed' WHERE fragment = ?", fragment)

    def _insert(self, row: VersionRow) -> None:
        self.journal.execute(
            f"INSERT INTO versions ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            row.fragment,
            row.version,
            row.slot,
            row.state_slot,
            row.digest,
            b"".join(row.part_digests),
            b"".join(row.state_digests),
            row.summary_json,
            row.created_at,
        )
        self.journal.execute(
            "INSERT INTO history (fragment, version, digest, summary_json, created_at) VALUES (?, ?, ?, ?, ?)",
            row.fragment,
            row.version,
            row.digest,
            row.summary_json,
            row.created_at,
        )
        self.journal.count("versions")

    def _adopt(self, draft: VersionDraft, row: VersionRow) -> None:
        self.pool(VERSION, row.fragment).hold(draft.slot, JOURNAL)
        if draft.state and row.state_slot is not None:
            self.pool(STATE, row.fragment).hold(draft.state, JOURNAL)
        draft.abandon()  # the writer's hold ends, the journal's is there

    def head(self, fragment: int = 0) -> VersionRow:
        """The newest version.

        Raises:
            Gone: the fragment has no version yet.
        """
        version = self.journal.value("SELECT version FROM heads WHERE fragment = ?", fragment)
        if version is None:
            raise Gone(f"Fragment {fragment} has no version yet.", "Ask again when the run has begun.")
        return self.version(fragment, version)

    def heads(self) -> tuple[int, ...]:
        """The newest version of each fragment: what a model version is."""
        found = self.journal.rows("SELECT version FROM heads WHERE version IS NOT NULL ORDER BY fragment")
        return tuple(version for (version,) in found)

    def version(self, fragment: int, version: int) -> VersionRow:
        """A version that is kept.

        Raises:
            Gone: it is not; the head is named.
        """
        row = self.journal.row(
            f"SELECT {COLUMNS} FROM versions WHERE fragment = ?1 AND version = ?2 "
            "AND version <= (SELECT heads.version FROM heads WHERE heads.fragment = ?1)",
            fragment,
            version,
        )
        if row is None:
            head = self.journal.value("SELECT version FROM heads WHERE fragment = ?", fragment)
            raise Gone(f"Version {version} of fragment {fragment} is not kept.", f"Pull version {head}.")
        return to_version(row)

    def versions(self, fragment: int = 0) -> tuple[VersionRow, ...]:
        """Every version that is kept, oldest first."""
        found = self.journal.rows(f"SELECT {COLUMNS} FROM versions WHERE fragment = ? ORDER BY version", fragment)
        return tuple(to_version(row) for row in found)

    def state_file(self, fragment: int = 0) -> int | None:
        """fd of the outer state beside the head; None where there is none yet. It belongs to the store."""
        row = self.head(fragment)
        return None if row.state_slot is None else self.pool(STATE, fragment)[row.state_slot].fd

    def pin_version(self, fragment: int, version: int) -> PinnedVersion:
        """Hold a version for reading, until `release`, or until `revoked` is set.

        Raises:
            Gone: it is not kept, or was revoked.
        """
        with self.lock:
            row = self.version(fragment, version)
            pool = self.pool(VERSION, fragment)
            pin = PinnedVersion(row, pool[row.slot], self._unpin)
            pool.hold(pin.slot, PULL)
            self.pins.append(pin)
        return pin

    def _unpin(self, pin: PinnedVersion) -> None:
        fragment = pin.row.fragment
        with self.lock:
            self.pins.remove(pin)
            self.pool(VERSION, fragment).drop(pin.slot, PULL)
            if self.journal.closed:
                return
            if pin.row.version not in self._kept(fragment):
                try:
                    with self.transaction():
                        self.drop_old(fragment)
                except DiskFull:
                    pass  # the next commit drops it

    def _revoke_oldest(self, fragment: int) -> None:
        """Where too many versions are held, take the oldest from the journal and tell its readers."""
        with self.lock:
            rows = self.versions(fragment)
            kept = self._kept(fragment)
            old = [
                row for row in rows[: max(0, len(rows) - self.keep_versions - self.max_pins)] if row.version not in kept
            ]
            if not old:
                return
            with self.transaction():
                for row in old:
                    self.drop_row(row)
            revoked = [pin for pin in self.pins if pin.row in old]
        for pin in revoked:
            pin.revoked.set()

    def _kept(self, fragment: int) -> set[int | None]:
        kept = {*self._newest(fragment, self.keep_versions), self.durable_version(fragment)}
        wanted = sorted(set(self.wanted(fragment)) - kept, reverse=True)
        return {*kept, *wanted[: max(0, self.keep_versions + self.max_pins - len(kept))]}

    def _newest(self, fragment: int, count: int) -> list[int]:
        """The last `count` versions of the run that are kept; where some were lost, their numbers are not in a row."""
        found = self.journal.rows(
            "SELECT version FROM versions WHERE fragment = ?1 "
            "AND version <= (SELECT heads.version FROM heads WHERE heads.fragment = ?1) ORDER BY version DESC LIMIT ?2",
            fragment,
            count,
        )
        return [version for (version,) in found]

    def drop_old(self, fragment: int) -> None:
        """Drop the rows of versions that nobody needs, inside a transaction; their slots are free once it is committed.

        Outer state is kept of the head, of the version before (to fall back to) and of `durable_version`.
        """
        kept = self._kept(fragment)
        head = self.head(fragment).version
        stateful = {*self._newest(fragment, 2), self.durable_version(fragment)}
        for row in self.versions(fragment):
            holds = self.pool(VERSION, fragment)[row.slot].holds.keys() if row.version < head else set()
            if row.version not in kept and not holds & {PULL, READER}:
                self.drop_row(row)
            elif row.state_slot is not None and row.version not in stateful and READER not in holds:
                self.journal.execute(
                    "UPDATE versions SET state_slot = NULL WHERE fragment = ? AND version = ?", fragment, row.version
                )
                self._drop_after_commit(STATE, fragment, row.state_slot)

    def drop_row(self, row: VersionRow) -> None:
        """Forget a version, inside a transaction; its slots are free once it is committed and nobody reads them."""
        self.journal.execute("DELETE FROM versions WHERE fragment = ? AND version = ?", row.fragment, row.version)
        self.drop_delta(row.fragment, row.version)
        self._drop_after_commit(VERSION, row.fragment, row.slot)
        if row.state_slot is not None:
            self._drop_after_commit(STATE, row.fragment, row.state_slot)

    def _drop_after_commit(self, kind: str, fragment: int, number: int) -> None:
        pool = self.pool(kind, fragment)
        self.journal.after_commit(lambda: pool.drop(pool[number], JOURNAL))

    def durable_version(self, fragment: int = 0) -> int | None:
        """The newest version that is known to survive a power loss."""
        found: int | None = self.journal.value("SELECT durable_version FROM heads WHERE fragment = ?", fragment)
        return found

    def write_durable(self, fragment: int = 0) -> int | None:
        """Bring the head to the disk's own memory, then say so in the journal; the one before is kept until then.

        May take as long as the disk needs; other calls go on meanwhile.

        Returns:
            The version that is durable now; None where the fragment has none.

        Raises:
            SyncFailed: fsync failed; the server must end. It is never tried again.
        """
        self.journal.checkpoint()  # here, so that no commit of the event loop has to wait for it
        with self.lock:
            if self.journal.value("SELECT version FROM heads WHERE fragment = ?", fragment) is None:
                return None
            row = self.head(fragment)
            if self.durable_version(fragment) == row.version:
                return row.version
            versions = self.pool(VERSION, fragment)
            held = [(versions, versions[row.slot])]
            if row.state_slot is not None:
                states = self.pool(STATE, fragment)
                held.append((states, states[row.state_slot]))
            for pool, slot in held:
                pool.hold(slot, READER)
        try:
            self._sync_slots(*(slot for _, slot in held))
            with self.journal.transaction(synced=True):
                self.journal.execute("UPDATE heads SET durable_version = ? WHERE fragment = ?", row.version, fragment)
                self.drop_old(fragment)
        finally:
            for pool, slot in held:
                pool.drop(slot, READER)
        return row.version

    def _sync_slots(self, *slots: Slot | None) -> None:
        for slot in slots:
            if slot:
                self.sync(slot.fd, str(slot.path))
        self.sync_folder(self.slots_directory)


def to_version(row: tuple[Any, ...]) -> VersionRow:
    """A row of `COLUMNS`."""
    values = dict(zip(COLUMNS.split(", "), row, strict=True))
    for name in ("part_digests", "state_digests"):
        values[name] = split_digests(values[name])
    return VersionRow(**values)


# -- What is read beside a version: what goes down of it, and the outer state; held so that nobody rewrites it.


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
