"""The state of a run in one file: `Server.save_state` writes it, and `Server.load_state` continues from it.

The file is the safetensors file of an exported model, with these tensors besides the model:

    atoll:version:<name>       a tensor of the algorithm, such as SCAFFOLD's c; or a parameter as workers have it, if
                               versions are downloaded through a lossy codec
    atoll:outer:<name>.<key>   the outer state, such as `momentum_buffer` or `master` (see `aggregation/outer_state`)

The entry `atoll.state` of its metadata, a compressed note, has the rows of the journal from which the run goes on, and
the settings. Updates that are not in a version yet are not in the file: their sites send them again, or train again.

Every byte of the file is checked. Its header must be the one that this run would write. The files of the versions and
outer states, made from the tensors, must have the digests in the note. The model must be the one in these files.

Code that the file names is never loaded: a setting with a path of code must be set again by the start that loads it.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import logging
import os
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from atoll.aggregation.plan import Plan
from atoll.blobs.model_file import ModelFile, model_header
from atoll.config import Settings
from atoll.config.run_file import CODE, FUNCTIONS, TABLES, flat, merged
from atoll.config.settings import FROZEN
from atoll.errors import BadRequest, ConfigError, StateCorrupt, UsageError
from atoll.format_text import visible
from atoll.json_files import NoteDamaged, seal, unseal
from atoll.posix import open_named, read_at, write_at
from atoll.store.file_slots import verify
from atoll.store.journal_tables import RunRow
from atoll.store.saved_rows import restore_rows, restored_state, saved_rows, saved_run
from atoll.store.store import Files, Store
from atoll.store.versions import VersionDigests
from atoll.tensors.layout import Layout, Segment
from atoll.tensors.safetensors_header import read_header
from atoll.tensors.schema import TensorSpec

LOG = logging.getLogger("atoll.server")

ENTRY = "atoll.state"
FORMAT = 2
"""Number of the file's format."""
OF_VERSION, OF_OUTER = "atoll:version:", "atoll:outer:"
READ_BYTES = 2**20
MOST_NOTE_BYTES = 2**30
"""Maximum size of the note when it is not compressed, about a million rounds."""

_OF_MACHINE = ("network", "disk", "server", "model.source", "model.args", "model.persistor", "run.script")
"""Settings of one machine: a saved state leaves them out, except those that are fixed once a run has begun."""
_AGAIN = "Save the state again, or copy the file again."


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file that is not in the model: a range of the file of a version or of an outer state."""

    spec: TensorSpec
    fragment: int
    is_outer: bool
    segment: Segment


def _further(plan: Plan, with_state: Sequence[bool]) -> dict[str, _Tensor]:
    """Return the tensors that the file has besides the model, by their names in the file.

    Args:
        plan: plan of the run.
        with_state: for each fragment, whether its version has an outer state.
    """
    found: dict[str, _Tensor] = {}

    def add(prefix: str, fragment: int, segment: Segment) -> None:
        name = f"{prefix}{segment.spec.name}"
        found[name] = _Tensor(replace(segment.spec, name=name), fragment, prefix == OF_OUTER, segment)

    for fragment, each in enumerate(plan.fragments):
        for segment in each.version.segments:
            if segment.spec.is_extra or (plan.has_masters and with_state[fragment] and segment.spec.is_stepped):
                add(OF_VERSION, fragment, segment)
        for segment in each.state_layout.segments if each.state_layout and with_state[fragment] else ():
            add(OF_OUTER, fragment, segment)
    taken = found.keys() & {*(spec.name for spec in plan.schema.tensors), *dict(plan.schema.aliases)}
    if taken:
        raise UsageError(
            f"The model has a tensor with the name {min(taken)!r}, under which a saved state has another tensor.",
            "Rename it: names of tensors that begin with atoll: are Atoll's own.",
        )
    return found


def _contents(
    plan: Plan, owners: Sequence[TensorSpec], further: Mapping[str, _Tensor], files: Files
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the tensors, in the order of the file.

    Args:
        plan: plan of the run.
        owners: the tensors, in this order.
        further: those of them that the model does not have.
        files: the open files of all fragments.
    """
    of: dict[str, ModelFile] = {}
    for each, (version_fd, state_fd) in zip(plan.fragments, files, strict=True):
        model = ModelFile(each.version, version_fd, state_fd if plan.has_masters else None)
        of |= dict.fromkeys(each.version.by_name, model)
    for spec in owners:
        if spec.name not in further:
            yield from of[spec.name].runs(spec)
            continue
        tensor = further[spec.name]
        fd = files[tensor.fragment][tensor.is_outer]
        assert fd is not None
        for _, run in _runs(fd, tensor.segment.offset, tensor.segment.nbytes):
            yield run


