"""The data of the demo, found on every machine: Python's own sources, and scikit-learn's digits."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import numpy as np
import torch
from demo_models import CONTEXT_BYTES
from torch import Tensor

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


def digits(sites: int, seed: int, concentration: float = 0.3, least: int = 20) -> tuple[list[Images], Images]:
    """scikit-learn's digits, non-IID: each class is dealt to the sites by shares drawn from a Dirichlet distribution.

    Args:
        concentration: the smaller, the more the sites differ.
        least: images that every site has; drawn again until it is so.

    Returns:
        (the images of every site, the test images that none of them has).

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError("The federated demo needs scikit-learn.", "pip install 'atoll[demo]'") from None
    loaded = load_digits()
    images, labels = loaded.images.astype(np.float32) / 16.0, loaded.target.astype(np.int64)
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(labels))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    owners = deal(labels, train, sites, draw, concentration, least)

    def take(indices: list[int]) -> Images:
        return torch.from_numpy(images[indices]).unsqueeze(1), torch.from_numpy(labels[indices])

    return [take(owner) for owner in owners], take(test.tolist())


def deal(
    labels: np.ndarray, members: np.ndarray, sites: int, draw: np.random.Generator, concentration: float, least: int
) -> list[list[int]]:
    """Deal `members`, indices of `labels` (whole numbers, [N]), to the sites; the arguments are those of `digits`.

    Returns:
        the indices of every site.
    """
    while True:
        owners: list[list[int]] = [[] for _ in range(sites)]
        for label in np.unique(labels):
            found = members[labels[members] == label]
            shares = draw.dirichlet([concentration] * sites)
            cuts = (np.cumsum(shares)[:-1] * len(found)).astype(int)
            for owner, part in zip(owners, np.split(found, cuts), strict=True):
                owner.extend(part.tolist())
        if min(map(len, owners)) >= least:
            return owners
