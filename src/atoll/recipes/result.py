"""What came of a recipe.

The folder that an execution writes into, and what came of it there.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll import registry
from atoll.child_processes import Terminated, raise_on_sigterm
from atoll.config import Settings
from atoll.errors import UsageError, public_api
from atoll.protocol.status_messages import RoundSummary, Status
from atoll.recipes.recipe import slug

if TYPE_CHECKING:
    from atoll.recipes.recipe import Recipe


@public_api
@dataclass(frozen=True)
class RunResult:
    """What an execution leaves.

    Attributes:
        model: the result of the run, a safetensors file; None where it lies on another machine.
        history: the rounds, oldest first; of a server that runs elsewhere its last ones.
        finished: whether the run is over; a site may leave a server's run before its end.
        state_dir: the run's state directory; None where it lies on another machine.
        folder: of the run file and the logs; None where nothing was written here.
        status: the last that the server said: clients, bytes, warnings; None of a simulation, and of a run that was
            finished before.
    """

    model: Path | None
    history: list[RoundSummary]
    finished: bool
    state_dir: Path | None
    folder: Path | None
    status: Status | None

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last round, each the mean over the clients that reported it."""
        return dict(self.history[-1].metrics) if self.history else {}


RUN_FILE = "run.toml"
WORKERS = "workers"
"""Where the clients' own files lie, in a folder for each."""


def require_clients(recipe: Recipe, num_clients: int) -> None:
    """Refuse an environment in which no round could close, or not where the recipe says.

    Raises:
        UsageError: it has fewer clients than the recipe wants, or none of a name that is to aggregate.
    """
    if num_clients < recipe.min_clients:
        raise UsageError(
            f"num_clients is {num_clients}, but min_clients of {recipe.name} is {recipe.min_clients}: no round would "
            "ever close.",
            f"Give the environment at least {recipe.min_clients}.",
        )
    sites = sites_of(num_clients)
    for site in recipe.settings(num_clients).swarm.aggregators:
        if site not in sites:
            raise UsageError(
                f"aggregators of {recipe.name} has {site!r}, which is none of the {num_clients} clients.",
                registry.nearest(site, sites, "They are site-1, site-2 and so on."),
            )


def sites_of(num_clients: int) -> list[str]:
    """The names of an environment's clients."""
    return [f"site-{number}" for number in range(1, num_clients + 1)]


def prepared(recipe: Recipe, given: str | Path | None, num_clients: int) -> Path:
    """The folder of a run, with its run file in it: a new one, or one that has the same run.

    Raises:
        UsageError: there is something else in it, or it cannot be one.
    """
    try:
        folder = _new_folder(recipe.name) if given is None else Path(given)
        is_new = _is_new(folder, recipe, num_clients)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"folder {str(error.filename if given is None else given)!r} cannot be used: {error}.", "Name another one."
        ) from None
    if is_new:
        try:
            recipe.write(folder / RUN_FILE, num_clients)
        except BaseException:
            with contextlib.suppress(OSError):
                folder.rmdir()  # if it is empty
            raise
    return folder


def _is_new(folder: Path, recipe: Recipe, num_clients: int) -> bool:
    """Whether a run file is to be written there: there is nothing; or else the same one."""
    if folder.is_file():
        raise UsageError(f"folder {str(folder)!r} is a file.", "Name another one.")
    run_file = folder / RUN_FILE
    if run_file.exists():
        if run_file.read_text(encoding="utf-8", errors="replace") != recipe.text(run_file, num_clients):
            raise UsageError(
                f"folder {str(folder)!r} has another run: {run_file} is not what this recipe writes.",
                "Name another folder, or leave folder out for a new one.",
            )
        return False
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"folder {str(folder)!r} is not empty, and has no {RUN_FILE}.", "Name another one.")
    return True


def _new_folder(name: str) -> Path:
    stem = Path("atoll-recipes") / f"{slug(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = stem, 1
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
        number += 1
        folder = stem.with_name(f"{stem.name}-{number}")


def result_of(settings: Settings, folder: Path, status: Status | None) -> RunResult:
    """What a finished run has left in its folder."""
    model, metrics = model_of(settings, folder), settings.exports / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    rows = [{key: value for key, value in json.loads(line).items() if key != "at"} for line in lines]
    return RunResult(
        model=model if model.exists() else None,
        history=[RoundSummary.model_validate(row) for row in rows],
        finished=True,
        state_dir=settings.disk.state_dir,
        folder=folder,
        status=status,
    )


def model_of(settings: Settings, folder: Path) -> Path:
    """Where the result of a run with real clients lies; that of a swarm is at each of them."""
    if settings.swarm.enabled:
        found = sorted((folder / WORKERS).glob("*/model.safetensors"))
        return found[0] if found else folder / WORKERS / "model.safetensors"
    return settings.exports / "model.safetensors"


def told(summary: RoundSummary, rounds: int) -> str:
    """A round in a line."""
    numbers = ", ".join(f"{key} {value:.4g}" for key, value in sorted(summary.metrics.items()))
    return f"round {summary.round} of {rounds}, {len(summary.workers)} updates{': ' if numbers else ''}{numbers}"


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the block, so that what it started ends, and then does what it would have done."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    raise_on_sigterm()
    told = False
    try:
        yield
    except Terminated:
        told = True
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if told:
            signal.raise_signal(signal.SIGTERM)
