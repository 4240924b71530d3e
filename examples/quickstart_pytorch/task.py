"""What Flower's quickstart-pytorch keeps in its task.py: the network, a partition of the data, train and test."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from atoll import data

RECORD_BYTES = 1 + 3 * 32 * 32
"""Of CIFAR-10's binary version: the label, then the picture."""


class Net(nn.Module):
    """A small convolutional network for 32×32 pictures of three colours in ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.classes = nn.Sequential(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))

    def forward(self, pictures: Tensor) -> Tensor:
        return self.classes(torch.flatten(self.features(pictures), 1))


def pictures() -> tuple[Tensor, Tensor]:
    """CIFAR-10 from the folder that CIFAR10 names (the binary version), else scikit-learn's digits, enlarged."""
    if folder := os.environ.get("CIFAR10"):
        files = sorted(Path(folder).glob("data_batch_*.bin"))
        records = np.concatenate([np.fromfile(path, np.uint8) for path in files]).reshape(-1, RECORD_BYTES)
        found = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).copy()).float() / 127.5 - 1.0
        return found, torch.from_numpy(records[:, 0].astype(np.int64))
    small, labels = data.digits().tensors
    large = (2.0 * small - 1.0).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3).repeat(1, 3, 1, 1)
    return large, labels


def load_data(partition: int, partitions: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """An even share of the pictures: 80 % of it to train on, 20 % to evaluate on."""
    mine = data.iid(TensorDataset(*pictures()), partitions, seed=42).subset(partition)
    train, test = (Subset(mine, indices) for indices in data.holdout(mine, 0.2, seed=42))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=256)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(batch), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


@torch.no_grad()
def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """(loss, accuracy)."""
    net.eval()
    loss = right = 0.0
    for batch, labels in loader:
        predicted = net(batch)
        loss += nn.functional.cross_entropy(predicted, labels, reduction="sum").item()
        right += (predicted.argmax(dim=1) == labels).sum().item()
    return loss / len(loader.dataset), right / len(loader.dataset)
