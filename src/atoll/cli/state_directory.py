"""Read a run's state directory while its server is down or running. Nothing here takes a lock or writes."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atoll.errors import StateCorrupt, StoreError, UsageError
from atoll.posix import file_error, read_own
from atoll.protocol import routes, status_messages
from atoll.store import journal_tables
from atoll.store.caller_tokens import stored_tokens
from atoll.store.journal import JOURNAL
from atoll.tensors.schema import Schema
from atoll.transport.tls import Token

HISTORY = 20
AS_STORED = "as read from this directory; if no server runs, `atoll server` continues the run"
UNDER_WAY = "was under way; if no server runs, `atoll server` "
PHASES = {"open": "open", "frozen": "closing"}


def journal_of(state_dir: Path) -> Path:
    """Return the path of the journal (the server's database) in a state directory.

    Raises:
        UsageError: the directory contains no run.
        StoreError: this user has no permission to read the directory.
    """
    path = state_dir / JOURNAL
    with permitted(state_dir):
        if not path.exists():
            raise no_run(state_dir)
    return path


@contextmanager
def permitted(state_dir: Path) -> Iterator[None]:
    """In the `with` block, turn an OSError about a file of a state directory into an error with a remedy.

    Args:
        state_dir: the state directory that the block reads.

    Raises:
        StoreError: a file is a link, a named pipe, a socket or a device. Or this user has no permission to read it; the
            message then says that nothing is damaged.
        StateCorrupt: a file is missing, cannot be read, or is a folder.
    """
    try:
        yield
    except PermissionError as error:
        raise unreadable(error.filename or state_dir) from error
    except OSError as error:
        if not error.filename or not Path(error.filename).is_relative_to(state_dir):
            raise
        if error.errno in (errno.ELOOP, errno.ENXIO):  # it is no file
            raise file_error(error, error.filename) from error
        raise StateCorrupt(
            f"{error.filename} cannot be read ({error.strerror}).",
            "Restore the file from a backup, or connect its disk. If that is impossible, start the server once: it "
            "falls back to an undamaged version, if there is one.",
        ) from error


def unreadable(path: Path | str) -> StoreError:
    """Return the error for a file that this user has no permission to read."""
    return StoreError(
        f"This user has no permission to read {path}.",
        "Nothing is damaged. Run the command as the owner of the file, or give this user read permission.",
    )


@contextmanager
def open_journal(state_dir: Path) -> Iterator[sqlite3.Connection]:
    """Open the journal (the server's database) read-only, in one transaction. A running server may still write to it.

    Raises:
        UsageError: the directory contains no run.
        StoreError: this user lacks a permission that reading the journal needs.
        StateCorrupt: the journal is damaged.
    """
    path = journal_of(state_dir)
    with permitted(state_dir):
        journal_tables.require_regular_files(path)
    try:
        with closing(journal_tables.connect_read_only(path)) as db:
            db.execute("BEGIN")
            yield db
    except (sqlite3.Error, UnicodeDecodeError) as error:  # UnicodeDecodeError: SQLite's message may quote damaged bytes
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
            if not os.access(path, os.R_OK):
                raise unreadable(path) from error
            if not os.access(state_dir, os.W_OK):
                raise StoreError(
                    f"SQLite cannot read {path} without permission to write into its folder.",
                    "Nothing is damaged. Run the command as the owner of the folder, or on a copy of the folder.",
                ) from error
        raise StateCorrupt(f"{path} cannot be read: {error}.", "Restore the directory from a backup.") from error


def require_unchanged(db: sqlite3.Connection, state_dir: Path) -> None:
    """Check that every row of the journal, the server's database, is as the server wrote it.

    Raises:
        StateCorrupt: a row is damaged or was changed.
    """
    if (changed := journal_tables.changed_row(db)) is not None:
        raise StateCorrupt(
            f"{journal_of(state_dir)} is damaged or was changed: the content of {changed} does not match its checksum.",
            "Restore the directory from a backup.",
        )


def no_run(state_dir: Path) -> UsageError:
    """Return the error for a directory that contains no run."""
    return UsageError(f"There is no run in {str(state_dir)!r}.", "Give the run file's disk.state_dir.")


def admin_token(state_dir: Path) -> Token | None:
    """Return the admin's token in a state directory; None if there is none, or this user may not read it."""
    with suppress(StoreError):
        if (text := stored_tokens(state_dir).get("admin")) is not None:
            return Token(text, str(state_dir / "admin.token"))
    return None


def stored_status(state_dir: Path) -> tuple[status_messages.Status, float]:
    """Return the status that the server saved last, and when (Unix time).

    The status is updated from the journal (a database), which may be newer. The time since a site's last request is
    counted up to now.

    Raises:
        UsageError: the directory contains no run.
        StoreError: this user lacks a permission that reading the journal needs.
        StateCorrupt: the journal is damaged. Its rows are checked only if the saved status cannot be read.
    """
    with open_journal(state_dir) as db:
        run = db.execute("SELECT run_id FROM run").fetchone()
        if run is None:
            raise no_run(state_dir)
        last, saved_at = _last_status(db, state_dir, run[0])
        return _status(db, last, max(0.0, time.time() - saved_at)), saved_at


def _last_status(db: sqlite3.Connection, state_dir: Path, run: str) -> tuple[status_messages.Status, float]:
    """Return the saved status, and when it was saved. If it cannot be read, return one with only the model's size."""
    path = state_dir / status_messages.KEPT
    try:
        status = status_messages.Status.model_validate_json(read_own(path))
        if status.run == run:
            return status, path.stat().st_mtime
    except (OSError, ValidationError):
        pass
    require_unchanged(db, state_dir)
    schema = Schema.from_json(json.loads(db.execute("SELECT schema_json FROM run").fetchone()[0]))
    status = status_messages.Status(
        run=run,
        protocol=routes.PROTOCOL,
        model_bytes=0 if schema.is_nothing else schema.model.nbytes,
        warnings=[f"{path} is missing or damaged, so the run's settings are not shown."],
    )
    return status, journal_of(state_dir).stat().st_mtime


def _status(db: sqlite3.Connection, last: status_messages.Status, age_s: float) -> status_messages.Status:
    epoch, ended, failed = db.execute("SELECT epoch, finished, failed FROM meta").fetchone()
    workflows = _workflows(db, last.workflows)
    # the journal marks a run as finished with its last round, but other workflows may follow
    is_over = all(each.state == "done" for each in workflows) if workflows else bool(ended)
    finished = is_over or (last.finished and last.epoch == epoch)
    counters = dict(db.execute("SELECT name, value FROM counters").fetchall())
    rounds = journal_tables.summaries(lambda sql, *values: db.execute(sql, values).fetchall(), HISTORY)
    return last.model_copy(
        update={
            "epoch": epoch,
            "finished": finished,
            "failed": failed or last.failed,
            "left_s": None,
            "fragments": _fragments(db, finished=finished or bool(ended)),
            "workflows": workflows,
            "workers": _workers(db, {worker.site: worker for worker in last.workers}, age_s, is_failed=bool(failed)),
            "history": [status_messages.RoundSummary.model_validate_json(each.summary_json) for each in rounds],
            "deaths": counters.get("deaths", 0),
            "refused": counters.get("refused", 0),
            "durable_version": db.execute("SELECT min(durable_version) FROM heads").fetchone()[0],
        }
    )


def _workflows(
    db: sqlite3.Connection, last: list[status_messages.WorkflowStatus]
) -> list[status_messages.WorkflowStatus]:
    """Return the workflows of a run. The first one that has not ended gets the state `running`."""
    ended = {place for (place,) in db.execute("SELECT place FROM workflows").fetchall()}
    found = [each.model_copy(update={"state": "done"}) if place in ended else each for place, each in enumerate(last)]
    place = next((place for place, each in enumerate(found) if each.state != "done"), None)
    if place is not None and found[place].state != "failed":
        how = "continues its rounds" if found[place].kind == "train" else "begins it again"
        update = {"state": "running", "quiet_s": 0.0, "detail": UNDER_WAY + how}
        found[place] = found[place].model_copy(update=update)
    return found


def _fragments(db: sqlite3.Connection, *, finished: bool) -> list[status_messages.FragmentStatus]:
    states = dict(db.execute("SELECT fragment, state FROM rounds WHERE state IN ('open', 'frozen')").fetchall())
    return [
        status_messages.FragmentStatus(
            fragment=fragment,
            version=version or 0,
            phase="finished" if finished else PHASES.get(states.get(fragment, ""), "gathering"),
            waiting_for=[],
            reason="" if finished else AS_STORED,
        )
        for fragment, version in db.execute("SELECT fragment, version FROM heads ORDER BY fragment").fetchall()
    ]


def _workers(
    db: sqlite3.Connection, last: dict[str, status_messages.WorkerStatus], age_s: float, *, is_failed: bool
) -> list[status_messages.WorkerStatus]:
    """Return the workers of a run. In a failed run, none is alive: each has ended, or was not told of the failure."""
    rows: list[tuple[Any, ...]] = db.execute(
        "SELECT site, host, state, joined_at, labels_json, detail, rounds_counted FROM members ORDER BY site"
    ).fetchall()
    found = ((last.get(row[0], status_messages.WorkerStatus(site=row[0])), row) for row in rows)
    return [
        worker.model_copy(
            update={
                "host": host,
                "state": (worker.state if worker.state == "ended" else "not told")
                if is_failed and state == "alive"
                else state,
                "joined_at": joined_at,
                "labels": json.loads(labels),
                "rounds": rounds,
                "error": detail if state != "left" else "",
                "last_heartbeat_s": worker.last_heartbeat_s + age_s,
            }
        )
        for worker, (_, host, state, joined_at, labels, detail, rounds) in found
    ]
