"""`atoll compare`: the runs of several state directories side by side, as a table, a plot or JSON."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from atoll.cli.stored_status import stored_status
from atoll.cli.text import WIDE, aligned, duration, fitting, next_step, require_file, size, still, width_of_output
from atoll.cli.which_run import STATE, RunsArgument, is_served, named_run, quoted, run_folders, state_of
from atoll.errors import UsageError
from atoll.format_text import visible
from atoll.protocol import status_messages
from atoll.store.reader import has_run, open_state
from atoll.store.round_summaries import ended_rounds

SHOWN = ("run", "state", "algorithm", "rounds", "version", "sites")
"""What the table shows as it is."""

MOST = 10
"""Largest number of runs that are compared if none is named."""

Compared = dict[str, Any]
"""What is compared of a run, as `--json` prints it."""


def command(
    runs: RunsArgument = None,
    directories: Annotated[
        list[Path] | None, typer.Option("--dir", help="Another way to give a RUN; can be repeated.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the metrics over the rounds to this file (PNG, SVG, PDF).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON, with the metrics of each round.")] = False,
) -> None:
    """Compare runs: their metrics at the end and at best, rounds, bytes, and seconds by round.

    Without a RUN, these are the newest ones here.
    """
    if plot is not None:
        require_file(plot, "compare.png")
    named = [*(runs or ()), *(directories or ())] or _newest()
    found = [_compared(each) for each in named]
    if json:
        print(json_module.dumps(found, indent=2))
    else:
        print("\n".join(map(visible, table(found, width_of_output()))))
    if plot is not None:
        with still("still drawing"):
            draw(found, plot)
        if not json:
            print(f"the plot is in {plot}")
    words = " ".join(map(quoted, named))
    plotted = f"atoll compare {words} --plot compare.png; " if plot is None else ""
    next_step(f"{plotted}in a browser: atoll page {words} --open")


def _newest() -> list[Path]:
    """Return the newest runs here, and say so.

    Raises:
        UsageError: there is none.
    """
    found = [each for each in run_folders() if has_run(each / STATE)][-MOST:]
    if not found:
        raise UsageError("No run is named, and there is none in the folder runs.", "Name them: atoll compare RUN RUN.")
    names = " ".join(map(quoted, found))
    print(f"atoll: No run is named. These are the newest ones here: {names}", file=sys.stderr, flush=True)
    return found


def _compared(run: Path) -> Compared:
    folder = named_run(run)
    assert folder is not None
    status, _ = stored_status(folder)
    with open_state(folder) as state:
        rounds = ended_rounds(state.rows, None)
    every = [status_messages.RoundSummary.model_validate_json(each.summary_json) for each in rounds]
    summaries = [each for each in every if each.fragment == 0]  # a round of several fragments counts once
    points = [(each.round, _values(each)) for each in summaries]
    names = sorted({name for _, values in points for name in values})
    times = [datetime.fromisoformat(each.created_at) for each in rounds if each.fragment == 0]
    gaps_s = [(later - earlier).total_seconds() for earlier, later in pairwise(times)]
    return {
        "run": str(run),
        "state": state_of(status, is_served=is_served(folder)),
        "algorithm": status.algorithm,
        "rounds": len(summaries),
        "version": status.version,
        "sites": len(status.workers),
        "bytes_up": sum(each.bytes_up for each in every),
        "seconds_per_round": median(gaps_s) if gaps_s else None,  # the mean would count pauses and restarts
        "metrics": {name: _metric(name, points, status.best) for name in names},
    }


def _values(summary: status_messages.RoundSummary) -> dict[str, float]:
    """Return the metrics of a round: the sites' own, and those of `server.evaluate` as `global.NAME`."""
    return summary.metrics | {f"{status_messages.GLOBAL}{name}": each for name, each in summary.global_metrics.items()}


def _metric(
    name: str, rounds: Sequence[tuple[int, dict[str, float]]], tracked: status_messages.BestStatus | None
) -> dict[str, Any]:
    """Return a metric's last and best value, the round of the best one, and (round, value) of each round with it."""
    points = [(number, values[name]) for number, values in rounds if name in values]
    mode = tracked.mode if tracked is not None and tracked.metric == name else "min" if name.endswith("loss") else "max"
    best_round, best = (min if mode == "min" else max)(points, key=lambda point: point[1])
    return {"last": points[-1][1], "best": best, "best_round": best_round, "points": points}


def table(runs: Sequence[Compared], width: int = WIDE) -> list[str]:
    """Return the runs as lines of text that fit into a width: one line a run, two columns a metric.

    On a narrower terminal it is turned: one column a run, one line a value.
    """
    names = sorted({name for each in runs for name in each["metrics"]})
    rows = [[*SHOWN, "sent", "s/round", *(column for name in names for column in (name, f"best {name} (round)"))]]
    for each in runs:
        pace = "-" if each["seconds_per_round"] is None else duration(each["seconds_per_round"])
        cells = [*(str(each[name]) for name in SHOWN), size(each["bytes_up"]), pace]
        for name in names:
            metric = each["metrics"].get(name)
            cells += (
                [f"{metric['last']:.4g}", f"{metric['best']:.4g} ({metric['best_round']})"] if metric else ["-", "-"]
            )
        rows.append(cells)
    lines = aligned(rows)
    if max(map(len, lines)) > width:
        lines = aligned(list(zip(*rows, strict=True)))
    return lines if max(map(len, lines)) <= width else fitting(rows[0], rows[1:], width)


def draw(runs: Sequence[Compared], out: Path) -> None:
    """Draw each metric over the rounds, one line a run.

    Raises:
        UsageError: matplotlib is not installed, the runs have no metrics, or the file's ending is not a format of it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib, which is not installed.", "pip install matplotlib.") from None
    names = sorted({name for each in runs for name in each["metrics"]})
    if not names:
        raise UsageError("The runs have reported no metrics, so there is nothing to draw.", "Leave out --plot.")
    figure = Figure(figsize=(7, 3 * len(names)), layout="constrained")
    axes: Any = figure.subplots(len(names), squeeze=False)
    for name, (axis,) in zip(names, axes, strict=True):
        for each in runs:
            if metric := each["metrics"].get(name):
                axis.plot(*zip(*metric["points"], strict=True), label=each["run"])
        axis.set(ylabel=name, xlabel="round")
        axis.legend()
    try:
        figure.savefig(out)
    except ValueError as error:
        raise UsageError(f"{out} cannot be drawn: {error}.", "Name it .png, .svg or .pdf.") from error
