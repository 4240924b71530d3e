"""What a site's script keeps from update to update, `worker.state`: names → tensors and JSON values, never sent.

The script finds what it had when it submitted its last update that counts. So the files hold several states, each with
its update: a refused or lost update leaves an earlier one, and a server that goes back leaves one from before that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load
from torch import Tensor

from atoll.errors import ConfigError, UsageError
from atoll.json_files import NoteDamaged, peek_note, write_note
from atoll.posix import own_folder, usable
from atoll.protocol import messages
from atoll.tensors.chunks import runs_of
from atoll.tensors.dtypes import dtype_name
from atoll.tensors.layout import safetensors_header
from atoll.tensors.payload import Packed, pack, unpack
from atoll.tensors.schema import Schema, TensorSpec
from atoll.worker.exchange.local_state import NEW, Owner, ScriptNote, WholeFile, wanted_anew
from atoll.worker.log_lines import LOG

MOST_NAMES, MOST_NAME_CHARS, MOST_JSON_BYTES = 1000, 200, 2**20
KEPT = 3
"""Number of states on disk besides that of the update that is being formed. By default a server keeps two versions, so
it goes back by one version at most. Together with an update that then no longer counts, three states are needed."""
_JSON = "atoll.state"


class WorkerState(MutableMapping[str, Any]):
    """Names → tensors, numbers, texts, lists and dicts that a site keeps for itself, with its updates: `worker.state`.

    Args:
        site: the site's name.
    """

    def __init__(self, site: str) -> None:
        self._site, self._values = site, dict[str, Any]()
        self._why_closed = "its content is known once the first round has begun"
        self._is_known = False

    def begin(self, values: dict[str, Any]) -> None:
        """Take the values with which a round begins."""
        self._values, self._is_known, self._why_closed = values, True, ""

    def end(self, why: str) -> None:
        """Refuse changes until the next round begins: they would be lost."""
        self._why_closed = why

    def packed(self) -> Packed:
        """Return the present values as JSON and tensors, which are not copied.

        Raises:
            UsageError: a value cannot be kept. The message names its place.
        """
        packed = pack(self._values, "worker.state", "keep")
        nbytes = len(json.dumps(packed.skeleton))
        if nbytes > MOST_JSON_BYTES:
            raise UsageError(
                f"worker.state of {self._site} has {nbytes} bytes besides its tensors; {MOST_JSON_BYTES} are possible.",
                "Keep long lists of numbers as tensors, and other data in files of your own.",
            )
        if not all(isinstance(each, Tensor) for each in packed.tensors):
            raise UsageError(f"worker.state of {self._site} has a stream.", "Keep a tensor with its values.")
        return packed

    def __getitem__(self, name: str) -> Any:
        return self._known[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME_CHARS:
            raise UsageError(
                f"worker.state cannot have the name {name!r:.250}.", f"Use a text of 1 to {MOST_NAME_CHARS} characters."
            )
        self._require_open()
        if len(self._values) >= MOST_NAMES and name not in self._values:
            raise UsageError(
                f"worker.state has {MOST_NAMES} names already, and cannot have {name!r}, too.",
                "Keep several values under one name, as a dict or list.",
            )
        pack(value, f"worker.state[{name!r}]", "keep")
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        self._require_open()
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"<state of {self._site}: {', '.join(self._values) or self._why_closed or 'empty'}>"

    @property
    def _known(self) -> dict[str, Any]:
        if not self._is_known:
            self._require_open()
        return self._values

    def _require_open(self) -> None:
        if self._why_closed:
            raise UsageError(
                f"worker.state of {self._site} cannot be used now: {self._why_closed}.",
                "Use it within a round, and change it before fl_round.submit(...).",
            )


@dataclass(frozen=True)
class SavedState:
    """One state on disk, and the update that it belongs to.

    Attributes:
        place: number of its file.
        digest: digest of the content of its file.
        ticket: ticket of the update.
        version: the version that the update was formed against.
        update: digest of the update.
    """

    place: int
    digest: str
    ticket: int
    version: int
    update: str


class ScriptState:
    """The files of a script's state. The note has the states, newest first, and is written after their files.

    Attributes:
        given: what the script wants to keep with the update that is formed next; None: nothing.

    Args:
        folder: the site's folder in the run.
        owner: the site and the run. Files of another owner are not used.
    """

    def __init__(self, folder: Path, owner: Owner) -> None:
        self._folder, self._owner, self._path = folder, owner, folder / "script.json"
        self.given: Packed | None = None
        self._current: Sequence[SavedState] = ()  # the state that the round began with, and those before it
        try:
            note: ScriptNote | None = peek_note(self._path, ScriptNote)
        except NoteDamaged as error:
            self._lose(f"{self._path} is damaged ({error})")
            note = None
        if note is not None and (note.site, note.run) != owner:
            LOG.warning("%s belongs to site %s in run %s, and is not used.", self._path, note.site, note.run)
            note = None
        self.note = note or ScriptNote(*owner)

    def load(self, outcome_of: Callable[[int], messages.Outcome]) -> dict[str, Any]:
        """Return the state with the last update that counts; empty without one. The next update is formed from it.

        Args:
            outcome_of: returns the state of a ticket's update.

        Raises:
            ConfigError: the state is damaged, and `ATOLL_NEW_STATE` does not allow it to begin empty.
        """
        states = self._states()
        while states and not _counts(states[0], outcome_of(states[0].ticket)):
            del states[0]
        self._current = states
        if not states:
            if self.note.dropped:
                LOG.warning("%s: the server went back too far: worker.state begins empty", self._owner.site)
            return {}
        with closing(self._file(states[0].place)) as file:
            if file.content_digest() != states[0].digest:
                self._lose(f"{file.path} is damaged or missing")
                return {}
            content = bytearray(file.nbytes)
            file.read_into(0, memoryview(content))
        tensors = load(bytes(content))
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        ordered = [tensors[str(number)] for number in range(len(tensors))]
        return cast(dict[str, Any], unpack(json.loads(header["__metadata__"][_JSON]), ordered))

    # -- with each update: see `LocalState`

    @property
    def is_empty(self) -> bool:
        """Whether no update of this site was formed with a state."""
        return not self.note.states

    def begin(self) -> None:
        """Forget the states after the current one: an update that does not count has left them."""
        if self.given is not None and len(self._current) < len(self.note.states):
            self._write(self._current)

    def keep(self) -> None:
        """Write `given` into a file that the note does not name."""
        if self.given is None:
            return
        tensors = cast("tuple[Tensor, ...]", self.given.tensors)  # `WorkerState` refuses streams
        specs = [TensorSpec(str(at), dtype_name(each.dtype), tuple(each.shape)) for at, each in enumerate(tensors)]
        ordered = Schema.build(specs).tensors
        header = safetensors_header(ordered, {_JSON: json.dumps(self.given.skeleton)})
        if not self._folder.is_dir():  # of a simulated site
            with usable(self._folder.parent):
                own_folder(self._folder, self._folder.parents[1])
        with closing(self._file(self._free)) as file:
            file.rewrite(chain([header], *(runs_of(tensors[int(spec.name)]) for spec in ordered)))
            self._digest = file.content_digest()

    def belongs_to(self, ticket: int, version: int, update: str = "") -> None:
        """Record which update the new state belongs to."""
        if self.given is not None:
            self._write([SavedState(self._free, self._digest, ticket, version, update), *self._current])
            self.given = None

    def moves_to(self, ticket: int, version: int, before: int) -> None:
        """Record that the update with the ticket `before` has another ticket, and is for another version."""
        states = self._states()
        moved = [replace(each, ticket=ticket, version=version) if each.ticket == before else each for each in states]
        if moved != states:
            self._write(moved)

    def _states(self) -> list[SavedState]:
        return [SavedState(**each) for each in self.note.states]

    @property
    def _free(self) -> int:
        return min(set(range(KEPT + 1)) - {each.place for each in self._current[:KEPT]})

    def _file(self, place: int) -> WholeFile:
        return WholeFile(self._folder / f"script-{place}.bin", 0)

    def _write(self, states: Sequence[SavedState]) -> None:
        dropped = self.note.dropped or len(states) > KEPT + 1
        self.note = ScriptNote(*self._owner, [vars(each) for each in states[: KEPT + 1]], dropped)
        write_note(self._path, self.note)

    def _lose(self, what: str) -> None:
        """Let a lost state begin empty if `ATOLL_NEW_STATE` allows it.

        Raises:
            ConfigError: the variable does not allow it, or is neither true nor false.
        """
        if not wanted_anew():
            raise ConfigError(
                f"worker.state of site {self._owner.site} is lost: {what}.",
                f"Restore the folder from a backup. Without a backup, set {NEW}=1 to let worker.state begin empty.",
            )
        LOG.warning("%s: worker.state begins empty, because %s is set: %s", self._owner.site, NEW, what)


def _counts(saved: SavedState, outcome: messages.Outcome) -> bool:
    """Return whether the update of a state counts. A restored server may have given its ticket to another update."""
    return outcome.state == "counted" and saved.update in ("", outcome.digest)
