"""Two kinds of rounds against each other: pairs of runs, one of each kind in turn, and the ratio of their rounds.

python bench/round_pairs.py identity --gb 1 --pairs 7    # certificates of the sites against TLS with a token
python bench/round_pairs.py policy --gb 0.1 --workers 2  # a policy with its egress log against none
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from round_run import Bench, measure, steady

from atoll.child_processes import raise_on_sigterm
from atoll.cli.main import run_command

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "identity": ({"tls": True, "credential": "token"}, {"credential": "certificate"}),
    "policy": ({}, {"policy": True}),
}
"""What is compared: the options of the first and of the second run of each pair."""


def main(
    what: Annotated[Literal["identity", "policy"], typer.Argument(help="What is compared.")],
    gb: Annotated[float, typer.Option(min=1e-6, help="Size of the fp32 model, in 10⁹ bytes.")] = 1.0,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each run; the first two are not steady.")] = 5,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of runs.")] = 7,
    for_s: Annotated[float, typer.Option(help="Seconds after which no pair begins.")] = 1e9,
    directory: Annotated[Path | None, typer.Option("--dir", help="Folder for files while it runs.")] = None,
) -> None:
    """Print the steady rounds of each pair, and the median ratio with the range of the middle pairs."""
    raise_on_sigterm()
    bench, begin_s, ratios = Bench(gb, workers, rounds, 50, folder=directory), time.monotonic(), list[float]()
    for number in range(pairs):
        if time.monotonic() - begin_s > for_s:
            break
        order = (0, 1) if number % 2 == 0 else (1, 0)  # whatever drifts meets both alike
        found = [0.0, 0.0]
        for kind in order:
            figures = measure(replace(bench, **KINDS[what][kind]), lambda _: None)
            found[kind] = statistics.median(steady(figures["rounds_s"]))
        ratios.append(found[1] / found[0])
        print(f"pair {number + 1}: {found[0]:.4f} s, {found[1]:.4f} s, ratio {ratios[-1]:.3f}", flush=True)
    low, high = interval(ratios)
    print(f"{what}: median ratio {statistics.median(ratios):.3f} of {len(ratios)} pairs, {low:.3f} to {high:.3f}")


def interval(ratios: list[float]) -> tuple[float, float]:
    """The range in which the median lies with ≥ 95 %, by the binomial distribution; all of it below six pairs."""
    ordered, n, below, out = sorted(ratios), len(ratios), 0.0, 0
    term = 0.5**n
    while below + term <= 0.025 and out < n // 2:
        below += term
        term *= (n - out) / (out + 1)
        out += 1
    cut = max(0, out - 1)
    return ordered[cut], ordered[n - 1 - cut]


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
