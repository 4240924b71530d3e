"""The state directory of a run: everything that a server must still know after it was killed.

    <directory>/lock             locked by the server that uses the directory
    <directory>/journal.sqlite   every decision, as rows
    <directory>/audit.head       where the audit log ended at the last commit
    <directory>/slots/           versions, outer states and spools: preallocated files that are rewritten

Bytes go to slots first, then a row says that they are there; no row exists without its bytes. On every start
a server makes a `Store`, then calls `store.slots.shape` and `store.recover`, then it uses the parts of the store.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from atoll.errors import RETRY_S, DiskFull, StateLocked, StoreError
from atoll.json_files import NoteDamaged
from atoll.posix import FolderTaken, replace_file, take_folder
from atoll.runtime import failpoint
from atoll.store import verify_journal
from atoll.store.audit_log import NAME, AuditHeadFile, AuditLog, read_head
from atoll.store.file_slots import FileShape, FragmentShapes, Slots, disk_error, is_slot_name
from atoll.store.journal import Durability, Journal
from atoll.store.recover_at_start import Recovery
from atoll.store.run_log import RunLog
from atoll.store.tickets import Tickets
from atoll.store.versions import Versions

LOG = logging.getLogger("atoll.server")

__all__ = ["FileShape", "FragmentShapes", "Store"]

Files = Sequence[tuple[int, int | None]]
"""The descriptors of each fragment: of a version, and of the outer state beside it."""

Contents = Callable[[Files], Iterator[memoryview]]
"""What to write, in order."""


class Store:
    """The state of one run on disk. Synchronous and thread-safe; calls that move bytes belong in a pool thread.

    Attributes:
        journal: transactions.
        audit: the audit log.
        run_log: the run, its members, rounds, history and workflows.
        slots: the files.
        tickets: tickets, and the updates that come under them.
        versions: versions, and what goes down in their place.
    """

    def __init__(
        self,
        directory: Path,
        *,
        durability: Durability = "process",
        keep_versions: int = 2,
        max_pins: int = 4,
        in_memory: bool = False,
    ) -> None:
        """Lock a state directory, make it if there is none, and raise its epoch.

        Args:
            durability: what an acknowledged update survives: `process`, the server being killed at any instruction;
                `power`, a power loss too.
            keep_versions: versions that can always be pulled.
            max_pins: further versions that slow pulls may hold.
            in_memory: slots lie in memory: of the run, only the journal outlives the process.

        Raises:
            StateLocked: another server uses it.
            StateCorrupt: its journal is damaged, or is missing while slots are there.
        """
        self.directory = directory = Path(directory)
        try:
            (directory / "slots").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{directory}: {error.strerror}.", "Give a disk.state_dir that this user may write."
            ) from error
        self._lock_fd = _lock(directory)
        try:
            begin = not any(is_slot_name(path.name) for path in (directory / "slots").iterdir())
            journal = Journal(directory / "journal.sqlite", durability, begin=begin and not _has_begun(directory))
        except BaseException:
            os.close(self._lock_fd)
            raise
        self.journal = journal
        self.audit = AuditLog(journal)
        self.slots = Slots(journal, directory / "slots", keep_versions + max_pins, in_memory=in_memory)
        self.run_log = RunLog(journal, self.audit)
        self.tickets = Tickets(journal, self.audit, self.slots)
        self.versions = Versions(
            journal,
            self.audit,
            self.slots,
            self.run_log,
            self.tickets,
            keep_versions=keep_versions,
            max_pins=max_pins,
        )
        try:
            head = self._begin_epoch(verify_journal.at_start(journal.rows, directory))
            journal.sync_folder(directory)
            journal.sync(head.fd, str(head.path))
        except BaseException:
            self.close()
            raise

    def _begin_epoch(self, start: verify_journal.Start) -> AuditHeadFile:
        """Log what was found, raise the epoch, and note from here on where the audit log ends."""
        for warning in start.warnings:
            LOG.warning("%s", warning)
        with self.journal.transaction(synced=True):
            self.journal.execute(
                "UPDATE meta SET epoch = max(epoch, ?) + 1", start.lost.epoch if start.lost is not None else 0
            )
            if start.lost is not None:
                self.audit.append("lost", entries=start.lost_entries, last_hash=start.lost.last_hash)
        failpoint("epoch.raised")
        head = AuditHeadFile(self.directory, self.journal.durability, self.run_log.epoch)
        self.audit.keep_head(head)
        return head

    def recover(self) -> tuple[str, ...]:
        """Bring the run to where it can go on; on every start, after `slots.shape`, before anything else.

        Heads are verified by their digests. If one does not verify, the newest version that does (at worst the durable
        one) takes its place: later updates expire, later rounds are forgotten, the epoch rises. Damaged parts of open
        tickets are dropped; a damaged accepted update expires, and its round opens again. Files that nothing refers to
        are removed. A frozen round stays as it is: its pass has to run again.

        Returns:
            A sentence for each thing that was lost.

        Raises:
            StateCorrupt: no version verifies; nothing was changed.
        """
        return Recovery(self.journal, self.audit, self.slots, self.run_log, self.tickets, self.versions).run()

    def free_bytes(self) -> int:
        """Return the bytes that are left for this user on the disk of the state directory, or in memory."""
        if self.slots.in_memory:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        info = os.statvfs(self.directory)
        return info.f_bavail * info.f_frsize

    def require_space(self, min_free_bytes: int) -> None:
        """Refuse a request that takes disk (or memory, in runs in memory) while little of it is left.

        Raises:
            DiskFull: it can be asked for again later.
        """
        free = self.free_bytes()
        if free < min_free_bytes:
            what = "memory left" if self.slots.in_memory else "disk left"
            error = DiskFull(
                f"The server has {free / 1e6:.0f} MB of {what}, and keeps {min_free_bytes / 1e6:.0f} MB free.",
                "It goes on when there is space; nothing is lost.",
            )
            error.retry_after_s = RETRY_S
            raise error

    def export(
        self, target: Path, heads: Sequence[int], header: bytes, contents: Contents, *, with_state: bool = False
    ) -> Path:
        """Write a model to `target`, replacing what is there in one step.

        Args:
            heads: the version of each fragment.
            contents: what follows the header.
            with_state: whether the outer state beside each is needed, too.

        Raises:
            Gone: a version, or the outer state beside it, is not kept.
            DiskFull: nothing is left behind.
            SyncFailed: fsync failed; the server must end.
        """
        with contextlib.ExitStack() as stack:
            files: list[tuple[int, int | None]] = []
            for fragment, version in enumerate(heads):
                pin = stack.enter_context(self.versions.pin(fragment, version, with_state=with_state))
                files.append((pin.fd, pin.state_fd))
            temp = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp").absolute()
            with self.journal.transaction():  # so that a start after a kill can remove it
                self.journal.execute("INSERT INTO exports_under_way VALUES (?)", str(temp))
            try:
                temp.parent.mkdir(parents=True, exist_ok=True)
                runs: Iterator[bytes | memoryview] = itertools.chain([header], _failing(contents(files)))
                replace_file(target, runs, temporary=temp, sync=lambda fd: self.journal.sync(fd, str(temp)))
                self.journal.sync_folder(temp.parent)
            except OSError as error:
                raise disk_error(error, target) from error
            finally:
                with contextlib.suppress(DiskFull), self.journal.transaction():  # else the next start does it
                    self.journal.execute("DELETE FROM exports_under_way WHERE path = ?", str(temp))
        return target

    def close(self) -> None:
        """Let go of the directory; of a finished run only the journal, the last version and what is beside it stay.

        Slots that have other holders are closed with the last of them.
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
                os.close(self._lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _failing(runs: Iterator[memoryview]) -> Iterator[memoryview]:
    for run in runs:
        failpoint("export.write")
        yield run


def directory_gone(state_dir: Path) -> StoreError | None:
    """Return the error to report if a state directory or one of its files is gone: it explains any other failure."""
    for path in (state_dir, state_dir / "slots", state_dir / "journal.sqlite"):
        if not path.exists():
            return StoreError(
                f"The state directory {state_dir} was removed while the server ran."
                if path == state_dir
                else f"{path} was removed while the server ran.",
                "Bring it back (its disk, or a copy) and start the server again: workers go on from there. Without it, "
                "a new run can begin from the last export.",
            )
    return None


def _has_begun(directory: Path) -> bool:
    """Return whether the audit log of a journal there has had entries: an empty or missing one has lost them."""
    try:
        head = read_head(directory)
    except NoteDamaged:
        return (directory / NAME).stat().st_size > 0
    return head is not None and head.entries > 0


def _lock(directory: Path) -> int:
    """Allow one server per state directory, even if the file that names it was removed."""
    path = directory / "lock"
    try:
        return take_folder(directory)
    except FolderTaken as holder:
        raise StateLocked(
            f"The state directory {directory} is in use by {holder}.",
            "Stop that server, or give this one another disk.state_dir.",
        ) from None
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}.", "Give a disk.state_dir that this user may write.") from error
