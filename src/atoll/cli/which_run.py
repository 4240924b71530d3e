"""Which run a command works on, and the state of that run: for every command alike.

A run is named by its folder, its state directory, or its name in `runs`: as an argument, or with `--dir`. Commands that
only read take the newest run here if none is named, and say which one that is.
"""

from __future__ import annotations

import difflib
import glob
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

from atoll.errors import UsageError
from atoll.format_text import visible
from atoll.posix import OWN_FILE, is_locked, no_sync, read_own, replace_file
from atoll.protocol.status_messages import Status
from atoll.simulate import INPUTS_FILE, STATE_DIR
from atoll.store.journal import JOURNAL
from atoll.store.reader import has_run, permitted

HERE = Path("atoll-run")
"""The default state directory of `atoll server`, in the current folder."""
RUNS, STATE = Path("runs"), "state"
"""Where `atoll run` puts runs, and the name of the state directory in the folder of each."""
FAILURE = "failure.txt"
"""Name of the file in the folder of an `atoll run` that says why it failed, until it is started again."""
FAILURE_CHARS = 2000
MOST_NEAR = 3
"""Number of runs with names like a wrong one that a message names."""

RunState = Literal[
    "never started", "running", "paused", "stopping", "finished", "stopped", "failed", "interrupted", "damaged"
]
"""The state of a run. Stopped: its admin ended it early. Interrupted: it is not over, but no process serves it."""

NAMED = "folder, state directory, or name in the folder runs"


def run_names(incomplete: str) -> list[str]:
    """Return the names of the runs here, and the folders that a path may mean, for the completion of a shell."""
    folders = sorted(glob.glob(f"{glob.escape(incomplete)}*/")) if incomplete else []
    return [*(each.name for each in run_folders()), *folders]


RunArgument = Annotated[
    Path | None,
    typer.Argument(help=f"The run: its {NAMED}.", metavar="[RUN]", show_default=False, autocompletion=run_names),
]
RunsArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        help=f"The runs: each by its {NAMED}.", metavar="[RUN]…", show_default=False, autocompletion=run_names
    ),
]
RunDir = Annotated[Path | None, typer.Option("--dir", help="Another way to give RUN.", show_default=False)]


# -- its state


def state_of(status: Status, *, is_served: bool) -> RunState:
    """Return the state of a run.

    Args:
        status: its status, from its server or as stored.
        is_served: whether a process serves the run now.
    """
    if status.failed:
        return "failed"
    if status.finished:
        return "stopped" if status.stopping else "finished"
    if not is_served:
        return "interrupted"
    return "stopping" if status.stopping else "paused" if status.paused else "running"


def is_served(state_dir: Path) -> bool:
    """Return whether a server, a simulation or an `atoll run` of this machine has a run in its hands."""
    return is_locked(state_dir) or (is_of_atoll_run(state_dir) and is_locked(state_dir.parent))


def note_failure(folder: Path, why: str) -> None:
    """Record in the folder of an `atoll run` why it failed; an empty text removes the record."""
    if why:
        replace_file(folder / FAILURE, [why[:FAILURE_CHARS].encode()], sync=no_sync, mode=OWN_FILE)
    else:
        (folder / FAILURE).unlink(missing_ok=True)


def noted_failure(folder: Path) -> str:
    """Return why the `atoll run` in a folder failed last; empty if it did not."""
    with suppress(OSError):
        return read_own(folder / FAILURE)[:FAILURE_CHARS].decode(errors="replace").strip()
    return ""


# -- its place


def state_directory(named: Path) -> Path:
    """Return the state directory that a path or a name leads to; the path itself if it leads to none."""
    with permitted(named):
        return next((each for each in _places(named) if has_run(each)), named)


def _places(named: Path) -> tuple[Path, ...]:
    return named, named / STATE, RUNS / named, RUNS / named / STATE


def is_of_atoll_run(state_dir: Path) -> bool:
    """Return whether a state directory is in the folder of an `atoll run`."""
    return state_dir.name == STATE and (state_dir.parent / INPUTS_FILE).exists()


