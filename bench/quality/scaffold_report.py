"""What `scaffold.py` writes: table, gates, plot; and what an earlier run of it wrote."""

from __future__ import annotations

import json
import statistics
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
from results import FOLDER, Gate, write
from scaffold_tasks import ALGORITHMS, CONCENTRATION, SITES, Task, settings_of

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def found_before(name: str, task: Task) -> dict[str, list[dict[str, Any]]]:
    """The figures that docs/results has, by algorithm.

    Raises:
        SystemExit: they are of other settings.
    """
    kept = json.loads((FOLDER / f"scaffold_{name}.json").read_text())
    now = {key: value for key, value in settings_of(task).items() if key != "chosen"}
    if any((kept["settings"].get(key) or None) != (value or None) for key, value in now.items()):
        raise SystemExit(f"docs/results/scaffold_{name}.json is of other settings: leave --more out.")
    found: dict[str, list[dict[str, Any]]] = kept["figures"]
    return {algorithm: found.get(algorithm, []) for algorithm in ALGORITHMS}


def report(name: str, task: Task, runs: dict[str, list[dict[str, Any]]], command: str) -> None:
    """Write the results, gates included; with seeds that both have, where some runs are still to come."""
    lacking = [algorithm for algorithm, several in runs.items() if len(several) < max(map(len, runs.values()))]
    runs = {algorithm: sorted(several, key=lambda each: each["seed"]) for algorithm, several in runs.items() if several}
    if not runs.keys() >= {"scaffold", "fedavg"}:
        return
    both = {each["seed"] for each in runs["scaffold"]} & {each["seed"] for each in runs["fedavg"]}

    def mean(algorithm: str, key: str) -> float:
        return statistics.mean(found[key][-1] if key == "accuracy" else found[key] for found in runs[algorithm])

    pair = [[found for found in runs[algorithm] if found["seed"] in both] for algorithm in ("scaffold", "fedavg")]
    each = [ours["accuracy"][-1] - other["accuracy"][-1] for ours, other in zip(*pair, strict=True)]
    gained = statistics.mean(each)
    failed = sum(found["failed"] for several in runs.values() for found in several)
    gates = [
        Gate(
            f"SCAFFOLD above FedAvg after round {task.rounds}, points, mean of the seeds",
            round(gained, 2),
            "> 0",
            gained > 0,
            "" if gained > 0 else "The gain depends on the steps of a round: see above.",
        ),
        Gate("failed aggregations, all runs", failed, "0", failed == 0),
    ]
    rows = []
    for algorithm, several in runs.items():
        over = statistics.mean(statistics.mean(found["accuracy"][1:]) for found in several)
        ends = " ".join(f"{found['accuracy'][-1]:.1f}" for found in several)
        times = [mean(algorithm, "seconds"), mean(algorithm, "cpu_seconds")]
        more = 100 * (times[1] / mean("fedavg", "cpu_seconds") - 1)
        rows.append(
            [
                algorithm,
                task.rate_of(algorithm),
                round(mean(algorithm, "accuracy"), 2),
                ends,
                round(over, 2),
                *times,
                f"{more:+.1f} %",
            ]
        )
    work = f"{task.steps} steps" if task.steps else f"{task.epochs} epochs of its own pictures"
    rates = "each algorithm at its own best rate" if task.own_rates else f"rate {task.rate:g} for all algorithms"
    weights = ". All sites make the same number of steps, so the weights are nearly equal" if task.steps else ""
    paragraphs = [
        "Accuracy of the global model on test pictures that no site has. In each round every site makes "
        f"{work} of plain SGD without momentum, batch {task.batch}, {rates}{weights}; "
        f"FedAdam's server has rate {task.adam_rate:g}, FedProx μ = {task.mu:g}. "
        f"{task.chosen}",
        f"SCAFFOLD minus FedAvg in points, seed by seed: {', '.join(f'{value:+.2f}' for value in each)}.",
        f"Seconds are those of a run: server, {SITES} threads of sites over HTTP, and measuring. The machine did other "
        "work as well, so CPU seconds are the fairer figure.",
    ]
    if lacking:
        paragraphs.append(f"Not run yet, or not with every seed: {', '.join(lacking)}. The option more adds runs.")
    plot(task, runs, FOLDER / f"scaffold_{name}.png")
    write(
        f"scaffold_{name}",
        title=f"SCAFFOLD and others on {task.title}: {SITES} sites, Dirichlet {CONCENTRATION}, {task.rounds} rounds of "
        f"{work}",
        command=command,
        settings={"seeds": sorted(both), **settings_of(task)},
        figures=runs,
        gates=gates,
        header=[
            "algorithm",
            "rate",
            "ends at, %",
            "each seed",
            "mean over the rounds, %",
            "s",
            "s of CPU",
            "CPU against FedAvg",
        ],
        rows=rows,
        text="\n\n".join(textwrap.fill(paragraph, 118) for paragraph in paragraphs),
    )


def plot(task: Task, runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Accuracy by round: the mean of the seeds, and from the least to the greatest of them."""
    figure, panel = plt.subplots(figsize=(7, 4.2))
    for algorithm, several in runs.items():
        points = list(zip(*(found["accuracy"] for found in several), strict=True))
        at = range(0, task.rounds + 1, task.measured_every)
        dashes = "--" if algorithm == "fedprox" else "-"
        panel.plot(at, [statistics.mean(values) for values in points], label=algorithm, ls=dashes)
        panel.fill_between(at, [min(v) for v in points], [max(v) for v in points], alpha=0.12)
    panel.set_title(f"{task.title}, {SITES} sites, Dirichlet {CONCENTRATION}")
    panel.set_xlabel("round")
    panel.set_ylabel("accuracy, %")
    panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
