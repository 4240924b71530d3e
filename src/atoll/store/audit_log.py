"""The audit log (a hash chain of updates, decisions and versions) and the file `audit.head` about the log's last entry.

The audit log is a table of the journal, the server's SQLite database. An entry is written in the same transaction as
the decision that it records. `atoll audit` prints the hash of the last entry. If you store this hash elsewhere, you
can prove later that neither this entry nor an earlier one was changed.

SQLite writes the newest transactions to its write-ahead log. If a frame of the write-ahead log is damaged, SQLite
silently drops this frame and all later ones. The file `audit.head` makes this loss visible. It has the number and the
hash of the last audit entry, and is rewritten after each commit that adds an entry. At every start, the server looks
for this entry in the audit log:

    found, with the same hash        nothing is lost; later entries were committed just before the server was killed
    not found: the log is shorter    the last entries are lost; with durability `process`, a power loss may cause this
    found, with another hash         journal and `audit.head` are from different runs, or from different times

There is one exception: the old `audit.head` of a loss that is already known. A start that finds a loss adds an entry
`lost`, which repeats the hash in `audit.head`. If the server is killed before it rewrites `audit.head`, the next start
finds this hash in the entry `lost`, and accepts the old file, even if the entry with its number has another hash now.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.errors import StateCorrupt, StoreError
from atoll.json_files import NoteDamaged, chain_hash, seal, unseal
from atoll.posix import NAMED_FILE, OwnedFile, open_own, read_own, write_at
from atoll.store.journal import Journal, KeptValue
from atoll.store.journal_tables import AUDIT, AuditRow, utc_text

START = "0" * 64


class AuditLog:
    """Adds entries to the audit log in the journal (the server's database), and updates the file `audit.head`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._end = KeptValue(journal, lambda: tip(journal.rows))
        self._head: AuditHeadFile | None = None
        self._noted: tuple[int, str] | None = None  # (entries, last hash) in the head file

    def append(self, what: str, **detail: Any) -> None:
        """Add an entry to the audit log. Call it inside a transaction.

        Args:
            what: kind of the entry, such as "accepted".
            detail: values of the entry, stored as JSON.
        """
        entries, previous = self._end.get()
        seq, stamp, text = entries + 1, utc_text(), json.dumps(detail, sort_keys=True)
        digest = chain_hash(seq, stamp, what, text, previous)
        self._journal.insert(AUDIT, AuditRow(seq, stamp, what, text, previous, digest))
        self._end.set((seq, digest))

    def keep_head(self, head: AuditHeadFile) -> None:
        """Write the last entry's number and hash to `head` now, and after each later commit that adds an entry."""
        self._head = head
        self._note_end()
        self._journal.committed = self._note_end

    def close(self) -> None:
        """Close the file `audit.head`."""
        if self._head is not None:
            self._head.close()

    def _note_end(self) -> None:
        end = self._end.get()
        if end != self._noted and self._head is not None:
            self._noted = end
            self._head.write(*end)


Query = Callable[..., list[tuple[Any, ...]]]
"""A function that runs an SQL query with the given values and returns all rows, such as `Journal.rows`."""


LOG = logging.getLogger("atoll.server")

NAME = "audit.head"
_BYTES = 512
"""Size of `audit.head` in bytes. It fits into one disk sector and one page, so a write is all or nothing."""
_TRIES = 5
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class AuditHead:
    """Content of the file `audit.head`: the number and hash of the audit log's last entry when the file was written.

    Attributes:
        entries: number of entries in the audit log.
        last_hash: hash of the last entry.
        epoch: the journal's epoch, a number that rises at every start of the server.
        durability: the server's setting `disk.durability`.
        boot: Linux's boot id. If it differs from the current id, the machine has rebooted since the file was written.
    """

    entries: int
    last_hash: str
    epoch: int
    durability: str
    boot: str


class AuditHeadFile(OwnedFile):
    """The open file `audit.head` of a running server.

    Args:
        folder: the state directory, locked by the caller.
        durability: the server's setting `disk.durability`.
        epoch: the journal's epoch, a number that rises at every start of the server.

    Raises:
        StoreError: the file cannot be opened for writing.
    """

    def __init__(self, folder: Path, durability: str, epoch: int) -> None:
        self.path = folder / NAME
        self._durability, self._epoch, self._boot = durability, epoch, boot_id()
        self._failed = False
        try:
            self.fd = open_own(self.path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be opened for writing ({error.strerror}).",
                "Make it a plain file that this user may write, or move it away: the server writes it again.",
            ) from error

    def write(self, entries: int, last_hash: str) -> None:
        """Write the number and hash of the audit log's last entry to the file.

        If the write fails, log a warning, but only the first time. The file then still names an earlier entry,
        which the next start of the server accepts.
        """
        if self.fd < 0:
            return
        note = seal(asdict(AuditHead(entries, last_hash, self._epoch, self._durability, self._boot)))
        try:
            write_at(self.fd, f"{note:<{_BYTES - 1}}\n".encode(), 0)
        except OSError as error:
            if not self._failed:
                LOG.warning(
                    "%s cannot be written (%s), so a later loss of journal entries may go unnoticed. Check the disk.",
                    self.path,
                    error.strerror,
                )
            self._failed = True


def boot_id() -> str:
    """Return Linux's boot id; empty if the system has none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def read_head(folder: Path) -> AuditHead | None:
    """Return the content of `audit.head` in a state directory; None if there is no such file.

    Raises:
        NoteDamaged: the file cannot be read, or was changed since a server wrote it.
    """
    for attempt in range(1, _TRIES + 1):
        try:
            return AuditHead(**unseal(read_own(folder / NAME, NAMED_FILE)))  # its mode stays as it is
        except FileNotFoundError:
            return None
        except NoteDamaged:
            if attempt == _TRIES:  # a running server may be rewriting it at this moment
                raise
        except (OSError, TypeError) as error:
            raise NoteDamaged(str(error)) from error
    raise AssertionError("not reached")


def require_same_log(head: AuditHead, rows: Query, where: Path) -> tuple[int, int]:
    """Check that `audit.head` and the audit log belong together, and count the entries that the log has lost.

    Args:
        head: content of `audit.head`.
        rows: function that runs an SQL query on the journal (the server's database).
        where: state directory, for the error message.

    Returns:
        The number of entries in the audit log, and the number of entries that it has lost.

    Raises:
        StateCorrupt: the entry that `head` names has another hash in the log, and no entry `lost` explains this.
    """
    entries, _ = tip(rows)
    if _is_noted_as_lost(head, rows):
        return entries, 0
    if head.entries > entries:
        return entries, head.entries - entries
    found = rows("SELECT hash FROM audit WHERE seq = ?", head.entries) if head.entries else [(START,)]
    if found != [(head.last_hash,)]:
        raise StateCorrupt(
            f"{NAME} does not belong to the audit log of {where}: entry {head.entries} has another hash.",
            "Restore the whole directory, with all of its files, from one backup.",
        )
    return entries, 0


def _is_noted_as_lost(head: AuditHead, rows: Query) -> bool:
    noted = rows("SELECT detail_json FROM audit WHERE what = 'lost' AND seq <= ?", head.entries)
    return any(json.loads(detail)["last_hash"] == head.last_hash for (detail,) in noted)


def tip(rows: Query) -> tuple[int, str]:
    """Return the audit log's number of entries and the hash of its last entry, without checking the hash chain."""
    found = rows("SELECT seq, hash FROM audit ORDER BY seq DESC LIMIT 1")
    return (int(found[0][0]), str(found[0][1])) if found else (0, START)
