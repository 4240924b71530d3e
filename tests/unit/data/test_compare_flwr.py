"""The same splits as those of `flwr-datasets`, where both mean the same.

Atoll draws from NumPy's frozen stream, `flwr-datasets` from a `Generator`. Here, its partitioners get Atoll's stream,
so that both draw the same numbers. Then the sites must have the same examples.

`flwr-datasets` wants older versions of `rich` and `datasets` than the other packages of the tests, so it is not in the
extra `test`. It works with the newer ones, so `.ci/run` installs it alone: pip install --no-deps flwr-datasets tqdm
seaborn.
"""

from __future__ import annotations

import warnings
from typing import Any

import datasets
import numpy as np
import pytest

from atoll import data

pytest.importorskip("flwr_datasets", reason="not installed: pip install --no-deps flwr-datasets tqdm seaborn")
from flwr_datasets import partitioner as flwr

LABELS = np.random.RandomState(0).randint(10, size=1200)
TABLE = datasets.Dataset.from_dict({"label": LABELS.tolist(), "number": list(range(1200))})


def parts_of(partitioner: Any, seed: int | None = None, table: datasets.Dataset = TABLE) -> list[list[int]]:
    """What each partition has, as the numbers of its examples."""
    partitioner.dataset = table
    if seed is not None:
        partitioner._rng = np.random.RandomState(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each repeated draw is warned of
        return [sorted(partitioner.load_partition(each)["number"]) for each in range(partitioner.num_partitions)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("alpha", "min_size"), [(0.1, 10), (0.5, 40), (10.0, 0)])
def test_dirichlet_splits_match_flwr(seed: int, alpha: float, min_size: int) -> None:
    """The Dirichlet split gives the same sites as `flwr-datasets`, also if shares are drawn again because a site has
    too few examples.
    """
    theirs = flwr.DirichletPartitioner(5, "label", alpha, min_partition_size=min_size, shuffle=False)
    assert parts_of(theirs, seed) == [*data.dirichlet(TABLE, 5, alpha, seed=seed, min_size=min_size)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("per_site", [1, 2, 3])
def test_shard_splits_match_flwr(seed: int, per_site: int) -> None:
    """The split into shards gives the same sites as `flwr-datasets`."""
    # It sorts by label itself, as Atoll does: stably.
    theirs = flwr.ShardPartitioner(10, "label", num_shards_per_partition=per_site, shuffle=False)
    table = TABLE.select(np.argsort(LABELS, kind="stable"))
    assert parts_of(theirs, seed, table) == [*data.shards(TABLE, 10, per_site, seed=seed)]


def test_natural_splits_match_flwr() -> None:
    """The split by a natural key gives the same sites as `flwr-datasets`."""
    assert parts_of(flwr.NaturalIdPartitioner("label")) == [*data.natural(TABLE, by="label")]


def test_iid_splits_have_the_sizes_of_flwr() -> None:
    """The IID split gives each site as many examples as `flwr-datasets` does."""
    assert sorted(map(len, parts_of(flwr.IidPartitioner(7)))) == sorted(data.iid(TABLE, 7).sizes)


@pytest.mark.parametrize("sites", [3, 8])
def test_linear_splits_match_flwr(sites: int) -> None:
    """The split with linearly growing sizes gives each site as many examples as `flwr-datasets` does."""
    theirs = parts_of(flwr.LinearPartitioner(sites))
    assert [*map(len, theirs)] == data.quantity_skew(TABLE, sites, shares=range(1, sites + 1)).sizes


@pytest.mark.parametrize(("sites", "per_site"), [(10, 1), (20, 1), (10, 3), (20, 5)])
def test_labels_are_divided_as_in_flwr(sites: int, per_site: int) -> None:
    """A split by labels gives each site as many labels and examples as `flwr-datasets` does."""
    # Both divide the examples of a label evenly: the same sizes, ordered.
    mode = "deterministic"
    theirs = parts_of(flwr.PathologicalPartitioner(sites, "label", per_site, class_assignment_mode=mode))
    ours = data.by_attribute(TABLE, sites, per_site)
    for label in range(10):
        sizes = [sorted(int((LABELS[part] == label).sum()) for part in each) for each in (theirs, [*ours])]
        assert sizes[0] == sizes[1]
