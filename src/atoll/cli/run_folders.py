"""The folders of `atoll run`, and `atoll runs`, which lists them.

runs/NAME-1/
    begun-with.json   what the run was begun with (simulate/inputs.py)
    run.toml          its settings, with absolute paths: a run file for every other command
    state/            the state directory
    workers/          a folder for each site
    server.log …      what each process printed
    failure.txt       why it failed last, until it is started again
"""

from __future__ import annotations

import json as jsons
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from blake3 import blake3
from pydantic import SecretStr

from atoll.cli.stored_status import stored_status
from atoll.cli.text import fitting, next_step, numbers, width_of_output
from atoll.cli.which_run import (
    RUNS,
    STATE,
    RunState,
    is_served,
    noted_failure,
    quoted,
    run_folders,
    state_of,
)
from atoll.config import FIELDS, GROUPS, Settings, default_of, toml_lines
from atoll.config.run_file import moved
from atoll.errors import AtollError, UsageError
from atoll.format_text import visible
from atoll.posix import OWN_FILE, OWN_FOLDER, is_locked, no_sync, replace_file
from atoll.simulate import INPUTS_FILE
from atoll.simulate.inputs import Earlier, Inputs, earlier_run

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
        said = f"{folder} is running" if is_locked(folder) else f"{said}. To go on with it: atoll run {folder}"
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
        state: its state, as `RunState` has it.
        round: rounds that have ended, of all.
        metrics: the sites' metrics of the last round that has some.
        global_metrics: what `server.evaluate` returned for the last version that was evaluated.
        changed_at: when its journal was written last, as Unix time; None if there is none.
        folder: the folder.
        detail: why it has failed or was stopped, or cannot be read.
    """

    run: str
    state: RunState
    round: str
    metrics: dict[str, float]
    global_metrics: dict[str, float]
    changed_at: float | None
    folder: str
    detail: str = ""


def listed_run(folder: Path) -> ListedRun:
    """Return what a run's folder tells, whether it is living, dead, damaged or empty."""
    begun = folder / INPUTS_FILE
    at = begun.stat().st_mtime if begun.exists() else None
    try:
        status, at = stored_status(folder / STATE)
    except UsageError:
        why = noted_failure(folder)
        state: RunState = "running" if is_locked(folder) else "failed" if why else "never started"
        return ListedRun(folder.name, state, "-", {}, {}, at, str(folder), why)
    except AtollError as error:
        return ListedRun(folder.name, "damaged", "-", {}, {}, at, str(folder), str(error))
    with suppress(OSError):
        at = max(each.stat().st_mtime for each in (folder / STATE).glob("journal.sqlite*"))
    last = status.history[-1].round if status.history else 0
    return ListedRun(
        folder.name,
        state_of(status, is_served=is_served(folder / STATE)),
        f"{last} of {status.rounds or '∞'}",
        next((each.metrics for each in reversed(status.history) if each.metrics), {}),
        next((each.global_metrics for each in reversed(status.history) if each.global_metrics), {}),
        at,
        str(folder),
        status.failed or status.stopped,
    )


def command(
    folder: Annotated[Path, typer.Argument(help="Folder that has the runs.", metavar="[DIR]")] = RUNS,
    json: Annotated[bool, typer.Option("--json", help="Print the runs as JSON.")] = False,
) -> None:
    """List the runs of `atoll run`: state, round, metrics, when and where."""
    runs = [listed_run(each) for each in run_folders(folder)]
    if json:
        print(jsons.dumps([asdict(each) for each in runs], indent=2))
    elif not runs:
        print(f"no runs in {visible(str(folder))}")
    else:
        rows = list(map(_row, runs))
        print("\n".join(fitting(("run", "state", "round", "when", "metrics"), rows, width_of_output())))
    going_on = next((each for each in reversed(runs) if each.state in ("interrupted", "failed")), None)
    show = f"atoll status {quoted(Path(runs[-1].folder))}" if runs else "atoll run --example digits"
    next_step(f"atoll run {quoted(Path(going_on.folder))}" if going_on else show)


def _row(run: ListedRun) -> tuple[str, ...]:
    when = f"{datetime.fromtimestamp(run.changed_at):%Y-%m-%d %H:%M}" if run.changed_at else "-"
    detail = visible(" ".join(run.detail.split()))
    shown = numbers(run.metrics | {f"global {name}": value for name, value in run.global_metrics.items()})
    return visible(run.run), run.state, run.round, when, "; ".join(filter(None, [shown, detail])) or "-"
