"""Low-communication training of a byte transformer: loss, bytes and wall time of each way, at equal tokens.

Four workers train on four parts of a text, 1,500 steps each (the slow one of an asynchronous run fewer, the others
more). Every run but the first is a real server with four DiLoCo loops over HTTP; the first is data-parallel training
in one process: a step is AdamW on the mean gradient of the four workers' batches. Its bytes are those of a ring
all-reduce, 2·(n−1)/n·S each way for every worker and step.

    python bench/quality/low_communication.py --text PATH             # a text file; by default Python's own sources
    python bench/quality/low_communication.py --only diloco --seeds 0 --more
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
from results import FOLDER, Gate, write
from safetensors.torch import load_file
from torch import Tensor, nn

import atoll
from atoll.cli.demo_data import corpus
from atoll.cli.demo_models import ByteTransformer, adamw, validation_loss

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAME = "low_communication"
WORKERS, STEPS, BATCH, WINDOW = 4, 1500, 8, 64
RATE, WARMUP, CLIP = 3e-3, 100, 1.0
FAST_S, SLOW_S = 0.025, 0.075
"""What a step takes at least where one worker has a third of the speed: more than four threads on two cores need."""
MARKS = 10
"""How often the global model is measured on its way."""

H20 = {"algorithm": "diloco", "codec": "none", "sync_every": 20}
STREAMING = {**H20, "num_fragments": 4, "tau": 1, "alpha": 0.5}
TOPK = {"codec": "topk", "downlink_codec": "topk", "outer_lr": 1.0, "outer_momentum": 0.0}
DELAYED = {"mode": "async", "dn_buffer_size": WORKERS, "sync_rounds_first": 10, "outer_momentum": 0.7}


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        settings: of the run; empty: data-parallel.
        slow: whether the last worker has a third of the speed, and every step its least duration.
    """

    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    slow: bool = False


WAYS: dict[str, Way] = {
    "data_parallel": Way("data-parallel"),
    "diloco": Way("DiLoCo, H = 20", H20),
    "diloco_50": Way("DiLoCo, H = 50", {**H20, "sync_every": 50}),
    "averaging": Way("plain averaging, H = 20", {**H20, "outer_lr": 1.0, "outer_momentum": 0.0}),
    "streaming": Way("streaming, K = 4, τ = 1, α = 0.5", STREAMING),
    "streaming_int8": Way("the same, int8 both ways", {**STREAMING, "codec": "int8", "downlink_codec": "int8"}),
    "streaming_int4": Way("the same, int4 both ways", {**STREAMING, "codec": "int4", "downlink_codec": "int4"}),
    "streaming_int4_a0": Way(
        "int4 both ways, α = 0", {**STREAMING, "alpha": 0.0, "codec": "int4", "downlink_codec": "int4"}
    ),
    "streaming_topk": Way("the same, top-k both ways, no momentum", {**STREAMING, **TOPK}),
    "slow_sync": Way("DiLoCo, H = 20, one worker slow", H20, slow=True),
    "slow_async": Way("async, one slow", {**H20, "mode": "async"}, slow=True),
    "slow_delayed": Way("async, delayed Nesterov, sync first, one slow", {**H20, **DELAYED}, slow=True),
    "slow_dylu": Way("the same with DyLU", {**H20, **DELAYED, "dylu": True}, slow=True),
}


def build(seed: int) -> ByteTransformer:
    """About 0.13 M parameters."""
    torch.manual_seed(seed)
    return ByteTransformer(width=64, layers=2, heads=4)


