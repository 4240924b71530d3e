"""The LightningModule. The server takes the first version from here, and every site trains its own."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class Classifier(LightningModule):
    """A small network for 8×8 pictures in ten classes."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def build(hidden: int = 64) -> Classifier:
    """What `model = "model:build"` in run.toml calls; keyword arguments come from `model_args`."""
    return Classifier(hidden)
