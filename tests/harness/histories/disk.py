"""Disks that lose what was not synced: the server's journal in memory, and images of folders.

The journal of a state directory is a database in memory. What a killed server leaves is the database without the open
transaction, and its files as they are. What a power loss leaves is the database as of the last synced commit, and of
each file what it had when it was last synced, or what it has now: the system may have written it by itself.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any


class MemoryDatabase(sqlite3.Connection):
    """A journal in memory.

    Attributes:
        image: its content when it was closed; empty while it is open.
        synced: its content after the last commit that survives a power loss.
    """

    image = synced = b""
    _is_full = True

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql.startswith("PRAGMA synchronous = "):
            self._is_full = sql.endswith("FULL")
        cursor = super().execute(sql, *values)
        if sql == "COMMIT" and self._is_full:
            self.note_synced()
        return cursor

    def note_synced(self) -> None:
        self.synced = b""  # as it is now, until the next commit; only asked for where commits are rarely synced

    def content(self) -> bytes:
        return self.image or self.serialize()

    def close(self) -> None:
        if not self.image:
            self.image = self.serialize()
        super().close()


class CarefulDatabase(MemoryDatabase):
    """A journal whose commits are usually not synced. It keeps the content after each synced one."""

    def note_synced(self) -> None:
        self.synced = self.serialize()


class Disks:
    """The databases of all state directories, by path, and the contents that files had when they were synced.

    Attributes:
        power: whether each commit is synced (`disk.durability = "power"`).
    """

    def __init__(self, *, power: bool) -> None:
        self.power = power
        self._databases: dict[str, MemoryDatabase] = {}
        self._images: dict[str, bytes] = {}
        self._synced: dict[str, bytes] = {}

    def connect(self, path: str | Path, *args: Any, **options: Any) -> sqlite3.Connection:
        """Open the database of a path, as `sqlite3.connect` does."""
        kind = MemoryDatabase if self.power else CarefulDatabase
        database = sqlite3.connect(":memory:", *args, factory=kind, **options)
        if image := self._images.get(str(path)):
            database.deserialize(image)
        self._databases[str(path)] = database
        return database

    def checkpoint(self, path: Path) -> None:
        """What SQLite's checkpoint does here: all that was committed survives a power loss."""
        self._databases[str(path)].note_synced()

    def fsync(self, fd: int) -> None:
        """Remember what a file has."""
        path = os.readlink(f"/proc/self/fd/{fd}")
        if os.path.isfile(path):
            self._synced[path] = Path(path).read_bytes()

    def copy_killed(self, before: Path, after: Path) -> Callable[[], None]:
        """Copy what a process leaves that is killed now. Call the result when its open transaction was undone."""
        _copy(before, after)
        for path in list(self._synced):
            if path.startswith(f"{before}/"):
                self._synced[f"{after}{path.removeprefix(str(before))}"] = self._synced.pop(path)
        return lambda: self._copy_database(before, after, power_loss=False)

    def copy_power_loss(self, before: Path, after: Path, chance: random.Random) -> Callable[[], None]:
        """Copy what a loss of power leaves now, as `copy_killed` does."""
        _copy(before, after)
        for path in sorted((after / "slots").iterdir()):
            was = str(before / "slots" / path.name)
            if chance.random() < 0.5:
                nbytes = path.stat().st_size
                path.write_bytes(self._synced.get(was, b"")[:nbytes].ljust(nbytes, b"\0"))
            self._synced[str(path)] = path.read_bytes()
        return lambda: self._copy_database(before, after, power_loss=True)

    def _copy_database(self, before: Path, after: Path, *, power_loss: bool) -> None:
        for path, database in list(self._databases.items()):
            if Path(path).parent == before:
                lost = power_loss and not self.power and database.synced
                self._images[str(after / Path(path).name)] = database.synced if lost else database.content()
                del self._databases[path]


def _copy(before: Path, after: Path) -> None:
    """Copy a folder of small files."""
    after.mkdir(mode=0o700)
    with os.scandir(before) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _copy(Path(entry.path), after / entry.name)
            elif entry.is_file(follow_symlinks=False):
                shutil.copyfile(entry.path, after / entry.name)
                os.chmod(after / entry.name, 0o600)


copy = _copy


def lose_power_at_site(folder: Path, chance: random.Random) -> None:
    """A site's folder after a loss of power: its notes are there, but bytes of some other files are not."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".bin", ".safetensors") and chance.random() < 0.4:
            path.write_bytes(bytes(path.stat().st_size))
