"""Flower's niid_bench on Fashion-MNIST, beside its published table.

The table is that of baselines/niid_bench in Flower's repository, after NIID-Bench (arXiv 2102.02079): 10 sites, 50
rounds of 10 epochs, batch 64, SGD with momentum 0.9; the best accuracy over the rounds.

    python baselines/niid_bench.py                           # 16 cells × 3 seeds: a day on 2 cores; resumes
    python baselines/niid_bench.py --split iid --algorithm fedavg --seeds 1

Needs Debian's package dataset-fashion-mnist. Results are written to baselines/niid_bench.json after each run.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import atoll

PUBLISHED = {
    "iid": {"fedavg": (89.23, 0.45), "scaffold": (89.33, 0.27), "fedprox": (89.42, 0.09), "fednova": (89.36, 0.09)},
    "dirichlet": {
        "fedavg": (88.09, 0.29),
        "scaffold": (88.44, 0.25),
        "fedprox": (88.15, 0.42),
        "fednova": (88.22, 0.12),
    },
    "2-classes": {
        "fedavg": (78.10, 2.51),
        "scaffold": (33.80, 41.22),
        "fedprox": (78.05, 0.99),
        "fednova": (71.67, 2.34),
    },
    "3-classes": {
        "fedavg": (82.43, 1.52),
        "scaffold": (80.32, 5.03),
        "fedprox": (82.99, 0.48),
        "fednova": (81.97, 1.34),
    },
}
SITES, BATCH, RATE, MOMENTUM, DECAY = 10, 64, 0.01, 0.9, 1e-5
RESULTS = Path(__file__).with_suffix(".json")
STATE = Path("build") / "niid_bench"


def network() -> nn.Module:
    """Two convolutions with 6 and 16 channels, and layers of 120, 84 and 10."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


@functools.cache
def split(kind: str, seed: int) -> atoll.data.Partition:
    """Fashion-MNIST's training pictures, as each site has them."""
    pictures = atoll.data.fashion_mnist()
    if kind == "iid":
        return atoll.data.iid(pictures, SITES, seed=seed)
    if kind == "dirichlet":
        return atoll.data.dirichlet(pictures, SITES, 0.5, seed=seed, min_size=10)
    return by_classes(pictures, int(kind[0]), seed)


def by_classes(pictures: TensorDataset, per_site: int, seed: int) -> atoll.data.Partition:
    """NIID-Bench's #C: site i has class i and others at random; the sites of a class share its pictures evenly.

    `atoll.data.by_attribute` gives each class to as many sites as any other. Here, a class may have one site or six.
    """
    draw, labels = np.random.default_rng(seed), pictures.tensors[1].numpy()
    classes = [
        [site, *draw.choice(np.delete(np.arange(10), site), per_site - 1, replace=False)] for site in range(SITES)
    ]
    parts: list[list[int]] = [[] for _ in range(SITES)]
    for label in range(10):
        owners = [site for site in range(SITES) if label in classes[site]]
        shuffled = draw.permutation(np.flatnonzero(labels == label))
        for site, part in zip(owners, np.array_split(shuffled, len(owners)), strict=True):
            parts[site] += part.tolist()
    return atoll.data.Partition(pictures, [f"site-{site:04}" for site in range(SITES)], parts)


def train(worker: Any) -> None:
    """Train a site for its epochs in each round. Arguments: the split, its seed, the epochs."""
    kind, seed, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    images, labels = split(kind, seed).subset(worker.site)[:]
    for fl_round in worker:
        model = network()
        fl_round.load_into(model)
        optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM, weight_decay=DECAY)
        with fl_round.correct(model, optimizer):
            for _ in range(epochs):
                for chosen in torch.randperm(len(labels)).split(BATCH):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
                    optimizer.step()
        fl_round.submit(model, weight=len(labels))


def evaluate(model: nn.Module) -> dict[str, float]:
    """Return the percent of Fashion-MNIST's test pictures that are right."""
    images, labels = atoll.data.fashion_mnist(train=False)[:]
    with torch.inference_mode():
        return {"accuracy": 100 * float((model(images).argmax(1) == labels).float().mean())}


def best(kind: str, algorithm: str, seed: int, rounds: int, epochs: int) -> float:
    """Run a cell of the table with one seed, or go on with it. Return the best accuracy over its rounds, in percent."""
    settings: dict[str, Any] = {"algorithm.name": algorithm, "rounds.total": rounds, "run.seed": seed}
    settings |= {"disk.state_dir": STATE / f"{kind}-{algorithm}-{seed}-{rounds}x{epochs}"}
    settings |= {"algorithm.mu": 0.01} if algorithm == "fedprox" else {}
    torch.manual_seed(seed)
    arguments = [kind, str(seed), str(epochs)]
    run = atoll.Simulation(
        network(), settings, script=train, arguments=arguments, sites=SITES, evaluate=evaluate, resume=True
    ).run()
    return max(each["global_metrics"]["accuracy"] for each in run.history)


def row(kind: str, algorithm: str, found: list[float]) -> str:
    """Return a line of the table: ours, the published one, and how many standard deviations lie between them."""
    published, spread = PUBLISHED[kind][algorithm]
    mean, own = statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0
    deviations = (mean - published) / ((own**2 + spread**2) / 2) ** 0.5
    ours = f"{mean:.2f} ± {own:.2f} | {len(found)}"
    return f"| {kind} | {algorithm} | {ours} | {published:.2f} ± {spread:.2f} | {deviations:+.1f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=PUBLISHED, action="append", help="by default, all")
    parser.add_argument("--algorithm", choices=PUBLISHED["iid"], action="append", help="by default, all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    is_full = (given.rounds, given.epochs) == (50, 10)
    results = json.loads(RESULTS.read_text()) if is_full and RESULTS.exists() else {}
    print("| sites have | algorithm | ours | seeds | published | z |\n|---|---|---|---|---|---|")
    for kind in given.split or PUBLISHED:
        for algorithm in given.algorithm or PUBLISHED[kind]:
            found = results.setdefault(kind, {}).setdefault(algorithm, {})
            for seed in range(1, given.seeds + 1):
                if str(seed) not in found:
                    found[str(seed)] = best(kind, algorithm, seed, given.rounds, given.epochs)
                    if is_full:
                        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(row(kind, algorithm, list(found.values())), flush=True)


if __name__ == "__main__":
    main()
