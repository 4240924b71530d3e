"""Pictures [N, 3, 32, 32] and labels: scikit-learn's digits, enlarged, or CIFAR-10 from a folder. No download."""

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from atoll import data

RECORD_BYTES = 1 + 3 * 32 * 32
"""Of CIFAR-10's binary version: the label, then the picture."""


def digits() -> tuple[TensorDataset, TensorDataset]:
    """(train, test)."""
    small, labels = data.digits().tensors
    pictures = (2.0 * small - 1.0).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3).repeat(1, 3, 1, 1)
    return TensorDataset(pictures[:1400], labels[:1400]), TensorDataset(pictures[1400:], labels[1400:])


def cifar10(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """(train, test), from data_batch_1.bin … test_batch.bin: the binary version of https://www.cs.toronto.edu/~kriz."""

    def read(paths: list[Path]) -> TensorDataset:
        records = np.concatenate([np.fromfile(path, np.uint8) for path in paths]).reshape(-1, RECORD_BYTES)
        pictures = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).copy()).float() / 127.5 - 1.0
        return TensorDataset(pictures, torch.from_numpy(records[:, 0].astype(np.int64)))

    return read(sorted(folder.glob("data_batch_*.bin"))), read([folder / "test_batch.bin"])


def load(dataset: str, folder: str) -> tuple[TensorDataset, TensorDataset]:
    return digits() if dataset == "digits" else cifar10(Path(folder))
