"""A worker's control variate c_i, on disk, through crashes: the one that counts, and what it may become.

Two files that take turns: `current`, and the one that is written while an update is formed. They change places when the
server says that this update was counted, and not before: a refused or lost update leaves c_i as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from atoll.tensors.chunks import bytes_of
from atoll.tensors.layout import file_layout
from atoll.tensors.schema import CONTROL, Schema
from atoll.wire import messages
from atoll.worker.files import ScratchFile, read_note, write_note


class OwnControls(Protocol):
    """c_i, which is read, and c_i⁺, which is written: runs of each control by its name."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of c_i, in new memory."""
        ...

    def write(self, name: str, start: int, values: Tensor) -> None:
        """c_i⁺ from element `start` on."""
        ...


@dataclass(frozen=True)
class ControlNote:
    """What the two files hold.

    Attributes:
        current: 0 or 1, the file with c_i.
        pending: the ticket whose update the other one belongs to; 0: it holds nothing of value.
    """

    current: int = 0
    pending: int = 0


class Controls:
    """c_i of one site in one run; zeros in the beginning.

    Args:
        folder: of the site in the run; locked by the caller.
        schema: of the run, with its controls.
    """

    def __init__(self, folder: Path, schema: Schema) -> None:
        specs = [spec for spec in schema.tensors if spec.group == CONTROL]
        layout = file_layout(specs, b"")
        self._segments = layout.by_name
        self._note_path = folder / "control.json"
        self._files = [ScratchFile(folder / f"control-{index}.bin", layout.nbytes) for index in (0, 1)]
        self.note: ControlNote = read_note(self._note_path, ControlNote) or ControlNote()
        if self._files[self.note.current].is_new:
            self.note = ControlNote()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of c_i of the control `name`."""
        return self._files[self.note.current].values(self._segments[name], start, stop)

    def begin(self) -> None:
        """What follows is written for an update that is being formed; an earlier one is forgotten."""
        if self.note.pending:
            self._write(replace(self.note, pending=0))

    def write(self, name: str, start: int, values: Tensor) -> None:
        """c_i⁺ from element `start` on."""
        segment = self._segments[name]
        self._files[1 - self.note.current].write(segment.offset + start * segment.spec.item_bytes, bytes_of(values))

    def belongs_to(self, ticket: int) -> None:
        """All of c_i⁺ is written, and becomes c_i if the update of this ticket is counted."""
        self._write(replace(self.note, pending=ticket))

    def settle(self, outcome_of: Callable[[int], messages.Outcome]) -> None:
        """Ask what became of the update that c_i⁺ belongs to, and make it c_i where it was counted."""
        if self.note.pending and outcome_of(self.note.pending).state == "counted":
            self._write(ControlNote(current=1 - self.note.current))

    def _write(self, note: ControlNote) -> None:
        self.note = note
        write_note(self._note_path, note)