def _runs(fd: int, offset: int, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """Read a range of a file in pieces. Yield (bytes before the piece, piece); the memory of a piece is used again.

    Raises:
        StateCorrupt: the file is too short.
    """
    memory = memoryview(bytearray(min(READ_BYTES, nbytes)))
    for start in range(0, nbytes, READ_BYTES):
        piece = memory[: min(READ_BYTES, nbytes - start)]
        try:
            read_at(fd, piece, offset + start)
        except EOFError as error:
            raise StateCorrupt(f"A file of the run's state was truncated: {error}.", _AGAIN) from None
        yield start, piece


def save(plan: Plan, store: Store, path: Path, code: Mapping[str, str]) -> Path:
    """Write the state of a run into a file, which replaces an existing file atomically. Return the path.

    Args:
        plan: plan of the run.
        store: store of the run.
        path: path of the file.
        code: argument of `Server` → description of the code that the program has passed.

    Raises:
        UsageError: the run is a swarm.
        DiskFull: there is no space; no partial file is left.
        SyncFailed: fsync failed; the server must end.
    """
    if plan.is_swarm:
        raise UsageError(
            "The run is a swarm: its versions and outer states are at its sites, so the server cannot save them.",
            "Export the model with `atoll export`.",
        )
    with contextlib.ExitStack() as stack:
        with store.journal.lock:  # so that the files and the rows are of one moment
            heads = [store.versions.head(fragment) for fragment in range(len(plan.fragments))]
            files = stack.enter_context(store.pinned([head.version for head in heads], with_state=True))
            rows = saved_rows(store)
        note = {
            "format": FORMAT,
            "rows": rows,
            "versions": [
                {
                    "version": head.version,
                    "digest": head.digest,
                    "part_digests": [digest.hex() for digest in head.part_digests],
                    "state_digests": [digest.hex() for digest in head.state_digests],
                    "summary_json": head.summary_json,
                    "created_at": head.created_at,
                }
                for head in heads
            ],
            "settings": _settings_of(plan.settings),
            "code": dict(code),
        }
        text = base64.b64encode(zlib.compress(seal(note).encode())).decode()
        further = _further(plan, [bool(head.state_digests) for head in heads])
        header, owners = model_header(plan.schema, {ENTRY: text}, [each.spec for each in further.values()])
        return store.write_named(path, itertools.chain([header], _contents(plan, owners, further, files)))


def _settings_of(settings: Settings) -> dict[str, Any]:
    """Return the settings that were set, without those of one machine, by `group.key`, as values for JSON."""
    values = flat(settings.model_dump(mode="json", by_alias=True, exclude_unset=True))
    return {
        key: value
        for key, value in values.items()
        if key in FROZEN or (key not in _OF_MACHINE and key.partition(".")[0] not in _OF_MACHINE)
    }


def _names_code(key: str, value: Any) -> bool:
    """Return whether the value of the setting `key` contains a path of code, such as `module:attribute`."""
    texts: list[Any] = [value] if key in FUNCTIONS else []
    tables = value if key in TABLES else [value] if key in CODE else []
    texts += [table.get(part) for table in tables for part in ("path", "kind") if isinstance(table, Mapping)]
    return any(isinstance(text, str) and ":" in text for text in texts)


def _chooses(mine: Mapping[str, Any], key: str) -> bool:
    """Return whether the settings of a start choose the code of the setting `key`.

    Args:
        mine: the settings of the start, as nested tables.
        key: `group.key` of a setting that names code.
    """
    group, _, name = key.partition(".")
    table = mine.get(group, {})
    own = table if key == "algorithm.path" else table.get(name)
    return bool(own.keys() & {"name", "path"}) if isinstance(own, Mapping) else own is not None


def _fits(mine: Mapping[str, Any], key: str, value: object) -> bool:
    """Return whether the settings of a start leave a saved value in place.

    They do not if they choose another algorithm, reducer, codec or optimizer, to which the saved options do not belong.

    Args:
        mine: the settings of the start, as nested tables.
        key: `group.key` of the saved value.
        value: the saved value.
    """
    group, _, name = key.partition(".")
    table = mine.get(group, {})
    if group == "algorithm":
        return not table.keys() & {"name", "path"}
    own = table.get(name)
    return not (isinstance(value, Mapping) and isinstance(own, Mapping) and own.keys() & {"name", "path"})


def _quoted(value: object) -> str:
    return "nothing" if value is None else visible(repr(value), 300)


@dataclass(frozen=True)
class SavedState:
    """The content of a file that `save` has written, without its tensors.

    Attributes:
        path: path of the file.
        id: digest of the note.
        note: the rows of the journal, the settings, and what is known of the files.
        values: the settings, by `group.key`.
    """

    path: Path
    id: str
    note: Mapping[str, Any]
    values: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> SavedState:
        """Read the header of a file.

        Raises:
            ConfigError: the file is missing or cannot be read, or is none that `save` has written.
            StateCorrupt: the file is damaged.
        """
        with _opened(path) as fd:
            header, _ = _header(path, fd)
        text = header.get(ENTRY)
        if text is None:
            raise ConfigError(
                f"{path} is a safetensors file without the state of a run.",
                "Pass a file that Server.save_state has written. To begin a new run with the model in this file, use "
                f"Server({str(path)!r}).",
            )
        try:
            unpacked = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), MOST_NOTE_BYTES)
            note = unseal(unpacked)
        except (ValueError, zlib.error) as error:  # NoteDamaged is a ValueError, too
            reason = error if isinstance(error, NoteDamaged) else "it is not a compressed note"
            raise _damaged(path, f"its metadata entry {ENTRY}: {reason}") from None
        tables = all(isinstance(note.get(key), dict) for key in ("rows", "settings", "code"))
        if note.get("format") != FORMAT or not tables:
            raise ConfigError(
                f"{path} has the format {note.get('format')!r}, but this version of Atoll reads the format {FORMAT}.",
                "Load it with the version of Atoll that has saved it.",
            )
        return cls(path, blake3(unpacked).hexdigest(), note, note["settings"])

    @property
    def run(self) -> RunRow:
        """The row about the run."""
        return saved_run(self.note["rows"])

    def settings(self, given: Settings | Mapping[str, Any] | None, replaced: Collection[str]) -> dict[str, Any]:
        """Return the settings of a start from this state: those of the saved run, replaced by the given ones.

        Log a warning about each given value that differs from the saved run's. If such a setting is fixed once a run
        has begun, the start refuses it later.

        Args:
            given: the settings of the start.
            replaced: settings in place of which the program passes code.

        Raises:
            ConfigError: a setting is unknown or wrong, or the saved run had code, and this start names none.
        """
        values = given.model_dump(by_alias=True, exclude_unset=True) if isinstance(given, Settings) else given or {}
        mine, saved = merged(values), {key: value for key, value in self.values.items() if key not in replaced}
        kept = {key: value for key, value in saved.items() if not _names_code(key, value) and _fits(mine, key, value)}
        settings = merged(values, merged(kept))
        chosen = _settings_of(Settings.build(settings))
        for key, value in saved.items():
            if _names_code(key, value) and not _chooses(mine, key):
                raise ConfigError(
                    f"The state in {self.path} is of a run with {key} = {_quoted(value)}, but this start has "
                    f"{_quoted(chosen.get(key))}. Atoll never loads code that a saved state names.",
                    f"Set {key} in the settings of this start.",
                )
        changed = [key for key in flat(mine) if key in chosen and chosen[key] != saved.get(key)]
        if changed:
            LOG.warning(
                "this start changes settings of the run in %s: %s",
                self.path,
                "; ".join(f"{key} = {_quoted(chosen[key])} in place of {_quoted(saved.get(key))}" for key in changed),
            )
        return settings

    def warn_of_code(self, code: Mapping[str, str]) -> None:
        """Warn if the program passes other code to `Server` than the program that saved the state.

        Args:
            code: argument of `Server` → description of the code.
        """
        saved = self.note["code"]
        for name in sorted({*saved, *code}):
            if saved.get(name) != code.get(name):
                LOG.warning(
                    "the run in %s was served with %s = %s, but this start has %s: its results may differ",
                    self.path,
                    name,
                    visible(str(saved.get(name, "none")), 300),
                    code.get(name, "none"),
                )

    def require_continued(self, store: Store) -> None:
        """Check that the run in a state directory began with this state, so that this start continues it.

        Raises:
            ConfigError: the directory has a run that began otherwise.
        """
        if restored_state(store) != self.id:
            heads = ", ".join(map(str, store.versions.heads())) or "none"
            raise ConfigError(
                f"{store.directory} already contains a run ({store.run_log.run_id[:8]}, version {heads}), so the state "
                f"in {self.path} (run {self.run.run_id[:8]}) cannot be loaded there. Nothing was changed.",
                "To continue the run in that directory, use Server without load_state. To continue from the saved "
                "state, set another disk.state_dir.",
            )
        LOG.info("continuing with the run in %s; %s is not read again", store.directory, self.path)

    def restore(self, plan: Plan, store: Store) -> None:
        """Make the saved run that of a new state directory, in one transaction.

        Raises:
            StateCorrupt: the file is damaged, or does not fit the plan. The state directory is as before.
            DiskFull: the disk is full.
        """
        with contextlib.ExitStack() as drafts, store.journal.transaction(synced=True), _opened(self.path) as fd:
            store.slots.shape([fragment.shapes() for fragment in plan.fragments])
            try:
                self._restore(plan, store, fd, drafts)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError, AssertionError) as error:
                raise _damaged(self.path, f"its note does not describe a run ({error!r})") from error

    def _restore(self, plan: Plan, store: Store, fd: int, drafts: contextlib.ExitStack) -> None:
        versions = self.note["versions"]
        further = _further(plan, [bool(each["state_digests"]) for each in versions])
        metadata, head = _header(self.path, fd)
        header, owners = model_header(
            plan.schema, {ENTRY: metadata.get(ENTRY, "")}, [each.spec for each in further.values()]
        )
        if head != header:
            raise _damaged(self.path, "its header differs from the one that was written")
        offsets, end = dict[str, int](), len(header)
        for spec in owners:
            offsets.setdefault(spec.name, end)
            end += spec.nbytes
        made = []
        for fragment, (each, saved) in enumerate(zip(plan.fragments, versions, strict=True)):
            draft = store.versions.begin(fragment, saved["version"])
            drafts.callback(draft.abandon)
            digests = VersionDigests(
                digest=saved["digest"],
                part_digests=tuple(map(bytes.fromhex, saved["part_digests"])),
                state_digests=tuple(map(bytes.fromhex, saved["state_digests"])),
            )
            shapes, version_fd, state_fd = each.shapes(), *draft.fds[:2]
            _copy(fd, offsets, each.version, each.header, version_fd, (OF_VERSION, ""))
            is_whole = verify(version_fd, shapes.version, digests.part_digests)
            if digests.state_digests and each.state and state_fd is not None and shapes.state:
                _copy(fd, offsets, each.state[1], each.state[0], state_fd, (OF_OUTER,))
                is_whole = is_whole and verify(state_fd, shapes.state, digests.state_digests)
            if not is_whole:
                raise _damaged(self.path, f"version {saved['version']}{store.journal.of(fragment)} has another digest")
            made.append((draft, digests, saved))
        files = [(draft.fds[0], draft.fds[1] if digests.state_digests else None) for draft, digests, _ in made]
        _require_same(self.path, fd, len(header), _contents(plan, owners, further, files))
        restore_rows(store, self.note["rows"], [saved["version"] for saved in versions], self.id)
        for draft, digests, saved in made:
            store.versions.restore(draft, digests, summary_json=saved["summary_json"], created_at=saved["created_at"])


