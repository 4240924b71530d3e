"""The read-only way into a state directory, whether its run is living, has ended, was killed or is damaged.

The journal is read in one transaction, so that all rows are of one moment while a server goes on. Nothing in the state
directory changes, and no file is left behind. SQLite can do that by itself only if both of its files beside the journal
exist and this user may use them: else it would make them, and leave them there. In all other cases, such as a run that
was stopped or a folder on a read-only disk, the journal and its log are copied into a temporary folder and read there.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import socket
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from atoll.errors import AtollError, BadRequest, Gone, StateCorrupt, StoreError, UsageError, no_more_files
from atoll.json_files import NoteDamaged
from atoll.posix import NAMED_FILE, file_error, open_own, read_own, remove_left_behind
from atoll.protocol.site_curves import SiteCurves, SiteCurvesQuery
from atoll.protocol.status_messages import KEPT, Recorded, Status
from atoll.store import journal_tables, verify_journal
from atoll.store.audit_log import NAME, AuditHead, read_head
from atoll.store.file_slots import READ_BYTES, STATE, VERSION, region_digest, slot_path
from atoll.store.journal import JOURNAL, require_journal, require_unchanged
from atoll.store.journal_tables import (
    AuditRow,
    Controls,
    IdentityRow,
    MemberRow,
    RoundState,
    Row,
    RunRow,
    Table,
    VersionRow,
    controls,
)
from atoll.store.kept_events import events_after
from atoll.store.migrations import migrated_copy
from atoll.store.round_summaries import Summary, first_values, site_curves, summaries, table_rows, with_sites
from atoll.tensors.fragments import split_of
from atoll.tensors.layout import Layout, version_layout
from atoll.tensors.schema import Schema

if TYPE_CHECKING:
    from atoll.blobs.model_file import FragmentFiles
    from atoll.protocol import run_events
    from atoll.protocol.run_events import EventPage, EventQuery

COPIES = 10
"""Number of times that journal and log are copied until both copies are of one moment."""
LOG_HEADER_BYTES = 32
WITH_INDEX = "&readonly_shm=1"
"""Else SQLite would write the index of a killed run anew."""
TEMPORARY = f"atoll-journal-{socket.gethostname()}_"  # several machines may share the folder of temporary files
RESTORE = "Restore the directory from a backup."


class Head(NamedTuple):
    """A fragment's newest version, and the newest one that survives a power loss; None: there is none."""

    fragment: int
    version: int | None
    durable: int | None


