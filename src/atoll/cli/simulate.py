"""`atoll simulate`: train with simulated sites, on this machine or on Ray."""

from __future__ import annotations

import gc
import json as jsons
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.child_processes import Terminated, raise_on_sigterm
from atoll.cli import EndsAtOnce
from atoll.cli.config import Dir, Rounds, Sets, read_settings, site_names
from atoll.cli.text import (
    UNTRAINED,
    Quiet,
    Verbose,
    choose_level,
    duration,
    faults_of_evaluation,
    log_level,
    log_lines,
    next_step,
    number_of,
    numbers,
    say_stopping,
    size,
    some,
    telling_what_is_awaited,
)
from atoll.format_text import Seldom
from atoll.protocol import status_messages
from atoll.simulate import ENGINES, with_own_folder

if TYPE_CHECKING:
    from atoll.simulate.simulation import Simulated, Simulation

LOG = logging.getLogger("atoll.cli")

LINE_S = 1.0
"""Minimum seconds between two lines of progress."""


def command(
    run_file: Annotated[Path, typer.Argument(help="Run file (TOML).", metavar="RUN.TOML")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script (its sys.argv), after `--`.", metavar="-- ARGS")
    ] = None,
    sets: Sets = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Training processes. Default: one for each CPU core.", show_default=False)
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help="local: processes on this machine; ray: a Ray cluster.", autocompletion=lambda: ENGINES),
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster (host:6379). Default: start Ray here.", show_default=False),
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option(help="Number of sites, or their names: a,b,c. Default: rounds.sites.", show_default=False),
    ] = None,
    rounds: Rounds = None,
    directory: Dir = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew; an earlier simulation is kept in a folder beside it.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the earlier simulation, whatever it was begun with, or show its result."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON; log to standard error.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train with many simulated sites, without a network. The same command continues an interrupted simulation.

    One that has finished, or was begun with other code or settings, needs --fresh or --resume.
    """
    choose_level(quiet=quiet, verbose=verbose)
    log_lines(sys.stderr if json else None)
    server = logging.getLogger("atoll.server")
    server.setLevel(log_level() if verbose else logging.WARNING)  # at INFO, the server logs a line for every worker
    server.addFilter(Seldom())
    raise_on_sigterm()
    settings = read_settings(run_file, sets, rounds=rounds, directory=directory)
    if directory is None:
        settings = with_own_folder(settings, run_file.parent)
    LOG.info("starting the simulation of %s; loading PyTorch takes a few seconds", settings.run.name)
    lines = Lines()
    with telling_what_is_awaited(lambda: lines.awaited):
        with EndsAtOnce():
            from atoll.simulate.simulation import Simulation

        gc.freeze()  # otherwise every full garbage collection visits all objects of torch
        simulation = Simulation(
            settings=settings,
            arguments=arguments or (),
            sites=None if sites is None else int(sites) if sites.isdecimal() else site_names(sites),
            processes=processes,
            engine=engine,
            address=address,
            fresh=fresh,
            resume=resume,
            on_round=lines.log_round,
        )
        lines.begin(simulation)
        try:
            done = simulation.run()
        except (KeyboardInterrupt, Terminated) as asked:
            say_stopping(asked, "stopping; to continue the simulation, start the same command again")
            raise
    LOG.info("%s", summary(done))
    if json:
        print(jsons.dumps(as_json(done), indent=2))
    next_step(f"atoll status --dir {simulation.settings.disk.state_dir}")


class Lines:
    """Logs the progress of a simulation: a line for each round, but at most one every `LINE_S` seconds.

    Attributes:
        awaited: what the command waits for.
    """

    def __init__(self) -> None:
        self.awaited = "still loading PyTorch"
        self._said_s = 0.0
        self._updates, self._rounds = 0, 0

    def begin(self, simulation: Simulation) -> None:
        """Log the settings of the simulation that begins."""
        settings, self._rounds = simulation.settings, simulation.settings.rounds.total
        self.awaited = "still starting the processes, and training the first round"
        LOG.info(
            "%s: %s, %s of %s, %s; files in %s",
            settings.run.name,
            number_of(settings.rounds.total, "round"),
            str(settings.algorithm.target),
            number_of(len(simulation.sites), "simulated site"),
            simulation.described,
            settings.disk.state_dir,
        )

    def log_round(self, round_: status_messages.RoundSummary) -> None:
        """Log a line for a finished round, if a line is due.

        The first line does not contain the pace (updates per second), because the first round includes the start of the
        processes.
        """
        now_s, first = time.monotonic(), self._said_s == 0.0
        is_last = round_.round >= self._rounds
        self.awaited = "still writing the result" if is_last else f"still in round {round_.round + 1}"
        self._updates += len(round_.sites)
        if not first and now_s - self._said_s < LINE_S and not is_last:
            return
        metrics = numbers(round_.metrics)
        pace = "" if first else f"; {_pace(self._updates / max(now_s - self._said_s, 1e-3))} worker-rounds/s"
        told = f"{round_.counted}{', ' if metrics else ''}{metrics}{pace}"
        LOG.info("round %d of %d: %s", round_.round, self._rounds, told)
        self._said_s, self._updates = now_s, 0


def summary(done: Simulated) -> str:
    """Return the result of a simulation as one line of text."""
    if not done.rounds:
        return f"the simulation was already finished, at version {done.version}; nothing was trained; {done.model}"
    parts = [
        f"finished at version {done.version} after {duration(done.seconds)}",
        "" if done.version else UNTRAINED,
        f"{number_of(done.rounds, 'round')}, {number_of(done.worker_rounds, 'worker-round')}, "
        f"{_pace(done.worker_rounds_per_s)} worker-rounds/s",
        f"a run with real sites would have sent {size(done.bytes_up)} up and {size(done.bytes_down)} down",
        f"{number_of(done.late, 'update')} too late to count" if done.late else "",
        f"{number_of(sum(done.refused.values()), 'update')} refused: {some(done.refused)}" if done.refused else "",
        f"{number_of(len(done.failed), 'simulated site')} failed: {some(done.failed)}" if done.failed else "",
        numbers(done.metrics),
        faults_of_evaluation(
            {str(version): why for version, why in done.not_evaluated.items()}, done.not_evaluated_count
        ),
        str(done.model),
    ]
    return "; ".join(filter(None, parts))


def _pace(per_s: float) -> str:
    """Return a rate as text: a whole number if it is at least ten, else two significant digits."""
    return f"{per_s:.0f}" if per_s >= 9.5 else f"{per_s:.2g}"


def as_json(done: Simulated) -> dict[str, Any]:
    """Return the result of a simulation as a JSON object."""
    paths = {"model": str(done.model), "metrics_file": str(done.metrics_file)}
    return {**vars(done), **paths, "worker_rounds_per_s": done.worker_rounds_per_s}
