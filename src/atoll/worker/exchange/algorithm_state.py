"""What the run's algorithm keeps at a site between rounds. It outlives the site's processes.

An update of the site may change it. What it becomes counts when this update was counted. The server compares which
update it stands behind with its journal: what the run has counted on must not be lost, or of another moment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from atoll.errors import ConfigError
from atoll.protocol.messages import Counted
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.schema import Schema, specs_beside
from atoll.worker.exchange.local_state import NOTHING, UNTOLD, Owner, TwoPhaseFile, TwoPhaseNote
from atoll.worker.log_lines import LOG

NEW = "ATOLL_NEW_STATE"


def wanted_anew() -> bool:
    """Whether a site that has lost its state is to begin at zero.

    Raises:
        ConfigError: the variable is neither true nor false.
    """
    text = os.environ.get(NEW, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise ConfigError(f"{NEW} is {text!r}.", "Set it to 1 to begin at zero where the site's state is lost.")


class AlgorithmState(TwoPhaseFile):
    """The tensors that the algorithm keeps at one site in one run; zeros in the beginning.

    Attributes:
        state: "kept" where the files hold it; "missing" where there are none, which is right in a site's first round
            alone; "new" where it is to begin at zero all the same.

    Args:
        folder: of the site in the run; locked by the caller.
        schema: of the run.
        keeps: the groups that the algorithm keeps: one tensor for each parameter.
        owner: as `TwoPhaseFile` has it.
    """

    def __init__(self, folder: Path, schema: Schema, keeps: Iterable[str], owner: Owner = UNTOLD) -> None:
        specs = [spec for group in keeps for spec in specs_beside(group, schema.tensors)]
        super().__init__(folder, "algorithm", specs, owner=owner)
        self._written: set[str] = set()  # since `begin`
        self.state: Literal["kept", "missing", "new"] = "kept" if self.found else "missing"

    def begin_anew_where_told(self, site: str) -> None:
        """Begin at zero where nothing is kept and `ATOLL_NEW_STATE` asks for it.

        Otherwise a server that has counted updates of this site refuses it.

        Raises:
            ConfigError: the variable is neither true nor false.
        """
        if wanted_anew() and self.state == "missing":
            LOG.warning("%s: its state begins at zero, as %s says", site, NEW)
            self.state = "new"

    @property
    def told(self) -> dict[str, Any]:
        """What a join says of it."""
        return {"local_state": self.state, "local_state_of": self.stands_for, "new_local_state": wanted_anew()}

    @property
    def stands_for(self) -> list[Counted]:
        """The updates that what one of the two files holds stands behind; the one that counts first."""
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
        """Make the state what it was behind the update of this site that the run has counted last.

        Mostly it is, or becomes it as soon as what is pending is settled. A server that fell back by one update gets
        the state before that one; what is pending then is the update that it has lost, which is sent again.

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
                LOG.warning("%s: the server has no update of this site: its state begins at zero", self._note_path)
                self.zero()
            return
        if self.state != "new":
            self.lose()
        self._write(
            TwoPhaseNote(version=_version(counted), update=counted.digest)
        )  # zero stands behind it from here on

    def _go_back(self) -> None:
        """The update that counted last is pending again."""
        LOG.warning("%s: the server went back behind the last update: so does the site's state", self._note_path)
        self._write(self.note.back())

    def begin_at_zero(self) -> None:
        """The site takes part: where nothing was kept, the state is zero."""
        if self.state != "kept":
            self.zero()

    def require_kept(self) -> None:
        """Updates of the site count in the run: it goes on with its own state, or begins at zero on purpose.

        Raises:
            ConfigError: it has none, and nothing says that it may begin anew. Or the variable is neither true nor
                false.
        """
        if self.state != "kept":
            self.lose()

    def lose(self) -> None:
        """Begin at zero if `ATOLL_NEW_STATE` asks for it.

        Raises:
            ConfigError: it does not, or the variable is neither true nor false.
        """
        if not wanted_anew():
            raise ConfigError(
                "Updates of this site count in the run, and the state that its algorithm keeps here is lost: "
                f"{self._note_path} and the files beside it are not there, not what was written, or of another moment "
                "or site.",
                f"Look at the disk, or bring them from a backup; without them, begin a new run from the export, or set "
                f"{NEW}=1 to begin at zero.",
            )
        LOG.warning("%s: the site's state begins at zero, as %s says", self._note_path, NEW)
        self.zero()
        self.state = "new"

    def begin(self) -> None:
        """Forget which tensors were written for an earlier update, too: `belongs_to` carries over all that are not."""
        super().begin()
        self._written.clear()

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Convert values to the dtype in which the tensor is kept, and note that it was written."""
        self._written.add(name)
        super().write(name, start, values.to(torch_dtype(self._segments[name].spec.dtype)))

    def belongs_to(self, ticket: int, version: int, update: str = "") -> None:
        """As `TwoPhaseFile` has it; a tensor of which nothing was written stays as it is."""
        for name, segment in self._segments.items():
            if name not in self._written:
                super().write(name, 0, self.read(name, 0, segment.spec.numel))
        super().belongs_to(ticket, version, update)
        self.state = "kept"


def _counted(version: int, update: str) -> Counted:
    return Counted(base_version=version if version >= 0 else None, digest=update)


def _version(counted: Counted) -> int:
    return -1 if counted.base_version is None else counted.base_version
