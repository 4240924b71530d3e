"""A round of many small tensors against a round of few large ones of the same total.

python bench/round_of_many_tensors.py
"""

from __future__ import annotations

import json as json_module
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from round import Folder, Json, require_exact, say
from round_run import Bench, measure, steady

from atoll.child_processes import raise_on_sigterm
from atoll.cli.main import run_command


def main(
    gb: Annotated[float, typer.Option(min=1e-6, help="Size of the fp32 model, in 10⁹ bytes.")] = 0.5,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each run; the first two are not steady.")] = 4,
    few: Annotated[int, typer.Option(min=1, help="Tensors of the one model.")] = 50,
    many: Annotated[int, typer.Option(min=1, help="Tensors of the other.")] = 5000,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, in turn.")] = 2,
    directory: Folder = None,
    json: Json = False,
) -> None:
    """Many small tensors against few large ones of the same total."""
    raise_on_sigterm()
    seconds: dict[int, list[float]] = {few: [], many: []}
    exact = True
    for number in range(repeats):
        for tensors in (few, many) if number % 2 == 0 else (many, few):  # the first meets the colder machine
            say(f"run {number + 1} of {repeats} with {tensors} tensors")
            figures = measure(Bench(gb, workers, rounds, tensors, folder=directory), lambda _: None)
            seconds[tensors] += steady(figures["rounds_s"])
            exact = exact and bool(figures["exact"])
    medians = {tensors: statistics.median(values) for tensors, values in seconds.items()}
    ratio = medians[many] / medians[few]
    answer: dict[str, Any] = {
        "ratio": round(ratio, 3),
        "steady_round_s": {str(tensors): round(value, 4) for tensors, value in medians.items()},
        "rounds_s": {str(tensors): values for tensors, values in seconds.items()},
        "exact": exact,
        "settings": figures["settings"] | {"tensors": [few, many], "repeats": repeats},
    }
    if json:
        print(json_module.dumps(answer, indent=2), flush=True)
    else:
        for tensors, value in medians.items():
            print(f"{tensors:>7} tensors: {value:.3f} s a round")
        print(f"  ratio        : {ratio:.2f}", flush=True)
    require_exact(answer)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
