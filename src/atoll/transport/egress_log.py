"""The egress log of a site: one line of JSON for everything that leaves, in a chain of hashes.

    {"seq": 7, "at": "2026-01-31T12:00:00Z", "what": "part", "detail": {…}, "previous": "…", "hash": "…"}

    what       detail
    run        a run that the site takes part in: its server, algorithm, policy, and the key of its receipts
    part       a part of an update or object that is about to be sent: ticket or object, bytes, digest
    update     an update that is complete: ticket, digest, bytes, norm, filters, weight, names of metrics
    answer     an answer to a task: its name, bytes, digest
    object     a published object that is complete
    served     bytes that another process is about to download from this one
    sat out    a round that the site sits out
    messages   small messages since the entry before: kind → [count, bytes]
    receipt    what the server has signed: that it has an update, or that a version contains it
    torn       the end of a line that a crash has cut off was removed

Each line is on the disk before its bytes leave (`keep`): threads that wait for that share one fdatasync. After it, the
file `egress.head` names the last line, so that a missing end is noticed. After a crash, the last lines may name bytes
that were never sent, and lines may stand behind the head: neither is an error. Messages, and receipts of updates that
do not count yet, wait for the next line, or for the end of the process.

Several processes may write to the log: each appends under a lock. Bytes are those of bodies, without headers and TLS. A
part that is sent again is in the log again, and so is a range that another process downloads.
"""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from atoll.errors import StateCorrupt, StoreError, UsageError
from atoll.json_files import NoteDamaged, chain_hash, seal, unseal
from atoll.posix import (
    OwnedFile,
    file_error,
    folder_error,
    open_own,
    own_folder,
    read_at,
    read_own,
    replace_file,
    write_at,
)
from atoll.system_calls import lock, sync_data, unlock

NAME, HEAD = "egress.jsonl", "egress.head"
HEAD_BYTES = 512
"""Size of `egress.head`. It fits into one sector of a disk, so a write is all or nothing."""
START = "0" * 64
KEYS = {"seq", "at", "what", "detail", "previous", "hash"}


@dataclass(frozen=True)
class Entry:
    """An entry of the log."""

    seq: int
    at: str
    what: str
    detail: dict[str, Any]
    previous: str
    hash: str

    @classmethod
    def read(cls, line: bytes, before: Entry | None) -> Entry:
        """Return the entry in a line.

        Args:
            line: the line, without the line feed.
            before: the entry before; None: it is the first one.

        Raises:
            ValueError: the line is no entry, or does not follow the entry before.
        """
        values = json.loads(line)
        if not isinstance(values, dict) or values.keys() != KEYS or not isinstance(values["detail"], dict):
            raise ValueError("it is no entry")
        entry = cls(**values)
        if (entry.seq, entry.previous) != ((before.seq + 1, before.hash) if before else (1, START)):
            raise ValueError("it does not follow the line before")
        if entry.hash != entry.expected_hash:
            raise ValueError("it was changed")
        return entry

    @property
    def expected_hash(self) -> str:
        """The hash that the entry must have."""
        return chain_hash(self.seq, self.at, self.what, json.dumps(self.detail, sort_keys=True), self.previous)

    @property
    def line(self) -> bytes:
        """The line of the log."""
        return json.dumps(vars(self)).encode() + b"\n"


@dataclass
class Sent:
    """What has left for one run, by the log.

    Attributes:
        rounds: (fragment, round) of each update.
        nbytes: bytes of parts, answers and served files.
        key: public key of the run's receipts; empty if there is none.
        counted: tickets of updates for which the log has the receipt that a version contains them.
    """

    rounds: set[tuple[int, int]]
    nbytes: int
    key: str
    counted: set[int]


