"""Crash-safe files for the state that a site keeps between rounds. The state changes with each update that counts.

An update counts when the server has aggregated it into a new version of the global model. Each state has two files: one
holds the current state. The other is written while an update is formed, and becomes current when the server says that
this update counted. A refused or lost update changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, cast

from safetensors.torch import load
from torch import Tensor

from atoll.errors import ConfigError
from atoll.json_files import NoteDamaged, note_from, peek_note, read_note, write_note
from atoll.posix import no_sync, own_folder, read_own, replace_file, usable
from atoll.protocol import messages
from atoll.protocol.messages import Counted
from atoll.tensors.chunks import bytes_of, runs_of
from atoll.tensors.dtypes import accumulate_dtype, dtype_name, torch_dtype
from atoll.tensors.layout import file_layout, safetensors_header
from atoll.tensors.schema import PARAMS, Schema, TensorSpec, extra_specs
from atoll.worker.arguments import flag
from atoll.worker.exchange.base_and_outbox import ScratchFile
from atoll.worker.log_lines import LOG

NOTHING = -2
"""Value of `before_version` if the file that is not current holds no earlier state."""


class Owner(NamedTuple):
    """The site and the run that files belong to."""

    site: str
    run: str


@dataclass(frozen=True)
class TwoPhaseNote:
    """The JSON note of a `TwoPhaseFile`: it describes the content of the two files.

    The update that was formed last is "pending" until the server says that it counted: that it went into a version of
    the global model. Versions are given by number. After a server falls back to an older version, the state before the
    last counted update may be needed, so the note describes that state, too.

    Attributes:
        current: index of the file with the current state, 0 or 1.
        pending: ticket of the pending update; the other file, which is not current, holds the state after this update.
            0: no update is pending.
        pending_version: the version that the pending update was formed against.
        counted: ticket of the update that counted last; 0: not known, or none counted.
        version: the version that the last counted update was formed against; -1: none counted.
        digests: content digest of each file, in hex.
        site: name of the site that the files belong to, to notice that a user swapped or copied folders.
        run: id of the run that the files belong to.
        update: digest of the update that counted last; empty if not known.
        pending_update: digest of the pending update; empty if not known.
        before_version: which earlier state the file that is not current holds: the state after the counted update that
            was formed against this version. -1: the state before any update counted. `NOTHING`: the file holds no
            earlier state.
        before_update: digest of the last counted update in this earlier state; empty if not known.
        generation: generation of the run's algorithm state that both files belong to; 0 in other files.
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
    generation: int = 0

    @property
    def updates(self) -> list[Counted]:
        """The last update that each file with valid values includes, that of the current file first."""
        places = [(self.version, self.update)]
        if self.pending:
            places.append((self.pending_version, self.pending_update))
        elif self.before_version != NOTHING:
            places.append((self.before_version, self.before_update))
        return [
            Counted(base_version=version if version >= 0 else None, digest=update, generation=self.generation)
            for version, update in places
        ]

    def pending_counted(self) -> TwoPhaseNote:
        """Return the note to write when the pending update has counted: the state after this update is now current."""
        return TwoPhaseNote(
            1 - self.current,
            counted=self.pending,
            version=self.pending_version,
            update=self.pending_update,
            before_version=self.version,
            before_update=self.update,
            digests=self.digests,
            generation=self.generation,
        )

    def counted_pending(self) -> TwoPhaseNote:
        """Return the note to write when the last counted update no longer counts.

        In this note that update is pending again, and the state before it is the current one.
        """
        return TwoPhaseNote(
            1 - self.current,
            pending=self.counted,
            pending_version=self.version,
            pending_update=self.update,
            version=self.before_version,
            update=self.before_update,
            digests=self.digests,
            generation=self.generation,
        )


