"""Change files and rows as a failing disk or memory would: one bit of one value."""

from __future__ import annotations

import json
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

from blake3 import blake3

from kit.halfway import ask_journal


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of the byte at `offset`; a negative offset counts from the end."""
    with path.open("r+b") as file:
        file.seek(offset, 0 if offset >= 0 else 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1 << bit]))


def damage_head(folder: Path, fragment: int = 0) -> None:
    """Flip one bit of the last value of a fragment's newest version, in a run's folder."""
    heads = "SELECT slot FROM versions JOIN heads USING (fragment, version)"
    ((slot,),) = ask_journal(folder, f"{heads} WHERE fragment = {fragment}")
    flip_bit(folder / "state" / "slots" / f"version-{fragment}-{slot}.safetensors", -1)


def flip_value(value: Any) -> Any:
    """The value with one bit changed; of the same type."""
    match value:
        case float():
            (bits,) = struct.unpack("<Q", struct.pack("<d", value))
            (flipped,) = struct.unpack("<d", struct.pack("<Q", bits ^ 1 << 51))
            return flipped
        case int():
            return value ^ 1 << 10
        case str():
            return value[:-1] + chr(ord(value[-1]) ^ 1) if value else "\x01"
        case bytes():
            return value[:-1] + bytes([value[-1] ^ 1]) if value else b"\x01"
    return 1  # NULL


def flip_column(journal: Path, table: str, column: str) -> bool:
    """Flip a bit of `column` in the last row of `table`, past all constraints; whether there is a row."""
    with closing(sqlite3.connect(journal)) as db, db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        keys = [row[1] for row in db.execute(f"PRAGMA table_info({table})") if row[5]]
        found = db.execute(f"SELECT {column}, {', '.join(keys)} FROM {table} ORDER BY {keys[-1]} DESC").fetchone()
        if found is None:
            return False
        where = " AND ".join(f"{key} IS ?" for key in keys)
        db.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (flip_value(found[0]), *found[1:]))
        return True


def log_frames(log: Path) -> list[int]:
    """Offsets of the frames of SQLite's write-ahead log that count: those behind them are of an earlier use."""
    data = log.read_bytes()
    page_bytes, salts = int.from_bytes(data[8:12], "big"), data[16:24]
    found, at = [], 32
    while data[at + 8 : at + 16] == salts:
        found.append(at)
        at += 24 + page_bytes
    return found


def columns(journal: Path) -> list[tuple[str, str]]:
    """Every (table, column) of a journal."""
    with closing(sqlite3.connect(journal)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        return [(table, row[1]) for table in tables for row in db.execute(f"PRAGMA table_info({table})")]


def rewrite_note(path: Path, **changes: Any) -> None:
    """Change keys of a note that covers itself with its digest, and seal it again; None takes a key out.

    Its size stays, if it can.
    """
    size = path.stat().st_size
    note = json.loads(path.read_text()) | changes | {"blake3": None}
    note = {key: value for key, value in note.items() if value is not None}
    text = json.dumps(note, sort_keys=True)
    sealed = f'{text[:-1]}, "blake3": "{blake3(text.encode()).hexdigest()}"}}'
    path.write_text(f"{sealed:<{size - 1}}\n")