class StateReader:
    """The rows of a run's journal at one moment.

    Args:
        db: connection to the journal, or to a copy of it, in a transaction.
        path: path of the journal.
    """

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db, self.path = db, path

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return every row of a query."""
        return self._db.execute(sql, values).fetchall()

    def select(self, table: Table[Row], how: str = "") -> list[Row]:
        """Return the rows of a table. `how` is SQL after the table's name."""
        return [table.read(row) for row in self.rows(f"{table.select} {how}")]

    def require_unchanged(self) -> None:
        """Check that every row is as the server wrote it.

        Raises:
            StateCorrupt: a row is damaged or was changed.
        """
        require_unchanged(self._db, self.path)

    def changed(self) -> list[str]:
        """Return, in words, all that is not as the server wrote it: pages of the file, definitions of tables, rows."""
        try:
            pages = [answer for (answer,) in self.rows("PRAGMA integrity_check") if answer != "ok"]
            definition = journal_tables.changed_definition(self._db)
            rows = journal_tables.changed_rows(self._db, journal_tables.CHECKED)
            return [*pages, *filter(None, [definition]), *rows]
        except sqlite3.Error as error:
            raise StateCorrupt(f"{self.path} cannot be read: {error}.", RESTORE) from error

    def run(self) -> RunRow:
        """Return the row of the run.

        Raises:
            UsageError: no run was begun in the directory.
        """
        found = self.select(journal_tables.RUNS)
        if not found:
            raise no_run(self.path.parent)
        return found[0]

    def meta(self) -> tuple[int, bool, str]:
        """Return the journal's epoch, whether the run's rounds have ended, and why it has failed ("": it has not)."""
        ((epoch, finished, failed),) = self.rows("SELECT epoch, finished, failed FROM meta")
        return epoch, bool(finished), failed

    def controls(self) -> Controls:
        """Return what the admin has asked of the run."""
        return controls(self.rows)

    def heads(self) -> list[Head]:
        """Return the newest version of each fragment, in the order of the fragments."""
        return [
            Head(*row) for row in self.rows("SELECT fragment, version, durable_version FROM heads ORDER BY fragment")
        ]

    def versions(self) -> list[VersionRow]:
        """Return the versions that the server still has as files, in the order of the fragments."""
        return self.select(journal_tables.VERSIONS, "ORDER BY fragment")

    def round_states(self) -> dict[int, RoundState]:
        """Return the state, `open` or `frozen`, of each fragment's round; a fragment without one is not in the dict."""
        return {
            each.fragment: each.state
            for each in self.select(journal_tables.ROUNDS, "WHERE state IN ('open', 'frozen')")
        }

    def members(self) -> list[MemberRow]:
        """Return the sites that have ever joined, in the order of their names."""
        return self.select(journal_tables.MEMBERS, "ORDER BY site")

    def identities(self) -> list[IdentityRow]:
        """Return what is known of the credentials of sites."""
        return self.select(journal_tables.IDENTITIES)

    def ended_workflows(self) -> set[int]:
        """Return the places of the workflows that have ended, in the run's list of workflows."""
        return {place for (place,) in self.rows("SELECT place FROM workflows")}

    def counter(self, name: str) -> int:
        """Return one of the run's totals, such as "deaths"."""
        return int(dict(self.rows("SELECT name, value FROM counters")).get(name, 0))

    def events_after(self, number: int, limit: int) -> list[run_events.Happened]:
        """Return the events after `number`, at most `limit`, in order, with the whole summaries of rounds.

        Raises:
            StateCorrupt: a row is damaged.
        """
        read = _reader_of_events().validate_json
        found = events_after(self.rows, number, limit)
        return [read(json.dumps(self._whole_event(each, text))) for each, text in found]

    def _whole_event(self, number: int, text: str) -> dict[str, Any]:
        """Return an event of the journal as the server's stream has it: with its number, and a round with its sites."""
        event = {"number": number, **json.loads(text)}
        if (summary := event.get("summary")) is not None:
            event["summary"] = json.loads(with_sites(self.rows, event["fragment"], json.dumps(summary)))
        return event

    def summaries(self, limit: int) -> list[Summary]:
        """Return the summaries of the last `limit` rounds that have ended, oldest first."""
        return summaries(self.rows, limit)

    def first_values(self) -> dict[str, Recorded]:
        """Return the first recorded value of each metric, in rounds of fragment 0."""
        return first_values(self.rows)

    def site_curves(self, asked: SiteCurvesQuery) -> SiteCurves:
        """Return one number of the sites' updates over the rounds.

        Raises:
            BadRequest: there is no such fragment, site or range.
            StateCorrupt: a row is damaged.
        """
        return site_curves(self.rows, asked)

    def table_rows(self) -> Iterator[str]:
        """Yield the lines of a CSV file with all updates of all rounds; see `round_summaries.table_rows`."""
        return table_rows(lambda: nullcontext(self.rows))

    def events(self) -> list[dict[str, Any]]:
        """Return what the journal keeps of what happened in the run, oldest first, as the server's stream has it.

        Rounds have their sites. Damaged events are left out.
        """
        rows = self.rows("SELECT number, of_site, event_json, row_check FROM events ORDER BY number")
        return [
            self._whole_event(number, text)
            for number, of_site, text, check in rows
            if journal_tables.row_check(number, of_site, text) == check
        ]

    def event_page(self, asked: EventQuery) -> EventPage:
        """Return the events after a number.

        Raises:
            Gone: there is no such event, or those that follow it are no longer kept.
            StateCorrupt: a row is damaged.
        """
        from atoll.store.event_pages import event_page

        return event_page(self.rows, asked)

    def audit_after(self, seq: int) -> list[AuditRow]:
        """Return the entries of the audit log after entry `seq`, in their order. Their hashes are not checked."""
        return [
            journal_tables.AUDIT.read(row)
            for row in self.rows(f"{journal_tables.AUDIT.select} WHERE seq > ? ORDER BY seq", seq)
        ]


@functools.cache
def _reader_of_events() -> TypeAdapter[run_events.Happened]:
    from atoll.protocol.run_events import RunEvent  # a slow import, which the status does not need

    return TypeAdapter(RunEvent)


# -- open a state directory


def no_run(state_dir: Path) -> UsageError:
    """Return the error for a directory that contains no run."""
    return UsageError(f"There is no run in {str(state_dir)!r}.", "Give the run file's disk.state_dir.")


def no_model(where: str) -> UsageError:
    """Return the error for an export of a run that has no model. `where` is its state directory or address."""
    return UsageError(f"The run at {where} has only workflows, no model.", "Export from a run that trains a model.")


