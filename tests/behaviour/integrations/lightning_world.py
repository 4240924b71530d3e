"""A tiny module, its data and a Trainer, of either package; and a server to take part in.

Where a test names no package it is the `usual` one, which `pytestmark = pytest.mark.usefixtures("each_package")`
makes each of `PACKAGES` in turn.
"""

from __future__ import annotations

import logging
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from kit.servers import new_server
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
import atoll.integrations.lightning

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
usual = PACKAGES[0]
SAMPLES, BATCH = 12, 4
"""Three optimizer steps an epoch."""
DILOCO = {
    "diloco.sync_every": 3,
    "algorithm.outer_optimizer.lr": 1.0,
    "algorithm.outer_optimizer.momentum": 0.0,
    "aggregation.upload_codec.name": "none",
}
"""A run of DiLoCo that takes over what its only site has trained, after an epoch."""

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
warnings.filterwarnings("ignore", module="pytorch_lightning")


def package(name: str | None = None) -> Any:
    return import_module(name or usual)


class One(nn.Module):
    """One weight that is trained, one that is frozen, BatchNorm where it is wanted."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        if norm:
            self.norm = nn.BatchNorm1d(1)


class Tiny:
    """A LightningModule whose loss is (w − target)²/2, so that its gradient is w − target.

    This class and what tests derive from it are of no package; an instance is of the one that is usual by then.
    """

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return object.__new__(cls if issubclass(cls, nn.Module) else _of_package(cls, usual))

    def __init__(self, target: float = 1.0, lr: float = 0.1, norm: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        if norm:
            self.norm = nn.BatchNorm1d(1)
        self.target, self.lr, self.has_norm = target, lr, norm
        self.seen: list[float] = []  # w at the begin of every validation
        self.steps = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.steps += 1
        if self.has_norm:
            self.norm(batch[0])
        loss = ((self.w - self.target) ** 2 / 2).sum()
        self.log("train_loss", loss)
        return loss

    def on_validation_start(self) -> None:
        self.seen.append(round(self.w.item(), 6))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_w", self.w.sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([value for value in self.parameters() if value.requires_grad], lr=self.lr)


@cache
def _of_package(kind: type[Tiny], name: str) -> Any:
    return type(kind.__name__, (kind, package(name).LightningModule), {"__module__": kind.__module__})


def module_class(name: str | None = None) -> Any:
    """`Tiny` of one package, whichever is usual."""
    return _of_package(Tiny, name or usual)


def data(samples: int = SAMPLES, *, offset: float = 0.0) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(samples, dtype=torch.float32)[:, None] + offset), batch_size=BATCH)


def trainer_of(name: str | None = None, **options: Any) -> Any:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    return package(name).Trainer(**(quiet | options))


def serve(folder: Path, algorithm: str = "fedavg", *, norm: bool = False, **options: Any) -> atoll.Server:
    """Not started yet; use it with `with`."""
    settings: dict[str, Any] = {
        "rounds.total": 2,
        "disk.min_free_bytes": 0,
        "network.heartbeat_interval_s": 0,
        "network.heartbeat_timeout_s": 0,
    }
    settings["network.port"] = 0
    return new_server(
        One(norm),
        **{"algorithm.name": algorithm, "disk.state_dir": folder / "state", "run.name": f"tiny-{algorithm}"},
        **settings | options,
    )


def lines(server: atoll.Server) -> list[dict[str, Any]]:
    """What the server's status says of the rounds, at the end of the run."""
    assert server.wait(60)
    return [summary.model_dump() for summary in server.status().history]


def patched(server: atoll.Server, folder: Path, name: str | None = None, site: str = "a", **options: Any) -> Any:
    """A Trainer, as `trainer_of` gives it, that takes part in the server's run."""
    trainer = trainer_of(name, **options)
    atoll.integrations.lightning.patch(trainer, server.url, site, folder=folder)
    return trainer


def fit_rounds(trainer: Any, module: Any, *loaders: Any) -> None:
    """Fit once in each round of the run; by default with `data()` to train from."""
    for _ in atoll.integrations.lightning.rounds(trainer):
        trainer.fit(module, *(loaders or (data(),)))
