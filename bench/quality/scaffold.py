"""SCAFFOLD against FedAvg, FedProx and FedAdam where sites differ much: Dirichlet 0.1 over eight sites.

Every run is a real server, and eight threads that run `train` below over HTTP, through `atoll.lightning.patch`. What
a site runs does not know the algorithm. Bars: SCAFFOLD ends above FedAvg in the mean of the seeds, and every round of
every run is made of all eight updates.

    python bench/quality/scaffold.py                     # scikit-learn's digits
    python bench/quality/scaffold.py --cifar PATH        # CIFAR-10; PATH as in pictures.py
    python bench/quality/scaffold.py --cifar PATH --short    # with a quarter of the steps a round, twice the rounds
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import tempfile
import textwrap
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from pictures import Pictures, cifar10
from results import FOLDER, Gate, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
import atoll.lightning
from atoll.cli.demo_data import deal, digits

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SITES, CONCENTRATION, LEAST = 8, 0.1, 20
PILOT = 100
"""The seed on which learning rates were chosen; no result is of it."""


@dataclass(frozen=True)
class Task:
    """A data set, and how it is trained; the same for all algorithms but for the servers' own settings.

    Attributes:
        steps: optimizer steps of every site in every round, as in the paper; 0: see `epochs`.
        rate: of the sites' SGD.
        adam_rate: of FedAdam's server.
        mu: of FedProx.
        epochs: of every site's own pictures in every round, where the steps are not the same for all.
        measured_every: rounds from one measurement of the global model to the next; divides `rounds`.
        cosine: whether the rate falls from round to round, to nearly zero in the last.
        chosen: how the rates were.
    """

    title: str
    channels: list[int]
    image: list[int]
    rounds: int
    steps: int
    batch: int
    rate: float
    adam_rate: float
    mu: float = 0.01
    epochs: int = 0
    measured_every: int = 1
    cosine: bool = False
    chosen: str = ""

    def settings(self, algorithm: str) -> dict[str, Any]:
        """What the server of an algorithm is told besides."""
        own: dict[str, dict[str, Any]] = {
            "fedprox": {"local_options": {"mu": self.mu}},
            "fedadam": {"outer_lr": self.adam_rate},
        }
        return own.get(algorithm, {})


RATES = (
    f"Of 0.05 and 0.1 the rate was taken as for digits, on seed {PILOT} with 100 steps over 20 rounds; FedAdam's of "
    "0.01, 0.03 and 0.1 with 40 steps of batch 32."
)

CIFAR10 = Task(
    "CIFAR-10",
    [16, 32, 64],
    [3, 32, 32],
    rounds=24,
    steps=400,
    batch=64,
    rate=0.05,
    adam_rate=0.01,
    measured_every=4,
    cosine=True,
    chosen="A round is about four epochs of an average site, and the rate falls from round to round by a cosine: both "
    f"as in the reference, which has 50 rounds and a larger network. {RATES} With 100 steps a round over 48 rounds, on "
    "the same three seeds, SCAFFOLD ended 0.45 points below FedAvg (see scaffold_cifar10_short); these settings were "
    f"then tried on seed {PILOT}, where it ended at 63.3 % and FedAvg at 60.7 %, and left as they were.",
)

TASKS = {
    "digits": Task(
        "digits",
        [16, 32],
        [1, 8, 8],
        rounds=20,
        steps=45,
        batch=16,
        rate=0.05,
        adam_rate=0.03,
        chosen="Of 0.02, 0.05 and 0.1 the rate was taken with which FedAvg and SCAFFOLD together are best in the mean "
        f"over the rounds on seed {PILOT}, which is not among those above; FedAdam's of 0.01, 0.03 and 0.1 likewise "
        "(the program does it with its option pilot). μ is Atoll's default. 45 steps are about "
        "four epochs of an average site; with 20, tried before "
        f"on seed {PILOT} too, SCAFFOLD ended 0.5 points above FedAvg at the same rate, and below it at 0.1 and 0.2.",
    ),
    "cifar10": CIFAR10,
    "cifar10_short": replace(
        CIFAR10,
        rounds=48,
        steps=100,
        chosen="A round is about one epoch of an average site; the rate falls from round to round by a cosine, as in "
        f"the reference. {RATES} With those 40 steps and a constant rate, and with 160, both tried on that seed for 20 "
        "and 16 rounds, SCAFFOLD was 2 to 4 points below FedAvg. With one epoch of each site's own pictures a round in "
        "place of 100 steps, weights from 370 to 11,798, it ended at 48.4 % there, and FedAvg at 62.0 %: its controls "
        "count every site alike. What it gains hangs on the steps of a round: with 400 it gains, see scaffold_cifar10.",
    ),
}
ALGORITHMS = ["fedavg", "fedprox", "fedadam", "scaffold"]


class Classifier(LightningModule):
    """3×3 convolutions with GroupNorm, which has no buffers; each halves the picture, but not digits' first one.

    One of more than 16 pixels is halved by the stride, which is cheaper.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
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
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * side * side, 10))
        self.rate = task.rate

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), batch_size=len(batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


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
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    atoll.lightning.patch(trainer, url, site, folder=folder)
    found: list[float] = []
    testing = DataLoader(TensorDataset(*test), batch_size=1000) if test else None
    for count, _ in enumerate(atoll.lightning.rounds(trainer)):
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
    first = Classifier(task)
    began_s, cpu_began_s = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        settings: dict[str, Any] = {"num_workers": SITES, "min_workers": SITES, "rounds": task.rounds, "port": 0}
        settings |= {"state_dir": folder / "state", "min_free_bytes": 0, **task.settings(algorithm)}
        settings |= {"heartbeat_timeout_s": 0}  # who was only stopped for a while is not dead
        # The server ends first: when a site fails, the others do not wait for it.
        with ThreadPoolExecutor(SITES) as pool, atoll.Server(first, algorithm=algorithm, **settings) as server:
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
    complete = sum(len(line["workers"]) == SITES for line in lines if "workers" in line)
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
    for rate in (0.02, 0.05, 0.1):
        for algorithm in ("fedavg", "scaffold"):
            print(f"rate {rate:<5} {algorithm:9}", told(run(replace(task, rate=rate), algorithm, sites, test, seed)))
    for rate in (0.01, 0.03, 0.1):
        print(
            f"adam_rate {rate:<5}", told(run(replace(task, adam_rate=rate), "fedadam", sites, test, seed)), flush=True
        )


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
    name = ("cifar10_short" if options.short else "cifar10") if options.cifar else "digits"
    task = TASKS[name]
    if options.rounds:
        task = replace(task, rounds=options.rounds)
    if options.epochs:
        task = replace(task, steps=0, epochs=options.epochs)
    pictures = cifar10(options.cifar) if options.cifar else None
    if options.pilot:
        pilot(name, task, pictures, PILOT)
        return
    flags = f"{' --cifar PATH' if options.cifar else ''}{' --short' if options.short else ''}"
    command = f"python bench/quality/scaffold.py{flags}"
    runs = found_before(name, task) if options.more else {algorithm: [] for algorithm in ALGORITHMS}
    for seed in options.seeds:
        sites, test = split(name, seed, pictures)
        for algorithm in options.only:  # beside each other, so that what else the machine does falls on all of them
            runs[algorithm] = [each for each in runs[algorithm] if each["seed"] != seed]
            runs[algorithm].append({"seed": seed, **run(task, algorithm, sites, test, seed)})
            print(f"seed {seed} {algorithm:9} {told(runs[algorithm][-1])}", flush=True)
        if not options.dry:  # after each seed: what was found is not lost if the next one is broken off
            report(name, task, runs, command)
    if not options.dry and not options.seeds:
        report(name, task, runs, command)


def settings_of(task: Task) -> dict[str, Any]:
    """What a result was made with, but for its seeds."""
    return {
        "sites": SITES,
        "concentration": CONCENTRATION,
        "least": LEAST,
        **asdict(task),
        "algorithms": {algorithm: task.settings(algorithm) for algorithm in ALGORITHMS},
        "pilot_seed": PILOT,
    }


def found_before(name: str, task: Task) -> dict[str, list[dict[str, Any]]]:
    """The figures that docs/results has, by algorithm.

    Raises:
        SystemExit: they are of other settings.
    """
    kept = json.loads((FOLDER / f"scaffold_{name}.json").read_text())
    now = {key: value for key, value in settings_of(task).items() if key != "chosen"}
    if {key: kept["settings"].get(key, 0) for key in now} != now:
        raise SystemExit(f"docs/results/scaffold_{name}.json is of other settings: leave --more out.")
    found: dict[str, list[dict[str, Any]]] = kept["figures"]
    return {algorithm: found.get(algorithm, []) for algorithm in ALGORITHMS}


def report(name: str, task: Task, runs: dict[str, list[dict[str, Any]]], command: str) -> None:
    """Write the results, gates included; with seeds that both have, where some runs are still to come."""
    lacking = [algorithm for algorithm, several in runs.items() if len(several) < max(map(len, runs.values()))]
    runs = {algorithm: sorted(several, key=lambda each: each["seed"]) for algorithm, several in runs.items() if several}
    if not runs.keys() >= {"scaffold", "fedavg"}:
        return
    both = {each["seed"] for each in runs["scaffold"]} & {each["seed"] for each in runs["fedavg"]}

    def mean(algorithm: str, key: str) -> float:
        return statistics.mean(found[key][-1] if key == "accuracy" else found[key] for found in runs[algorithm])

    pair = [[found for found in runs[algorithm] if found["seed"] in both] for algorithm in ("scaffold", "fedavg")]
    each = [ours["accuracy"][-1] - other["accuracy"][-1] for ours, other in zip(*pair, strict=True)]
    gained = statistics.mean(each)
    failed = sum(found["failed"] for several in runs.values() for found in several)
    gates = [
        Gate(
            f"SCAFFOLD above FedAvg behind round {task.rounds}, points, mean of the seeds",
            round(gained, 2),
            "> 0",
            gained > 0,
        ),
        Gate("failed aggregations, all runs", failed, "0", failed == 0),
    ]
    rows = []
    for algorithm, several in runs.items():
        over = statistics.mean(statistics.mean(found["accuracy"][1:]) for found in several)
        ends = " ".join(f"{found['accuracy'][-1]:.1f}" for found in several)
        times = [mean(algorithm, "seconds"), mean(algorithm, "cpu_seconds")]
        more = 100 * (times[1] / mean("fedavg", "cpu_seconds") - 1)
        rows.append([algorithm, round(mean(algorithm, "accuracy"), 2), ends, round(over, 2), *times, f"{more:+.1f} %"])
    paragraphs = [
        "Accuracy of the global model on test pictures that no site has. Every site makes "
        f"{task.steps} steps of plain SGD a round, batch {task.batch}, rate {task.rate:g} for all algorithms, so that "
        f"the weights are nearly equal; FedAdam's server has rate {task.adam_rate:g}, FedProx μ = {task.mu:g}. "
        f"{task.chosen}",
        f"SCAFFOLD less FedAvg, points, seed by seed: {', '.join(f'{value:+.2f}' for value in each)}.",
        f"Seconds are those of a run: server, {SITES} threads of sites over HTTP and the measuring, "
        "on a machine that did other work too, which those by the clock show; those of the CPU are the fairer ones.",
    ]
    if lacking:
        paragraphs.append(f"Not run yet, or not with every seed: {', '.join(lacking)}. The option more adds runs.")
    plot(task, runs, FOLDER / f"scaffold_{name}.png")
    write(
        f"scaffold_{name}",
        title=f"SCAFFOLD and others on {task.title}: {SITES} sites, Dirichlet {CONCENTRATION}, {task.rounds} rounds of "
        f"{task.steps} steps",
        command=command,
        settings={"seeds": sorted(both), **settings_of(task)},
        figures=runs,
        gates=gates,
        header=[
            "algorithm",
            "ends at, %",
            "each seed",
            "mean over the rounds, %",
            "s",
            "s of CPU",
            "CPU against FedAvg",
        ],
        rows=rows,
        text="\n\n".join(textwrap.fill(paragraph, 118) for paragraph in paragraphs),
    )


def plot(task: Task, runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Accuracy by round: the mean of the seeds, and from the least to the greatest of them."""
    figure, panel = plt.subplots(figsize=(7, 4.2))
    for algorithm, several in runs.items():
        points = list(zip(*(found["accuracy"] for found in several), strict=True))
        at = range(0, task.rounds + 1, task.measured_every)
        dashes = "--" if algorithm == "fedprox" else "-"
        panel.plot(at, [statistics.mean(values) for values in points], label=algorithm, ls=dashes)
        panel.fill_between(at, [min(v) for v in points], [max(v) for v in points], alpha=0.12)
    panel.set_title(f"{task.title}, {SITES} sites, Dirichlet {CONCENTRATION}")
    panel.set_xlabel("round")
    panel.set_ylabel("accuracy, %")
    panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
