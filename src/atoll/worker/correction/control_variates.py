"""A worker's control variate c_i, which outlives its process: c_i⁺ takes its place when its update was counted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from atoll.errors import ConfigError
from atoll.protocol.messages import Counted
from atoll.tensors.schema import CONTROL, Schema
from atoll.worker.exchange.local_state import NOTHING, UNTOLD, Owner, TurnNote, Turns
from atoll.worker.log_lines import LOG

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


class Controls(Turns):
    """c_i of one site in one run; zeros in the beginning.

    Its note says behind which update of the site it is c_i; the server compares that with its journal.

    Attributes:
        state: "kept" where the files hold c_i; "missing" where there are none, which is as it should be in a site's
            first round alone; "new" where it is to begin at zero all the same.

    Args:
        folder: of the site in the run; locked by the caller.
        schema: of the run, with its controls.
        owner: as `Turns` has it.
    """

    def __init__(self, folder: Path, schema: Schema, owner: Owner = UNTOLD) -> None:
        super().__init__(folder, "control", (spec for spec in schema.tensors if spec.group == CONTROL), owner=owner)
        self.state: Literal["kept", "missing", "new"] = "kept" if self.found else "missing"

    def begin_anew_where_told(self, site: str) -> None:
        """Begin at zero where nothing is kept and `ATOLL_NEW_CONTROLS` asks for it; else a server that has counted
        updates of this site refuses it.

        Raises:
            ConfigError: the variable is neither true nor false.
        """
        if wanted_anew() and self.state == "missing":
            LOG.warning("%s: its control begins at zero, as ATOLL_NEW_CONTROLS says", site)
            self.state = "new"

    @property
    def told(self) -> dict[str, Any]:
        """What a join says of it."""
        return {"controls": self.state, "controls_of": self.stands_for, "new_controls": wanted_anew()}

    @property
    def stands_for(self) -> list[Counted]:
        """The updates behind which c_i is what one of the two files holds; the one that counts first."""
        note = self.note
        if self.state != "kept":
            return []
        found = [_counted(note.version, note.update)]
        if note.pending:
            found.append(_counted(note.pending_version, note.pending_update))
        elif note.before_version != NOTHING:
            found.append(_counted(note.before_version, note.before_update))
        return found

    def follow(self, counted: Counted) -> None:
        """Have c_i be what it was behind the update of this site that the run has counted last.

        Mostly it is, or becomes it as soon as what is pending is settled. A server that fell back by one update gets
        the c_i before that one; what is pending then is the update that it has lost, which is sent again.

        Raises:
            ConfigError: it is of another moment. Or the variable is neither true nor false.
        """
        note, offered = self.note, self.stands_for
        if self.state == "kept" and any(each.names(counted) for each in offered[: 2 if note.pending else 1]):
            return
        if self.state == "kept" and len(offered) > 1 and not note.pending and offered[1].names(counted):
            if self._holds(note, 1 - note.current):
                self._go_back()
                return
        elif counted.base_version is None:
            if self.state == "kept":
                LOG.warning("%s: the server has no update of this site: its control begins at zero", self._note_path)
                self.zero()
            return
        if self.state != "new":
            self.lose()
        self._write(TurnNote(version=_version(counted), update=counted.digest))  # zero stands for c_i from here on

    def _go_back(self) -> None:
        """The update that counted last is pending again."""
        LOG.warning("%s: the server went back behind the last update: so does the control", self._note_path)
        self._write(self.note.back())

    def begin_at_zero(self) -> None:
        """The site takes part: where nothing was kept, c_i is zero."""
        if self.state != "kept":
            self.zero()

    def require_kept(self) -> None:
        """The site's updates are in the run's c: it goes on with its own, or begins at zero on purpose.

        Raises:
            ConfigError: it has none, and nobody has said so. Or the variable is neither true nor false.
        """
        if self.state != "kept":
            self.lose()

    def lose(self) -> None:
        if not wanted_anew():
            raise ConfigError(
                "This site's updates are in the run's controls, and what it has kept of its own is lost: "
                f"{self._note_path} and the files beside it are not there, not what was written, or of another moment "
                "or site.",
                f"Look at the disk, or bring them from a backup; without them, begin a new run from the export, or set "
                f"{NEW}=1 to begin at zero.",
            )
        LOG.warning("%s: the site's control begins at zero, as %s says", self._note_path, NEW)
        self.zero()
        self.state = "new"

    def belongs_to(self, ticket: int, version: int, update: str = "") -> None:
        """As `Turns` has it; from here on c_i⁺, and so c_i, is kept."""
        super().belongs_to(ticket, version, update)
        self.state = "kept"


def _counted(version: int, update: str) -> Counted:
    return Counted(base_version=version if version >= 0 else None, digest=update)


def _version(counted: Counted) -> int:
    return -1 if counted.base_version is None else counted.base_version
