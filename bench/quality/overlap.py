"""How long training stands still at synchronisations over a slow line: the whole model at once, and streaming.

Two workers, a model of 8 MB in fp32, sent as bf16, pulled as it is. A local step sleeps 25 ms, H = 240: all of it is on
one machine, so what is measured is waiting, not computing. The line lets 12 MB/s through, each way and connection, with
a delay of 20 ms: without overlap the exchange of one of four fragments takes about a third of the time between two.

    python bench/quality/overlap.py
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from results import FOLDER, Gate, write
from torch import nn

import atoll
from atoll.testing.proxy import Pace, Proxy

H, K, ROUNDS, STEP_S = 240, 4, 3, 0.025
LINE = Pace(delay_s=0.02, bytes_per_s=12e6)
SHARE = 2.0
"""Percent of its time for which training may stand still with overlap."""

RUNS: dict[str, dict[str, int]] = {
    "the whole model": {},
    f"{K} fragments, no overlap": {"num_fragments": K},
    f"{K} fragments, τ = {H // K // 2}": {"num_fragments": K, "tau": H // K // 2},
    f"{K} fragments, τ = {H // K}": {"num_fragments": K, "tau": H // K},
}


def build() -> nn.Module:
    """2.1 M parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))


def measure(settings: dict[str, int]) -> dict[str, Any]:
    """Seconds of the workers' loops, those that they waited, and how often a merge had to wait; means over both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = atoll.Server(
            build(), num_workers=2, rounds=ROUNDS, sync_every=H, port=0, state_dir=folder / "state", **settings
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
                said.append(diloco.sync_metrics | {"seconds": time.monotonic() - began})

        with Proxy(server.port, LINE) as a, Proxy(server.port, LINE) as b:
            workers = [threading.Thread(target=train, args=each) for each in (("a", a.url), ("b", b.url))]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        server.run()

    def mean(key: str) -> float:
        return sum(each.get(key, 0.0) for each in said) / len(said)

    return {key: mean(key) for key in ("seconds", "seconds_waited", "merges_waited", "rounds")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the results go")
    options = parser.parse_args()
    logging.getLogger("atoll").addHandler(logging.NullHandler())
    figures = {}
    for title, settings in RUNS.items():
        figures[title] = found = measure(dict(settings))
        print(f"{title}: {found['seconds']:.1f} s, waited {found['seconds_waited']:.2f} s", flush=True)
    _, alone, half, _ = figures.values()
    exchange = 100 * alone["seconds_waited"] / alone["rounds"] / (H / K * STEP_S)
    stalls = 100 * half["seconds_waited"] / half["seconds"]
    write(
        "overlap",
        title="How long training stands still over a slow line",
        command="python bench/quality/overlap.py",
        settings={"H": H, "K": K, "rounds": ROUNDS, "step_s": STEP_S, "bytes_per_s": LINE.bytes_per_s},
        figures={"runs": figures, "exchange_percent_of_interval": exchange},
        gates=[
            Gate(f"τ = {H // K // 2}: training stands still, % of the time", stalls, f"<= {SHARE:g}", stalls <= SHARE)
        ],
        header=["", "s", "s waited", "waited, % of the time", "merges that waited"],
        rows=[
            [
                title,
                each["seconds"],
                each["seconds_waited"],
                100 * each["seconds_waited"] / each["seconds"],
                each["merges_waited"],
            ]
            for title, each in figures.items()
        ],
        text=f"Two workers, 8 MB, {LINE.bytes_per_s / 1e6:g} MB/s each way and connection behind a proxy, H = {H}, "
        f"{STEP_S * 1000:g} ms a step. Without overlap the exchange of a fragment takes {exchange:.0f} % of the time "
        "between two of them.",
        folder=options.folder,
    )


if __name__ == "__main__":
    main()