def has_run(state_dir: Path) -> bool:
    """Return whether a directory has a journal."""
    return (state_dir / JOURNAL).exists()


def require_run(state_dir: Path) -> Path:
    """Return the path of the journal in a state directory.

    Raises:
        UsageError: the directory contains no run.
        StoreError: this user has no permission to read the directory.
    """
    with permitted(state_dir):
        if not has_run(state_dir):
            raise no_run(state_dir)
    return state_dir / JOURNAL


@contextmanager
def permitted(state_dir: Path) -> Iterator[None]:
    """In the `with` block, turn an OSError about a file of a state directory into an error with a remedy.

    Args:
        state_dir: the state directory that the block reads.

    Raises:
        StoreError: a file is a link, a named pipe, a socket or a device. Or this process may open no more files. Or
            this user has no permission to read it; the message then says that nothing is damaged.
        StateCorrupt: a file is missing, cannot be read, or is a folder.
    """
    try:
        yield
    except PermissionError as error:
        raise _unreadable(error.filename or state_dir) from error
    except OSError as error:
        if not error.filename or not Path(error.filename).is_relative_to(state_dir):
            raise
        if error.errno in (errno.ELOOP, errno.ENXIO) or no_more_files(error):  # it is no file, or not opened
            raise file_error(error, error.filename) from error
        raise StateCorrupt(
            f"{error.filename} cannot be read ({error.strerror}).",
            "Restore the file from a backup, or connect its disk. If that is impossible, start the server once: it "
            "falls back to an undamaged version, if there is one.",
        ) from error


def _unreadable(path: Path | str) -> StoreError:
    return StoreError(
        f"This user has no permission to read {path}.",
        "Nothing is damaged. Run the command as the owner of the file, or give this user read permission.",
    )


@contextmanager
def open_state(state_dir: Path, *, in_server: bool = False) -> Iterator[StateReader]:
    """Open the journal of a state directory, and yield its rows of this moment. A running server is not held up.

    Args:
        state_dir: the state directory.
        in_server: whether this process is the server that has the journal open. Then it is never copied: closing a
            copied file would end the process's locks on the journal.

    Raises:
        UsageError: the directory contains no run.
        StoreError: this user has no permission to read a file, a file is a link or a pipe, or there is no space for a
            copy of the journal.
        StateCorrupt: the journal is damaged, or is that of another program or of another version of Atoll.
    """
    path = require_run(state_dir)
    with ExitStack() as stack:
        try:
            with permitted(state_dir):
                journal_tables.require_regular_files(path)
                db = _begun(path, WITH_INDEX) if in_server else _connected(path)
            stack.callback(db.close)
            version = require_journal(db, path)
            if not version:
                raise StateCorrupt(f"{path} is empty.", RESTORE)
            if version < journal_tables.SCHEMA_VERSION:
                db = stack.enter_context(closing(migrated_copy(db, version)))
            yield StateReader(db, path)
        except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite's message may quote bytes that are damaged
            raise StateCorrupt(f"{path} cannot be read: {error}.", RESTORE) from error


def _connected(path: Path) -> sqlite3.Connection:
    """Connect to a journal, or to a copy of it, and begin a transaction."""
    _, log, index, _ = journal_tables.files_of(path)
    if _fit(log, index):
        with suppress(sqlite3.OperationalError):  # this user may not use the index; or the disk cannot lock files
            return _begun(path, WITH_INDEX)
    try:
        remove_left_behind(tempfile.gettempdir(), TEMPORARY)
        with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY}{os.getpid()}-") as folder:
            _copy(path, log, Path(folder))
            return _begun(Path(folder) / path.name)  # the open files outlive their names, and go with this process
    except OSError as error:
        if error.filename and Path(error.filename).is_relative_to(path.parent):
            raise
        raise StoreError(
            f"{path} cannot be copied into the folder of temporary files ({error.strerror}).",
            "Free some space there, or set TMPDIR to another folder.",
        ) from error


def _fit(log: Path, index: Path) -> bool:
    """Return whether the index is of this log: both have the same salt. Else SQLite would try to read it for 10 s."""
    try:
        with open(_open(log), "rb") as log_file, open(_open(index), "rb") as index_file:
            return log_file.read(24)[16:] == index_file.read(40)[32:]
    except (FileNotFoundError, PermissionError):  # without the index, the journal and its log are copied
        return False


def _begun(path: Path, options: str = "") -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro{options}", uri=True, isolation_level=None)
    try:
        db.execute("BEGIN")
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()  # BEGIN alone opens no file
    except BaseException:
        db.close()
        raise
    return db


