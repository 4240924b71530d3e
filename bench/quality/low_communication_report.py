"""What `low_communication.py` writes: table, gates, plot."""

from __future__ import annotations

import functools
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib
from low_communication_ways import FAST_S, MARKS, NAME, OWN_TEXT, SLOW_S, TRIED, WAYS
from results import Gate, write

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Runs = dict[str, list[dict[str, Any]]]
"""Way → a run of each seed."""

Tuning = dict[str, dict[str, float]]
"""Way → inner learning rate, as text → loss on the seed that rates are tried on."""


def best_rate(losses: dict[str, float]) -> float:
    """The rate with the least loss; a loss that is not finite is none."""
    return float(min(losses, key=lambda rate: losses[rate] if math.isfinite(losses[rate]) else math.inf))


def report(runs: Runs, tuning: Tuning, settings: dict[str, Any], folder: Path) -> None:
    """Write the results, gates included, of the seeds that are there."""
    mean = functools.partial(mean_of, runs)
    base_bytes = mean("data_parallel", "up") + mean("data_parallel", "down")
    rows: list[list[Any]] = []
    for name, way in WAYS.items():
        if not runs[name]:
            continue
        up, down = mean(name, "up"), mean(name, "down")
        rows.append(
            [
                way.title,
                f"{runs[name][0]['rate']:g}",
                mean(name, "loss"),
                " ".join(f"{each['loss']:.4f}" for each in runs[name]),
                with_error(runs, name, "data_parallel"),
                up / 1e6,
                down / 1e6,
                f"{base_bytes / (up + down):.0f} ×",
                f"{mean(name, 'seconds'):.0f}" if runs[name][0]["seconds"] else "",
                f"{mean(name, 'waited'):.0f}" if runs[name][0].get("waited") is not None else "",
            ]
        )
    plot(runs, folder)
    write(
        NAME,
        title="Low-communication training of a byte transformer, 4 workers, equal tokens",
        command="python bench/quality/low_communication.py" + ("" if settings["text"] == OWN_TEXT else " --text PATH"),
        settings=settings,
        figures={"runs": runs, "tuning": tuning},
        gates=gates(runs, base_bytes),
        header=[
            "way",
            "rate",
            "loss",
            "each seed",
            "against data-parallel",
            "MB up",
            "MB down",
            "fewer bytes",
            "s",
            "s waited",
        ],
        rows=rows,
        text=TEXT + tuned(tuning) + variants(tuning) + speeds(runs) + lacking(runs),
        folder=folder,
    )


TEXT = f"""Loss in nats per byte of the global model on text that no worker has, against data-parallel training on the
same seeds, each way at its own best inner learning rate; ± is the standard error of the mean over the seeds. Bytes are
those of updates and versions of all four workers together, counted where they are sent and received, without headers
and messages: about 4 kB for each exchange of a worker, whatever the model, which with int4 and a model so small would
be an eighth more. "Fewer bytes" counts both
directions, against a ring all-reduce of fp32 gradients at every step, which moves 2·3/4 times the model each way at
each of four workers; against one model at every step it is two thirds of that. Seconds are those of a run by the
clock, on a machine that did other work, too; "s waited" is what a worker stood still. Where one worker is slow, a
step takes {FAST_S * 1000:.0f} ms at least, the slow worker's {SLOW_S * 1000:.0f} ms; the others are not paced, and
their seconds are not to be compared with those. Seed 100, on which settings were tried, is not among those of the
table."""


def tuned(tuning: Tuning) -> str:
    """The loss of each way at each rate that it was tried with."""
    rates = sorted({float(rate) for losses in tuning.values() for rate in losses})
    if not rates:
        return ""
    lines = ["", "", "Loss at each inner learning rate, on the seed that rates are tried on:", ""]
    lines += [f"| way | {' | '.join(f'{rate:g}' for rate in rates)} |", f"|{' --- |' * (len(rates) + 1)}"]
    for name, way in WAYS.items():
        cells = [tuning[name].get(f"{rate:g}") for rate in rates]
        if any(cell is not None for cell in cells):
            lines.append(f"| {way.title} | {' | '.join('' if cell is None else f'{cell:.4f}' for cell in cells)} |")
    return "\n".join(lines)


