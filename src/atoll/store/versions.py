"""Versions: written into a free slot, made real by one UPDATE of the head, kept while somebody reads them.

Which rows stay after a commit: the newest `keep_versions`, `durable_version`, and whatever is pinned. Slow pulls may so
hold `max_pins` further versions; beyond that the oldest is revoked, and its slot rewritten once its readers let go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from atoll.errors import DiskFull, Gone, StoreError, UsageError
from atoll.failpoints import failpoint
from atoll.store import audit_log
from atoll.store.deltas import Deltas, split_digests
from atoll.store.file_slots import DELTA, JOURNAL, PULL, READER, SPOOL, STATE, VERSION, WRITER, Slot
from atoll.store.handles import PinnedVersion, VersionDraft
from atoll.store.rows import VersionRow, now

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
