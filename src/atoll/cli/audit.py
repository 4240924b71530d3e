"""`atoll audit`: check that nothing in a run's audit log was changed later, and show its last entries.

The log records what each site submitted, what the server decided, and which versions the server made.
"""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli.state_directory import journal_of, open_journal, require_unchanged, unreadable
from atoll.errors import StateCorrupt, UsageError
from atoll.format_text import number_of, visible
from atoll.json_files import NoteDamaged
from atoll.store import verify_journal
from atoll.store.audit_log import NAME, read_head


def command(
    folder: Annotated[
        Path | None, typer.Argument(help="State directory of a server, running or stopped.", metavar="STATE_DIR")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option("--dir", help="Another way to give STATE_DIR.", show_default=False)
    ] = None,
    last: Annotated[int, typer.Option(min=0, help="How many of the last entries to print.")] = 20,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Check the audit log of a run, compare the server's journal with it, and show the last entries.

    Keep the printed hash of the last entry in another place: it changes if this entry or an earlier one is changed.
    """
    chosen = [each for each in (folder, state_dir) if each is not None]
    if len(chosen) != 1:
        raise UsageError(
            "Both STATE_DIR and --dir are given." if chosen else "No state directory is given.",
            "Name the directory: atoll audit STATE_DIR.",
        )
    count, digest, entries = read(chosen[0], last)
    if json:
        found = [{"seq": seq, "at": at, "what": what} | json_module.loads(detail) for seq, at, what, detail in entries]
        print(json_module.dumps({"entries": count, "last_hash": digest, "last": found}, indent=2))
        return
    for seq, at, what, detail in entries:
        text = ", ".join(f"{key} {value}" for key, value in json_module.loads(detail).items())
        print(visible(f"{seq:>6}  {at}  {what:<10} {text}"))
    print(f"{number_of(count, 'entry')} checked, none changed or removed; the last hash is {digest}")


def read(state_dir: Path, last: int) -> tuple[int, str, list[tuple[int, str, str, str]]]:
    """Check a run's audit log and journal. Return the log's length, its last hash and its last entries.

    Args:
        state_dir: the state directory of a run.
        last: how many entries to return.

    Returns:
        The number of all entries, the last hash, and for each of the last entries: number, time, kind, detail as JSON.

    Raises:
        UsageError: no run was begun in the directory.
        StoreError: this user has no permission to read the directory.
        StateCorrupt: an entry was changed or removed, or the journal is damaged.
    """
    journal_of(state_dir)
    try:
        head = read_head(state_dir)  # before the journal, because a running server may write both
    except NoteDamaged as error:
        if isinstance(error.__cause__, PermissionError):
            raise unreadable(state_dir / NAME) from None
        raise StateCorrupt(
            f"{state_dir / NAME}, the file with the audit log's last hash, is damaged: {error}.",
            "Check the disk for errors. The server writes this file again at its next start.",
        ) from None
    with open_journal(state_dir) as db:

        def rows(sql: str, *values: Any) -> list[tuple[Any, ...]]:
            return db.execute(sql, values).fetchall()

        require_unchanged(db, state_dir)
        count, digest = verify_journal.everything(rows, state_dir, head)
        entries = rows("SELECT seq, at, what, detail_json FROM audit WHERE seq > ? ORDER BY seq", max(0, count - last))
        return count, digest, [(int(seq), str(at), str(what), str(text)) for seq, at, what, text in entries]
