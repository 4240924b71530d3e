"""The data of the demo, found on every machine: Python's own sources, and scikit-learn's digits."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import torch
from demo_models import CONTEXT_BYTES
from torch import Tensor

from atoll import data
from atoll.errors import ConfigError

NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
VALIDATION_SHARE = 0.1
VALIDATION_WINDOWS = 192
LEAST_BYTES = 10**6


def standard_library() -> list[Path]:
    """The standard library's .py files without its tests, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in sorted(root.rglob("*.py")) if not NOT_SOURCES & set(path.relative_to(root).parts)]


def corpus(workers: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """Split the standard library by files.

    Returns:
        (a text of bytes [n] for each worker, validation windows [N, context + 1] that none of them has).

    Raises:
        ConfigError: this Python comes without its sources.
    """
    texts = [path.read_bytes() for path in standard_library()]
    total_bytes = sum(map(len, texts))
    if total_bytes < LEAST_BYTES:
        raise ConfigError(
            f"This Python has {total_bytes} bytes of standard library sources; the demo trains on them.",
            "Use a Python that is installed with its sources, or python examples/demo/demo.py --algorithm fedavg.",
        )
    random.Random(seed).shuffle(texts)
    held_out, held_bytes = 0, 0
    while held_bytes < VALIDATION_SHARE * total_bytes:
        held_bytes += len(texts[held_out])
        held_out += 1
    return [_tensor(texts[held_out + index :: workers]) for index in range(workers)], _windows(
        _tensor(texts[:held_out]), VALIDATION_WINDOWS // workers * workers
    )


def _tensor(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)


def _windows(text: Tensor, count: int) -> Tensor:
    """Evenly spaced windows [count, context + 1]."""
    starts = torch.linspace(0, len(text) - CONTEXT_BYTES - 1, count).long()
    return torch.stack([text[start : start + CONTEXT_BYTES + 1] for start in starts.tolist()]).long()


def batch(text: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Random windows [size, context + 1] of a text."""
    starts = torch.randint(len(text) - CONTEXT_BYTES - 1, (size,), generator=generator).tolist()
    return torch.stack([text[start : start + CONTEXT_BYTES + 1] for start in starts]).long()


Images = tuple[Tensor, Tensor]
"""Images [N, 1, 8, 8] in 0 … 1, and labels [N]."""


def digits(sites: int, seed: int, alpha: float = 0.3, least: int = 20) -> tuple[list[Images], Images]:
    """scikit-learn's digits, non-IID: the images of each digit are divided by shares from a Dirichlet distribution.

    Args:
        alpha: the smaller, the more the sites differ.
        least: images that every site has.

    Returns:
        (the images of every site, the test images that none of them has).
    """
    images, labels = data.digits().tensors
    train, test = data.holdout(labels, 0.2, seed=seed)
    images_train, labels_train = images[train], labels[train]
    parts = data.dirichlet(labels_train, sites, alpha, seed=seed, min_size=least)
    return [(images_train[part], labels_train[part]) for part in parts], (images[test], labels[test])