@dataclass(frozen=True)
class Data:
    """A text of bytes for each worker, and validation windows [N, WINDOW + 1] that none of them has."""

    texts: list[Tensor]
    validation: Tensor

    @classmethod
    def read(cls, path: Path | None) -> Data:
        """The file in parts: nine tenths for the workers, one after the other, the rest to measure by."""
        if path is None:
            texts, windows = corpus(WORKERS, seed=0)
            return cls(texts, windows[:, : WINDOW + 1])
        text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        cut = len(text) * 9 // 10
        starts = torch.linspace(cut, len(text) - WINDOW - 1, 192).long().tolist()
        windows = torch.stack([text[start : start + WINDOW + 1] for start in starts]).long()
        return cls(list(torch.chunk(text[:cut], WORKERS)), windows)

    def batches(self, worker: int, seed: int) -> Callable[[], Tensor]:
        """Asked for the next batch [BATCH, WINDOW + 1] of a worker; the same ones for a seed, whatever the way."""
        text, generator = self.texts[worker], torch.Generator().manual_seed(1000 * seed + worker)

        def following() -> Tensor:
            starts = torch.randint(len(text) - WINDOW - 1, (BATCH,), generator=generator).tolist()
            return torch.stack([text[start : start + WINDOW + 1] for start in starts]).long()

        return following


def rate_at(progress: float) -> float:
    """Learning rate, of RATE: a short rise, then a cosine down to a tenth; `progress` from 0 to 1."""
    if progress * STEPS < WARMUP:
        return progress * STEPS / WARMUP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


