"""State of a site that changes with each update that counts, on disk, through crashes.

Two files that take turns: the one that counts, and the one that is written while an update is formed. They change
places when the server says that this update was counted, and not before: a refused or lost one leaves all as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from atoll.errors import ConfigError
from atoll.json_files import read_note, write_note
from atoll.protocol import messages
from atoll.protocol.messages import Counted
from atoll.tensors.chunks import CHUNK_BYTES, bytes_of
from atoll.tensors.dtypes import accumulate_dtype, dtype_name, torch_dtype
from atoll.tensors.layout import file_layout
from atoll.tensors.schema import PARAMS, Schema, TensorSpec, specs_beside
from atoll.worker.exchange.base_and_outbox import ScratchFile
from atoll.worker.log_lines import LOG

NOTHING = -2
"""In place of a version: the file that does not count holds nothing of value."""


class Owner(NamedTuple):
    """The site and the run that files belong to."""

    site: str
    run: str


@dataclass(frozen=True)
class TwoPhaseNote:
    """What the two files hold.

    Attributes:
        current: 0 or 1, the file that counts.
        pending: the ticket of the update that the other one belongs to; 0: it holds nothing of value.
        pending_version: that this update was formed against.
        counted: the ticket of the update that counted last; 0: none has.
        version: that it was formed against; -1: none has.
        digests: of what each file holds, in hex; empty where they were not read.
        site, run: that the files are of; a folder may be swapped or copied.
        update: digest of the update that counted last; empty where it is not known.
        pending_update: of the one that is pending.
        before_version, before_update: of the update behind which the other file counted; `NOTHING`: it does not hold
            that any more. A server that falls back may need it.
    """

    current: int = 0
    pending: int = 0
    pending_version: int = -1
    counted: int = 0
    version: int = -1
    digests: Sequence[str] = ("", "")
    site: str = ""
    run: str = ""
    update: str = ""
    pending_update: str = ""
    before_version: int = NOTHING
    before_update: str = ""

    def forth(self) -> TwoPhaseNote:
        """The pending update has counted: its file is current, and the other one is what was before."""
        return TwoPhaseNote(
            1 - self.current,
            counted=self.pending,
            version=self.pending_version,
            update=self.pending_update,
            before_version=self.version,
            before_update=self.update,
            digests=self.digests,
        )

    def back(self) -> TwoPhaseNote:
        """The update that counted last is pending again: what was before it is current."""
        return TwoPhaseNote(
            1 - self.current,
            pending=self.counted,
            pending_version=self.version,
            pending_update=self.update,
            version=self.before_version,
            update=self.before_update,
            digests=self.digests,
        )


class TwoPhaseFile:
    """Runs of some tensors; zeros in the beginning.

    Attributes:
        found: whether the files were there, with what they hold; else they may hold anything until `zero`.

    Args:
        folder: of the site in the run; locked by the caller.
        name: of the files.
        specs: the tensors, as they are kept.
        owner: the site and the run; files of others count as lost.
        sparse: whether little of them is going to be written.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        specs: Iterable[TensorSpec],
        *,
        owner: Owner,
        sparse: bool = False,
    ) -> None:
        layout = file_layout(list(specs), b"")
        self._segments = layout.by_name
        self._note_path, self._owner = folder / f"{name}.json", owner
        self._sparse, used = sparse, () if sparse else None
        self._files = [ScratchFile(folder / f"{name}-{index}.bin", layout.nbytes, used) for index in (0, 1)]
        note: TwoPhaseNote | None = read_note(self._note_path, TwoPhaseNote)
        if note is not None and not _is_sound(note):
            note = None
        foreign = note is not None and self._is_foreign(note)
        self.found = note is not None and not foreign and self._holds(note, note.current)
        if not self.found and not foreign and (note is None or not note.digests[note.current]):
            self._note_path.unlink(missing_ok=True)  # the files are there from now on, and would be believed
        self.note = note if note is not None and self.found else TwoPhaseNote()
        self._is_pending_lost = bool(self.note.pending) and not self._holds(self.note, 1 - self.note.current)

    def _is_foreign(self, note: TwoPhaseNote) -> bool:
        """Whether the files are of another site or run. They stay until they are written: the folder may go back."""
        if (note.site, note.run) == self._owner:
            return False
        LOG.warning(
            "%s is of site %s in run %s: here it counts as lost. Bring each site its own folder.",
            self._note_path,
            note.site,
            note.run,
        )
        return True

    def _holds(self, note: TwoPhaseNote, index: int) -> bool:
        """Whether a file is there, and holds what was written."""
        file = self._files[index]
        if not file.is_new and note.digests[index] in ("", file.content_digest()):
            return True
        LOG.warning("%s is not what was written: it counts as lost. Look at the disk.", file.path)
        return False

    def zero(self) -> None:
        """Begin at zero, whatever the files hold."""
        self._note_path.unlink(missing_ok=True)
        self.note, self._is_pending_lost = TwoPhaseNote(), False
        zeros = memoryview(bytes(CHUNK_BYTES))
        for file in self._files:
            if self._sparse:
                os.ftruncate(file.fd, 0)
                os.ftruncate(file.fd, file.nbytes)
            elif not file.is_new:
                for offset in range(0, file.nbytes, CHUNK_BYTES):
                    file.write(offset, zeros[: file.nbytes - offset])

    def close(self) -> None:
        """Close both files; what they hold stays on disk."""
        for file in self._files:
            file.close()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the tensor `name`, as it counts, in new memory."""
        return self._files[self.note.current].values(self._segments[name], start, stop)

    def begin(self) -> None:
        """What follows is written for an update that is being formed; an earlier one is forgotten."""
        self._is_pending_lost = False
        if self.note.pending or self.note.before_version != NOTHING:
            self._write(replace(self.note, pending=0, before_version=NOTHING))

    def write(self, name: str, start: int, values: Tensor) -> None:
        """What the tensor may become, from element `start` on."""
        segment = self._segments[name]
        self._files[1 - self.note.current].write(segment.offset + start * segment.spec.item_bytes, bytes_of(values))

    def belongs_to(self, ticket: int, version: int, update: str = "") -> None:
        """All is written, and counts if the update of this ticket, formed against this version, is counted.

        Args:
            update: its digest, where all of it was formed here.
        """
        current, digests = self.note.current, list(self.note.digests)
        digests[1 - current] = self._files[1 - current].content_digest()
        digests[current] = digests[current] or self._files[current].content_digest()
        note = replace(self.note, pending=ticket, pending_version=version, pending_update=update, digests=digests)
        self._write(note)

    def passes_to(self, ticket: int, version: int) -> None:
        """What was pending is the same update under another ticket."""
        self._write(replace(self.note, pending=ticket, pending_version=version))

    def settle(self, outcome_of: Callable[[int], messages.Outcome]) -> None:
        """Ask what became of the update that is pending, and let what was written count where it was counted.

        A server that was restored gives the numbers of tickets again, so the number alone does not tell.
        """
        note = self.note
        if not note.pending or (outcome := outcome_of(note.pending)).state != "counted":
            return
        if outcome.digest and note.pending_update and outcome.digest != note.pending_update:
            return
        if self._is_pending_lost:
            self.lose()
            return
        self._write(note.forth())

    def lose(self) -> None:
        """What belongs to an update that counted is not there any more, and what was before it counts no longer."""
        self.zero()

    def take_back(self, ticket: int) -> None:
        """Leave all as it was before the update of this ticket, the last that was formed, whether it counted or not."""
        if self.note.pending == ticket:
            self._write(replace(self.note, pending=0))
        elif self.note.counted == ticket:
            self._write(replace(self.note, current=1 - self.note.current, counted=0, before_version=NOTHING))

    def _write(self, note: TwoPhaseNote) -> None:
        self.note = replace(note, site=self._owner.site, run=self._owner.run)
        write_note(self._note_path, self.note)


def _is_sound(note: TwoPhaseNote) -> bool:
    return note.current in (0, 1) and isinstance(note.digests, list | tuple) and len(note.digests) == 2


class LocalState:
    """All that a site keeps between rounds; what becomes of an update is passed on to each file."""

    def __init__(self, outcome_of: Callable[[int], messages.Outcome], *files: TwoPhaseFile | None) -> None:
        self._outcome_of, self._all = outcome_of, [each for each in files if each is not None]

    def settle(self) -> None:
        """As `TwoPhaseFile.settle`."""
        for file in self._all:
            file.settle(self._outcome_of)

    def begin(self, ticket: int) -> None:
        """As `TwoPhaseFile.begin`, for this ticket; what an earlier one left pending is settled before."""
        for file in self._all:
            if file.note.pending != ticket:  # mostly it is settled by then
                file.settle(self._outcome_of)
            file.begin()

    def belongs_to(self, ticket: int, version: int, update: str = "") -> None:
        """As `TwoPhaseFile.belongs_to`."""
        for file in self._all:
            file.belongs_to(ticket, version, update)

    def moves_to(self, ticket: int, version: int, before: int) -> None:
        """What was pending for the ticket `before` is the same update under another one."""
        for file in self._all:
            if file.note.pending == before:
                file.passes_to(ticket, version)


# -- Error feedback: what encoding an update has lost stays at the worker and is added to its next update.
#
#     g = Δ + e        sent: C(g)        e ← g − dec(C(g)), once the update was counted
#
# So over rounds what the server decodes adds up to what was trained, but for the last e (Karimireddy et al., arXiv
# 1901.09847, algorithm 2). e is kept in the dtype of accumulation, one tensor for each parameter.


class Residuals(TwoPhaseFile):
    """e of one site in one run; zero where nothing is kept.

    Args:
        folder: of the site in the run; locked by the caller.
        schema: of what is trained together.
        name: of the files.
        owner: as `TwoPhaseFile` has it.
        sparse: whether only one rank's share is kept here.
    """

    def __init__(
        self,
        folder: Path,
        schema: Schema,
        name: str = "residual",
        *,
        owner: Owner,
        sparse: bool = False,
    ) -> None:
        super().__init__(
            folder,
            name,
            (
                TensorSpec(spec.name, dtype_name(accumulate_dtype(spec.dtype)), spec.shape)
                for spec in schema.tensors
                if spec.group == PARAMS
            ),
            owner=owner,
            sparse=sparse,
        )
        if not self.found:
            self.zero()

    def follow(self, version: int, site: str) -> None:
        """An update against this version is about to be formed: what belongs to a later one is of no use.

        A server that was restored, or fell back, goes on from a version before the last update that counted.
        """
        if self.note.version >= version:
            LOG.warning(
                "%s: the server went back to version %d: what compression had left over is dropped", site, version
            )
            self.zero()


# -- What the run's algorithm keeps at a site between rounds. It outlives the site's processes.
#
# An update of the site may change it. What it becomes counts when this update was counted. The server compares which
# update it stands behind with its journal: what the run has counted on must not be lost, or of another moment.


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

    def __init__(self, folder: Path, schema: Schema, keeps: Iterable[str], owner: Owner) -> None:
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
