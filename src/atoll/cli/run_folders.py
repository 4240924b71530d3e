"""The folders of `atoll run`, and `atoll runs`, which lists them.

runs/NAME-1/
    begun-with.json   what the run was begun with (simulate/inputs.py)
    run.toml          its settings, with absolute paths: a run file for every other command
    state/            the state directory
    workers/          a folder for each site
    server.log …      what each process printed
"""

from __future__ import annotations

import fcntl
import json as jsons
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from blake3 import blake3
from pydantic import SecretStr

from atoll.cli.stored_status import RUNS, STATE, stored_status
from atoll.cli.text import next_step, numbers
from atoll.config import FIELDS, GROUPS, Settings, default_of, toml_lines
from atoll.config.run_file import moved
from atoll.errors import AtollError, UsageError
from atoll.format_text import visible
from atoll.posix import OWN_FILE, OWN_FOLDER, no_sync, replace_file
from atoll.simulate.inputs import FILE, Earlier, Inputs, earlier_run

RUN_FILE = "run.toml"


class Place(NamedTuple):
    """The folder of a run that begins or goes on.

    Attributes:
        folder: the folder.
        earlier: the run that goes on; None if a new run begins.
        said: a line about an earlier run that does not go on; may be empty.
    """

    folder: Path
    earlier: Earlier | None
    said: str


def place(stem: Path, inputs: Inputs, *, fresh: bool, resume: bool) -> Place:
    """Return the folder in which a run begins, or that of the run which goes on: the newest one of the same name.

    Args:
        stem: the folder without its number, such as `runs/digits`.
        inputs: what the run would be begun with now.
        fresh: begin a new run.
        resume: go on with the newest run, whatever it was begun with.

    Raises:
        UsageError: there is no run to go on with; or `fresh` and `resume` are both set.
    """
    if fresh and resume:
        raise UsageError("Both --fresh and --resume are given.", "Use one of them.")
    last = max(_numbers(stem), default=0)
    folder = stem.with_name(f"{stem.name}-{last}")
    earlier = earlier_run(folder / STATE, folder, inputs) if last and not fresh else None
    if resume and earlier is None:
        raise UsageError(f"There is no run {stem}-N to go on with.", "Leave --resume out: a new run begins.")
    if earlier is not None and (resume or not (earlier.finished or earlier.differences)):
        return Place(folder, earlier, "")
    said = earlier.described(folder) if earlier is not None else ""
    if earlier is not None and not earlier.finished:
        said = f"{folder} is running" if is_in_use(folder) else f"{said}. To go on with it: atoll run {folder}"
    while True:
        last += 1
        with suppress(FileExistsError):
            folder = stem.with_name(f"{stem.name}-{last}")
            folder.mkdir(OWN_FOLDER, parents=True)
            return Place(folder, None, said)


def finished_twin(stem: Path, inputs: Inputs) -> Path | None:
    """Return the newest finished run of a name that was begun with the same inputs; None if there is none."""
    for number in sorted(_numbers(stem), reverse=True):
        folder = stem.with_name(f"{stem.name}-{number}")
        with suppress(AtollError):
            earlier = earlier_run(folder / STATE, folder, inputs)
            if earlier is not None and earlier.finished and Inputs.read(folder) == inputs:
                return folder
    return None


def _numbers(stem: Path) -> Iterator[int]:
    for each in stem.parent.glob(f"{stem.name}-*"):
        with suppress(ValueError):
            yield int(each.name.removeprefix(f"{stem.name}-"))


def write_run_file(folder: Path, settings: Settings) -> Path:
    """Write the settings that differ from their defaults into the run's folder, with absolute paths."""
    known = {key: default_of(key) if key in FIELDS else None for key in settings.by_key()}
    chosen = {key: value for key, value in settings.by_key().items() if value not in (None, known[key])}
    chosen = {key: moved(key, value, lambda path: str(Path(path).resolve())) for key, value in chosen.items()}
    chosen |= {key: value.get_secret_value() for key, value in chosen.items() if isinstance(value, SecretStr)}
    chosen |= {"disk.state_dir": STATE}
    chosen.pop("disk.export_dir", None)  # results of several runs cannot share a folder
    groups = list(GROUPS)
    lines = toml_lines(dict(sorted(chosen.items(), key=lambda each: groups.index(each[0].partition(".")[0]))))
    path = folder / RUN_FILE
    replace_file(path, ["\n".join([*lines, ""]).encode()], sync=no_sync, mode=OWN_FILE)  # it may have secrets
    return path