def step_(model: ByteTransformer, optimizer: torch.optim.Optimizer, progress: float, *batches: Tensor) -> None:
    """One step on the mean loss of the batches."""
    for group in optimizer.param_groups:
        group["lr"] = RATE * rate_at(progress)
    optimizer.zero_grad()
    model.loss(torch.cat(batches)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()


def data_parallel(data: Data, seed: int) -> dict[str, Any]:
    """Every step on the batches of all workers."""
    model = build(seed)
    optimizer, sources = adamw(model), [data.batches(worker, seed) for worker in range(WORKERS)]
    curve = []
    for step in range(STEPS):
        step_(model, optimizer, step / STEPS, *(source() for source in sources))
        if (step + 1) % (STEPS // MARKS) == 0:
            curve.append([WORKERS * (step + 1), validation_loss(model, data.validation)])
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    each_way = WORKERS * STEPS * 2 * (WORKERS - 1) * nbytes / WORKERS
    return {"loss": curve[-1][1], "curve": curve, "up": each_way, "down": each_way, "seconds": None, "steps": STEPS}


class Pace:
    """How many steps were made by all together, and when each worker may go on."""

    def __init__(self, way: Way) -> None:
        self._way, self._lock, self.steps = way, threading.Lock(), 0
        self._due_s = [0.0] * WORKERS

    def wait(self, worker: int) -> None:
        """Let a step take its time."""
        if self._way.slow:
            duration_s = SLOW_S if worker == WORKERS - 1 else FAST_S
            now_s = time.monotonic()
            self._due_s[worker] = max(now_s, self._due_s[worker] + duration_s)
            time.sleep(self._due_s[worker] - now_s)

    def count(self) -> None:
        with self._lock:
            self.steps += 1


def run(way: Way, data: Data, seed: int) -> dict[str, Any]:
    """One training. Loss of the global model at the end and on its way, bytes both ways, seconds by the clock."""
    if not way.settings:
        return data_parallel(data, seed)
    is_async = way.settings.get("mode") == "async"
    total, pace, model = WORKERS * STEPS, Pace(way), build(seed)
    with tempfile.TemporaryDirectory() as folder:
        rounds = 0 if is_async else STEPS // way.settings["sync_every"]
        options = {**way.settings, "rounds": rounds, "num_workers": WORKERS, "port": 0, "heartbeat_interval_s": 1.0}
        server = atoll.Server(model, state_dir=Path(folder) / "state", **options).start()
        told: list[dict[str, float]] = [{} for _ in range(WORKERS)]

        def work(worker: int) -> None:
            mine, following = build(seed), data.batches(worker, seed)
            optimizer = adamw(mine)
            with atoll.DiLoCo(
                mine, optimizer, server=server.url, site=f"w{worker}", folder=Path(folder) / "workers"
            ) as diloco:
                while (pace.steps < total) if is_async else (diloco.step < STEPS):
                    pace.wait(worker)
                    progress = pace.steps / total if is_async else diloco.step / STEPS
                    step_(mine, optimizer, progress, following())
                    pace.count()
            told[worker] = diloco.sync_metrics

        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(WORKERS)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        probe, curve = build(seed), []

        def measure(path: Path) -> float:
            probe.load_state_dict(load_file(path), strict=False)
            return validation_loss(probe, data.validation)

        for mark in range(1, MARKS):
            while pace.steps < total * mark // MARKS and any(thread.is_alive() for thread in threads):
                time.sleep(0.05)
            curve.append([pace.steps, measure(server.save_state(Path(folder) / "now.safetensors"))])
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        if is_async:
            path = server.save_state(Path(folder) / "now.safetensors")
        else:
            server.run()
            path = server.exports / "model.safetensors"
        curve.append([pace.steps, measure(path)])
        stale = server.status().staleness
        server.stop()
    return {
        "loss": curve[-1][1],
        "curve": curve,
        "up": sum(each["bytes_up"] for each in told),
        "down": sum(each["bytes_down"] for each in told),
        "seconds": seconds,
        "waited": sum(each["seconds_waited"] for each in told) / WORKERS,
        "steps": pace.steps / WORKERS,
        "staleness": stale,
    }


Runs = dict[str, list[dict[str, Any]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, help="by default Python's own sources")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS), help="these ways")
    parser.add_argument("--more", action="store_true", help="keep the runs that docs/results has, and add these")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the results go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("atoll").setLevel(logging.WARNING)
    data, settings = Data.read(options.text), described(options.text)
    runs: Runs = {name: [] for name in WAYS}
    path = options.folder / f"{NAME}.json"
    if options.more and path.exists():
        document = json.loads(path.read_text())
        if {key: document["settings"].get(key) for key in settings} != settings:
            raise SystemExit(f"{path} has runs of other settings; leave --more out.")
        runs |= document["figures"]["runs"]
    for seed, name in itertools.product(options.seeds, options.only):
        runs[name] = [each for each in runs[name] if each["seed"] != seed]
        runs[name].append({"seed": seed} | run(WAYS[name], data, seed))
        last = runs[name][-1]
        print(f"seed {seed} {name:15} loss {last['loss']:.4f}, {last['seconds'] or 0:.0f} s", flush=True)
        report(runs, settings, options.folder)


def described(text: Path | None) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "text": text.name if text else "Python's standard library",
        "workers": WORKERS,
        "steps": STEPS,
        "batch": BATCH,
        "window": WINDOW,
        "rate": RATE,
        "parameters": sum(parameter.numel() for parameter in build(0).parameters()),
        "fast_s": FAST_S,
        "slow_s": SLOW_S,
        "ways": {name: way.settings for name, way in WAYS.items()},
    }


