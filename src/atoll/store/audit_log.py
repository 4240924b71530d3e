"""The audit log: what each site submitted, what was decided, what version came of it, chained by hashes; and its head.

An entry is written in the transaction of the decision it records. An operator that notes the last hash somewhere else
(`atoll audit` prints it) can show later that nothing before it was changed.

The journal's end lies in SQLite's write-ahead log, and SQLite drops what follows a damaged frame of it without a word.
So the head file notes the end of the audit log. It is rewritten in place after each commit that adds an entry; it may
be behind the journal after a kill, and is ahead of it only if the journal has lost its end:

    entry and hash are in the log       nothing is lost; what follows them was committed just before a kill
    the log ends before                 the end is lost: a power loss may do that with durability `process`
    the log has another hash there      journal and file are of different runs, or of different moments

Except if an entry `lost` of the log names the file's hash: a start has found and noted that loss, and was itself killed
before it rewrote the file. Its entry may have the very number of one that was lost.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from atoll.errors import StateCorrupt, StoreError
from atoll.json_files import NoteDamaged, seal, unseal
from atoll.posix import OwnedFile, write_at
from atoll.store.journal import Journal
from atoll.store.journal_tables import AUDIT, AuditRow, now

START = "0" * 64


class AuditLog:
    """The audit log of a journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._end: tuple[int, str] | None = None
        self._end_as_of = journal.undone
        self._head: AuditHeadFile | None = None
        self._noted: tuple[int, str] | None = None  # the end that the head file has

    def append(self, what: str, **detail: Any) -> None:
        """Add an entry, inside a transaction."""
        entries, previous = self._known_end()
        seq, at, text = entries + 1, now(), json.dumps(detail, sort_keys=True)
        digest = hash_of(seq, at, what, text, previous)
        self._journal.insert(AUDIT, AuditRow(seq, at, what, text, previous, digest))
        self._end = seq, digest

    def keep_head(self, head: AuditHeadFile) -> None:
        """Note the log's end in its head file, now and after each commit that moves it."""
        self._head = head
        self._note_end()
        self._journal.committed = self._note_end

    def close(self) -> None:
        """Let go of the head file."""
        if self._head is not None:
            self._head.close()

    def _known_end(self) -> tuple[int, str]:
        if self._end is None or self._end_as_of != self._journal.undone:
            self._end, self._end_as_of = tip(self._journal.rows), self._journal.undone
        return self._end

    def _note_end(self) -> None:
        end = self._known_end()
        if end != self._noted and self._head is not None:
            self._noted = end
            self._head.write(*end)


Query = Callable[..., list[tuple[Any, ...]]]
"""(SQL, *values) → every row: `Journal.rows`, or that of a reader beside the server."""


def hash_of(seq: int, at: str, what: str, detail_json: str, previous: str) -> str:
    """Return the hash that an entry must have."""
    return blake3(json.dumps([seq, at, what, detail_json, previous]).encode()).hexdigest()


LOG = logging.getLogger("atoll.server")

NAME = "audit.head"
_BYTES = 512
"""Within one sector and one page: the file is written whole or not at all."""
_TRIES = 5
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class AuditHead:
    """The end of an audit log.

    Attributes:
        entries: how many it has.
        last_hash: of the last entry.
        epoch: of the journal.
        durability: that the server was started with.
        boot: id of the system's start; another id means that the machine was started again since.
    """

    entries: int
    last_hash: str
    epoch: int
    durability: str
    boot: str


class AuditHeadFile(OwnedFile):
    """The head file of a running server.

    Args:
        folder: the state directory, locked by the caller.

    Raises:
        StoreError: it cannot be opened for writing.
    """

    def __init__(self, folder: Path, durability: str, epoch: int) -> None:
        self.path = folder / NAME
        self._durability, self._epoch, self._boot = durability, epoch, boot_id()
        self._failed = False
        try:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be opened for writing ({error.strerror}).",
                "Make it a plain file that this user may write, or move it away: it is made again.",
            ) from error

    def write(self, entries: int, last_hash: str) -> None:
        """Note that the audit log ends here. A failure leaves the earlier end, which is no error at a start."""
        if self.fd < 0:
            return
        note = seal(asdict(AuditHead(entries, last_hash, self._epoch, self._durability, self._boot)))
        try:
            write_at(self.fd, f"{note:<{_BYTES - 1}}\n".encode(), 0)
        except OSError as error:
            if not self._failed:
                LOG.warning(
                    "%s cannot be written (%s): a loss of the journal's end may go unnoticed.",
                    self.path,
                    error.strerror,
                )
            self._failed = True


def boot_id() -> str:
    """Return the id of this start of the system; empty if the system has none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def read_head(folder: Path) -> AuditHead | None:
    """Read the head file of a state directory; None if there is none.

    Raises:
        NoteDamaged: it is not what was written.
    """
    for attempt in range(1, _TRIES + 1):
        try:
            return AuditHead(**unseal((folder / NAME).read_bytes()))
        except FileNotFoundError:
            return None
        except NoteDamaged:
            if attempt == _TRIES:  # a running server may be rewriting it at this moment
                raise
        except (OSError, TypeError) as error:
            raise NoteDamaged(str(error)) from None
    raise AssertionError("not reached")


def require_same_log(head: AuditHead, rows: Query, where: Path) -> tuple[int, int]:
    """Compare the head file with the log, as far as the log goes.

    Returns:
        Entries of the log, and how many of the file's entries the log lacks.

    Raises:
        StateCorrupt: the log has another entry in its place, and has not noted a loss.
    """
    entries, _ = tip(rows)
    if _is_noted_as_lost(head, rows):
        return entries, 0
    if head.entries > entries:
        return entries, head.entries - entries
    found = rows("SELECT hash FROM audit WHERE seq = ?", head.entries) if head.entries else [(START,)]
    if found != [(head.last_hash,)]:
        raise StateCorrupt(
            f"The audit log of {where} is not the one that {NAME} belongs to: its entry {head.entries} is another one.",
            "Restore the whole directory, with all of its files, from one backup.",
        )
    return entries, 0


def _is_noted_as_lost(head: AuditHead, rows: Query) -> bool:
    noted = rows("SELECT detail_json FROM audit WHERE what = 'lost' AND seq <= ?", head.entries)
    return any(json.loads(detail)["last_hash"] == head.last_hash for (detail,) in noted)


def tip(rows: Query) -> tuple[int, str]:
    """Return the number of entries and the last hash, unchecked."""
    found = rows("SELECT seq, hash FROM audit ORDER BY seq DESC LIMIT 1")
    return (int(found[0][0]), str(found[0][1])) if found else (0, START)
