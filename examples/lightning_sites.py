"""Sites with data of very different kinds train one LightningModule, by the algorithm that is named:

    python examples/lightning_sites.py --set algorithm.name=scaffold

Starts a server, and a process for each site. What a site runs, `train`, is the same for every algorithm.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll

CLASSES, FEATURES, SAMPLES = 4, 16, 256


class Classifier(LightningModule):
    """A small network with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def points(seed: int, shares: Tensor) -> TensorDataset:
    """Points around one centre a class; `shares` of the classes."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    classes = torch.multinomial(shares, SAMPLES, replacement=True, generator=generator)
    return TensorDataset(centres[classes] + torch.randn(SAMPLES, FEATURES, generator=generator), classes)


def train(number: int) -> None:
    """One site. ATOLL_SERVER and ATOLL_SITE name the run and this site; without them it trains alone."""
    shares = torch.full((CLASSES,), 0.05)
    shares[number % CLASSES] = 1.0  # nearly all of this site's data are of one class
    own = DataLoader(points(1 + number, shares), batch_size=32, shuffle=True)
    test = DataLoader(points(1000, torch.ones(CLASSES)), batch_size=SAMPLES)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=1,
    )
    atoll.integrations.lightning.patch(trainer)
    module = Classifier()
    for _ in atoll.integrations.lightning.rounds(trainer):
        trainer.validate(module, test, verbose=False)  # the global model: travels as global_accuracy
        trainer.fit(module, own, test)  # and after local training: accuracy


def serve(algorithm: str, sites: int, rounds: int) -> None:
    """The server, and a process for each site."""
    name = f"lightning-{algorithm}"
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        settings = atoll.Settings.build(
            {
                "run.name": name,
                "algorithm.name": algorithm,
                "rounds.sites": sites,
                "rounds.min_sites": sites,
                "rounds.total": rounds,
                "diloco.sync_every": SAMPLES // 32,  # DiLoCo's H, here an epoch; others train as long as a fit does
                "network.port": 0,
                "disk.state_dir": Path(folder) / "state",
            }
        )
        with atoll.Server(Classifier(), settings) as server:
            print(f"run {server.status().name} at {server.url}: {sites} sites, {rounds} rounds", flush=True)
            processes = [
                subprocess.Popen(
                    [sys.executable, __file__, "--as-site", str(number)],
                    env=os.environ | {"ATOLL_SERVER": server.url, "ATOLL_SITE": f"site-{number}", "ATOLL_DIR": folder},
                )
                for number in range(sites)
            ]
            failed = [process.args for process in processes if process.wait()]
            if failed:
                raise SystemExit(f"{len(failed)} of {sites} sites failed")
            for summary in server.status().history:
                told = ", ".join(f"{key} {value:.3f}" for key, value in sorted(summary.metrics.items()))
                print(f"{name} round {summary.round}: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="fedavg", help="fedavg, fedprox, fedadam, scaffold, diloco, …")
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--as-site", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_site is None:
        serve(given.algorithm, given.sites, given.rounds)
    else:
        train(given.as_site)


if __name__ == "__main__":
    main()
