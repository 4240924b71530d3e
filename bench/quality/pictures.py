"""CIFAR-10 from a file or folder that is named; nothing is unpickled, nothing is downloaded.

a zip               train/CLASS/NNNN.jpg and test/CLASS/NNNN.jpg (or .png), needs Pillow
a folder            data_batch_1.bin … data_batch_5.bin, test_batch.bin: CIFAR-10's binary version
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from atoll.errors import ConfigError

MEAN, DEVIATION = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
RECORD_BYTES = 1 + 3 * 32 * 32
"""Of the binary version: the label, then the picture as [3, 32, 32]."""

Pictures = tuple[Tensor, Tensor]
"""Normalised pictures [N, 3, 32, 32], and labels [N]."""


def cifar10(path: Path) -> tuple[Pictures, Pictures]:
    """(train, test).

    Raises:
        ConfigError: there is neither a zip nor a folder of the forms above.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return _from_zip(archive, "train"), _from_zip(archive, "test")
    if (path / "test_batch.bin").is_file():
        return _from_records(sorted(path.glob("data_batch_*.bin"))), _from_records([path / "test_batch.bin"])
    raise ConfigError(
        f"{path} is neither a zip of pictures nor a folder with test_batch.bin.",
        "Give a zip with train/CLASS/*.jpg and test/CLASS/*.jpg, or the folder of CIFAR-10's binary version.",
    )


def _from_zip(archive: zipfile.ZipFile, part: str) -> Pictures:
    """Classes are numbered in the order of their names."""
    names = sorted(
        name for name in archive.namelist() if name.startswith(f"{part}/") and name.endswith((".jpg", ".png"))
    )
    classes = sorted({name.split("/")[1] for name in names})
    if len(classes) != 10:
        raise ConfigError(f"{archive.filename} has {len(classes)} classes in {part}/.", "CIFAR-10 has ten.")
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("RGB")) for name in names])
    labels = np.array([classes.index(name.split("/")[1]) for name in names])
    return _normalised(pixels.transpose(0, 3, 1, 2)), torch.from_numpy(labels)


def _from_records(paths: list[Path]) -> Pictures:
    records = np.concatenate([np.fromfile(path, np.uint8) for path in paths]).reshape(-1, RECORD_BYTES)
    return _normalised(records[:, 1:].reshape(-1, 3, 32, 32)), torch.from_numpy(records[:, 0].astype(np.int64))


def _normalised(pixels: np.ndarray) -> Tensor:
    """uint8 [N, 3, 32, 32] with a mean of 0 and a deviation of 1 in every channel."""
    scaled = torch.from_numpy(np.ascontiguousarray(pixels)).float().div_(255)
    return scaled.sub_(torch.tensor(MEAN)[:, None, None]).div_(torch.tensor(DEVIATION)[:, None, None])