def _copy(path: Path, log: Path, folder: Path) -> None:
    """Copy a journal and its log into a folder, so that both are of one moment.

    What a checkpoint changes in the database meanwhile is in the log, too, and counts there. So the copies agree if the
    log was copied after the database, and SQLite has not begun to overwrite the log from its first byte.

    Raises:
        OSError: a file cannot be read or written.
        StoreError: a server has overwritten the log during each copy.
    """
    for _ in range(COPIES):
        before = _moment(path, log)
        with open(_open(path), "rb") as file, open(folder / path.name, "wb") as copy:
            shutil.copyfileobj(file, copy, READ_BYTES)
        (folder / log.name).unlink(missing_ok=True)  # of an earlier copy; there may be no log any more
        with suppress(FileNotFoundError), open(_open(log), "rb") as file, open(folder / log.name, "wb") as copy:
            shutil.copyfileobj(file, copy, READ_BYTES)
        if _moment(path, log) == before:
            return
    raise StoreError(
        f"A server has changed {path} each of the {COPIES} times that it was copied.",
        "Run the command again later; or run it as the owner of the folder: that needs no copy.",
    )


def _moment(path: Path, log: Path) -> tuple[int | bytes, ...]:
    """Return values that differ once SQLite overwrites the log of a journal, or writes a journal that has no log."""
    found = os.lstat(path)
    with suppress(FileNotFoundError), open(_open(log), "rb") as file:
        if header := file.read(LOG_HEADER_BYTES):  # with random values, new each time that SQLite writes it
            return found.st_ino, header
    return found.st_ino, found.st_size, found.st_mtime_ns


def _open(path: Path) -> int:
    return open_own(path, mode=NAMED_FILE)  # with this mode, a file that others may read stays so


# -- the status, the audit log, and the files of a version


def saved_status(state_dir: Path) -> tuple[Status, float] | None:
    """Return the status that a server saved last, and when (Unix time); None if there is none, or if it is damaged."""
    try:
        path = state_dir / KEPT
        return Status.model_validate_json(read_own(path, NAMED_FILE)), path.stat().st_mtime
    except (OSError, ValidationError):
        return None


def recorded_failure(state_dir: Path) -> str:
    """Return why the run in a state directory has failed for good.

    Return an empty text if it has not failed, if a later start succeeded, or if the journal cannot be read.
    """
    with suppress(OSError, AtollError), open_state(state_dir) as state:
        return state.meta()[2]
    return ""


class CheckedAudit(NamedTuple):
    """An audit log in which nothing was changed: run, number of entries, the last one's hash, its last entries."""

    run: str
    entries: int
    last_hash: str
    last: list[AuditRow]


def checked_audit(state_dir: Path, last: int) -> CheckedAudit:
    """Check a run's audit log, and compare the journal with it.

    Args:
        state_dir: the state directory of a run.
        last: how many of the last entries to return.

    Raises:
        UsageError: no run was begun in the directory.
        StoreError: this user has no permission to read the directory.
        StateCorrupt: an entry was changed or removed, or the journal is damaged.
    """
    head = _audit_head(state_dir)
    with open_state(state_dir) as state:
        state.require_unchanged()
        entries, digest = verify_journal.everything(state.rows, state_dir, head)
        return CheckedAudit(state.run().run_id, entries, digest, state.audit_after(max(0, entries - last)))


def compared_audit(state_dir: Path) -> tuple[int, str]:
    """Compare the audit log with the rows of the journal, of which some may not match their checksums.

    Returns:
        The number of entries, and the last entry's hash.

    Raises:
        StateCorrupt: an entry was changed or removed, or a row differs.
    """
    head = _audit_head(state_dir)
    with open_state(state_dir) as state:
        return verify_journal.everything(state.rows, state_dir, head)


def _audit_head(state_dir: Path) -> AuditHead | None:
    """Return the content of `audit.head`. Read it before the journal, because a running server may write both."""
    require_run(state_dir)
    try:
        return read_head(state_dir)
    except NoteDamaged as error:
        if isinstance(error.__cause__, PermissionError):
            raise _unreadable(state_dir / NAME) from None
        raise StateCorrupt(
            f"{state_dir / NAME}, the file with the audit log's last hash, is damaged: {error}.",
            "Check the disk for errors. The server writes this file again at its next start.",
        ) from None


