"""Move the local state of a simulated site between disks: read its files as bytes, and write them again.

The files are written in the same order as in `worker/exchange/local_state.py`: the note without the pending update, the
pending file, then the full note. So after a kill in between, the round can be trained again.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from atoll.json_files import note_from, read_note, write_note
from atoll.worker.exchange.local_state import TwoPhaseNote

NAMES = ("algorithm", "residual")
"""Names of local state. NAME-0.bin and NAME-1.bin are written in turn; the note NAME.json says which is current."""

Kept = dict[str, bytes]
"""Name of a file → its bytes."""


def pending(folder: Path) -> set[int]:
    """Return the tickets of the pending updates on which a site's local state depends."""
    notes = [read_note(folder / f"{name}.json", TwoPhaseNote) for name in NAMES]
    return {note.pending for note in notes if note is not None and note.pending}


def read_kept(folder: Path) -> Kept:
    """Return the files of a site's local state; empty before the site's first round."""
    if not folder.is_dir():
        return {}
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".json")}


def put_kept(folder: Path, kept: Kept) -> None:
    """Write files that `read_kept` returned into a folder that no other process uses."""
    if not kept:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in kept.items():
        (folder / name).write_bytes(content)


def write_kept(folder: Path, kept: Kept) -> None:
    """Replace a site's local state from before a round by the state from after the round, safely against a kill.

    Args:
        folder: the site's folder.
        kept: the files after the round.
    """
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