class TwoPhaseFile:
    """Two files with the same tensors, and a note that says which of the files holds the current values.

    Attributes:
        found: whether the current file was found undamaged. If not, the tensors have undefined values until `zero` is
            called.
        note: says which file is the current one, and which update its values belong to.

    Args:
        folder: the site's folder in the run; locked by the caller.
        name: name of the files, without suffix.
        specs: the tensors, with the dtypes in which they are kept.
        owner: the site and the run. Files of another owner count as lost.
        sparse: whether only a small share of the tensors is going to be written; then no disk space is allocated in
            advance.
    """

    _file: ClassVar[type[ScratchFile]] = ScratchFile

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
        used = () if sparse else None
        self._files = [self._file(folder / f"{name}-{index}.bin", layout.nbytes, used) for index in (0, 1)]
        note: TwoPhaseNote | None = read_note(self._note_path, TwoPhaseNote)
        if note is not None and not _is_sound(note):
            note = None
        foreign = note is not None and self._is_foreign(note)
        self.found = note is not None and not foreign and self._holds(note, note.current)
        self.note = note if note is not None and self.found else TwoPhaseNote()
        self._is_pending_lost = bool(self.note.pending) and not self._holds(self.note, 1 - self.note.current)

    def _is_foreign(self, note: TwoPhaseNote) -> bool:
        """Return whether the files belong to another site or run, and warn if so.

        The files are not deleted at once, so that the user can still move the folder back.
        """
        if (note.site, note.run) == self._owner:
            return False
        LOG.warning(
            "%s belongs to site %s in run %s, so this site does not use it. Use a separate folder for each site.",
            self._note_path,
            note.site,
            note.run,
        )
        return True

    def _holds(self, note: TwoPhaseNote, index: int) -> bool:
        """Return whether the file with this index has the digest in the note; warn if it has another one."""
        file = self._files[index]
        if note.digests[index] == file.content_digest():
            return True
        LOG.warning("%s is damaged (its digest differs) and is not used. Check the disk.", file.path)
        return False

    def zero(self) -> None:
        """Set all tensors to zero, and remove the note, which names the update of the old values."""
        self._note_path.unlink(missing_ok=True)
        self.note, self._is_pending_lost = TwoPhaseNote(), False
        for file in self._files:
            file.zero()

    def close(self) -> None:
        """Close both files. They are kept on disk."""
        for file in self._files:
            file.close()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the tensor `name` in the current state, in new memory."""
        return self._files[self.note.current].values(self._segments[name], start, stop)

    def begin(self) -> None:
        """Prepare to write the state after a new update. The new state overwrites the file that is not current.

        First, the note is rewritten so that it no longer describes that file.
        """
        self._is_pending_lost = False
        if self.note.pending or self.note.before_version != NOTHING:
            self._write(replace(self.note, pending=0, before_version=NOTHING))

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Write new values of a tensor, from element `start` on. They become current if their update counts."""
        segment = self._segments[name]
        self._files[1 - self.note.current].write(segment.offset + start * segment.spec.item_bytes, bytes_of(values))

    def belongs_to(self, ticket: int, version: int, update: str = "") -> None:
        """Record that all new values are written, and which update they belong to.

        Args:
            ticket: ticket of the update.
            version: number of the version that the update was formed against.
            update: digest of the update; empty if this process formed only a part of the update.
        """
        current, digests = self.note.current, list(self.note.digests)
        digests[1 - current] = self._files[1 - current].content_digest()
        digests[current] = digests[current] or self._files[current].content_digest()
        note = replace(self.note, pending=ticket, pending_version=version, pending_update=update, digests=digests)
        self._write(note)

    def passes_to(self, ticket: int, version: int) -> None:
        """Record that the pending update is submitted again, under another ticket and for another version."""
        self._write(replace(self.note, pending=ticket, pending_version=version))

    def adopt_if_counted(self, outcome_of: Callable[[int], messages.Outcome]) -> None:
        """If the pending update counted, make the values after this update the current ones.

        A restored server may have given the same ticket number to another update, so the digests of the updates are
        compared, too.

        Args:
            outcome_of: returns the state of a ticket's update.
        """
        note = self.note
        if not note.pending or (outcome := outcome_of(note.pending)).state != "counted":
            return
        if outcome.digest and note.pending_update and outcome.digest != note.pending_update:
            return
        if self._is_pending_lost:
            self.lose()
            return
        self._write(note.pending_counted())

    def lose(self) -> None:
        """Set all tensors to zero. Called if an update has counted, but the values after this update are damaged."""
        self.zero()

    def take_back(self, ticket: int) -> None:
        """Undo the newest update if it has this ticket: go back to the values from before that update."""
        if self.note.pending == ticket:
            self._write(replace(self.note, pending=0))
        elif self.note.counted == ticket:
            self._write(replace(self.note.counted_pending(), pending=0, pending_version=-1, pending_update=""))

    def _write(self, note: TwoPhaseNote) -> None:
        self.note = replace(note, site=self._owner.site, run=self._owner.run)
        write_note(self._note_path, self.note)


