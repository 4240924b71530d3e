"""Simulated workers on this machine: worker-rounds a second, and memory by the number of workers.

    python bench/simulation.py

A model of 1 MB; a client that loads it, adds to every parameter and submits. All of 200 simulated sites in each round;
then 20 a round, of 200 and of 1,000. What else ran on the machine meanwhile is measured and written beside.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "quality"))
from harness.process_figures import anonymous_kb, cpu_s
from results import FOLDER, Gate, write

import atoll
from atoll.protocol.status_messages import RoundSummary

BAR_PER_S = 500
"""A known simulator does 89."""
BAR_GROWTH_MB = 25.0
SAMPLE_S = 0.05


def build(width: int = 256) -> nn.Module:
    """1 MB: four linear layers."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


_model: list[nn.Module] = []


def train(worker: Any) -> None:
    """The client: one model for all simulated sites of a process."""
    if not _model:
        _model.append(build())
    model = _model[0]
    for fl_round in worker:
        fl_round.load_into(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-3)
        fl_round.submit(model, metrics={"loss": 1.0 / fl_round.number})


def busy_s() -> float:
    """What all cores have been busy for, since the machine was started."""
    fields = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def measure(workers: int, per_round: int, rounds: int, processes: int, folder: Path) -> dict[str, Any]:
    """One simulation, in this process."""
    marks: list[tuple[float, float, float]] = []
    peaks_mb = {"server": 0.0, "processes": 0.0}
    ended = threading.Event()

    def own_s() -> float:
        return cpu_s(os.getpid()) + sum(map(cpu_s, simulation.pids()))

    def on_round(summary: RoundSummary) -> None:
        if not marks:
            peaks_mb.update(server=0.0, processes=0.0)  # of the rounds, not of the start
        marks.append((time.monotonic(), busy_s(), own_s()))

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            here = anonymous_kb(os.getpid()) * 1024 / 1e6
            there = max((anonymous_kb(pid) * 1024 / 1e6 for pid in simulation.pids()), default=0.0)
            peaks_mb["server"] = max(peaks_mb["server"], here)
            peaks_mb["processes"] = max(peaks_mb["processes"], there)

    simulation = atoll.Simulation(
        build(),
        script=train,
        sites=workers,
        processes=processes,
        settings={
            "rounds.total": rounds,
            "rounds.sample_fraction": per_round / workers,
            "algorithm.name": "fedavg",
            "disk.state_dir": folder,
        },
        on_round=on_round,
    )
    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    done = simulation.run()
    ended.set()
    sampler.join()
    assert not done.failed
    (first, *_), (last, *_) = marks[0], marks[-1]
    seconds, cores = last - first, os.cpu_count() or 1
    own = marks[-1][2] - marks[0][2]
    others = (marks[-1][1] - marks[0][1] - own) / (seconds * cores)
    count = per_round * (len(marks) - 1)
    return {
        "workers": workers,
        "per_round": per_round,
        "rounds": len(marks) - 1,
        "per_s": count / seconds,
        "best_round_per_s": per_round / min(b[0] - a[0] for a, b in itertools.pairwise(marks)),
        "cpu_ms": 1e3 * own / count,
        "others": max(0.0, others),
        "server_mb": peaks_mb["server"],
        "process_mb": peaks_mb["processes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="of 200 workers each; ten times as many of 20 each")
    parser.add_argument("--times", type=int, default=3, help="runs of the first; their median counts")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the results go")
    parser.add_argument("--one", nargs=3, type=int, metavar=("WORKERS", "PER_ROUND", "ROUNDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        workers, per_round, rounds = options.one
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(measure(workers, per_round, rounds, options.processes, Path(name) / "state")))
        return

    def one(workers: int, per_round: int, rounds: int) -> dict[str, Any]:
        argv = [sys.executable, __file__, "--processes", str(options.processes), "--one"]
        done = subprocess.run([*argv, *map(str, (workers, per_round, rounds))], stdout=subprocess.PIPE, check=True)
        figures: dict[str, Any] = json.loads(done.stdout)
        print(figures, flush=True)
        return figures

    all_of_200 = [one(200, 200, options.rounds) for _ in range(options.times)]
    few = [one(workers, 20, 10 * options.rounds) for workers in (200, 1000)]
    report(options, all_of_200, few)


def report(options: argparse.Namespace, all_of_200: list[dict[str, Any]], few: list[dict[str, Any]]) -> None:
    """Write the figures and the gates."""
    middle = sorted(all_of_200, key=lambda run: run["per_s"])[(len(all_of_200) - 1) // 2]
    growth = {key: few[1][key] - few[0][key] for key in ("server_mb", "process_mb")}
    other = f"Others took {100 * middle['others']:.0f} % of the machine meanwhile."
    gates = [
        Gate(
            "worker-rounds a second, all of 200",
            middle["per_s"],
            f">= {BAR_PER_S}",
            middle["per_s"] >= BAR_PER_S,
            other,
        ),
        *(
            Gate(
                f"anonymous memory of {of}, 1,000 workers against 200, growth in MB",
                growth[key],
                f"<= {BAR_GROWTH_MB:g}",
                growth[key] <= BAR_GROWTH_MB,
            )
            for key, of in (("server_mb", "the simulation"), ("process_mb", "a process that trains"))
        ),
    ]
    rows = [
        [
            run["workers"],
            run["per_round"],
            run["per_s"],
            run["best_round_per_s"],
            run["cpu_ms"],
            100 * run["others"],
            run["server_mb"],
            run["process_mb"],
        ]
        for run in [*all_of_200, *few]
    ]
    write(
        "simulation",
        title="Simulated workers on one machine",
        command="python bench/simulation.py",
        settings={"processes": options.processes, "rounds": options.rounds, "model_mb": 1.05},
        figures={"all_of_200": all_of_200, "few": few},
        gates=gates,
        header=[
            "workers",
            "a round",
            "worker-rounds/s",
            "best round, /s",
            "CPU, ms each",
            "others, % of the machine",
            "the simulation, MB",
            "a process, MB",
        ],
        rows=rows,
        text=f"""The model has 1 MB, and each site adds to every parameter. {options.processes} processes train on
{os.cpu_count()} cores, beside the process that keeps the run. The rate covers all rounds but the first, with their
closing. The gate takes the median of the runs, of two runs the lower one. Memory is anonymous memory, including
Python and PyTorch: the maximum after the first round, sampled twenty times a second.""",
        folder=options.folder,
    )
    for gate in gates:
        print(f"{gate.name}: {gate.value:.4g} ({gate.bar}) {'met' if gate.ok else 'MISSED ' + gate.note}")


if __name__ == "__main__":
    main()