@dataclass(frozen=True)
class VersionFiles:
    """The open files of a version. Their digests are right.

    Attributes:
        number: number of the version; the lowest one if the fragments' newest versions differ.
        schema: schema of the whole model.
        fragments: the files of each fragment.
        require_kept: raises `Gone` if the server has deleted the version meanwhile. Call it after the files were read.
    """

    number: int
    schema: Schema
    fragments: Sequence[FragmentFiles]
    require_kept: Callable[[], None]


StateCheck = Callable[[int, Layout, Sequence[bytes], bool], bool]
"""Return whether an outer state has its digests: descriptor, version's layout, digests, whether chunks are stepped."""


@contextmanager
def open_version(state_dir: Path, number: int | None, is_whole: StateCheck) -> Iterator[VersionFiles]:
    """Open the files of a version, and compare them with their digests.

    Args:
        state_dir: the state directory of a run.
        number: number of the version; None: the newest.
        is_whole: compares an outer state with its digests.

    Raises:
        UsageError: the directory contains no run, or the run has no model.
        Gone: the version or its fp32 values were deleted; or the run keeps its versions in memory or at the sites of a
            swarm.
        StateCorrupt: the journal or a file of the version is damaged.
    """
    with open_state(state_dir) as state:
        state.require_unchanged()
        run = state.run()
        heads = {each.fragment: each.version for each in state.heads() if each.version is not None}
        wanted = heads if number is None else dict.fromkeys(heads, number)
        rows = [row for row in state.versions() if row.version == wanted.get(row.fragment, -1) <= heads[row.fragment]]
    split, settings = split_of(json.loads(run.schema_json)), json.loads(run.settings_json)
    if split.schema.is_nothing:
        raise no_model(str(state_dir))
    newest = max(heads.values(), default=0)
    if settings["swarm.enabled"] and newest:
        raise Gone(
            f"The run is a swarm: version {newest} is stored at its sites, not in {state_dir}.",
            "While the server and the sites run, export with --server. After the run, take model.safetensors "
            "from a site's folder: .atoll/SITE, or ATOLL_DIR/SITE.",
        )
    if not settings["disk.in_files"]:
        raise Gone("The run keeps its versions in memory, not on disk.", "Use --server, or a file in exports/.")
    if len(rows) < split.count:
        raise Gone(
            f"{state_dir} does not contain version {newest if number is None else number}.",
            f"Its newest version is {newest}; disk.export_every keeps older ones as files in exports/.",
        )

    def require_kept() -> None:
        # a server deletes a version's row before it overwrites the version's file
        with open_state(state_dir) as state:
            stored = set(state.versions())
        if not stored.issuperset(rows):
            raise Gone("The running server deleted this version during the export.", "Export again.")

    with ExitStack() as stack:
        try:
            with permitted(state_dir):
                files = [
                    _version_files(state_dir / "slots", row, schema, settings, is_whole, stack)
                    for row, schema in zip(rows, split.schemas, strict=True)
                ]
        except StateCorrupt:
            require_kept()
            raise
        yield VersionFiles(min(row.version for row in rows), split.schema, files, require_kept)


def _version_files(
    folder: Path, row: VersionRow, schema: Schema, settings: dict[str, Any], is_whole: StateCheck, stack: ExitStack
) -> FragmentFiles:
    """Open the files of a fragment's version and compare them with their digests. `stack` closes the files."""
    layout = version_layout(schema, int(settings["network.part_bytes"]), int(settings["model.ranks"]))
    path = slot_path(folder, VERSION, row.fragment, row.slot)
    file = _kept_open(path, stack)
    if [region_digest(file, ((part.start, part.nbytes),)) for part in layout.parts] != list(row.part_digests):
        raise _damaged(path)
    if settings["aggregation.download_codec.name"] == "none" or not row.state_digests:
        return layout, file, None
    if row.state_slot is None:
        raise Gone(f"The fp32 values of version {row.version} were deleted.", "Export the newest version.")
    path = slot_path(folder, STATE, row.fragment, row.state_slot)
    masters = _kept_open(path, stack)
    in_chunks = settings["algorithm.outer_optimizer"]["granularity"] == "chunk"
    with suppress(BadRequest):  # the file's header is damaged
        if is_whole(masters, layout, row.state_digests, in_chunks):
            return layout, file, masters
    raise _damaged(path)


def _kept_open(path: Path, stack: ExitStack) -> int:
    fd = _open(path)
    stack.callback(os.close, fd)
    return fd


def _damaged(path: Path) -> StateCorrupt:
    return StateCorrupt(
        f"{path} is damaged: its digest differs.", "Start the server once: it falls back to an undamaged version."
    )
