"""Versions at the server: how each is written, committed, kept while workers download it, and dropped.

A version is written into a free slot (a preallocated file), and committed by one SQL UPDATE of the table `heads`. A
download pins the version, so that its slot is not reused. After a commit, the store keeps the newest `keep_versions`
versions, the newest version that survives a power loss (the durable version), versions that workers will soon download
(`Versions.wanted`), and pinned versions. If these are more than `keep_versions + max_pins` when the next version is
begun, the oldest pinned ones are dropped: the event `revoked` of their pins is set, and their slots become free when
these pins are released.

A delta is the difference of a version from the previous version. A worker that has the previous version downloads only
the delta. A delta is committed, kept and dropped together with its version. If a delta is damaged, workers download
the whole version.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

from atoll.errors import DiskFull, Gone, StoreError, UsageError
from atoll.runtime import failpoint
from atoll.store.audit_log import AuditLog
from atoll.store.file_slots import DELTA, JOURNAL, PULL, SPOOL, STATE, VERSION, WRITER, Slot, Slots
from atoll.store.journal import LOG_CHANGES, Journal
from atoll.store.journal_tables import (
    DELTAS,
    HISTORY,
    SITE_ROUNDS,
    VERSIONS,
    DeltaRow,
    HistoryRow,
    SiteRoundRow,
    VersionRow,
    utc_text,
)
from atoll.store.run_log import RunLog
from atoll.store.tickets import Tickets

Row = TypeVar("Row")
_KEPT = "fragment = ?1 AND version <= (SELECT heads.version FROM heads WHERE heads.fragment = ?1)"


@dataclass(frozen=True, kw_only=True)
class VersionDigests:
    """Digests of the files that were written for a new version.

    Attributes:
        digest: digest of the version, hex.
        part_digests: BLAKE3 of each region of the version's file.
        state_digests: BLAKE3 of each region of the outer optimizer state's file; empty if no state was written.
        delta_digest: digest of the delta (the encoded difference from the previous version), hex; empty if there is
            no delta.
        delta_digests: BLAKE3 of each region of the delta's file; empty if there is no delta.
    """

    digest: str
    part_digests: tuple[bytes, ...]
    state_digests: tuple[bytes, ...] = ()
    delta_digest: str = ""
    delta_digests: tuple[bytes, ...] = ()


@dataclass(eq=False)
class VersionDraft:
    """The files of a new version that is not committed yet: the version, the outer optimizer's state and the delta.

    `Versions.begin` returns a draft. When its files are written, call `Versions.finish`, then `Versions.commit`; or
    `abandon`.

    Attributes:
        row: the row of the new version, and `written` its digests; `Versions.finish` sets both.
    """

    fragment: int
    version: int
    slot: Slot
    state: Slot | None
    delta: Slot | None
    _drop: Callable[[], None]
    row: VersionRow | None = None
    written: VersionDigests | None = None
    ended: bool = False

    @property
    def fds(self) -> tuple[int, int | None, int | None]:
        """The file descriptors of the version, the outer optimizer's state and the delta (the encoded difference).

        If the version has no state or no delta, None takes its place. Do not close the descriptors.
        """
        return self.slot.fd, self.state.fd if self.state else None, self.delta.fd if self.delta else None

    def abandon(self) -> None:
        """Discard the draft, so that its files can be reused. After a commit or an earlier call, do nothing."""
        if not self.ended:
            self.ended = True
            self._drop()


class Pin(Generic[Row]):
    """Keeps the files of a version or a delta (a difference between versions) unchanged for reading, until `release`.

    Attributes:
        row: row of the version or the delta.
        slots: the files of the version and, if requested, of the outer optimizer's state; or the file of the delta.
        fds: one descriptor for each of `slots`, duplicated for this pin.
        revoked: event that is set when the store needs the files for newer versions. Then stop reading and call
            `release`.
    """

    def __init__(
        self, row: Row, slots: Sequence[Slot], revoked: threading.Event, drop: Callable[[Pin[Row]], None]
    ) -> None:
        self.row, self.slots, self.revoked, self._drop = row, slots, revoked, drop
        self.fds: list[int] = []
        # before the first `dup`: if a later one fails, the descriptors so far are closed
        self._close = weakref.finalize(self, _close, self.fds)
        self.fds.extend(os.dup(slot.fd) for slot in slots)

    @property
    def fd(self) -> int:
        """Descriptor of the file of the version or the delta (a difference between versions)."""
        return self.fds[0]

    @property
    def state_fd(self) -> int | None:
        """Descriptor of the outer optimizer's state; None if it was not requested or does not exist."""
        return self.fds[1] if len(self.fds) > 1 else None

    def release(self) -> None:
        """Close the descriptors, and let the store reuse the files. Idempotent."""
        if self._close.detach():
            _close(self.fds)
            self._drop(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


class Versions:
    """The versions of a run that the server keeps as files.

    Args:
        keep_versions: number of newest versions that workers can always download.
        max_pins: number of older versions that are kept in addition while workers still download them.

    Attributes:
        keep_updates: number of newest rounds of a fragment of which the updates and the bases are kept.
        wanted: function that returns, for a fragment, the versions that workers will soon download. The store keeps
            them, too, but at most `keep_versions + max_pins` versions in all.
    """

    def __init__(
        self,
        journal: Journal,
        audit: AuditLog,
        slots: Slots,
        run_log: RunLog,
        tickets: Tickets,
        *,
        keep_versions: int,
        max_pins: int,
    ) -> None:
        self._journal, self._audit, self._slots = journal, audit, slots
        self._run_log, self._tickets = run_log, tickets
        self._keep_versions, self._max_pins, self.keep_updates = keep_versions, max_pins, 0
        self._pins: list[Pin[VersionRow]] = []  # oldest first
        self.wanted: Callable[[int], Collection[int]] = lambda fragment: ()

    # -- write

    def begin(self, fragment: int, version: int) -> VersionDraft:
        """Return a draft: the files into which to write the next version of a fragment.

        Raises:
            DiskFull: the disk is full. No partial file is left behind.
            StoreError: `version` is not the next version number.
        """
        head, shapes = self._require_next(fragment, version), self._slots.shapes_of(fragment)
        self._revoke_oldest(fragment)
        with contextlib.ExitStack() as on_error:

            def take(kind: str) -> Slot:
                slot = self._slots.pool(kind, fragment).take(WRITER)
                on_error.callback(self._slots.pool(kind, fragment).drop, slot, WRITER)
                return slot

            slot = take(VERSION)
            state = take(STATE) if shapes.state else None
            delta = take(DELTA) if shapes.delta and head is not None else None
            return VersionDraft(fragment, version, slot, state, delta, on_error.pop_all().close)

    def finish(self, draft: VersionDraft, written: VersionDigests, *, summary_json: str = "{}") -> VersionRow:
        """Make a draft ready to be committed, and return the row of the new version.

        With durability `power`, the files are fsynced, which may take long: call it in a thread.

        Args:
            draft: the draft, with all its files completely written.
            written: digests of the files.
            summary_json: summary of the round, kept in the history.

        Raises:
            SyncFailed: fsync failed; the server must end.
            UsageError: the draft has ended, or `written` has the wrong number of digests.
        """
        self._check_digests(draft, written)
        if self._journal.durability == "power":
            self._sync_slots(draft.slot, draft.state if written.state_digests else None)
        draft.written, draft.row = (
            written,
            VersionRow(
                draft.fragment,
                draft.version,
                draft.slot.number,
                draft.state.number if draft.state and written.state_digests else None,
                written.digest,
                written.part_digests,
                written.state_digests,
                summary_json,
                utc_text(),
            ),
        )
        return draft.row

    def commit(self, draft: VersionDraft, tickets: Sequence[int] = (), sites: Mapping[str, str] | None = None) -> None:
        """Commit a finished draft as the newest version of its fragment, and mark `tickets` as counted.

        Call it inside a transaction. After its commit, the draft has ended.

        Args:
            draft: the draft.
            tickets: the tickets of the closed round's updates, in the order of the journal; empty for version 0.
            sites: site → summary of its update in the round, as JSON.

        Raises:
            StoreError: the round was not closed with exactly these tickets, or another version was committed since
                `begin`.
        """
        row, written, fragment, version = draft.row, draft.written, draft.fragment, draft.version
        assert row is not None
        assert written is not None
        previous = self._require_next(fragment, version)
        self._count(fragment, previous, version, tickets)
        self._journal.insert(VERSIONS, row)
        self._journal.insert(HISTORY, HistoryRow(fragment, version, row.digest, row.summary_json, row.created_at))
        self._journal.execute_many(
            SITE_ROUNDS.insert,
            (SITE_ROUNDS.write(SiteRoundRow(fragment, version, *each)) for each in (sites or {}).items()),
        )
        self._journal.count("versions")
        if draft.delta and previous is not None:
            base, delta = self.get(fragment, previous).digest, (written.delta_digest, written.delta_digests)
            self._journal.insert(DELTAS, DeltaRow(fragment, version, draft.delta.number, previous, base, *delta))
        self._audit.append("committed", fragment=fragment, version=version, digest=row.digest, tickets=list(tickets))
        failpoint("head.before")
        self._journal.execute(
            "UPDATE heads SET version = ?, durable_version = ? WHERE fragment = ? AND version IS ?",
            version,
            version if self._journal.durability == "power" else self.durable(fragment),
            fragment,
            previous,
        )
        self._journal.after_commit(lambda: failpoint("head.after"))
        self._journal.after_commit(lambda: self._adopt(draft, row))
        self.drop_old(fragment)
        self._journal.after_commit(lambda: self._slots.pool(SPOOL, fragment).trim(len(tickets)))

    def restore(self, draft: VersionDraft, written: VersionDigests, *, summary_json: str, created_at: str) -> None:
        """Make a draft the newest version of a fragment that has no version: one from another state directory.

        Call it inside a transaction that also adds the version to the history and to the audit log.

        Raises:
            SyncFailed: fsync failed; the server must end.
        """
        row = replace(self.finish(draft, written, summary_json=summary_json), created_at=created_at)
        self._journal.insert(VERSIONS, row)
        self._journal.execute(
            "UPDATE heads SET version = ?1, durable_version = ?2 WHERE fragment = ?3",
            row.version,
            row.version if self._journal.durability == "power" else None,
            row.fragment,
        )
        self._journal.after_commit(lambda: self._adopt(draft, row))

    def forget_first(self, fragment: int) -> VersionRow:
        """Remove the rows of a fragment's version 0, which is written again. Call it inside a transaction.

        Return the row. The file of the version stays until the next start.
        """
        row = self.get(fragment, 0)
        self.forget(row)
        self._journal.execute("UPDATE heads SET version = NULL, durable_version = NULL WHERE fragment = ?", fragment)
        self._journal.execute("DELETE FROM history WHERE fragment = ? AND version = 0", fragment)
        return row

    def _check_digests(self, draft: VersionDraft, written: VersionDigests) -> None:
        shapes, parts, state = self._slots.shapes_of(draft.fragment), written.part_digests, written.state_digests
        wanted = (
            len(shapes.version.regions),
            len(shapes.state.regions) if shapes.state and state else 0,
            len(shapes.delta.regions) if shapes.delta and draft.delta else 0,
        )
        if draft.ended or (len(parts), len(state), len(written.delta_digests)) != wanted:
            raise UsageError(
                f"The draft of version {draft.version} "
                f"{'has been committed or abandoned' if draft.ended else 'got the wrong number of digests'}."
            )

    def next_number(self, fragment: int = 0) -> int:
        """Return the next version number: one above the newest version ever committed, even if that one is lost."""
        newest = self._journal.value(
            "SELECT version FROM history WHERE fragment = ? ORDER BY seq DESC LIMIT 1", fragment
        )
        return 0 if newest is None else int(newest) + 1

    def _require_next(self, fragment: int, version: int) -> int | None:
        """Check that `version` is the next version number. Return the newest version's number; None if there is none.

        A fragment without any version may begin with any number, because the run may come from a saved state.

        Raises:
            StoreError: `version` is not the next version number.
        """
        head, following = self._head_number(fragment), self.next_number(fragment)
        if version != following and (head, following) != (None, 0):
            raise StoreError(
                f"Version {version}{self._journal.of(fragment)} cannot be made: the newest version is {head}, and the "
                f"next one is {following}."
            )
        return head

    def _count(self, fragment: int, head: int | None, version: int, tickets: Sequence[int]) -> None:
        if head is None and not tickets:
            return
        round_ = None if head is None else self._run_log.round(fragment, head)
        if round_ is None or round_.state != "frozen" or round_.tickets != tuple(tickets):
            raise StoreError(
                f"Version {version}{self._journal.of(fragment)} was made from the tickets {list(tickets)}, but the "
                f"round's state and tickets in the journal are {round_ and (round_.state, list(round_.tickets))}."
            )
        rows = self._tickets.get_all(tickets)
        self._tickets.end(rows, "counted", "", version, keep=self.keep_updates > 0)
        self._journal.execute_many(
            "UPDATE members SET rounds_counted = rounds_counted + 1 WHERE site = ?", [(row.site,) for row in rows]
        )
        self._journal.execute("DELETE FROM rounds WHERE fragment = ? AND base_version < ?", fragment, head)
        self._journal.execute("UPDATE rounds SET state = 'committed' WHERE fragment = ?", fragment)

    def _adopt(self, draft: VersionDraft, row: VersionRow) -> None:
        files = [(VERSION, draft.slot), (DELTA, draft.delta), (STATE, draft.state if row.state_digests else None)]
        for kind, slot in files:
            if slot is not None:
                self._slots.pool(kind, row.fragment).hold(slot, JOURNAL)
        draft.abandon()  # ends the writer's hold; the journal's hold remains

    # -- rows

    def _head_number(self, fragment: int) -> int | None:
        found: int | None = self._journal.value("SELECT version FROM heads WHERE fragment = ?", fragment)
        return found

    def head(self, fragment: int = 0) -> VersionRow:
        """Return the newest version of a fragment.

        Raises:
            Gone: the fragment has no version yet.
        """
        version = self._head_number(fragment)
        if version is None:
            raise Gone(f"Fragment {fragment} has no version yet.", "Ask again after the run has started.")
        return self.get(fragment, version)

    def heads(self) -> tuple[int, ...]:
        """Return the number of each fragment's newest version. Together they are the newest model."""
        found = self._journal.rows("SELECT version FROM heads WHERE version IS NOT NULL ORDER BY fragment")
        return tuple(version for (version,) in found)

    def get(self, fragment: int, version: int) -> VersionRow:
        """Return the row of a version that the server still has.

        Raises:
            Gone: the server does not have the version. The message gives the newest version's number.
        """
        row = self._journal.first(VERSIONS, f"WHERE {_KEPT} AND version = ?2", fragment, version)
        if row is None:
            head = self._head_number(fragment)
            what = "does not exist" if head is None or version > head else "is no longer kept"
            raise Gone(
                f"Version {version}{self._journal.of(fragment)} {what}.",
                f"The newest version is {head}; disk.export_every keeps older ones as files in exports/.",
            )
        return row

    def kept(self, fragment: int = 0) -> tuple[VersionRow, ...]:
        """Return the rows of all versions of a fragment that the server still has, oldest first."""
        return tuple(self._journal.select(VERSIONS, "WHERE fragment = ? ORDER BY version", fragment))

    def require_whole(self, version: int) -> None:
        """Check that the run can go back to a version: each fragment has it, with the outer optimizer's state.

        Raises:
            Gone: it cannot; the message lists the versions to which it can.
        """
        heads = self.heads()
        whole = [
            {row.version for row in self.kept(fragment) if row.state_slot is not None or not row.state_digests}
            for fragment in range(len(heads))
        ]
        earlier = [
            each
            for each in sorted(set.union(*whole))
            if each < max(heads)
            and all(each in found or each >= head for found, head in zip(whole, heads, strict=True))
        ]
        if version not in earlier:
            kept = f"It can go back to: {', '.join(map(str, earlier))}." if earlier else "No earlier version is kept."
            why = "no longer has it with the state of the optimizer" if version < max(heads) else "has no such version"
            raise Gone(
                f"The run cannot go back to version {version}: its server {why}.",
                f"{kept} To keep more versions from now on, restart the server with a larger disk.keep_versions.",
            )

    def delta(self, fragment: int, version: int) -> DeltaRow | None:
        """Return the row of the delta that leads from an older version to `version`; None if there is none."""
        return self._journal.first(DELTAS, "WHERE fragment = ? AND version = ?", fragment, version)

    def state_file(self, fragment: int = 0) -> int | None:
        """Return the descriptor of the outer optimizer's state after the newest version; None if there is no state.

        Do not close the descriptor.
        """
        row = self.head(fragment)
        return None if row.state_slot is None else self._slots.pool(STATE, fragment)[row.state_slot].fd

    # -- read

    def pin(self, fragment: int, version: int, *, with_state: bool = False) -> Pin[VersionRow]:
        """Keep a version's file unchanged for reading. Release the pin after reading, or when its `revoked` is set.

        Args:
            fragment: the fragment.
            version: number of the version.
            with_state: also keep the outer optimizer's state after this version. Version 0 has none.

        Raises:
            Gone: the version or the state is no longer kept.
        """
        with self._journal.lock:
            row = self.get(fragment, version)
            if with_state and row.state_digests and row.state_slot is None:
                raise Gone(f"The outer optimizer's state after version {version} is gone.", "Use the newest version.")
            numbers = [(VERSION, row.slot)]
            if with_state and row.state_slot is not None:
                numbers.append((STATE, row.state_slot))
            pools = [(self._slots.pool(kind, fragment), number) for kind, number in numbers]
            pin = Pin(row, [pool[number] for pool, number in pools], threading.Event(), self._unpin)
            for pool, number in pools:
                pool.hold(pool[number], PULL)
            self._pins.append(pin)
        return pin

    def pin_delta(self, fragment: int, version: int) -> Pin[DeltaRow]:
        """Keep a version and its delta (the difference from the version before) unchanged until the pin is released.

        Raises:
            Gone: the server no longer has the version, or the version has no delta.
        """
        with self._journal.lock, contextlib.ExitStack() as pinned:
            pin, row = pinned.enter_context(self.pin(fragment, version)), self.delta(fragment, version)
            if row is None:
                raise Gone(
                    f"Version {version}{self._journal.of(fragment)} has no delta.", "Download the whole version."
                )
            pool = self._slots.pool(DELTA, fragment)
            slot = pool[row.slot]

            def drop(_: Pin[DeltaRow]) -> None:
                pool.drop(slot, PULL)
                pin.release()

            delta = Pin(row, [slot], pin.revoked, drop)
            pool.hold(slot, PULL)
            pinned.pop_all()
        return delta

    def _unpin(self, pin: Pin[VersionRow]) -> None:
        fragment = pin.row.fragment
        with self._journal.lock:
            self._pins.remove(pin)
            for kind, slot in zip((VERSION, STATE), pin.slots, strict=False):
                self._slots.pool(kind, fragment).drop(slot, PULL)
            if not self._journal.closed and pin.row.version not in self._needed(fragment):
                with contextlib.suppress(DiskFull), self._journal.transaction():
                    self.drop_old(fragment)  # if this fails, the next commit drops the version

    def _revoke_oldest(self, fragment: int) -> None:
        """If there are more than `keep_versions + max_pins` versions, drop the oldest, and set `revoked` of their pins.

        Versions that are still needed stay.
        """
        with self._journal.lock:
            rows, needed = self.kept(fragment), self._needed(fragment)
            most = self._keep_versions + self._max_pins
            old = [row for row in rows[: max(0, len(rows) - most)] if row.version not in needed]
            if not old:
                return
            with self._journal.transaction():
                for row in old:
                    self.drop(row)
            revoked = self._pins_of(fragment, old)
        for pin in revoked:
            pin.revoked.set()

    def _pins_of(self, fragment: int, rows: Collection[VersionRow]) -> list[Pin[VersionRow]]:
        versions = {row.version for row in rows}  # compare numbers: rows differ once an outer state is dropped
        return [pin for pin in self._pins if pin.row.fragment == fragment and pin.row.version in versions]

    # -- keep and drop

    def _needed(self, fragment: int) -> set[int | None]:
        kept_versions = {*self._newest(fragment, self._keep_versions), self.durable(fragment), *self._back_to}
        wanted = sorted(set(self.wanted(fragment)) - kept_versions, reverse=True)
        return {*kept_versions, *wanted[: max(0, self._keep_versions + self._max_pins - len(kept_versions))]}

    @property
    def _back_to(self) -> set[int]:
        """The version that the admin wants to go back to, until recovery has done it; empty if there is none."""
        back_to = self._run_log.controls.back_to
        return set() if back_to is None else {back_to}

    def _newest(self, fragment: int, count: int) -> list[int]:
        """Return the numbers of the newest `count` versions on disk. The numbers have gaps if versions were lost."""
        found = self._journal.rows(
            f"SELECT version FROM versions WHERE {_KEPT} ORDER BY version DESC LIMIT ?2", fragment, count
        )
        return [version for (version,) in found]

    def drop_old(self, fragment: int) -> None:
        """Drop versions that are neither needed nor being read. Call it in a transaction; the commit frees their files.

        States of the outer optimizer are kept for the newest `keep_versions` versions (the run may go back to one of
        them), at least for the newest and the one before, in case the newest turns out to be damaged; for the newest
        version that survives a power loss, for versions that are being read with their state, and for one that the
        admin wants to go back to.
        """
        needed, head = self._needed(fragment), self._head_number(fragment)
        if head is None:
            return
        if self.keep_updates:
            self._tickets.drop_kept(fragment, min(self._newest(fragment, self.keep_updates)))
        stateful = {*self._newest(fragment, max(2, self._keep_versions)), self.durable(fragment), *self._back_to}
        for row in self.kept(fragment):
            pins = self._pins_of(fragment, [row])
            with_state = row.version in stateful or any(pin.state_fd is not None for pin in pins)
            if row.version not in needed and not pins:
                self.drop(row)
            elif row.state_slot is not None and not with_state:
                self.forget_state(row)
                self._slots.drop_after_commit(STATE, fragment, row.state_slot)

    def drop(self, row: VersionRow) -> None:
        """Delete the rows of a version and its delta. Call it inside a transaction.

        After the commit, the files may be reused as soon as none of them is being read.
        """
        delta = self.delta(row.fragment, row.version)
        self.forget(row)
        self._slots.drop_after_commit(DELTA, row.fragment, delta.slot if delta else None)
        self._slots.drop_after_commit(VERSION, row.fragment, row.slot)
        self._slots.drop_after_commit(STATE, row.fragment, row.state_slot)

    def forget(self, row: VersionRow) -> None:
        """Delete the rows of a version and its delta, but do not free their files. Call it inside a transaction."""
        for table in ("versions", "deltas"):
            self._journal.execute(f"DELETE FROM {table} WHERE fragment = ? AND version = ?", row.fragment, row.version)

    def forget_state(self, row: VersionRow) -> None:
        """Record that the outer optimizer's state after a version is no longer kept. Call it inside a transaction."""
        self._journal.execute(
            "UPDATE versions SET state_slot = NULL WHERE fragment = ? AND version = ?", row.fragment, row.version
        )

    def drop_all_but_heads(self) -> None:
        """For each fragment, drop all versions except the newest, if the newest is known to survive a power loss.

        The bases of rounds with kept updates stay, too.

        Call it when the run is finished.
        """
        with self._journal.transaction():
            for fragment in self._slots.fragments:
                rows = self.kept(fragment)
                if rows and self.durable(fragment) == rows[-1].version:
                    for row in rows[: max(0, len(rows) - 1 - self.keep_updates)]:
                        self.drop(row)

    # -- durable versions

    def durable(self, fragment: int = 0) -> int | None:
        """Return the number of the newest version that is known to survive a power loss; None if there is none."""
        found: int | None = self._journal.value("SELECT durable_version FROM heads WHERE fragment = ?", fragment)
        return found

    def write_durable(self, fragment: int = 0) -> int | None:
        """Fsync a fragment's newest version, then record in the journal that this version survives a power loss.

        The fsync may be slow, but does not block other calls. Until the fsync is done, the store keeps the version that
        was fsynced last.

        Returns:
            The number of the newest version; None if the fragment has no version.

        Raises:
            SyncFailed: fsync failed; the server must end.
        """
        self._journal.checkpoint(LOG_CHANGES)  # in this thread, so that no commit in the event loop waits for it
        with self._journal.lock:
            head = self._head_number(fragment)
            if head is None or self.durable(fragment) == head:
                return head
            pin = self.pin(fragment, head, with_state=True)
        with pin:
            self._sync_slots(*pin.slots)
            with self._journal.transaction(synced=True):
                self._journal.execute("UPDATE heads SET durable_version = ? WHERE fragment = ?", head, fragment)
                self.drop_old(fragment)
        return head

    def _sync_slots(self, *slots: Slot | None) -> None:
        for slot in slots:
            if slot:
                self._journal.sync(slot.fd, str(slot.path))
        self._journal.sync_folder(self._slots.folder)