def _copy(
    source: int, offsets: Mapping[str, int], layout: Layout, header: bytes, target: int, prefixes: Sequence[str]
) -> None:
    """Copy the tensors of a layout from a saved state into their own file.

    Args:
        source: descriptor of the saved state.
        offsets: name of a tensor → where it begins in the saved state.
        layout: layout of the own file.
        header: header of the own file.
        target: descriptor of the own file.
        prefixes: what may stand before the name of a tensor in the saved state; the first that is there counts.
    """
    write_at(target, header, 0)
    for segment in layout.segments:
        name = next(name for prefix in prefixes if (name := f"{prefix}{segment.spec.name}") in offsets)
        for start, run in _runs(source, offsets[name], segment.nbytes):
            write_at(target, run, segment.offset + start)


def _require_same(path: Path, fd: int, offset: int, expected: Iterator[bytes | memoryview]) -> None:
    """Check that a file has these bytes from `offset` on, and then ends.

    Raises:
        StateCorrupt: it has others.
    """
    for run in expected:
        if os.pread(fd, len(run), offset) != run:
            raise _damaged(path, f"a tensor at byte {offset} differs from the one that was written")
        offset += len(run)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file that a user names.

    Raises:
        ConfigError: it is missing, or cannot be read.
    """
    try:
        fd = open_named(path)
    except OSError as error:
        raise ConfigError(
            f"The saved state {str(path)!r} cannot be read ({error.strerror or error}).",
            "Pass the path of a file that Server.save_state has written.",
        ) from error
    try:
        yield fd
    finally:
        os.close(fd)


def _header(path: Path, fd: int) -> tuple[dict[str, str], bytes]:
    """Return the metadata and the bytes of a file's header.

    Raises:
        StateCorrupt: the file is no safetensors file, or is cut.
    """
    try:
        found = read_header(lambda at, count: os.pread(fd, count, at), os.fstat(fd).st_size, str(path))
    except BadRequest as error:
        raise _damaged(path, error.message.rstrip(".")) from None
    return found.metadata, os.pread(fd, found.nbytes, 0)


def _damaged(path: Path, what: str) -> StateCorrupt:
    return StateCorrupt(
        f"{path} is not the state that Server.save_state has written, or is damaged: {what}.",
        f"{_AGAIN} The state directory was not changed.",
    )