def variants(tuning: Tuning) -> str:
    """What was tried to bring int4 both ways closer: each variant against data-parallel training of the same kind."""
    told = {name: way for name, way in TRIED.items() if way.settings and tuning[name] and tuning[way.against]}
    if not told:
        return ""
    lines = [
        "",
        "",
        "Tried on that seed to bring int4 both ways with α = 0.25 closer; data-parallel training has the same",
    ]
    lines += ["inner optimizer, schedule and steps, and its own best rate:", ""]
    lines += ["| variant | loss at each rate | data-parallel | above it |", f"|{' --- |' * 4}"]
    for name, way in {"streaming_int4_a25": WAYS["streaming_int4_a25"], **told}.items():
        if tuning[name] and tuning[way.against]:
            best, base = (min(tuning[each].values()) for each in (name, way.against))
            losses = ", ".join(f"{rate}: {loss:.4f}" for rate, loss in tuning[name].items())
            theirs = f"{base:.4f} ({best_rate(tuning[way.against]):g})"
            lines.append(f"| {way.title} | {losses} | {theirs} | {100 * (best / base - 1):+.2f} % |")
    return "\n".join(lines)


def with_error(runs: Runs, name: str, other: str) -> str:
    """By how many percent a loss is above another's, and the standard error of that over the seeds."""
    theirs = {each["seed"]: each["loss"] for each in runs[other]}
    each_seed = [100 * (each["loss"] / theirs[each["seed"]] - 1) for each in runs[name] if each["seed"] in theirs]
    if len(each_seed) < 2:
        return f"{above(runs, name, other):+.2f} %"
    return f"{above(runs, name, other):+.2f} ± {statistics.stdev(each_seed) / math.sqrt(len(each_seed)):.2f} %"


def speeds(runs: Runs) -> str:
    """How many times as long as the others' the slow worker's steps were; empty where no run has measured it."""
    told = []
    for name, way in WAYS.items():
        of_each = [each["step_s"] for each in runs[name] if way.slow and "step_s" in each]
        if of_each:
            told.append(f"{way.title} {' '.join(f'{s[-1] / statistics.fmean(s[:-1]):.1f}' for s in of_each)}")
    return f"\n\nThe slow worker's step, measured, in steps of the others: {'; '.join(told)}." if told else ""


def lacking(runs: Runs) -> str:
    """Which ways were not run, or not with every seed."""
    most = max(map(len, runs.values()))
    short = [way.title for name, way in WAYS.items() if len(runs[name]) < most]
    return f"\n\nNot run yet, or not with every seed: {'; '.join(short)}. The option more adds runs." if short else ""


def mean_of(runs: Runs, name: str, key: str) -> float:
    values = [each[key] for each in runs[name] if each.get(key) is not None]
    return statistics.fmean(values) if values else math.nan


NOTES = {
    "streaming_int4": "On seed 100 (DiLoCo +0.5 %): streaming as it is +4.1 %, int4 both ways +4.0 %: int4 costs "
    "nothing; outer_lr 0.4: +5.0 %, 1.0: +4.0 %; α = 0: +1.5 %. Uncompressed, in a simulation of one process on the "
    "same seed: outer_momentum 0.8 +5.0 %, 0.95 +4.1 %, τ = 0 +4.5 %; α = 0.25 +1.6 %: it is half of the local "
    "parameters that is too much to keep. In another one: +3.6 %, and with half and twice the learning rate +3.4 %. "
    "int4 both ways with H = 12 (131 × fewer bytes): +3.5 %; there outer_lr 0.4 +3.6 %, outer_momentum 0.7 +3.8 %, "
    "0.8 and outer_lr 1.0 +5.1 %, 0.95 and 0.4 +3.2 %, 0.95 and 0.25 +4.0 %. With twice the learning "
    "rate, data-parallel training, too: +2.4 %, with 3.3 times +4.3 %. Why no outer step mends it: "
    "docs/low-communication.md, α.",
    "slow_delayed": "With outer_momentum 0.9 +15 % (seed 0). On seed 100 with 10 synchronous rounds first: 0.7 +5.4 %, "
    "0.5 +5.6 %, 0.5 with outer_lr 1 +9.9 %, 0.7 with DyLU +5.9 %; with 30 of them 0.7 +5.1 %; with 25 0.3 +7.9 %. In "
    "a simulation on the same seed: 0.9 with outer_lr 0.3 +10.0 %, 0.8 with 0.4 +6.5 %, 0.7 with 1/√(1+s) +7.8 %; with "
    "a step for 2 updates and momentum on every second 0.8 +3.7 %, 0.7 +4.5 %; for 3 updates and momentum on every "
    "second 0.8 +5.7 %, on each 0.8 +1.5 %; H = 10 with 0.8 +5.1 %. In another one (0.7: +4.7 %): momentum on each "
    "update in equal shares (the paper's c = 1/N) 0.7 +6.3 %, 0.8 +9.1 %; four workers of the same speed 0.7 +4.5 %, "
    "0.8 +8.8 %; twice the learning rate 0.7 +3.7 % (and DiLoCo +1.6 % above data-parallel): it is not the slow one, "
    "but momentum on what nobody has waited for. A step for 2 updates and momentum on every second: 0.9 +4.9 %, 0.85 "
    "with outer_lr 1 +6.9 %, 0.8 with 0.5 +4.6 %, on every third 0.8 +5.6 %, H = 10 with 0.85 +4.6 %, 0.9 +9.2 %; with "
    "25 synchronous rounds first 0.8 +1.8 %, 0.75 +1.6 %, which is the way below.",
}
"""Of a gate that is missed: what was tried."""


