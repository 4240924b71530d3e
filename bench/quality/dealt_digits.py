"""The digits of the results in docs/results, dealt as when they were measured."""

from __future__ import annotations

import numpy as np
import torch
from demo_data import Images


def digits(sites: int, seed: int, concentration: float = 0.3, least: int = 20) -> tuple[list[Images], Images]:
    """scikit-learn's digits, non-IID: each class is dealt to the sites by shares drawn from a Dirichlet distribution.

    Args:
        concentration: the smaller, the more the sites differ.
        least: images that every site has; drawn again until it is so.

    Returns:
        (the images of every site, the test images that none of them has).
    """
    from sklearn.datasets import load_digits

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
