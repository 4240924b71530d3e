"""A worker's control variate c_i, on disk, through crashes: the one that counts, and what it may become.

Two files that take turns: `current`, and the one that is written while an update is formed. They change places when the
server says that this update was counted, and not before: a refused or lost update leaves c_i as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from atoll.errors import ConfigError
from atoll.tensors.chunks import CHUNK_BYTES, bytes_of
from atoll.tensors.layout import file_layout
from atoll.tensors.schema import CONTROL, Schema
from atoll.wire import messages
from atoll.worker.files import ScratchFile, read_note, write_note
from atoll.worker.reporting import LOG

NEW = "ATOLL_NEW_CONTROLS"


def wanted_anew() -> bool:
    """Whether a site that has lost its control is to begin at zero.

    Raises:
        ConfigError: the variable is neither true nor false.
    """
    text = os.environ.get(NEW, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise ConfigError(f"{NEW} is {text!r}.", "Set it to 1 to begin at zero where the site's control is lost.")


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

    Attributes:
        state: "kept" where the files hold c_i; "missing" where there are none, which is as it should be in a site's
            first round alone; "new" where it is to begin at zero all the same.

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
        self.state: Literal["kept", "missing", "new"] = "kept"
        note: ControlNote | None = read_note(self._note_path, ControlNote)
        if note is None or self._files[note.current].is_new or (note.pending and self._files[1 - note.current].is_new):
            self.state = "missing"
            self._note_path.unlink(missing_ok=True)  # the files are there from now on, and would be believed
        self.note: ControlNote = note if note is not None and self.state == "kept" else ControlNote()

    def begin_anew_where_told(self, site: str) -> None:
        """Begin at zero where nothing is kept and `ATOLL_NEW_CONTROLS` asks for it; else a server that has counted
        updates of this site refuses it.

        Raises:
            ConfigError: the variable is neither true nor false.
        """
        if wanted_anew() and self.state == "missing":
            LOG.warning("%s: its control begins at zero, as ATOLL_NEW_CONTROLS says", site)
            self.state = "new"

    def begin_at_zero(self) -> None:
        """The site takes part: where nothing was kept, c_i is zero. A file without a note may hold anything."""
        if self.state == "kept":
            return
        zeros = memoryview(bytes(CHUNK_BYTES))
        for file in self._files:
            if not file.is_new:
                for offset in range(0, file.nbytes, CHUNK_BYTES):
                    file.write(offset, zeros[: file.nbytes - offset])

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
        self.state = "kept"

    def settle(self, outcome_of: Callable[[int], messages.Outcome]) -> None:
        """Ask what became of the update that c_i⁺ belongs to, and make it c_i where it was counted."""
        if self.note.pending and outcome_of(self.note.pending).state == "counted":
            self._write(ControlNote(current=1 - self.note.current))

    def _write(self, note: ControlNote) -> None:
        self.note = note
        write_note(self._note_path, note)
