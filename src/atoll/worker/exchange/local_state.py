"""State of a site that changes with each update that counts, on disk, through crashes.

Two files that take turns: the one that counts, and the one that is written while an update is formed. They change
places when the server says that this update was counted, and not before: a refused or lost one leaves all as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from atoll.json_files import read_note, write_note
from atoll.protocol import messages
from atoll.tensors.chunks import CHUNK_BYTES, bytes_of
from atoll.tensors.dtypes import accumulate_dtype, dtype_name
from atoll.tensors.layout import file_layout
from atoll.tensors.schema import PARAMS, Schema, TensorSpec
from atoll.worker.exchange.base_and_outbox import ScratchFile
from atoll.worker.log_lines import LOG

NOTHING = -2
"""In place of a version: the file that does not count holds nothing of value."""


class Owner(NamedTuple):
    """The site and the run that files belong to; empty where a note of an earlier Atoll does not tell."""

    site: str = ""
    run: str = ""


UNTOLD = Owner()


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
        owner: Owner = UNTOLD,
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
        if all(theirs in ("", ours) for theirs, ours in zip((note.site, note.run), self._owner, strict=True)):
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
        owner: Owner = UNTOLD,
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