def above(runs: Runs, name: str, other: str, key: str = "loss") -> float:
    """By how many percent a loss, or what `key` names, is above another's, mean over the seeds that both have."""
    theirs = {each["seed"]: each[key] for each in runs[other]}
    both = [(each[key], theirs[each["seed"]]) for each in runs[name] if each["seed"] in theirs]
    return 100 * (sum(mine for mine, _ in both) / sum(its for _, its in both) - 1) if both else math.nan


def gates(runs: Runs, base_bytes: float) -> list[Gate]:
    """The promises whose runs are there."""
    found = []
    mean, there = functools.partial(mean_of, runs), {name for name in WAYS if runs[name]}

    def fewer(name: str) -> float:
        return base_bytes / (mean(name, "up") + mean(name, "down"))

    promises = {
        "diloco": ("DiLoCo, H = 20", 1.0, 20),
        "streaming_int4": ("streaming + int4 both ways, α = 0.5", 2.0, 100),
        "streaming_int4_a25": ("streaming + int4 both ways, α = 0.25", 2.0, 100),
        "streaming_int4_a0": ("streaming + int4 both ways, α = 0", 2.0, 100),
    }
    for name, (title, percent, times) in promises.items():
        if {name, "data_parallel"} <= there:
            loss, bytes_ = above(runs, name, "data_parallel"), fewer(name)
            note = "" if loss <= percent else NOTES.get(name, "")
            found.append(Gate(f"{title}: loss above data-parallel, %", loss, f"<= {percent:g}", loss <= percent, note))
            found.append(Gate(f"{title}: times fewer bytes", bytes_, f">= {times}", bytes_ >= times))
    for name, title in {
        "slow_delayed": "async + delayed Nesterov + sync first",
        "slow_delayed_warm": "async + delayed Nesterov on steps for 2 updates + a third sync first",
        "slow_buffered": "async, a step for 3 updates, Nesterov, sync first",
    }.items():
        if {name, "slow_sync"} <= there:
            loss, time_ = above(runs, name, "slow_sync"), 1 + above(runs, name, "slow_sync", "seconds") / 100
            note = "" if loss <= 3 else NOTES.get(name, "")
            found.append(Gate(f"{title}: loss above sync, %", loss, "<= 3", loss <= 3, note))
            found.append(Gate(f"{title}: wall time against sync, one worker slow", time_, "< 1", time_ < 1))
    return found


def plot(runs: Runs, folder: Path) -> None:
    """Loss over local steps of all workers, mean of the seeds; over bytes to the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5))
    for name, several in runs.items():
        if not several:
            continue
        points = [statistics.fmean(each["curve"][mark][1] for each in several) for mark in range(MARKS)]
        steps = [statistics.fmean(each["curve"][mark][0] for each in several) for mark in range(MARKS)]
        left.plot(steps, points, label=WAYS[name].title, linestyle="--" if WAYS[name].slow else "-")
        total = statistics.fmean(each["up"] + each["down"] for each in several) / 1e6
        right.scatter([total], [points[-1]], label=WAYS[name].title, marker="x" if WAYS[name].slow else "o")
    left.set(xlabel="steps of all workers", ylabel="validation loss, nats per byte", ylim=(None, 3.2))
    right.set(xlabel="MB both ways, all workers", ylabel="validation loss at the end", xscale="log")
    right.legend(fontsize=7)
    folder.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(folder / f"{NAME}.png", dpi=100)
    plt.close(figure)
