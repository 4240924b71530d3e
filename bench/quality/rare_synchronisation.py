"""DiLoCo that synchronises every 100, 200 or 500 steps: the loss after so many tokens, against data-parallel training.

The model, the data, the inner optimizer and the search for its rate are those of `low_communication.py`, with 6,000
steps of each worker, since 3,000 steps are only six rounds of 500. Each run is measured ten times on its way, so the
table also says after how many tokens a way reaches the loss that data-parallel training has after a tenth, a fifth ….

    python bench/quality/rare_synchronisation.py --text PATH        # a text file; by default Python's own sources
    python bench/quality/rare_synchronisation.py --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import logging
import math
from pathlib import Path
from typing import Any

import torch
from low_communication import Data, run, untried
from low_communication_report import best_rate
from low_communication_ways import BATCH, H20, OWN_TEXT, TUNED_ON, WINDOW, WORKERS, Inner, Way
from results import FOLDER, Gate, write

NAME = "rare_synchronisation"
STEPS, RATES = 6000, (3e-3, 6e-3, 12e-3)
LONG = Inner(steps=STEPS)
WAYS = {
    "data_parallel": Way("data-parallel", inner=LONG, rates=RATES),
    **{
        f"H{every}": Way(f"DiLoCo, H = {every}", H20 | {"diloco.sync_every": every}, inner=LONG, rates=RATES)
        for every in (100, 200, 500)
    },
}
TOKENS_A_STEP = WORKERS * BATCH * WINDOW
"""Tokens of a step of all workers."""


def tokens_to(curve: list[list[float]], loss: float) -> float:
    """After how many tokens a run first had a loss of at most `loss`; infinite if it never had.

    Args:
        curve: [steps of all workers, loss] at each measurement.
    """
    return next((steps * BATCH * WINDOW for steps, reached in curve if reached <= loss), math.inf)


def report(runs: dict[str, list[dict[str, Any]]], tuning: dict[str, dict[str, float]], text: str, folder: Path) -> None:
    """Write the table of the seeds that are there."""
    base = {each["seed"]: each for each in runs["data_parallel"]}
    rows, gates = [], []
    for name, way in WAYS.items():
        several = [each for each in runs[name] if each["seed"] in base]
        if not several:
            continue
        loss = sum(each["loss"] for each in several) / len(several)
        against = sum(base[each["seed"]]["loss"] for each in several) / len(several)
        above = 100 * (loss / against - 1)
        nbytes = sum(each["up"] + each["down"] for each in several)
        theirs = sum(base[each["seed"]]["up"] + base[each["seed"]]["down"] for each in several)
        half = [base[each["seed"]]["curve"][len(each["curve"]) // 2 - 1][1] for each in several]
        tokens = max(tokens_to(each["curve"], goal) for each, goal in zip(several, half, strict=True))
        seeds = " ".join(f"{each['loss']:.4f}" for each in several)
        rate, times = f"{several[0]['rate']:g}", f"{theirs / nbytes:.0f} ×"
        reached = f"{tokens / 1e6:.1f} M" if math.isfinite(tokens) else "not reached"
        rows.append([way.title, rate, loss, seeds, f"{above:+.1f} %", times, reached])
        if name != "data_parallel":
            gates.append(Gate(f"{way.title}: loss above data-parallel, %", above, "reported", True))
    write(
        NAME,
        title="DiLoCo that synchronises rarely, 4 workers, 6,000 steps each, equal tokens",
        command="python bench/quality/rare_synchronisation.py" + ("" if text == OWN_TEXT else " --text PATH"),
        settings={"text": text, "workers": WORKERS, "steps": STEPS, "batch": BATCH, "window": WINDOW},
        figures={"runs": runs, "tuning": tuning},
        gates=gates,
        header=["way", "rate", "loss", "each seed", "above", "fewer bytes", "tokens to data-parallel's loss at half"],
        rows=rows,
        text=f"Loss in nats per byte after {STEPS * TOKENS_A_STEP / 1e6:.1f} M tokens of all workers, from scratch.",
        folder=folder,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, help="by default Python's own sources")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the results go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("atoll").setLevel(logging.WARNING)
    data, text = Data.read(options.text), options.text.name if options.text else OWN_TEXT
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    tuning: dict[str, dict[str, float]] = {name: {} for name in WAYS}
    for name, way in WAYS.items():
        for rate in untried(way.rates, tuning[name]):
            tuning[name][f"{rate:g}"] = run(way, data, TUNED_ON, rate)["loss"]
            print(f"rate {rate:g} {name:15} loss {tuning[name][f'{rate:g}']:.4f}", flush=True)
    for seed in options.seeds:
        for name, way in WAYS.items():
            rate = best_rate(tuning[name])
            runs[name].append({"seed": seed, "rate": rate} | run(way, data, seed, rate))
            print(f"seed {seed} {name:15} loss {runs[name][-1]['loss']:.4f}", flush=True)
            report(runs, tuning, text, options.folder)


if __name__ == "__main__":
    main()
