"""Robust reducers against the mean: seconds and anonymous memory of one pass over 10 updates × 0.4 GB.

Every pass runs in a process of its own over the same files, as the server runs it. The mean is measured before and
after each of the others, and that one is compared with those two: a machine that other processes use changes its pace.

    python bench/quality/robust_reducers.py
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from harness.process_figures import Peaks
from results import FOLDER, Gate, write

from atoll.aggregation.make_version import NextFiles, RoundFiles, UpdateInput, make_version
from atoll.aggregation.outer_state import state_layout
from atoll.aggregation.plan import AggregationPlan, FragmentPlan
from atoll.codecs import NoneCodec
from atoll.outer_optimizers import build_outer
from atoll.protocol.values import FrozenRound, FrozenUpdate
from atoll.reducers import build_reducers
from atoll.registry import OwnName
from atoll.tensors.chunks import bytes_of
from atoll.tensors.layout import update_layout, version_header, version_layout
from atoll.tensors.schema import Schema, TensorSpec

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Pass = tuple[float, float]
"""Seconds, and MB of anonymous memory."""
REDUCERS: dict[str, dict[str, Any]] = {"clipped_mean": {}, "median": {}, "trimmed_mean": {"trim": 0.2}}
TENSORS = 50
MEMORY_MB, TIMES = 200.0, 4.0


def schema_of(gb: float) -> Schema:
    numel = int(gb * 1e9) // 4 // TENSORS
    return Schema.build([TensorSpec(f"layer.{index}", "F32", (numel,)) for index in range(TENSORS)])


def fill(path: Path, nbytes: int, seed: int, header: bytes = b"") -> None:
    """Normal numbers, another file each."""
    generator, run = torch.Generator().manual_seed(seed), torch.empty(2**20)
    with open(path, "wb", buffering=0) as file:
        file.write(header)
        left = nbytes - len(header)
        while left:
            left -= file.write(bytes_of(run.normal_(generator=generator))[:left])


def one_pass(folder: Path, gb: float, updates: int, threads: int, name: str, begin: Any, told: Any) -> None:
    """In a process of its own: says when it has imported everything, waits, runs the pass, says its seconds."""
    torch.set_num_threads(1)
    schema, codec = schema_of(gb), NoneCodec()
    version, update = version_layout(schema), update_layout(schema.tensors, lambda _: codec)
    rule = build_outer(OwnName("sgd"), {"lr": 1.0, "momentum": 0.0})
    state = state_layout(schema.tensors, rule, version.part_bytes)
    reducers = build_reducers(
        dict.fromkeys(("params", "buffers"), OwnName("mean")), OwnName(name), REDUCERS.get(name, {})
    )

    def opened(file: str) -> int:
        return os.open(folder / file, os.O_RDWR | os.O_CREAT)

    planned = FragmentPlan(schema, version_header(schema), version, update, state, None)
    nothing: Any = None  # which the pass does not use
    plan = AggregationPlan(
        values=nothing,
        split=nothing,
        codecs={"none": codec},
        rule=rule,
        reducers=reducers,
        fragments=(planned,),
        threads=threads,
    )
    frozen = [
        FrozenUpdate(
            ticket=index, site=f"site-{index}", digest="00" * 32, weight=1.0, steps=1, norm=index + 1.0, scale=1.0
        )
        for index in range(updates)
    ]
    files = {index: UpdateInput(opened(f"update-{index}")) for index in range(updates)}
    told.put(None)
    begin.wait()
    result = make_version(
        plan,
        FrozenRound(fragment=0, number=1, base_version=0, version=1, updates=frozen),
        RoundFiles(opened("base"), None, files),
        NextFiles(opened("next"), opened("state") if state else None),
    )
    told.put((result.seconds, result.digest))


def measure(folder: Path, gb: float, updates: int, threads: int, name: str) -> tuple[float, float]:
    """Seconds of one pass, and MB of anonymous memory above what the process had before."""
    context = mp.get_context("spawn")
    begin, told, peaks = context.Event(), context.Queue(), Peaks()
    process = context.Process(target=one_pass, args=(folder, gb, updates, threads, name, begin, told))
    process.start()
    try:
        assert process.pid is not None
        told.get(timeout=300)
        peaks.begin(process.pid)
        begin.set()
        seconds, _ = told.get(timeout=3600)
        process.join()
        return seconds, peaks.peak_mb(process.pid)
    finally:
        peaks.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=0.4)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where the files go while it runs")
    options = parser.parse_args()
    order = order_of(options.repeat)
    raw: dict[str, list[Pass]] = {name: [] for name in order}
    with tempfile.TemporaryDirectory(dir=options.dir) as text:
        folder, schema = Path(text), schema_of(options.gb)
        header = version_header(schema)
        fill(folder / "base", version_layout(schema).nbytes, 0, header)
        nbytes = update_layout(schema.tensors, lambda _: NoneCodec()).nbytes
        for index in range(options.updates):
            fill(folder / f"update-{index}", nbytes, index + 1)
        measure(folder, options.gb, options.updates, options.threads, "mean")  # the files are made, the cache is warm
        for name in order:
            raw[name].append(measure(folder, options.gb, options.updates, options.threads, name))
            print(f"{name:13} {raw[name][-1][0]:6.2f} s  {raw[name][-1][1]:6.1f} MB", flush=True)
    report(raw, options.gb, options.updates, options.threads)


def order_of(repeat: int) -> list[str]:
    """In which order the passes are run."""
    return ["mean", *(name for each in REDUCERS for name in (each, "mean"))] * repeat


def report(raw: dict[str, list[Pass]], gb: float, updates: int, threads: int) -> None:
    """Write the results of all passes, gates and plot included."""
    order, left = order_of(len(raw["median"])), {name: iter(passes) for name, passes in raw.items()}
    taken = [next(left[name])[0] for name in order]
    seconds = {name: statistics.median(second for second, _ in runs) for name, runs in raw.items()}
    memory = {name: max(mb for _, mb in runs) for name, runs in raw.items()}
    ratios = {
        name: [
            taken[at] / statistics.mean((taken[at - 1], taken[at + 1])) for at, each in enumerate(order) if each == name
        ]
        for name in REDUCERS
    }
    times = {name: statistics.median(several) for name, several in ratios.items()}
    gates = [
        Gate(f"{name}: {what}", value, f"≤ {bar:g} {unit}", value <= bar)
        for name in REDUCERS
        for what, value, bar, unit in (
            ("time against the mean", times[name], TIMES, "×"),
            ("anonymous memory", memory[name], MEMORY_MB, "MB"),
        )
    ]
    plot(ratios, memory, FOLDER / "robust_reducers.png")
    write(
        "robust_reducers",
        title=f"Robust reducers: one pass over {updates} updates × {gb:g} GB",
        command="python bench/quality/robust_reducers.py",
        settings={"gb": gb, "updates": updates, "threads": threads, "options": REDUCERS},
        figures={name: [{"seconds": s, "anon_mb": mb} for s, mb in runs] for name, runs in raw.items()},
        gates=gates,
        header=["reducer", "seconds (median)", "× the mean", "anonymous memory, MB"],
        rows=[[name, round(seconds[name], 2), round(times.get(name, 1.0), 2), round(memory[name], 1)] for name in raw],
    )


def plot(ratios: dict[str, list[float]], memory: dict[str, float], path: Path) -> None:
    """Time of every pass against the means around it, and the most memory, each beside its bar."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4))
    for at, several in enumerate(ratios.values()):
        left.plot([at] * len(several), several, "o", alpha=0.6)
    left.axhline(TIMES, color="grey", ls="--")
    left.set_xticks(range(len(ratios)), list(ratios))
    left.set_ylabel("time, × the mean's")
    left.set_ylim(0, TIMES * 1.1)
    right.bar(range(len(memory)), list(memory.values()))
    right.axhline(MEMORY_MB, color="grey", ls="--")
    right.set_xticks(range(len(memory)), list(memory))
    right.set_yscale("log")
    right.set_ylabel("anonymous memory, MB")
    for panel in (left, right):
        panel.tick_params(axis="x", labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