def run_folder(state_dir: Path) -> Path:
    """Return the path by which a run is named to a person: the folder of its `atoll run`, else its state directory."""
    return state_dir.parent if is_of_atoll_run(state_dir) else state_dir


def start_command(state_dir: Path) -> str:
    """Return the command that starts a run again."""
    if is_of_atoll_run(state_dir):
        return f"atoll run {quoted(state_dir.parent)}"
    return f"atoll server run.toml --dir {quoted(state_dir)}"


def quoted(path: Path) -> str:
    """Return a path for a command to copy."""
    return shlex.quote(visible(str(path)))


def named_run(run: Path | None, directory: Path | None = None) -> Path | None:
    """Return the state directory of the run that a command line names; None: it names none.

    Args:
        run: the argument RUN.
        directory: the option `--dir`.

    Raises:
        UsageError: both are given; or there is no such run, or it was never started.
        StoreError: this user has no permission to read the directory.
    """
    if run is not None and directory is not None:
        raise UsageError(f"Both RUN, {str(run)!r}, and --dir are given.", "Use one of them.")
    named = run if run is not None else directory
    if named is None:
        return None
    found = state_directory(named)
    if not has_run(found):
        raise no_such_run(named)
    return found


def no_such_run(named: Path) -> UsageError:
    """Return the error for a name that leads to no run. It tells of the start that failed, or names near runs."""
    for folder in _places(named):
        if (folder / INPUTS_FILE).exists():
            why = noted_failure(folder).rstrip(".")
            how = f"failed before it began: {why}" if why else "was never started: its server has not begun"
            return UsageError(f"The run in {folder} {how}.", f"To start it: atoll run {quoted(folder)}")
    known = [each.name for each in reversed(run_folders()) if has_run(each / STATE)]
    near = difflib.get_close_matches(named.name, known, n=MOST_NEAR)
    shown = f"Did you mean {' or '.join(near)}?" if near else f"The newest runs here: {', '.join(known[:MOST_NEAR])}."
    remedy = f"{visible(shown)} `atoll runs` lists all." if known else "Give the run file's disk.state_dir."
    return UsageError(f"There is no run in {str(named)!r}.", remedy)


def run_folders(folder: Path = RUNS) -> list[Path]:
    """Return the folders of the runs in a folder, the newest last."""
    with suppress(OSError):
        found = [(each.stat().st_mtime, each) for each in folder.iterdir() if each.is_dir()]
        return [each for _, each in sorted(found)]
    return []


def require_one(run: Path | None, directory: Path | None, *, has_server: bool) -> None:
    """Check that a command line does not name both a run and a server.

    Raises:
        UsageError: it does.
    """
    if has_server and (run is not None or directory is not None):
        raise UsageError("RUN and --dir cannot be combined with --server and --token-file.", "Leave out one of them.")


def run_to_read(run: Path | None, directory: Path | None, *, has_server: bool) -> Path | None:
    """Return the state directory of the run that a reading command shows; None: that of a server.

    If no run and no server is named, it is the newest run here. A line on standard error then says which one.

    Args:
        run: the argument RUN.
        directory: the option `--dir`.
        has_server: whether the command line names a server or its token.

    Raises:
        UsageError: both a run and a server are named; or what `named_run` raises.
    """
    require_one(run, directory, has_server=has_server)
    if has_server or (run is None and directory is None and os.environ.get("ATOLL_SERVER")):
        return None
    return named_run(run, directory) or newest_run()


def newest_run(why: str = "No run is named.") -> Path | None:
    """Return the state directory of the run here that has changed last, and say so; None if there is no run here."""
    found = list(_runs_here())
    if not found:
        return None
    _, newest = max(found)
    print(
        f"atoll: {visible(why)} This is the newest one here: {quoted(run_folder(newest))}", file=sys.stderr, flush=True
    )
    return newest


def _runs_here() -> Iterator[tuple[float, Path]]:
    for state_dir in (HERE, Path(STATE_DIR), *(each / STATE for each in run_folders())):
        with suppress(OSError):
            if has_run(state_dir):
                yield max(each.stat().st_mtime for each in state_dir.glob(f"{JOURNAL}*")), state_dir