class EgressLog(OwnedFile):
    """The open log of this machine's user. Thread-safe; other processes may have it open, too.

    Args:
        folder: the folder of the log; made if it is missing.

    Attributes:
        path: the file.
        sent: id of a run → what has left for it.

    Raises:
        StoreError: the log cannot be opened or written.
        StateCorrupt: an entry was changed or removed.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.sent: dict[str, Sent] = defaultdict(lambda: Sent(set(), 0, "", set()))
        self._lock, self._keeping, self._offset = threading.RLock(), threading.Lock(), 0
        self._last: Entry | None = None
        self._head = OwnedFile()
        self._kept = 0  # number of entries that are on the disk, as far as this process knows
        self._broken: OSError | None = None  # lines may be lost: a later sync that succeeds does not bring them back
        try:
            own_folder(folder)
            self.fd = open_own(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            if isinstance(error.filename, str) and error.filename == str(self.path):
                raise file_error(error, self.path) from error
            raise folder_error(error, folder, "Let this user write it, or set log.folder in the policy.") from error
        with self._locked():
            pass

    def append(self, what: str, **detail: Any) -> Entry:
        """Add an entry, and return it when it is in the file.

        Raises:
            StoreError: the file cannot be written. What was to be sent must not be sent.
        """
        with self._locked():
            self._require_unbroken()
            return self._append(what, detail)

    def keep(self, entry: Entry) -> None:
        """Return when an entry is on the disk and `egress.head` names it or a later one. Then its bytes may leave.

        Raises:
            StoreError: the disk fails. What was to be sent must not be sent.
        """
        with self._keeping:  # a thread that has waited here finds its entry kept with that of another one
            if entry.seq <= self._kept:
                return
            self._require_unbroken()
            last = self._last or entry
            try:
                sync_data(self.fd)
                with self._locked():
                    if read_head(self.path)[0] < last.seq:
                        write_at(self._head.fd, _head_text(last.seq, last.hash), 0)
            except OSError as error:
                self._broken = error
            self._require_unbroken()
            self._kept = last.seq

    def keep_all(self) -> None:
        """Keep the last entry, and with it all others. It raises what `keep` does."""
        if self._last is not None:
            self.keep(self._last)

    def _require_unbroken(self) -> None:
        if self._broken is not None:
            raise file_error(self._broken, self.path) from self._broken

    def _append(self, what: str, detail: dict[str, Any]) -> Entry:
        last = self._last
        seq, previous = (last.seq + 1, last.hash) if last else (1, START)
        at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        entry = Entry(seq, at, what, json.loads(json.dumps(detail)), previous, "")
        entry = Entry(**{**vars(entry), "hash": entry.expected_hash})
        try:
            done = os.write(self.fd, entry.line)
        except OSError as error:
            raise file_error(error, self.path) from error
        if done < len(entry.line):
            raise StoreError(f"{self.path} has no space for an entry, so nothing is sent.", "Free disk space.")
        self._offset += done
        self._note(entry)
        return entry

    def _note(self, entry: Entry) -> None:
        """Take over an entry, of this process or of another one."""
        self._last, detail = entry, entry.detail
        sent = self.sent[str(detail.get("run", ""))]
        if entry.what == "update":
            sent.rounds.add((detail["fragment"], detail["round"]))
        elif entry.what in ("part", "answer", "served"):
            sent.nbytes += int(detail["bytes"])
        elif entry.what == "run":
            sent.key = detail.get("receipt_key") or sent.key
        elif entry.what == "receipt" and detail["state"] == "counted":
            sent.counted.add(detail["ticket"])

    def _locked(self) -> _Locked:
        return _Locked(self)

    def _catch_up(self) -> None:
        """Read the entries that other processes have added. Called with the lock."""
        size = os.fstat(self.fd).st_size
        head = self._begin(size) if self._head.fd < 0 else (0, START)
        if size < self._offset:
            raise StateCorrupt(f"{self.path} has become shorter.", "Restore it from a backup; nothing is sent.")
        if size == self._offset:
            return _require_end(self.path, head, self._last)
        data = bytearray(size - self._offset)
        read_at(self.fd, memoryview(data), self._offset)
        whole, feed, torn = bytes(data).rpartition(b"\n")
        for line in whole.split(b"\n") if feed else ():
            try:
                self._note(_headed(Entry.read(line, self._last), head))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise _changed(self.path, self._last, error) from None
        self._offset += len(whole) + len(feed)
        _require_end(self.path, head, self._last)
        if torn:
            os.ftruncate(self.fd, self._offset)
            self._append("torn", {"lost_bytes": len(torn)})
        return None

    def _begin(self, size: int) -> tuple[int, str]:
        """Open `egress.head`, or make it for a log without lines. Return its number of entries, and the last hash."""
        path = self.path.with_name(HEAD)
        if not size and not path.exists():
            replace_file(path, [_head_text(0, START)])
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)  # both names
            finally:
                os.close(folder)
        head = read_head(self.path)
        self._head.fd = open_own(path, os.O_WRONLY)
        return head


class _Locked:
    """Holds the lock of the log among threads and processes, and reads what others have added."""

    def __init__(self, log: EgressLog) -> None:
        self._log = log

    def __enter__(self) -> None:
        self._log._lock.acquire()
        try:
            lock(self._log.fd, wait=True)
            self._log._catch_up()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError):
                raise file_error(error, self._log.path) from error
            raise

    def __exit__(self, *_: object) -> None:
        if self._log.fd >= 0:
            unlock(self._log.fd)
        self._log._lock.release()


def read_log(path: Path) -> Iterator[Entry]:
    """Yield the entries of a log, each checked against the one before. An end that a crash has cut off is left out.

    Raises:
        UsageError: there is no log.
        StoreError: it cannot be read.
        StateCorrupt: an entry was changed or removed; the message names it.
    """
    try:
        fd = open_own(path)
    except FileNotFoundError:
        if path.with_name(HEAD).exists():
            _require_end(path, read_head(path), None)
        raise UsageError(
            f"There is no egress log at {path}.", "A site keeps one from its first run with a policy on."
        ) from None
    except OSError as error:
        raise file_error(error, path) from error
    last: Entry | None = None
    with open(fd, "rb") as file:
        lock(fd, shared=True, wait=True)  # a process may be writing the head
        head = read_head(path) if os.fstat(fd).st_size or path.with_name(HEAD).exists() else (0, START)
        unlock(fd)
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                last = _headed(Entry.read(line[:-1], last), head)
            except (ValueError, TypeError, RecursionError) as error:
                raise _changed(path, last, error) from None
            yield last
    _require_end(path, head, last)


def read_head(log: Path) -> tuple[int, str]:
    """Return what `egress.head` beside a log says: number of entries that were on the disk, and hash of the last one.

    Raises:
        StateCorrupt: it is missing or damaged.
    """
    path = log.with_name(HEAD)
    try:
        note = unseal(read_own(path))
        return int(note["entries"]), str(note["last_hash"])
    except (OSError, NoteDamaged, KeyError, ValueError, TypeError) as error:
        raise StateCorrupt(
            f"Nothing shows where the egress log {log} ends: {path} cannot be used ({error}).",
            f"Restore {NAME} and {HEAD} together from a backup. {_ANEW}",
        ) from None


def _head_text(entries: int, last_hash: str) -> bytes:
    return f"{seal({'entries': entries, 'last_hash': last_hash}):<{HEAD_BYTES - 1}}\n".encode()


def _headed(entry: Entry, head: tuple[int, str]) -> Entry:
    """Return an entry.

    Raises:
        ValueError: it is the one that the head names, but has another hash.
    """
    if entry.seq == head[0] and entry.hash != head[1]:
        raise ValueError(f"{HEAD} names another hash")
    return entry


def _require_end(path: Path, head: tuple[int, str], last: Entry | None) -> None:
    """Raise an error if a log ends before the entry that its head names."""
    if (ends := last.seq if last else 0) < head[0]:
        compare = "`atoll egress --compare` names the first update that is missing. " if last else ""
        raise StateCorrupt(
            f"The end of the egress log {path} is missing: it has {ends} lines, but {HEAD} names line {head[0]}.",
            f"Restore both from a backup. {compare}{_ANEW}",
        )


_ANEW = f"To begin a new log, move {NAME} and {HEAD} away."


def _changed(path: Path, before: Entry | None, error: Exception) -> StateCorrupt:
    number = before.seq + 1 if before else 1
    return StateCorrupt(
        f"Line {number} of the egress log {path} cannot be trusted: {error}.",
        "Compare it with a backup, or with the server's audit log. " + _ANEW,
    )
