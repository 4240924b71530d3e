"""What a run was begun with, kept as a note beside it, so that an earlier result is never taken for a new one.

The inputs are the settings that decide the result, the code that they name with all that it imports from your own
folders (`used_code`), the script's arguments, the files and folders that these name, and the sites. Of data, names,
sizes and times of change are compared, of `MOST_FILES` files in a folder at most; their bytes are not read.
"""

from __future__ import annotations

import itertools
import logging
import os
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from atoll.config import Settings, to_toml
from atoll.config.run_file import CODE, FILTERS, FUNCTIONS, moved
from atoll.errors import AtollError, ConfigError, StoreError, UsageError
from atoll.format_text import duration
from atoll.json_files import NoteDamaged, peek_note, write_note
from atoll.simulate import INPUTS_FILE
from atoll.simulate.used_code import GivenCode, digests
from atoll.store.reader import has_run, open_state
from atoll.store.store import lock_directory

LOG = logging.getLogger("atoll.simulate")

PLACES = ("network.", "disk.", "swarm.", "rounds.sites")
"""Beginnings of the settings that do not decide a result, or that `sites` has already."""
MOST_FILES = 20_000
"""Number of files of a folder of which sizes and times are compared."""
PASSED_OVER = ("__pycache__", "site-packages", "node_modules")
"""Folders that are no data, and change by themselves; so are hidden ones."""
SHOWN = 4
"""Number of differences that a message names."""


@dataclass(frozen=True)
class Inputs:
    """What decides the result of a run.

    Attributes:
        settings: `group.key` → value as TOML.
        code: file or function → digest; value that a function of the program uses → its text.
        data: file or folder that the arguments, `model.source` or such values name → sizes and times of change.
        arguments: the arguments of the script.
        sites: the names of all sites.
    """

    settings: dict[str, str]
    code: dict[str, str]
    data: dict[str, str]
    arguments: list[str]
    sites: list[str]

    @classmethod
    def of(
        cls,
        settings: Settings,
        script: str | Callable[..., Any],
        arguments: Sequence[str],
        sites: Sequence[str],
        given: Sequence[object] = (),
    ) -> Inputs:
        """Return what a run would be begun with now.

        Args:
            settings: the run's settings.
            script: the training code: its name, or a function that no name leads to.
            arguments: the arguments of the script.
            sites: the names of all sites.
            given: further code that a program passes: functions, filters, or lists of them.
        """
        objects = GivenCode(*given, *([] if isinstance(script, str) else [script]))
        named = [
            script if isinstance(script, str) else "",
            *(settings.at(key) for key in FUNCTIONS),
            *(settings.at(key).path for key in CODE),
            *objects.places,
        ]
        named += [table.get("path") for key in FILTERS for table in settings.at(key)]
        values = {key: value for key, value in settings.by_key().items() if not key.startswith(PLACES)}
        paths = [settings.model.source or "", *(each.rpartition("=")[2] for each in arguments), *objects.named_texts]
        own = {settings.disk.state_dir.resolve(), settings.exports.resolve()}
        return cls(
            settings={key: _text(key, value) for key, value in values.items() if value is not None},
            code=digests([str(each) for each in named if each]) | objects.parts,
            data={path: state for path in paths if path and (state := _state(Path(path), own))},
            arguments=list(arguments),
            sites=list(sites),
        )

    @classmethod
    def read(cls, folder: Path) -> Inputs | None:
        """Return the inputs of the run in a folder; None if they were not recorded, or the note is damaged."""
        with suppress(NoteDamaged, AtollError):
            found: Inputs | None = peek_note(folder / INPUTS_FILE, cls)
            return found
        return None

    def write(self, folder: Path) -> None:
        """Record these inputs for the run in a folder."""
        write_note(folder / INPUTS_FILE, self)

    def differences(self, earlier: Inputs) -> list[str]:
        """Return in what these inputs differ from those of an earlier run, each difference as a text."""
        found = [f"{key} is {new}, was {old}" for key, old, new in _changed(earlier.settings, self.settings)]
        found += [f"{_short(file)} has changed" for file, *_ in _changed(earlier.code, self.code)]
        found += [f"{_short(path)} has changed" for path, *_ in _changed(earlier.data, self.data)]
        if self.arguments != earlier.arguments:
            old, new = (shlex.join(each.arguments) or "none" for each in (earlier, self))
            found.append(f"the script's arguments are {new}, were {old}")
        if sorted(self.sites) != sorted(earlier.sites):
            of_names = len(self.sites) == len(earlier.sites)
            old, new = (", ".join(each.sites) if of_names else str(len(each.sites)) for each in (earlier, self))
            found.append(f"the sites are {new}, were {old}")
        return found


def listed_differences(found: Sequence[str]) -> str:
    """Return the first `SHOWN` differences, and the number of the others, as text."""
    more = len(found) - SHOWN
    return "; ".join([*found[:SHOWN], *([f"and {more} more"] if more > 0 else [])])


def _changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[tuple[str, str, str]]:
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [(key, old.get(key, "not set"), new.get(key, "not set")) for key in keys]


