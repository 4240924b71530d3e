"""What earlier runs of a site have left on its disk, and this one under another number of ranks: removed at a start.

SITE/RUN/                       the files of a worker that is not sharded, `files.py`
SITE/rank-R-of-N/RUN/           those of rank R of N
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from atoll.errors import AtollError
from atoll.sealed import NoteDamaged
from atoll.worker.exchange.base_and_outbox import OutboxNote, locked
from atoll.worker.json_notes import peek_note
from atoll.worker.log_lines import LOG, size

_OURS = re.compile(
    r"lock|(base|base-next)(-f\d+)?\.(safetensors|json|tmp)|(outbox|delta)(-f\d+)?\.(bin|json|tmp)|"
    r"(control|residual)(-f\d+)?(-[01]\.bin|\.json|\.tmp)|held\.(json|tmp)|"
    r"(version|state|spool)-\d+-\d+\.(safetensors|bin)"
)
"""Names of the files in a worker's folder."""

_RANK = re.compile(r"rank-(\d+)-of-(\d+)")


def folder_of(home: Path, run: str, share: tuple[int, int] | None) -> Path:
    """Of a worker's files.

    Args:
        home: the site's folder.
        share: rank and number of ranks, where the model is sharded: this rank's files are its own.
    """
    return (home / f"rank-{share[0]}-of-{share[1]}" if share else home) / run


def remove_earlier(current: Path, site: str, share: tuple[int, int] | None = None) -> None:
    """Remove what nothing refers to any more beside the folder `current`, and say so.

    That is what earlier runs have left, and other numbers of ranks, in this run, too: their shares of a base or an
    update are of no use to this division. A folder stays that a process has locked, whose outbox holds an update that
    no server has acknowledged, or that holds anything else than a worker's files. No link is followed: what lies
    elsewhere was put there by somebody.

    Args:
        share: as for `folder_of`; each rank removes other folders than the others.
    """
    count = freed_bytes = 0
    for parent in (current.parent, *_other_divisions(current, share)):
        for folder in sorted(parent.iterdir()):
            if folder == current or folder.is_symlink() or not (folder / "lock").is_file():
                continue
            with suppress(AtollError, OSError), locked(folder, site):
                nbytes = _remove(folder)
                if nbytes is not None:
                    count, freed_bytes = count + 1, freed_bytes + nbytes
        with suppress(OSError):  # there is more in it
            if parent != current.parent and _RANK.fullmatch(parent.name):
                parent.rmdir()
    if count:
        runs = "an earlier run" if count == 1 else f"{count} earlier runs"
        LOG.info("%s: removed the files of %s, %s: every update in them was sent", site, runs, size(freed_bytes))


def _other_divisions(current: Path, share: tuple[int, int] | None) -> Iterator[Path]:
    """Where the site has files of other numbers of ranks, as far as this rank is to look after them."""
    home = current.parent.parent if share else current.parent
    rank, ranks = share or (0, 1)
    if share and rank == 0:
        yield home
    for path in sorted(home.iterdir()):
        match = _RANK.fullmatch(path.name)
        if match is None or path.is_symlink() or (share and int(match[2]) == ranks):
            continue
        owner = int(match[1])
        if owner == rank or (rank == 0 and owner >= ranks):
            yield path


def _remove(folder: Path) -> int | None:
    """Remove a folder that is locked by the caller; returns its bytes, None where it has to stay."""
    try:
        notes: list[OutboxNote | None] = [peek_note(path, OutboxNote) for path in folder.glob("outbox*.json")]
    except NoteDamaged as error:
        LOG.warning(
            "%s stays: the note of its outbox is damaged (%s), and may be of an update not sent.", folder, error
        )
        return None
    if not all(note is not None and note.sent for note in notes):
        return None
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with os.scandir(fd) as entries:
            found = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
        if not all(map(_OURS.fullmatch, found)) or not all(stat.S_ISREG(each.st_mode) for each in found.values()):
            return None
        for name in sorted(found, key="lock".__eq__):  # last: it is the lock where folders cannot be locked
            os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
    folder.rmdir()
    return sum(each.st_size for each in found.values())