def report(runs: Runs, settings: dict[str, Any], folder: Path) -> None:
    """Write the results, gates included, of the seeds that are there."""
    mean = functools.partial(mean_of, runs)
    base_bytes = mean("data_parallel", "up") + mean("data_parallel", "down")
    rows = []
    for name, way in WAYS.items():
        if not runs[name]:
            continue
        up, down = mean(name, "up"), mean(name, "down")
        rows.append(
            [
                way.title,
                mean(name, "loss"),
                " ".join(f"{each['loss']:.4f}" for each in runs[name]),
                f"{above(runs, name, 'data_parallel'):+.2f} %",
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
        command="python bench/quality/low_communication.py" + ("" if settings["text"][0] == "P" else " --text PATH"),
        settings=settings,
        figures={"runs": runs},
        gates=gates(runs, base_bytes),
        header=[
            "way",
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
        text=TEXT + lacking(runs),
        folder=folder,
    )


TEXT = f"""Loss in nats per byte of the global model on text that no worker has, against data-parallel training on the
same seeds. Bytes are those of all four workers together, as they went over the socket; "fewer bytes" counts both
directions, against a ring all-reduce at every step. Seconds are those of a run by the clock, on a machine that did
other work, too; "s waited" is what a worker stood still. Where one worker is slow, a step takes
{FAST_S * 1000:.0f} ms at least, the slow worker's {SLOW_S * 1000:.0f} ms; the others are not paced, and their seconds
are not to be compared with those. Seed 100, on which settings were tried, is not among those of the table."""


def lacking(runs: Runs) -> str:
    """Which ways were not run, or not with every seed."""
    most = max(map(len, runs.values()))
    short = [way.title for name, way in WAYS.items() if len(runs[name]) < most]
    return f"\n\nNot run yet, or not with every seed: {'; '.join(short)}. The option more adds runs." if short else ""


def mean_of(runs: Runs, name: str, key: str) -> float:
    values = [each[key] for each in runs[name] if each.get(key) is not None]
    return statistics.fmean(values) if values else math.nan


TRIED = {
    "streaming_int4": "On seed 100 (DiLoCo +0.5 %): streaming as it is +4.1 %, int4 both ways +4.0 %: int4 costs "
    "nothing; outer_lr 0.4: +5.0 %, 1.0: +4.0 %; α = 0: +1.5 %.",
    "slow_delayed": "With outer_momentum 0.9 +15 % (seed 0). On seed 100 with 10 synchronous rounds first: 0.7 +5.4 %, "
    "0.5 +5.6 %, 0.5 with outer_lr 1 +9.9 %, 0.7 with DyLU +5.9 %; with 30 of them 0.7 +5.1 %; with 25 0.3 +7.9 %.",
}
"""Of a gate that is missed: what was tried."""


def above(runs: Runs, name: str, other: str) -> float:
    """By how many percent a loss is above another one, mean over the seeds that both have."""
    theirs = {each["seed"]: each["loss"] for each in runs[other]}
    both = [(each["loss"], theirs[each["seed"]]) for each in runs[name] if each["seed"] in theirs]
    return 100 * (sum(loss for loss, _ in both) / sum(loss for _, loss in both) - 1) if both else math.nan


def gates(runs: Runs, base_bytes: float) -> list[Gate]:
    """The promises whose runs are there."""
    found = []
    mean, there = functools.partial(mean_of, runs), {name for name in WAYS if runs[name]}

    def fewer(name: str) -> float:
        return base_bytes / (mean(name, "up") + mean(name, "down"))

    titles = {
        "diloco": "DiLoCo, H = 20",
        "streaming_int4": "streaming + int4 both ways, α = 0.5",
        "streaming_int4_a0": "streaming + int4 both ways, α = 0",
    }
    for name, percent, times in (("diloco", 1.0, 20), ("streaming_int4", 2.0, 100), ("streaming_int4_a0", 2.0, 100)):
        if {name, "data_parallel"} <= there:
            loss, bytes_ = above(runs, name, "data_parallel"), fewer(name)
            title = titles[name]
            note = "" if loss <= percent else TRIED.get(name, "")
            found.append(Gate(f"{title}: loss above data-parallel, %", loss, f"<= {percent:g}", loss <= percent, note))
            found.append(Gate(f"{title}: times fewer bytes", bytes_, f">= {times}", bytes_ >= times))
    if {"slow_delayed", "slow_sync"} <= there:
        loss, time_ = (
            above(runs, "slow_delayed", "slow_sync"),
            mean("slow_delayed", "seconds") / mean("slow_sync", "seconds"),
        )
        note = "" if loss <= 3 else TRIED["slow_delayed"]
        found.append(Gate("async + delayed Nesterov + sync first: loss above sync, %", loss, "<= 3", loss <= 3, note))
        found.append(Gate("the same: wall time against sync, one worker slow", time_, "< 1", time_ < 1))
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


if __name__ == "__main__":
    main()