def _text(key: str, value: object) -> str:
    try:
        return to_toml(moved(key, value, lambda path: str(Path(path).resolve())))
    except ConfigError:  # an object of the program
        return type(value).__name__


def _short(path: str) -> str:
    with suppress(ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return path


def _state(path: Path, own: Collection[Path]) -> str:
    """Return a text that changes with a file, or with the files in a folder and its subfolders; empty without either.

    Args:
        path: the file or folder.
        own: folders that the run itself writes to, which do not count.
    """
    try:
        files = list(itertools.islice(_files(path, own), MOST_FILES + 1)) if path.is_dir() else [path]
        found = [f"{each} {_stat(each)}" for each in files[:MOST_FILES]] if files != [path] or path.exists() else []
    except (OSError, ValueError):
        return ""
    if len(files) > MOST_FILES:
        LOG.info("%s: of the files in it, the first %d tell whether the data have changed", path, MOST_FILES)
    return blake3("\n".join(found).encode(errors="replace")).hexdigest() if found else ""


def _stat(file: Path) -> str:
    with suppress(OSError):
        at = file.stat()
        return f"{at.st_size} {at.st_mtime_ns}"
    return "cannot be read"


def _files(folder: Path, own: Collection[Path]) -> Iterator[Path]:
    """Yield the files below a folder, in the order of their names; a link is followed, but no folder is read twice."""
    seen = set[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen or Path(real) in own or INPUTS_FILE in names or has_run(Path(place)) or len(seen) > MOST_FILES:
            folders.clear()  # a run's own folder, or one that was read already
            continue
        seen.add(real)
        folders[:] = sorted(each for each in folders if each not in PASSED_OVER and not each.startswith("."))
        yield from (Path(place, each) for each in sorted(names) if not each.startswith("."))


# -- a run that is there already


class Earlier(NamedTuple):
    """The run that a folder has already.

    Attributes:
        finished: whether its last round has ended.
        version: its newest version.
        quiet_s: seconds since its server wrote last.
        differences: in what it was begun with other inputs than those of this start.
    """

    finished: bool
    version: int
    quiet_s: float
    differences: list[str]

    def described(self, where: Path) -> str:
        """Return one sentence about the run, without a full stop."""
        end = " finished at version " if self.finished else " stopped after version "
        text = f"The run in {where}{end}{self.version}, {duration(max(0.0, self.quiet_s))} ago"
        return f"{text}, and was begun otherwise: {listed_differences(self.differences)}" if self.differences else text


def earlier_run(state_dir: Path, noted: Path, inputs: Inputs) -> Earlier | None:
    """Return what a state directory has of an earlier run; None if no run was begun in it.

    Args:
        state_dir: the state directory.
        noted: the folder with the note of its inputs.
        inputs: the inputs of this start.

    Raises:
        StoreError: this user has no permission to read the directory, or its journal is damaged.
    """
    if not has_run(state_dir):
        return None
    with open_state(state_dir) as state:
        versions = [each.version or 0 for each in state.heads()]
        finished, quiet_s = state.meta()[1], time.time() - state.path.stat().st_mtime
    before = Inputs.read(noted)
    return Earlier(finished, min(versions), quiet_s, inputs.differences(before) if before else []) if versions else None


def begin(state_dir: Path, inputs: Inputs, *, fresh: bool, resume: bool) -> None:
    """Decide whether a start begins a run, or continues the one in the state directory.

    A run that has stopped, and was begun with the same inputs, is continued. So is one that has made no version yet.

    Args:
        state_dir: the state directory, which also has the note of the run's inputs.
        inputs: the inputs of this start.
        fresh: begin a new run; an earlier one is kept in another folder beside it.
        resume: continue the earlier run, or return its result, whatever it was begun with.

    Raises:
        UsageError: `fresh` and `resume` are both given. Or neither is, and the earlier run has finished, or was begun
            with other inputs.
        StateLocked: another process uses the directory.
    """
    if fresh and resume:
        raise UsageError("Both --fresh and --resume are given.", "Use one of them.")
    if not has_run(state_dir):
        return
    if fresh:
        put_aside(state_dir)
        return
    earlier = None
    with suppress(StoreError):  # the start says what is damaged
        earlier = earlier_run(state_dir, state_dir, inputs)
    if earlier is None or resume or not (earlier.finished or (earlier.differences and earlier.version)):
        return
    rest = "returns its result" if earlier.finished else "continues it"
    raise UsageError(
        f"{earlier.described(state_dir)}.",
        "fresh=True, as a command --fresh, begins a new one and keeps this one beside it; resume=True, as a command "
        f"--resume, {rest}.",
    )


def put_aside(state_dir: Path) -> None:
    """Rename a state directory to the first free one of NAME-1, NAME-2 and so on, and log it.

    Raises:
        StateLocked: a process uses the directory.
    """
    lock = lock_directory(state_dir)
    try:
        number = 1
        while os.path.lexists(kept := state_dir.with_name(f"{state_dir.name}-{number}")):
            number += 1
        state_dir.rename(kept)
    finally:
        lock.close()
    LOG.info("the earlier run is kept in %s", kept)