def _is_sound(note: TwoPhaseNote) -> bool:
    return note.current in (0, 1) and isinstance(note.digests, list | tuple) and len(note.digests) == 2


class FilesOfScript(Protocol):
    """What `LocalState` calls of a `ScriptState`."""

    def begin(self) -> None:
        """Prepare to write the state with a new update."""

    def belongs_to(self, ticket: int, version: int, update: str) -> None:
        """Record that the state is written, and which update it belongs to."""

    def moves_to(self, ticket: int, version: int, before: int) -> None:
        """Record that the update with the ticket `before` has another ticket, and is for another version."""


class LocalState:
    """All files of a site's local state. Each method applies to every file.

    Args:
        outcome_of: returns the state of a ticket's update.
        files: the files; None for a state that the run does not have.
        script: what the site's script keeps; None: nothing.
    """

    def __init__(
        self,
        outcome_of: Callable[[int], messages.Outcome],
        *files: TwoPhaseFile | None,
        script: FilesOfScript | None = None,
    ) -> None:
        self._outcome_of, self._all = outcome_of, [each for each in files if each is not None]
        self._script = script

    def adopt_if_counted(self) -> None:
        """In each file, switch to the values after the pending update if this update counted."""
        for file in self._all:
            file.adopt_if_counted(self._outcome_of)

    def begin(self, ticket: int) -> None:
        """Prepare all files for an update with this ticket. If another pending update has counted, first adopt it."""
        for file in self._all:
            if file.note.pending != ticket:  # usually nothing is pending any more
                file.adopt_if_counted(self._outcome_of)
            file.begin()
        if self._script is not None:
            self._script.begin()

    def belongs_to(self, ticket: int, version: int, update: str = "") -> None:
        """Record in every file which update the new values belong to. See `TwoPhaseFile.belongs_to`."""
        for file in self._all:
            file.belongs_to(ticket, version, update)
        if self._script is not None:
            self._script.belongs_to(ticket, version, update)

    def moves_to(self, ticket: int, version: int, before: int) -> None:
        """Record that the pending update with ticket `before` now has the ticket `ticket`, and is for `version`."""
        for file in self._all:
            if file.note.pending == before:
                file.passes_to(ticket, version)
        if self._script is not None:
            self._script.moves_to(ticket, version, before)


# -- Error feedback: the worker keeps the encoding error e of an update and adds e to its next update.
#
#     g = Δ + e        sent: C(g)        e ← g − dec(C(g)), once the update has counted
#
# So the decoded updates add up to the trained changes, except for the last e (Karimireddy et al., arXiv 1901.09847,
# algorithm 2). e is kept in the accumulation dtype, one tensor for each parameter.


