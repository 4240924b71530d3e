"""What an execution of a recipe leaves, and how it ends."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.child_processes import Terminated, raise_on_sigterm
from atoll.config import Settings
from atoll.errors import public_api
from atoll.protocol.status_messages import RoundSummary, Status

RUN_FILE = "run.toml"
SITES = "workers"
"""The sites' own files lie there, in a folder for each."""


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
        status: the last that the server said: sites, bytes, warnings; None of a simulation, and of a run that was
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
        """Of the last round, each the mean over the sites that reported it."""
        return dict(self.history[-1].metrics) if self.history else {}


def sites_of(count: int) -> list[str]:
    """Return the names of an environment's sites."""
    return [f"site-{number}" for number in range(1, count + 1)]


def result_of(settings: Settings, folder: Path, status: Status | None) -> RunResult:
    """Return what a finished run has left in its folder."""
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
    """Return where the result of a run with real sites lies; that of a swarm is at each of them."""
    if settings.swarm.enabled:
        found = sorted((folder / SITES).glob("*/model.safetensors"))
        return found[0] if found else folder / SITES / "model.safetensors"
    return settings.exports / "model.safetensors"


def round_line(summary: RoundSummary, rounds: int) -> str:
    """Return a round in a line."""
    numbers = ", ".join(f"{key} {value:.4g}" for key, value in sorted(summary.metrics.items()))
    return f"round {summary.round} of {rounds}, {len(summary.workers)} updates{': ' if numbers else ''}{numbers}"


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Unwind the block at SIGTERM, so that what it started ends, and then do what SIGTERM would have done."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    raise_on_sigterm()
    terminated = False
    try:
        yield
    except Terminated:
        terminated = True
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if terminated:
            signal.raise_signal(signal.SIGTERM)
