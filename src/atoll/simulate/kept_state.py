"""The memory of a simulated site: files that it keeps between its rounds, as bytes for another disk, and back.

They are written in the order of `worker/exchange/local_state.py`: the note without the pending update, the pending
file, the note. A kill in between leaves a state from which the round can be trained again.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from atoll.json_files import note_from, read_note, write_note
from atoll.worker.exchange.local_state import TwoPhaseNote

NAMES = ("algorithm", "residual")
"""Of the files: NAME-0.bin and NAME-1.bin take turns, NAME.json says which counts."""

Kept = dict[str, bytes]
"""Name of a file → its bytes."""


def pending(folder: Path) -> set[int]:
    """Return the tickets of the updates that these files depend on."""
    notes = [read_note(folder / f"{name}.json", TwoPhaseNote) for name in NAMES]
    return {note.pending for note in notes if note is not None and note.pending}


def read_kept(folder: Path) -> Kept:
    """Return all that a site keeps; nothing before its first round."""
    if not folder.is_dir():
        return {}
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".json")}


def put_kept(folder: Path, kept: Kept) -> None:
    """Write files that `read_kept` returned into a folder that no other process has."""
    if not kept:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in kept.items():
        (folder / name).write_bytes(content)


def write_kept(folder: Path, kept: Kept) -> None:
    """Replace what a site kept before a round by what it keeps after it."""
    for name in NAMES:
        if f"{name}.json" not in kept:
            continue
        note = note_from(kept[f"{name}.json"], TwoPhaseNote)
        files = [folder / f"{name}-{index}.bin" for index in (0, 1)]
        path = folder / f"{name}.json"
        if read_note(path, TwoPhaseNote) is None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            files[note.current].write_bytes(kept[files[note.current].name])
        else:
            write_note(path, replace(note, pending=0, pending_version=-1))
        other = files[1 - note.current]
        other.write_bytes(kept[other.name])
        write_note(path, TwoPhaseNote(**asdict(note)))