class Residuals(TwoPhaseFile):
    """The residual of one fragment at one site, on disk: the encoding error that is added to the next update.

    The residual is zero if no undamaged files are found.

    Args:
        folder: the site's folder in the run; locked by the caller.
        schema: the fragment's schema.
        name: name of the files, without suffix.
        owner: the site and the run. Files of another owner count as lost.
        sparse: whether only one rank's share of a sharded model is kept here.
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
        """Set the residual to zero if the server has gone back to a version without this site's last counted update.

        The server goes back if it was restored from a backup or has lost power. Call this before the next update is
        formed.

        Args:
            version: number of the version that the next update is formed against.
            site: the site's name, for the warning.
        """
        if self.note.version >= version:
            LOG.warning(
                "%s: the server went back to version %d; the encoding error of earlier updates is set to zero",
                site,
                version,
            )
            self.zero()


# -- The state that the run's algorithm keeps at a site between rounds, such as SCAFFOLD's control variate.
#
# An update may change the state; the change becomes current when the update counts. A worker that joins names the last
# update in its state. The server compares this update with its journal, to notice a lost or outdated state.


NEW = "ATOLL_NEW_STATE"


def wanted_anew() -> bool:
    """Return whether `ATOLL_NEW_STATE` allows a site that has lost its state to start again from zero.

    Raises:
        ConfigError: the variable is neither true nor false.
    """
    return flag(NEW, "start from zero if the site's state is lost")


class AlgorithmState(TwoPhaseFile):
    """The tensors that the run's algorithm keeps at one site, on disk, such as SCAFFOLD's control variate.

    Attributes:
        state: "kept": the files contain the state. "missing": no state was found, which is normal only in a site's
            first round. "new": no state was found, and the user allowed the site to start from zero.

    Args:
        folder: the site's folder in the run; locked by the caller.
        schema: the run's schema.
        keeps: the names of the groups of tensors that the algorithm keeps. Each group has one tensor for each
            parameter.
        owner: the site and the run. Files of another owner count as lost.
    """

    def __init__(self, folder: Path, schema: Schema, keeps: Iterable[str], owner: Owner) -> None:
        specs = [spec for group in keeps for spec in extra_specs(group, schema.tensors)]
        super().__init__(folder, "algorithm", specs, owner=owner)
        self._written: set[str] = set()  # names of the tensors that were written since `begin`
        self.state: Literal["kept", "missing", "new"] = "kept" if self.found else "missing"
        has_earlier = self.note.before_version != NOTHING and not self.note.pending
        self._is_earlier_lost = has_earlier and not self._holds(self.note, 1 - self.note.current)

    def begin_anew_if_allowed(self, site: str) -> None:
        """Allow a missing state to start from zero if `ATOLL_NEW_STATE` is true.

        If `state` stays "missing", a server that has aggregated updates of this site refuses the site when it joins.

        Raises:
            ConfigError: the variable is neither true nor false.
        """
        if wanted_anew() and self.state == "missing":
            LOG.warning("%s: no state of the algorithm was found; it starts from zero, because %s is set", site, NEW)
            self.state = "new"

    @property
    def join_fields(self) -> dict[str, Any]:
        """The fields about this state in the site's request to join the run."""
        return {"local_state": self.state, "local_state_of": self.last_updates, "new_local_state": wanted_anew()}

    @property
    def last_updates(self) -> list[Counted]:
        """The last update that each file with valid values includes, that of the current file first.

        The list is empty if the attribute `state` is not "kept". A lost earlier state is left out: a server that has
        gone back to it begins anew. So does a server after the pending update if the state after this update is lost
        and may start from zero.
        """
        updates = self.note.updates if self.state == "kept" else []
        return updates[:1] if self._is_earlier_lost or (self._is_pending_lost and wanted_anew()) else updates

    def follow(self, counted: Counted) -> bool:
        """Switch to the state that includes all counted updates of the site, and no later one.

        Usually there is nothing to do: this state is current already, or is the state after the pending update, which
        `adopt_if_counted` makes current. If the server fell back to an older version and so lost the last update, the
        state before that update becomes current. The update becomes pending, so that it can be sent again. If the
        server has no update of this site in the present generation, the state is set to zero.

        Args:
            counted: the site's last counted update, as the server knows it, and the present generation.

        Returns:
            False if the earlier state is found to be damaged only now. Ask for a ticket again, without this state.

        Raises:
            ConfigError: neither file has the right state, and `ATOLL_NEW_STATE` does not allow the site to start from
                zero. Or the variable is neither true nor false.
        """
        note, offered = self.note, self.last_updates
        if self.state == "kept" and any(each.names(counted) for each in offered[: 2 if note.pending else 1]):
            return True
        was_before = len(offered) > 1 and not note.pending and offered[1].names(counted)
        if was_before and self._holds(note, 1 - note.current):
            self._go_back()
        elif counted.base_version is None:
            if self.state == "kept" or counted.generation:
                LOG.info("%s: the server has no update of this site, so the state starts from zero", self._note_path)
                self._write_zero(counted)
        elif was_before:
            self._is_earlier_lost = True
            return False
        else:
            if self.state != "new":
                self.lose()
            self._write_zero(counted)
        return True

    def _write_zero(self, counted: Counted) -> None:
        """Set the state to zero, and record that this is the state after the update `counted`."""
        self.zero()
        digests = [file.content_digest() for file in self._files]
        version = -1 if counted.base_version is None else counted.base_version
        self._write(
            TwoPhaseNote(version=version, update=counted.digest, digests=digests, generation=counted.generation)
        )
        self.state = "kept"

    def _go_back(self) -> None:
        """Return to the state before the last counted update.

        That update becomes pending, so that it can be sent again.
        """
        LOG.warning(
            "%s: the server went back to before this site's last update, so this state goes back, too",
            self._note_path,
        )
        self._write(self.note.counted_pending())

    def begin_at_zero(self) -> None:
        """If no state was found, set the state to zero. Called after the server has let the site join."""
        if self.state != "kept":
            self.zero()

    def require_kept(self) -> None:
        """Require that the state was found or may start from zero. Call this if updates of this site have counted.

        Raises:
            ConfigError: no state was found, and `ATOLL_NEW_STATE` does not allow the site to start from zero. Or the
                variable is neither true nor false.
        """
        if self.state != "kept":
            self.lose()

    def lose(self) -> None:
        """Handle the loss of the state: set it to zero if `ATOLL_NEW_STATE` allows that.

        Raises:
            ConfigError: the variable does not allow it, or is neither true nor false.
        """
        if not wanted_anew():
            raise ConfigError(
                "The algorithm's state of this site is lost, although the run's model contains updates that depend on "
                f"it: {self._note_path} and its .bin files are missing, damaged, too old, too new, or of another site.",
                f"Restore these files from a backup. Without a backup, set {NEW}=1 to let this state start "
                "from zero, or begin a new run from the exported model.",
            )
        LOG.warning("%s: the algorithm's state is lost; it starts from zero, because %s is set", self._note_path, NEW)
        self.zero()
        self.state = "new"

    def begin(self) -> None:
        """Prepare to write the state after a new update. Tensors that are not written afterwards keep their values."""
        super().begin()
        self._is_earlier_lost = False
        self._written.clear()

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Write new values of a tensor, from element `start` on, in the dtype of the stored tensor."""
        self._written.add(name)
        super().write(name, start, values.to(torch_dtype(self._segments[name].spec.dtype)))

    def belongs_to(self, ticket: int, version: int, update: str = "") -> None:
        """Complete the new values, and record which update they belong to.

        A tensor that was not written since `begin` keeps its value: it is copied from the current file to the new one.
        See `TwoPhaseFile.belongs_to` for the arguments.
        """
        for name, segment in self._segments.items():
            if name not in self._written:
                super().write(name, 0, self.read(name, 0, segment.spec.numel))
        super().belongs_to(ticket, version, update)
        self.state = "kept"


# -- The tensors that a site keeps for itself: those with the rule `keep` in `model.buffers`.


class WholeFile(ScratchFile):
    """A file that is always rewritten as a whole, so that its size may change."""

    def __init__(self, path: Path, nbytes: int, used: Iterable[tuple[int, int]] | None = None) -> None:
        super().__init__(path, path.stat().st_size if path.is_file() else nbytes, used)

    def rewrite(self, runs: Iterable[memoryview | bytes]) -> None:
        """Replace the content of the file."""
        self.nbytes = 0
        self.zero()
        for run in runs:
            self.write(self.nbytes, memoryview(run))
            self.nbytes += len(run)


class KeptTensors(TwoPhaseFile):
    """The tensors of one fragment that a site keeps for itself, on disk, such as batch normalisation in FedBN.

    Their shapes may change from update to update. Each file is a safetensors file, or empty.

    Args:
        folder: the site's folder in the run; locked by the caller.
        names: the names of the tensors.
        name: name of the files, without suffix.
        owner: the site and the run. Files of another owner count as lost.
    """

    _file = WholeFile

    def __init__(self, folder: Path, names: Iterable[str], name: str, owner: Owner) -> None:
        super().__init__(folder, name, (), owner=owner)
        self._names = sorted(names)
        if not self.found:
            self.zero()

    def zero(self) -> None:
        """Forget all values: the site begins with those of the initial model again."""
        super().zero()
        for file in self._files:
            cast(WholeFile, file).rewrite(())

    def values(self) -> dict[str, Tensor]:
        """Return the current values by name, in new memory; empty until an update of this site has counted."""
        file = self._files[self.note.current]
        content = bytearray(file.nbytes)
        file.read_into(0, memoryview(content))
        return load(bytes(content)) if content else {}

    def keep(self, tensors: Mapping[str, object]) -> None:
        """Write the values that become current if the update counts that is being formed.

        Args:
            tensors: the model's tensors by name. A tensor that is missing keeps its current value.
        """
        values = self.values() | {name: value for name in self._names if isinstance(value := tensors.get(name), Tensor)}
        specs = [TensorSpec(name, dtype_name(each.dtype), tuple(each.shape)) for name, each in values.items()]
        schema = Schema.build(specs)
        runs = chain.from_iterable(runs_of(values[spec.name].detach()) for spec in schema.tensors)
        file = self._files[1 - self.note.current]
        cast(WholeFile, file).rewrite(chain([safetensors_header(schema.tensors, {})], runs))


# -- What a site's script keeps: `ScriptState`.


@dataclass(frozen=True)
class ScriptNote:
    """The JSON note of what a site's script keeps.

    Attributes:
        site, run: the owner of the files.
        states: the fields of each `SavedState`, the newest first.
        dropped: whether there were earlier states, which are no longer kept.
    """

    site: str
    run: str
    states: Sequence[dict[str, Any]] = ()
    dropped: bool = False


# -- Move the local state of a site between disks: read its files as bytes, and write them again.
#
# The files are written in the same order as in a round: the note without the pending update, the pending file, then the
# full note. So after a kill in between, the round can be trained again.


NAMES = ("algorithm", "residual", "kept")
"""The NAME of each kind of local state. NAME-0.bin and NAME-1.bin are written in turn; NAME.json says which is current.
"""

Kept = dict[str, bytes]
"""Name of a file → its bytes."""


def pending(folder: Path) -> set[int]:
    """Return the tickets of a site's pending updates, and of the states of its script, from the notes in its folder."""
    if not folder.is_dir():
        return set()
    notes = [read_note(folder / f"{name}.json", TwoPhaseNote) for name in NAMES]
    tickets = {note.pending for note in notes if note is not None and note.pending}
    with suppress(NoteDamaged):  # `ScriptState` refuses such a note
        script: ScriptNote | None = peek_note(folder / "script.json", ScriptNote)
        tickets |= {each["ticket"] for each in script.states} if script is not None else set()
    return tickets


