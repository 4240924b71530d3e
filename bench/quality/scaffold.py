"""SCAFFOLD against FedAvg, FedProx and FedAdam where sites differ much: Dirichlet 0.1 over eight sites.

Every run is a real server, and eight threads that run `train` below over HTTP, through
`atoll.integrations.lightning.patch`. What a site runs does not know the algorithm. Bars: SCAFFOLD ends above FedAvg in
the mean of the seeds, and every round of every run is made of all eight updates.

    python bench/quality/scaffold.py                     # scikit-learn's digits
    python bench/quality/scaffold.py --cifar PATH        # CIFAR-10; PATH as in pictures.py
    python bench/quality/scaffold.py --cifar PATH --short    # with a quarter of the steps a round, twice the rounds
    python bench/quality/scaffold.py --cifar PATH --gpu      # 50 rounds × 4 epochs with a larger network, on a GPU
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import statistics
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

import numpy as np
import torch
from dealt_digits import deal, digits
from lightning.pytorch import LightningModule, Trainer
from pictures import Pictures, cifar10
from scaffold_report import found_before, report
from scaffold_tasks import ALGORITHMS, CONCENTRATION, LEAST, PILOT, SITES, TASKS, Task
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
import atoll.integrations.lightning


class Classifier(LightningModule):
    """3×3 convolutions with GroupNorm, which has no buffers; each halves the picture, but not digits' first one.

    One of more than 16 pixels is halved by the stride, which is cheaper.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.rate = task.rate
        self.net = moderate(task) if task.moderate else self._small(task)

    @staticmethod
    def _small(task: Task) -> nn.Sequential:
        layers: list[nn.Module] = []
        before, side = task.image[0], task.image[1]
        for index, width in enumerate(task.channels):
            stride = 2 if side > 16 else 1
            layers += [nn.Conv2d(before, width, 3, stride, padding=1), nn.GroupNorm(4, width), nn.ReLU()]
            side //= stride
            if stride == 1 and (index or side > 8):
                layers.append(nn.MaxPool2d(2))
                side //= 2
            before = width
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * side * side, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), batch_size=len(batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def moderate(task: Task) -> nn.Sequential:
    """Pairs of 3×3 convolutions, each pair halving the picture, and three dense layers."""
    layers: list[nn.Module] = []
    before, side = task.image[0], task.image[1]
    for index, width in enumerate(task.channels):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        before = width
        if index % 2:
            layers.append(nn.MaxPool2d(2))
            side //= 2
    dense = [nn.Linear(before * side * side, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), *dense, nn.Linear(512, 10))


def train(
    url: str, site: str, folder: Path, module: Classifier, task: Task, own: Pictures, test: Pictures | None, seed: int
) -> list[float]:
    """One site, whatever the server's algorithm is.

    Args:
        test: what the global model is measured on; None: by another site.

    Returns:
        percent that are right, before the first round and behind every `task.measured_every`; empty without `test`.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(TensorDataset(*own), batch_size=task.batch, shuffle=True, generator=generator)
    trainer = Trainer(
        max_epochs=task.epochs or -1,
        max_steps=task.steps or -1,
        accelerator="cuda" if task.moderate and torch.cuda.is_available() else "cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    atoll.integrations.lightning.patch(trainer, url, site, folder=folder)
    found: list[float] = []
    testing = DataLoader(TensorDataset(*test), batch_size=1000) if test else None
    for count, _ in enumerate(atoll.integrations.lightning.rounds(trainer)):
        if testing is not None and count % task.measured_every == 0:
            found.append(100 * trainer.validate(module, testing, verbose=False)[0]["accuracy"])
        if task.cosine:
            module.rate = task.rate * (1 + math.cos(math.pi * count / task.rounds)) / 2
        trainer.fit(module, loader)
    if testing is not None:  # the module holds the result
        found.append(100 * trainer.validate(module, testing, verbose=False)[0]["accuracy"])
    return found


def run(task: Task, algorithm: str, sites: list[Pictures], test: Pictures, seed: int) -> dict[str, Any]:
    """One training. Its accuracies in percent, rounds that lacked an update, and seconds: by the clock, of the CPU."""
    torch.manual_seed(seed)
    task = replace(task, rate=task.rate_of(algorithm))
    first = Classifier(task)
    began_s, cpu_began_s = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        settings: dict[str, Any] = {
            "rounds.sites": SITES,
            "rounds.min_sites": SITES,
            "rounds.total": task.rounds,
            "network.port": 0,
        }
        settings |= {"disk.state_dir": folder / "state", "disk.min_free_bytes": 0, **task.settings(algorithm)}
        settings |= {"network.heartbeat_timeout_s": 0}  # a site that was only stopped for a while is not dead
        # The server ends first: when a site fails, the others do not wait for it.
        with (
            ThreadPoolExecutor(SITES) as pool,
            atoll.Server(first, settings={"rounds.total": 0, "algorithm.name": algorithm, **settings}) as server,
        ):
            futures = [
                pool.submit(
                    train,
                    server.url,
                    f"site-{index}",
                    folder / "sites",
                    Classifier(task),
                    task,
                    own,
                    None if index else test,
                    1000 * seed + index,
                )
                for index, own in enumerate(sites)
            ]
            curve, *_ = [future.result() for future in futures]
            refused = server.status().refused
        lines = [json.loads(line) for line in (server.exports / "metrics.jsonl").read_text().splitlines()]
    complete = sum(len(line["sites"]) == SITES for line in lines if "sites" in line)
    return {
        "accuracy": [round(value, 3) for value in curve],
        "failed": task.rounds - complete + refused,
        "seconds": round(time.monotonic() - began_s, 2),
        "cpu_seconds": round(time.process_time() - cpu_began_s, 2),
    }


def split(name: str, seed: int, pictures: tuple[Pictures, Pictures] | None) -> tuple[list[Pictures], Pictures]:
    """What each site has, and the test pictures."""
    if pictures is None:
        return digits(SITES, seed, CONCENTRATION, LEAST)
    (images, labels), test = pictures
    draw = np.random.default_rng(seed)
    owners = deal(labels.numpy(), draw.permutation(len(labels)), SITES, draw, CONCENTRATION, LEAST)
    return [(images[owner], labels[owner]) for owner in owners], test


def pilot(name: str, task: Task, pictures: tuple[Pictures, Pictures] | None, seed: int) -> None:
    """Print what each learning rate comes to, on a seed that no result is made of."""
    sites, test = split(name, seed, pictures)
    for rate, algorithm in itertools.product((0.02, 0.05, 0.1, 0.2), ALGORITHMS):
        tried = replace(task, rate=rate, own_rates={})
        print(f"rate {rate:<5} {algorithm:9}", told(run(tried, algorithm, sites, test, seed)), flush=True)
    for rate, adam_rate in itertools.product((0.05, 0.1), (0.01, 0.1)):
        tried = replace(task, rate=rate, adam_rate=adam_rate, own_rates={})
        print(f"rate {rate:<5} adam_rate {adam_rate:<5}", told(run(tried, "fedadam", sites, test, seed)), flush=True)


def told(found: dict[str, Any]) -> str:
    """One line of a run."""
    mean = statistics.mean(found["accuracy"][1:])
    return (
        f"{found['accuracy'][-1]:.1f} % at the end, {mean:.1f} % over the rounds, {found['failed']} failed, "
        f"{found['seconds']:.0f} s, {found['cpu_seconds']:.0f} s of CPU"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cifar", type=Path, help="CIFAR-10 in place of digits: a zip or a folder, see pictures.py")
    parser.add_argument("--short", action="store_true", help="CIFAR-10 with 100 steps a round over 48 rounds")
    parser.add_argument("--gpu", action="store_true", help="CIFAR-10 with the reference's network, on a GPU")
    parser.add_argument("--rounds", type=int, help="by default 20, for CIFAR-10 24; a multiple of 4 there")
    parser.add_argument("--epochs", type=int, help="of each site's own pictures a round, not as many steps for all")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", choices=ALGORITHMS, default=ALGORITHMS, help="these algorithms")
    parser.add_argument(
        "--more", action="store_true", help="keep the runs that docs/results has of the same settings, and add these"
    )
    parser.add_argument("--pilot", action="store_true", help=f"only print what learning rates come to, on seed {PILOT}")
    parser.add_argument("--dry", action="store_true", help="leave docs/results as it is")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if options.gpu and not (options.cifar and torch.cuda.is_available()):
        parser.error("--gpu is CIFAR-10's (--cifar PATH), and wants a GPU that torch sees.")
    name = f"cifar10{'_gpu' if options.gpu else '_short' if options.short else ''}" if options.cifar else "digits"
    task = TASKS[name]
    if options.rounds:
        task = replace(task, rounds=options.rounds)
    if options.epochs:
        task = replace(task, steps=0, epochs=options.epochs)
    pictures = cifar10(options.cifar) if options.cifar else None
    if options.pilot:
        pilot(name, task, pictures, PILOT)
        return
    given = {" --cifar PATH": options.cifar, " --short": options.short, " --gpu": options.gpu}
    flags = "".join(flag for flag, value in given.items() if value)
    command = f"python bench/quality/scaffold.py{flags}"
    runs = found_before(name, task) if options.more else {algorithm: [] for algorithm in ALGORITHMS}
    for seed in options.seeds:
        sites, test = split(name, seed, pictures)
        for algorithm in options.only:  # beside each other, so that what else the machine does falls on all of them
            runs[algorithm] = [each for each in runs[algorithm] if each["seed"] != seed]
            runs[algorithm].append({"run.seed": seed, **run(task, algorithm, sites, test, seed)})
            print(f"seed {seed} {algorithm:9} {told(runs[algorithm][-1])}", flush=True)
        if not options.dry:  # after each seed: what was found is not lost if the next one is broken off
            report(name, task, runs, command)
    if not options.dry and not options.seeds:
        report(name, task, runs, command)


if __name__ == "__main__":
    main()
