"""The state directory of a run: everything that a server must still know after it was killed.

    <directory>/lock             who has the directory
    <directory>/journal.sqlite   every decision, as rows
    <directory>/audit.head       where the audit log ended at the last commit
    <directory>/slots/           versions, outer states and spools: preallocated files that are rewritten

Bytes go to slots first, then a row says that they are there; a row whose bytes are missing cannot exist. `Store` is the
whole of it for the server: `open`, `shape`, `recover`, then the methods of its parts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from atoll.errors import StateLocked, StoreError
from atoll.json_files import NoteDamaged
from atoll.posix import Held, take_folder
from atoll.runtime import failpoint
from atoll.store import audit_log, recover_at_start, verify_journal
from atoll.store.audit_log import NAME, AuditHeadFile, read_head, tip
from atoll.store.file_slots import VERSION, FileShape, FragmentShapes, is_slot_name
from atoll.store.journal import Durability, Journal
from atoll.store.journal_tables import Recovered
from atoll.store.model_copies import Contents, write_copy
from atoll.store.versions import Reading

LOG = logging.getLogger("atoll.server")

__all__ = ["FileShape", "FragmentShapes", "Recovered", "Store"]


class Store(Reading):
    """The state of one run on disk. Synchronous and thread-safe; what moves bytes of files belongs in a pool thread."""

    _lock_fd: int
    _audit_head: AuditHeadFile | None = None

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        durability: Durability = "process",
        keep_versions: int = 2,
        max_pins: int = 4,
        in_memory: bool = False,
    ) -> Self:
        """Take a state directory, made where there is none, and raise its epoch.

        Args:
            durability: what an acknowledged update survives: `process`, the server being killed at any instruction;
                `power`, a power loss too.
            keep_versions: versions that can always be pulled.
            max_pins: further versions that slow pulls may hold.
            in_memory: slots lie in memory: of the run, only the journal outlives the process.

        Raises:
            StateLocked: another server has it.
            StateCorrupt: its journal is damaged, or is not there while slots are.
        """
        directory = Path(directory)
        try:
            (directory / "slots").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{directory}: {error.strerror}.", "Give a state_dir that this user may write.") from error
        lock_fd = _own(directory)
        try:
            begin = not any(is_slot_name(path.name) for path in (directory / "slots").iterdir())
            journal = Journal(directory / "journal.sqlite", durability, begin=begin and not _has_begun(directory))
        except BaseException:
            os.close(lock_fd)
            raise
        store = cls(directory, journal, durability, keep_versions, max_pins)
        store._lock_fd, store.in_memory = lock_fd, in_memory
        try:
            store._audit_head = store._begin_epoch(verify_journal.at_start(journal, directory))
            store.sync_folder(directory)
            store.sync(store._audit_head.fd, str(store._audit_head.path))
        except BaseException:
            store.close()
            raise
        return store

    def _begin_epoch(self, start: verify_journal.Start) -> AuditHeadFile:
        """Say what was found, raise the epoch, and from here on note where the audit log ends."""
        for warning in start.warnings:
            LOG.warning("%s", warning)
        with self.journal.transaction(synced=True):
            self.journal.execute(
                "UPDATE meta SET epoch = max(epoch, ?) + 1", start.lost.epoch if start.lost is not None else 0
            )
            if start.lost is not None:
                audit_log.append(self.journal, "lost", entries=start.lost_entries, last_hash=start.lost.last_hash)
        failpoint("epoch.raised")
        head = AuditHeadFile(self.directory, self.durability, self.epoch)
        head.write(*tip(self.journal))
        self.journal.audit_moved = head.write
        return head

    def recover(self) -> Recovered:
        """Bring the run to where it can go on; after `shape`, before anything else, on every start.

        Heads are verified by their digests. One that does not verify gives way to the newest version that does (at
        worst `durable_version`): later updates expire, later rounds are forgotten, the epoch rises. Damaged parts of
        open tickets are dropped; a damaged accepted update expires, and its round opens again. Files that nothing
        refers to are removed. A frozen round is returned as it is: its pass has to run again.

        Raises:
            StateCorrupt: no version verifies; nothing was changed.
        """
        return recover_at_start.recover(self)

    def export(
        self, target: Path, heads: Sequence[int], header: bytes, contents: Contents, *, with_state: bool = False
    ) -> Path:
        """Write a model to `target`, replacing what is there in one step.

        Args:
            heads: the version of each fragment.
            contents: what comes behind the header.
            with_state: whether the outer state beside each is needed, too.

        Raises:
            Gone: a version, or the outer state beside it, is not kept.
            DiskFull: nothing is left behind.
            SyncFailed: fsync failed; the server must end.
        """
        hold = self.reading if with_state else self.pinned
        write_copy(self, target, [hold(f, version) for f, version in enumerate(heads)], header, contents)
        return target

    def close(self) -> None:
        """Let go of the directory; of a finished run only the journal, the last version and what is beside it stay.

        Slots that are still held elsewhere are closed with their last holder.
        """
        with self.lock:
            if self.journal.closed:
                return
            for spool in self.spools.values():
                spool.close(StoreError("The server is stopping.", "Send it again when it is back."))
            self.spools.clear()
            self.live_tickets.clear()
            try:
                if self.journal.usable and self.finished:
                    self._forget_all_but_heads()
            finally:
                for pool in self.pools.values():
                    pool.trim()
                    pool.close()
                self.journal.close()
                if self._audit_head is not None:
                    self._audit_head.close()
                os.close(self._lock_fd)

    def _forget_all_but_heads(self) -> None:
        with self.transaction():
            for kind, fragment in self.pools:
                rows = self.versions(fragment) if kind == VERSION else ()
                if rows and self.durable_version(fragment) == rows[-1].version:
                    for row in rows[:-1]:
                        self.drop_row(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_begun(directory: Path) -> bool:
    """Whether a journal there has had entries of its audit log: one that is empty or missing has lost them."""
    try:
        head = read_head(directory)
    except NoteDamaged:
        return (directory / NAME).stat().st_size > 0
    return head is not None and head.entries > 0


def _own(directory: Path) -> int:
    """One server per state directory, also where the file that names it was removed."""
    path = directory / "lock"
    try:
        return take_folder(directory)
    except Held as holder:
        raise StateLocked(
            f"The state directory {directory} is in use by {holder}.",
            "Stop that server, or give this one another state_dir.",
        ) from None
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}.", "Give a state_dir that this user may write.") from error