def state_in(folder: Path, counted: Counted, head: int) -> messages.SiteState:
    """Return what a site says of the state that the algorithm keeps at it, read from the note in its folder.

    If the server has gone back to the earlier of the two states, and this one is damaged, it is left out, as in
    `AlgorithmState.last_updates`: then the server begins anew.

    Args:
        folder: the site's folder.
        counted: the site's last counted update, as the server knows it, and the present generation.
        head: number of the server's newest version.
    """
    note: TwoPhaseNote | None = read_note(folder / "algorithm.json", TwoPhaseNote)
    updates = [] if note is None else note.updates
    if note is not None and len(updates) > 1 and counted.base_version is not None:
        earlier, index = (0, note.current) if note.pending else (1, 1 - note.current)
        goes_back = updates[earlier].names(counted) and (not note.pending or note.pending_version >= head)
        if goes_back and not _has_digest(folder / f"algorithm-{index}.bin", note.digests[index]):
            del updates[earlier]
    return messages.SiteState(
        local_state="missing" if note is None else "kept", local_state_of=updates, new_local_state=wanted_anew()
    )


def _has_digest(path: Path, digest: str) -> bool:
    """Return whether a file of a site's state has the digest in its note; warn if it is damaged or missing."""
    if path.is_file():
        with closing(WholeFile(path, 0)) as file:
            if file.content_digest() == digest:
                return True
    LOG.warning("%s is damaged (its digest differs) or missing, and is not used. Check the disk.", path)
    return False


