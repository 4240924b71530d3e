"""A tiny module, its data and a Trainer, of either package; and a server to take part in.

The package is the `usual` one; `pytestmark = pytest.mark.usefixtures("each_package")` makes it each of `PACKAGES` in
turn.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from kit import together
from kit.servers import plain_server
from safetensors.torch import load_file
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


def package() -> Any:
    return import_module(usual)


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

    def __init__(self, target: float = 1.0, lr: float = 0.1, norm: bool = False, w: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((1,), w))
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
    return type(kind.__name__, (kind, import_module(name).LightningModule), {"__module__": kind.__module__})


def data(samples: int = SAMPLES, *, offset: float = 0.0) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(samples, dtype=torch.float32)[:, None] + offset), batch_size=BATCH)


def trainer_of(**options: Any) -> Any:
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
    return package().Trainer(**(quiet | options))


def serve(folder: Path, algorithm: str = "fedavg", *, norm: bool = False, **options: Any) -> atoll.Server:
    """Of two rounds, DiLoCo as `DILOCO` says; not started yet: use it with `with`."""
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "rounds": 2,
        "run.name": f"tiny-{algorithm}",
        "network.heartbeat_interval_s": 0,
        "network.heartbeat_timeout_s": 0,
    }
    return plain_server(folder, One(norm), **settings | (DILOCO if algorithm == "diloco" else {}) | options)


def rounds_of(server: atoll.Server) -> list[Any]:
    """What the server's status says of the rounds, at the end of the run."""
    assert server.wait(60)
    return server.status().history


def result(server: atoll.Server) -> dict[str, Tensor]:
    """What the run has exported at its end."""
    assert server.wait(60)
    return load_file(server.exports / "model.safetensors")


def patched(server: atoll.Server | None, folder: Path, site: str = "a", **options: Any) -> Any:
    """A Trainer, as `trainer_of` gives it, that takes part in the server's run; weight, steps and filters are ours."""
    ours = {key: options.pop(key) for key in ("weight", "steps", "filters") if key in options}
    trainer = trainer_of(**options)
    atoll.integrations.lightning.patch(trainer, server and server.url, site, folder=folder, **ours)
    return trainer


def driver_of(trainer: Any) -> Any:
    """What the Trainer's callback takes part with."""
    (found,) = (each for each in trainer.callbacks if hasattr(each, "driver"))
    return found.driver


def exchange_of(trainer: Any) -> Any:
    """The base and the local state of the site."""
    return driver_of(trainer).worker._backend.participation.exchange


def global_control(trainer: Any, name: str = "w", count: int = 1) -> list[float]:
    """The run's control variate, as the site has pulled it last."""
    return exchange_of(trainer).base.values_of(f"atoll.control.{name}", 0, count).tolist()


def fit_rounds(trainer: Any, module: Any, *loaders: Any) -> None:
    """Fit once in each round of the run; by default with `data()` to train from."""
    for _ in atoll.integrations.lightning.rounds(trainer):
        trainer.fit(module, *(loaders or (data(),)))


def fit_at_once(
    server: atoll.Server, folder: Path, modules: Mapping[str, Any], offsets: Mapping[str, float] = {}, **options: Any
) -> None:
    """Every site of `modules` fits its own in each round, with `data` at its offset."""

    def work(site: str) -> None:
        trainer = patched(server, folder / site, site, **options)
        fit_rounds(trainer, modules[site], data(offset=offsets.get(site, 0.0)))

    together(*(partial(work, site) for site in modules), timeout_s=100)


def scaffold_by_hand(
    sites: Mapping[str, tuple[float, int]], rounds: int, eta: float = 0.1
) -> tuple[list[dict[str, float]], float]:
    """SCAFFOLD, algorithm 1, option II, of sites with (target, steps) of `Tiny`: where each one's steps end, and x."""
    own, x, c = dict.fromkeys(sites, 0.0), 0.0, 0.0
    ends: list[dict[str, float]] = []
    for _ in range(rounds):
        ends.append({})
        deltas = []
        for name, (target, steps) in sites.items():
            y = x
            for _ in range(steps):
                y -= eta * ((y - target) - own[name] + c)
            deltas.append(-c + (x - y) / (steps * eta))
            own[name] += deltas[-1]
            ends[-1][name] = y
        x, c = sum(ends[-1].values()) / len(sites), c + sum(deltas) / len(sites)
    return ends, x