def model_digest(path: Path) -> str:
    """Return the digest of the tensors in a safetensors file, without its header."""
    with path.open("rb") as file:
        file.seek(int.from_bytes(file.read(8), "little"), os.SEEK_CUR)
        digest = blake3()
        while data := file.read(2**20):
            digest.update(data)
    return digest.hexdigest()


# -- atoll runs


@dataclass(frozen=True)
class ListedRun:
    """One run as `atoll runs` shows it.

    Attributes:
        run: name of the folder.
        state: running, finished, stopped, failed, empty, damaged or unreadable.
        round: rounds that have ended, of all.
        metrics: those of the last round.
        changed_at: when its journal was written last, as Unix time; None if there is none.
        folder: the folder.
        detail: why it has failed, or cannot be read.
    """

    run: str
    state: str
    round: str
    metrics: dict[str, float]
    changed_at: float | None
    folder: str
    detail: str = ""


def listed_run(folder: Path) -> ListedRun:
    """Return what a run's folder tells, whether it is living, dead, damaged or empty."""
    begun = folder / FILE
    at = begun.stat().st_mtime if begun.exists() else None
    try:
        status, at = stored_status(folder / STATE)
    except UsageError:
        return ListedRun(folder.name, "running" if is_in_use(folder) else "empty", "-", {}, at, str(folder))
    except AtollError as error:
        state = "damaged" if error.code == "state_corrupt" else "unreadable"
        return ListedRun(folder.name, state, "-", {}, at, str(folder), str(error))
    with suppress(OSError):
        at = max(each.stat().st_mtime for each in (folder / STATE).glob("journal.sqlite*"))
    state = "failed" if status.failed else "finished" if status.finished else "stopped"
    if is_in_use(folder) and not status.finished:
        state = "running"
    last = status.history[-1] if status.history else None
    done = f"{last.round if last else 0} of {status.rounds or '∞'}"
    return ListedRun(folder.name, state, done, last.metrics if last else {}, at, str(folder), status.failed)


def is_in_use(folder: Path) -> bool:
    """Return whether an `atoll run` has locked the folder."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(fd)
    return False


def command(
    folder: Annotated[Path, typer.Argument(help="Folder that has the runs.", metavar="[DIR]")] = RUNS,
    json: Annotated[bool, typer.Option("--json", help="Print the runs as JSON.")] = False,
) -> None:
    """List the runs of `atoll run`: state, round, metrics, when and where."""
    found = sorted((each for each in folder.glob("*") if each.is_dir()), key=lambda each: each.stat().st_mtime)
    runs = [listed_run(each) for each in found]
    if json:
        print(jsons.dumps([asdict(each) for each in runs], indent=2))
    elif not runs:
        print(f"no runs in {folder}")
    else:
        for line in _lines(runs):
            print(line)
    going_on = next((each.folder for each in reversed(runs) if each.state == "stopped"), None)
    show = f"atoll status --dir {runs[-1].folder}/{STATE}" if runs else "atoll run --example digits"
    next_step(f"atoll run {going_on}" if going_on else show)


def _lines(runs: Sequence[ListedRun]) -> Iterator[str]:
    rows = [("run", "state", "round", "when", "folder", "metrics"), *map(_row, runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(run: ListedRun) -> tuple[str, ...]:
    when = f"{datetime.fromtimestamp(run.changed_at):%Y-%m-%d %H:%M}" if run.changed_at else "-"
    detail = visible(" ".join(run.detail.split()))
    return visible(run.run), run.state, run.round, when, visible(run.folder), detail or numbers(run.metrics) or "-"