def read_kept(folder: Path) -> Kept:
    """Return the content of the files of a site's local state; empty before the site's first round."""
    if not folder.is_dir():
        return {}
    with usable(folder):
        return {path.name: read_own(path) for path in folder.iterdir() if path.suffix in (".bin", ".json")}


def put_kept(folder: Path, kept: Kept) -> None:
    """Write the files from `read_kept` into a folder. No other process may use this folder."""
    if not kept:
        return
    with usable(folder):
        own_folder(folder, folder.parent)
        for name, content in kept.items():
            _write(folder / name, content)


def write_kept(folder: Path, kept: Kept) -> None:
    """Replace a site's local state with the state after a round. A kill in between leaves the old state or the new one.

    Args:
        folder: the site's folder.
        kept: the files after the round.
    """
    if "script.json" in kept:
        _write_script(folder, kept)
    for name in NAMES:
        if f"{name}.json" not in kept:
            continue
        note = note_from(kept[f"{name}.json"], TwoPhaseNote)
        files = [folder / f"{name}-{index}.bin" for index in (0, 1)]
        path = folder / f"{name}.json"
        if read_note(path, TwoPhaseNote) is None:
            own_folder(folder, folder.parents[1])
            _write(files[note.current], kept[files[note.current].name])
        else:
            write_note(path, replace(note, pending=0, pending_version=-1))
        other = files[1 - note.current]
        _write(other, kept[other.name])
        write_note(path, TwoPhaseNote(**asdict(note)))


def _write_script(folder: Path, kept: Kept) -> None:
    """Replace what a site's script keeps: the note without the states that are written, their files, the full note."""
    note, path = note_from(kept["script.json"], ScriptNote), folder / "script.json"
    before: ScriptNote | None = read_note(path, ScriptNote)
    known = [] if before is None else list(before.states)
    if before is None:
        own_folder(folder, folder.parents[1])
    elif list(note.states) != known:
        write_note(path, replace(note, states=[each for each in note.states if each in known]))
    for each in note.states:
        if each not in known:
            _write(folder / f"script-{each['place']}.bin", kept[f"script-{each['place']}.bin"])
    write_note(path, note)


def _write(path: Path, content: bytes) -> None:
    replace_file(path, [content], sync=no_sync)
