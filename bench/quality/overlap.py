"""How long training stands still at synchronisations over a slow line: the whole model at once, and streaming.

Two workers, a model of 8 MB in fp32, sent as bf16, pulled as it is. A local step is a pause of 25 ms and a step of SGD:
all of it is on one machine, so what is measured is waiting, not computing. The line lets 12 MB/s through, each way and
connection, with a delay of 20 ms each way. H is such that without overlap the exchange of one of four fragments takes
a third of the time between two; that it does is a gate, too.

    python bench/quality/overlap.py
    python bench/quality/overlap.py --set diloco.sync_every=240 --mb-per-s 4 --folder /tmp/slower
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from harness.proxy import Pace, Proxy
from results import FOLDER, Gate, write
from torch import nn

import atoll

K, ROUNDS, STEP_S, DELAY_S = 4, 3, 0.025, 0.02
SHARE, EXCHANGE = 2.0, 100 / 3
"""Percent: of its time for which training may stand still with overlap; of its interval that an exchange is to take."""


def build() -> nn.Module:
    """2.1 M parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))


def measure(line: Pace, settings: dict[str, int]) -> dict[str, float]:
    """Seconds of the workers' loops, those that they waited, their steps, bytes, and merges that had to wait; means."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = atoll.Server(
            build(),
            settings={
                "algorithm.name": "diloco",
                "rounds.sites": 2,
                "rounds.total": ROUNDS,
                "network.port": 0,
                "disk.state_dir": folder / "state",
                **settings,
            },
        ).start()
        said: list[dict[str, float]] = []

        def train(site: str, url: str) -> None:
            model = build()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            with atoll.DiLoCo(model, optimizer, server=url, site=site, folder=folder / "workers") as diloco:
                began = time.monotonic()
                while not diloco.finished:
                    time.sleep(STEP_S)
                    optimizer.step()
                told = {"seconds": time.monotonic() - began, "steps": float(diloco.step)}
                said.append(diloco.sync_metrics | told)

        with Proxy(server.port, line) as a, Proxy(server.port, line) as b:
            workers = [threading.Thread(target=train, args=each) for each in (("a", a.url), ("b", b.url))]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        server.run()

    def mean(key: str) -> float:
        return sum(each.get(key, 0.0) for each in said) / len(said)

    keys = ("seconds", "seconds_waited", "steps", "merges_waited", "rounds", "bytes_up", "bytes_down")
    return {key: mean(key) for key in keys}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sync-every", type=int, default=360, help="H, a multiple of 8")
    parser.add_argument("--mb-per-s", type=float, default=12.0, help="of the line, each way and connection")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the results go")
    options = parser.parse_args()
    logging.getLogger("atoll").addHandler(logging.NullHandler())
    h, line = options.sync_every, Pace(delay_s=DELAY_S, bytes_per_s=options.mb_per_s * 1e6)
    every = h // K
    runs: dict[str, dict[str, int]] = {
        "the whole model": {},
        f"{K} fragments, no overlap": {"diloco.num_fragments": K},
        f"{K} fragments, τ = {every // 2}": {"diloco.num_fragments": K, "diloco.fragment_sync_delay": every // 2},
        f"{K} fragments, τ = {every}": {"diloco.num_fragments": K, "diloco.fragment_sync_delay": every},
    }
    figures = {}
    for title, settings in runs.items():
        figures[title] = found = measure(line, {"diloco.sync_every": h, **settings})
        print(f"{title}: {found['seconds']:.1f} s, waited {found['seconds_waited']:.2f} s", flush=True)
    _, alone, half, _ = figures.values()
    exchange = 100 * alone["seconds_waited"] / alone["rounds"] / (every * STEP_S)
    stalls = 100 * half["seconds_waited"] / half["seconds"]
    plot(figures, options.folder)
    write(
        "overlap",
        title="How long training waits on a slow line",
        command="python bench/quality/overlap.py",
        settings={
            "H": h,
            "K": K,
            "rounds": ROUNDS,
            "step_s": STEP_S,
            "bytes_per_s": line.bytes_per_s,
            "delay_s": line.delay_s,
            "runs": runs,
        },
        figures={"runs": figures, "exchange_percent_of_interval": exchange},
        gates=[
            Gate("an exchange without overlap, % of its interval", exchange, ">= 33.3", exchange >= EXCHANGE),
            Gate(f"τ = {every // 2}: training waits, % of the time", stalls, f"<= {SHARE:g}", stalls <= SHARE),
        ],
        header=["", "s", "s waited", "waited, % of the time", "ms a step besides", "merges that waited"],
        rows=[
            [
                title,
                each["seconds"],
                each["seconds_waited"],
                100 * each["seconds_waited"] / each["seconds"],
                1e3 * (each["seconds"] - each["seconds_waited"]) / each["steps"],
                each["merges_waited"],
            ]
            for title, each in figures.items()
        ],
        text=f"""Two workers, a model of 8 MB, a proxy with {options.mb_per_s:g} MB/s each way and connection, {
            DELAY_S * 1e3:g} ms of delay each way, H = {h}. A step is a pause of {
            STEP_S * 1e3:g} ms and one of SGD, so that the threads
that transfer find a free core. "ms a step besides" is the time of a step without waiting. Waiting is all that holds up
the training thread: forming the update, merging, the transfer both ways, and the other worker. Without overlap the
exchange of a fragment takes {exchange:.0f} % of the time between two exchanges.""",
        folder=options.folder,
    )


def plot(figures: dict[str, dict[str, Any]], folder: Path) -> None:
    """Seconds of every way, trained and waited."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    waited = [each["seconds_waited"] for each in figures.values()]
    trained = [each["seconds"] - each["seconds_waited"] for each in figures.values()]
    axes.barh(list(figures), trained, label="trained")
    axes.barh(list(figures), waited, left=trained, label="stood still")
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "overlap.png", dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
