"""The state directory of a run: everything that a server needs to continue after a kill.

    <directory>/lock             names the server that has locked the directory
    <directory>/journal.sqlite   the journal: a database with every decision of the server
    <directory>/audit.head       number and hash of the audit log's last entry
    <directory>/slots/           preallocated tensor files: versions, outer optimizer states, arriving updates
    <directory>/updates/         the updates of the last rounds, with disk.keep_updates

Bytes are written to a tensor file before a row of the journal refers to them, so no row exists without its bytes. At
every start, a server creates a `Store`, then calls `store.slots.shape`, then `store.recover`. Only then may it use the
store.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from atoll.errors import RETRY_S, DiskFull, StateLocked, StoreError
from atoll.format_text import size
from atoll.json_files import NoteDamaged
from atoll.posix import (
    FolderTaken,
    Lock,
    file_error,
    folder_error,
    mode_in,
    open_own,
    own_folder,
    remedy_of,
    replace_file,
    require_no_pipes,
    take_folder,
)
from atoll.runtime import failpoint
from atoll.store import verify_journal
from atoll.store.audit_log import NAME, AuditHeadFile, AuditLog, read_head
from atoll.store.file_slots import FileShape, FragmentShapes, Slots, is_slot_name
from atoll.store.identities import Identities
from atoll.store.journal import JOURNAL, Durability, Journal
from atoll.store.journal_tables import files_of
from atoll.store.kept_events import EventRows
from atoll.store.receipt_key import ReceiptKey
from atoll.store.recover_at_start import Recovery
from atoll.store.run_log import RunLog
from atoll.store.tickets import Tickets, require_links
from atoll.store.versions import Versions
from atoll.store.workflow_facts import WorkflowFacts
from atoll.system_calls import memory_bytes

LOG = logging.getLogger("atoll.server")

__all__ = ["FileShape", "FragmentShapes", "Store"]

WRITABLE = "Use a disk.state_dir that this user may write."

Files = Sequence[tuple[int, int | None]]
"""For each fragment: (descriptor of a version's file, descriptor of the outer optimizer state's file or None)."""

ModelReader = Callable[[Files], Iterator[memoryview]]
"""A function that reads the files of all fragments, and yields the tensor bytes of an exported model file in order."""


class Store:
    """The files of one run at the server. Thread-safe. Methods that read or write files block: call them in a thread.

    Attributes:
        journal: the journal (the server's database), for transactions.
        audit: the audit log.
        run_log: the journal's rows about the run, its sites, rounds, history and workflows.
        slots: the preallocated tensor files.
        tickets: the tickets and their updates.
        identities: the credentials of the sites.
        facts: what the present workflow has got from sites.
        versions: the versions, and the encoded differences between versions (deltas).
    """

    def __init__(
        self,
        directory: Path,
        *,
        durability: Durability = "process",
        keep_versions: int = 2,
        max_pins: int = 4,
        keep_updates: int = 0,
        in_memory: bool = False,
    ) -> None:
        """Create or open a state directory, lock it, and raise the journal's epoch.

        Args:
            directory: path of the state directory.
            durability: what an acknowledged update survives. `process`: a kill of the server at any instruction.
                `power`: also a power loss.
            keep_versions: number of newest versions that workers can always download.
            max_pins: number of older versions that are kept in addition while workers still download them.
            keep_updates: number of newest rounds with kept updates, and with the versions that they start from.
            in_memory: keep the tensor files in memory. Then only the journal outlives the process.

        Raises:
            StateLocked: another server uses the directory.
            StateCorrupt: the journal is damaged, or it is missing although tensor files exist.
            StoreError: the directory cannot be created or locked.
        """
        self.directory = directory = Path(directory)
        try:
            own_folder(directory)
            own_folder(directory / "slots", directory)
            if not os.access(directory / "slots", os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), directory / "slots")
        except OSError as error:
            folder = directory / "slots" if os.path.isdir(directory) else directory
            raise folder_error(error, folder, WRITABLE) from error
        self._lock = lock_directory(directory)
        try:
            require_no_pipes(*(path for path in (directory, *directory.iterdir()) if path.is_dir()))
            begin = not any(is_slot_name(path.name) for path in (directory / "slots").iterdir())
            journal = Journal(directory / JOURNAL, durability, begin=begin and not _has_begun(directory))
        except BaseException:
            self._lock.close()
            raise
        self.journal = journal
        self.audit = AuditLog(journal)
        keep_versions = max(keep_versions, keep_updates + 1)
        self.slots = Slots(journal, directory / "slots", keep_versions + max_pins, in_memory=in_memory)
        self.run_log = RunLog(journal, self.audit)
        self._receipt_key: ReceiptKey | None = None
        self.tickets = Tickets(journal, self.audit, self.slots)
        self.events = EventRows(journal)
        self.identities = Identities(journal, self.audit)
        self.facts = WorkflowFacts(journal, directory / "answers")
        self.versions = Versions(
            journal,
            self.audit,
            self.slots,
            self.run_log,
            self.tickets,
            keep_versions=keep_versions,
            max_pins=max_pins,
        )
        self.versions.keep_updates = keep_updates
        try:
            if keep_updates:
                require_links(directory)
            head = self._begin_epoch(verify_journal.at_start(journal.rows, directory))
            journal.sync_folder(directory)
            journal.sync(head.fd, str(head.path))
        except BaseException:
            self.close()
            raise

    @property
    def receipt_key(self) -> ReceiptKey:
        """The key of the run's receipts, which is written at its first use.

        Raises:
            StoreError: its file cannot be used.
        """
        if self._receipt_key is None:
            self._receipt_key = ReceiptKey(self.directory)
        return self._receipt_key

    def _begin_epoch(self, start: verify_journal.Start) -> AuditHeadFile:
        """Log the warnings in `start`, raise the epoch in the journal, and begin to keep `audit.head` up to date."""
        for warning in start.warnings:
            LOG.warning("%s", warning)
        with self.journal.transaction(synced=True):
            self.journal.execute(
                "UPDATE meta SET epoch = max(epoch, ?) + 1", start.lost.epoch if start.lost is not None else 0
            )
            if start.lost is not None:
                self.audit.append("lost", entries=start.lost_entries, last_hash=start.lost.last_hash)
            if start.may_lack_tickets:
                self.tickets.skip_numbers()
        failpoint("epoch.raised")
        head = AuditHeadFile(self.directory, self.journal.durability, self.run_log.epoch)
        self.audit.keep_head(head)
        return head

    def recover(self) -> tuple[str, ...]:
        """Check the files against the journal and drop damaged ones. Call it at every start, after `slots.shape`.

        If the admin has asked for an earlier version, the run first goes back to it.
        The newest version of each fragment is compared with its digests. If it is damaged, the run continues from the
        newest intact version: updates for later versions expire, later rounds are deleted, and the epoch rises.
        Damaged parts of incomplete updates are dropped. A damaged accepted update expires, and its round opens again.
        Files that no row of the journal refers to are removed. A round that was closed, but has no new version yet,
        stays closed; the server has to aggregate its updates again.

        Returns:
            One sentence for each loss.

        Raises:
            StateCorrupt: all versions of a fragment are damaged. This fragment's files and rows stay unchanged.
        """
        recovery = Recovery(
            self.journal, self.audit, self.slots, self.run_log, self.tickets, self.versions, self.events
        )
        return recovery.run()

    def free_bytes(self) -> int:
        """Return how many bytes this user can still write to the state directory's disk.

        With `in_memory`, return the available memory in bytes.
        """
        if self.slots.in_memory:
            return memory_bytes()
        info = os.statvfs(self.directory)
        return info.f_bavail * info.f_frsize

    def require_space(self, min_free_bytes: int) -> None:
        """Raise an error if `free_bytes()` is below `min_free_bytes`.

        Raises:
            DiskFull: fewer bytes are free. The error's `retry_after_s` says when the client may repeat its request.
        """
        free = self.free_bytes()
        if free < min_free_bytes:
            what = "memory left" if self.slots.in_memory else "disk left"
            error = DiskFull(
                f"The server has {size(free)} of {what}, but must keep {size(min_free_bytes)} free "
                "(disk.min_free_bytes).",
                "Free some space: the run then continues by itself, and nothing is lost.",
            )
            error.retry_after_s = RETRY_S
            raise error

    def export(
        self, target: Path, heads: Sequence[int], header: bytes, contents: ModelReader, *, with_state: bool = False
    ) -> Path:
        """Write a model file to `target`. An existing file is replaced atomically.

        Args:
            target: path of the file.
            heads: number of the version to export, for each fragment.
            header: first bytes of the file.
            contents: function that yields the bytes after the header.
            with_state: whether `contents` also reads the outer optimizer's state.

        Returns:
            `target`.

        Raises:
            Gone: a version or its outer optimizer state is no longer kept.
            DiskFull: the disk is full. No partial file is left behind.
            SyncFailed: fsync failed; the server must end.
        """
        with self.pinned(heads, with_state=with_state) as files:
            return self.write_named(target, itertools.chain([header], _failing(contents(files))))

    @contextlib.contextmanager
    def pinned(self, heads: Sequence[int], *, with_state: bool) -> Iterator[Files]:
        """Keep the files of these versions unchanged inside a `with` block, and yield their descriptors.

        Args:
            heads: for each fragment, the number of the version.
            with_state: whether to keep the outer optimizer's state, too.

        Raises:
            Gone: a version or its outer optimizer state is no longer kept.
        """
        with contextlib.ExitStack() as stack:
            pins = [
                stack.enter_context(self.versions.pin(fragment, version, with_state=with_state))
                for fragment, version in enumerate(heads)
            ]
            yield [(pin.fd, pin.state_fd) for pin in pins]

    def write_named(self, target: Path, runs: Iterator[bytes | memoryview]) -> Path:
        """Write a file that a user names. An existing file is replaced atomically.

        Args:
            target: path of the file.
            runs: the content, in pieces.

        Returns:
            `target`.

        Raises:
            DiskFull: the disk is full. No partial file is left behind.
            SyncFailed: fsync failed; the server must end.
        """
        temp = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp").absolute()
        with self.journal.transaction():  # so that the next start can remove the partial file after a kill
            self.journal.execute("INSERT INTO exports_under_way VALUES (?)", str(temp))
        try:
            mode = mode_in(self.directory, target)
            replace_file(target, runs, temporary=temp, sync=lambda fd: self.journal.sync(fd, str(temp)), mode=mode)
            self.journal.sync_folder(temp.parent)
        except OSError as error:
            raise file_error(error, target) from error
        finally:
            # on failure, the next start removes the row; there is no journal any more if the server ends meanwhile
            with contextlib.suppress(DiskFull), self.journal.lock:
                if not self.journal.closed:
                    with self.journal.transaction():
                        self.journal.execute("DELETE FROM exports_under_way WHERE path = ?", str(temp))
        return target

    @contextlib.contextmanager
    def initial_file(self, fragment: int, flags: int = os.O_RDONLY) -> Iterator[int]:
        """In a swarm: yield a descriptor of the file with version 0 of a fragment, which the first worker downloads."""
        fd = open_own(self.directory / f"initial-{fragment}.safetensors", flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close and unlock the directory. If the run is finished, first remove all versions except the newest.

        A tensor file that is still being read or written stays open until its last reader or writer has ended.
        """
        with self.journal.lock:
            if self.journal.closed:
                return
            self.tickets.close_spools()
            try:
                if self.journal.usable and self.run_log.finished:
                    self.versions.drop_all_but_heads()
            finally:
                self.slots.close()
                self.journal.close()
                self.audit.close()
                self._lock.close()

    def discard(self, *, with_folder: bool) -> None:
        """Close, and remove what this store has made in a directory that was empty, because no run began there.

        Args:
            with_folder: whether to remove the directory, too.
        """
        with contextlib.closing(Lock(os.dup(self._lock.fd))):  # no other server takes the directory meanwhile
            self.close()
            with contextlib.suppress(OSError):
                shutil.rmtree(self.directory / "slots")
                for path in (*files_of(self.journal.path), self.directory / NAME, self.directory / "lock"):
                    path.unlink(missing_ok=True)
                if with_folder:
                    self.directory.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _failing(runs: Iterator[memoryview]) -> Iterator[memoryview]:
    for run in runs:
        failpoint("export.write")
        yield run


def directory_gone(state_dir: Path) -> StoreError | None:
    """Return an error if the state directory, its slots folder or its journal is missing; None if all are there.

    Report this error instead of any other failure, because it is the cause.
    """
    for path in (state_dir, state_dir / "slots", state_dir / JOURNAL):
        if not path.exists():
            return StoreError(
                f"The state directory {state_dir} was removed while the server was running."
                if path == state_dir
                else f"{path} was removed while the server was running.",
                "Mount its disk again, or restore a copy; then start the run again, and the workers continue. "
                "If you cannot do that, start a new run from the last exported model.",
            )
    return None


def _has_begun(directory: Path) -> bool:
    """Return whether `audit.head` shows that this directory once had a journal with entries.

    If True, and the journal is now empty or missing, the journal was lost.
    """
    try:
        head = read_head(directory)
    except NoteDamaged:
        return (directory / NAME).stat().st_size > 0
    return head is not None and head.entries > 0


def require_unlocked(directory: Path) -> None:
    """Check that no server uses a state directory, if it has a run.

    Raises:
        StateLocked: another server uses the directory.
        StoreError: the directory cannot be locked.
    """
    if (directory / JOURNAL).exists():
        lock_directory(directory).close()


def lock_directory(directory: Path) -> Lock:
    """Lock the state directory for this process, and return the lock.

    The lock is taken on the directory itself, so it lasts even if the file `lock` is removed. If the file system cannot
    lock directories, the file is locked instead.

    Raises:
        StateLocked: another process holds the lock.
        StoreError: the directory cannot be locked.
    """
    path = directory / "lock"
    try:
        return take_folder(directory)
    except FolderTaken as holder:
        raise StateLocked(
            f"The state directory {directory} is in use by {holder}.",
            "Stop that server, or set another disk.state_dir for this one.",
        ) from None
    except OSError as error:
        raise StoreError(f"{path} cannot be locked: {error.strerror}.", remedy_of(error, WRITABLE)) from error
