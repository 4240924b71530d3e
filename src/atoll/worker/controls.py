"""A worker's control variate c_i, which outlives its process: c_i⁺ takes its place when its update was counted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from atoll.errors import ConfigError
from atoll.tensors.schema import CONTROL, Schema
from atoll.worker.reporting import LOG
from atoll.worker.turns import Turns

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

    Attributes:
        state: "kept" where the files hold c_i; "missing" where there are none, which is as it should be in a site's
            first round alone; "new" where it is to begin at zero all the same.

    Args:
        folder: of the site in the run; locked by the caller.
        schema: of the run, with its controls.
    """

    def __init__(self, folder: Path, schema: Schema) -> None:
        super().__init__(folder, "control", (spec for spec in schema.tensors if spec.group == CONTROL))
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
                f"{self._note_path} and the files beside it are not there, or not what was written.",
                f"Look at the disk, or bring them from a backup; without them, begin a new run from the export, or set "
                f"{NEW}=1 to begin at zero.",
            )
        LOG.warning("%s: the site's control begins at zero, as %s says", self._note_path, NEW)
        self.zero()
        self.state = "new"

    def belongs_to(self, ticket: int, version: int) -> None:
        """As `Turns` has it; from here on c_i⁺, and so c_i, is kept."""
        super().belongs_to(ticket, version)
        self.state = "kept"
