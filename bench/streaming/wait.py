"""How long training stands still at synchronisations over a slow line: the whole model at once, and streaming.

    python bench/streaming/wait.py

Two workers, a model of 8 MB in fp32, sent as bf16, pulled as it is, over 4 MB/s each way and connection with a delay of
20 ms. A local step sleeps 25 ms; H = 240. All of it is on one machine, so what is measured is waiting, not computing.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

import atoll
from atoll.testing.proxy import Pace, Proxy

H, ROUNDS, STEP_S = 240, 3, 0.025
LINE = Pace(delay_s=0.02, bytes_per_s=4e6)
RUNS = [
    {},
    {"num_fragments": 4},
    {"num_fragments": 4, "tau": 10},
    {"num_fragments": 4, "tau": 30},
    {"num_fragments": 4, "tau": 60},
]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))


def measure(settings: dict[str, int]) -> tuple[float, float, float]:
    """Seconds of the run, those that a worker waited, and how often a merge had to wait."""
    folder = Path(tempfile.mkdtemp())
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
            while not diloco.finished:
                time.sleep(STEP_S)
                optimizer.step()
        said.append(diloco.sync_metrics)

    begin_s = time.monotonic()
    with Proxy(server.port, LINE) as a, Proxy(server.port, LINE) as b:
        workers = [threading.Thread(target=train, args=each) for each in (("a", a.url), ("b", b.url))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    server.run()
    seconds = time.monotonic() - begin_s
    waited = sum(each["seconds_waited"] for each in said) / 2
    return seconds, waited, sum(each.get("merges_waited", 0) for each in said) / 2


if __name__ == "__main__":
    logging.getLogger("atoll").addHandler(logging.NullHandler())
    for settings in RUNS:
        seconds, waited, merges = measure(dict(settings))
        print(f"{settings or 'whole model'}: {seconds:.1f} s, waited {waited:.2f} s, {merges:.0f} merges waited")
