"""Splits of a data set over sites: what each site has, seeds, minimum sizes, refused arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from hashlib import sha256
from typing import Any, NamedTuple

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from atoll import data
from atoll.errors import AtollError, UsageError

LABELS = np.repeat(np.arange(10), [60, 70, 80, 90, 100, 100, 110, 120, 130, 140])
"""A thousand labels, of which each has its own number."""

SPLITS: dict[str, Callable[[Any, int], data.Partition]] = {
    "iid": lambda labels, seed: data.iid(labels, 7, seed=seed),
    "dirichlet": lambda labels, seed: data.dirichlet(labels, 7, 0.3, seed=seed),
    "dirichlet, balanced": lambda labels, seed: data.dirichlet(labels, 7, 0.3, seed=seed, balanced=True),
    "shards": lambda labels, seed: data.shards(labels, 7, seed=seed),
    "by attribute": lambda labels, seed: data.by_attribute(labels, 7, seed=seed),
    "by attribute, 3 values": lambda labels, seed: data.by_attribute(labels, 7, 3, seed=seed),
    "quantity skew": lambda labels, seed: data.quantity_skew(labels, 7, seed=seed),
    "natural": lambda labels, seed: data.natural(labels, by=labels, sites=7),
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=list(SPLITS))
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_each_index_belongs_to_one_site(split: Callable[[Any, int], data.Partition], seed: int) -> None:
    parts = split(LABELS, seed)
    assert len(parts) == 7
    assert sorted(index for part in parts for index in part) == list(range(1000))
    assert all(part == sorted(part) and all(type(index) is int for index in part) for part in parts)
    assert [*split(LABELS, seed)] == [*parts]


@pytest.mark.parametrize("split", [split for name, split in SPLITS.items() if name != "natural"])
def test_another_seed_gives_another_split(split: Callable[[Any, int], data.Partition]) -> None:
    assert [*split(LABELS, 0)] != [*split(LABELS, 1)]


DIGESTS = {
    "iid": "f8bb6570341cbe4f",
    "dirichlet": "dc2db1d5a141f9fc",
    "dirichlet, balanced": "8930648864a4cd4a",
    "shards": "93d61611482c0d9d",
    "by attribute": "ade4c94ed544bf11",
    "by attribute, 3 values": "08da1bb69428b511",
    "quantity skew": "6b3b7d4e1ee3bf17",
    "natural": "f5d9af3ce4e06249",
}


@pytest.mark.parametrize("name", SPLITS)
def test_a_seed_gives_the_same_split_everywhere(name: str) -> None:
    """A seed gives the same split on every machine."""
    # The splits of seed 5 are written down: a NumPy that draws other numbers would part the sites of one run.
    text = repr([*SPLITS[name](LABELS, 5)])
    assert sha256(text.encode()).hexdigest()[:16] == DIGESTS[name]


# -- what each kind of split promises


def test_iid_gives_all_sites_equally_many() -> None:
    parts = data.iid(1003, 10)
    assert sorted(parts.sizes) == [100] * 7 + [101] * 3


@pytest.mark.parametrize("balanced", [False, True])
def test_a_large_alpha_gives_all_sites_equal_labels(balanced: bool) -> None:
    """With a very large α, the Dirichlet split gives all sites nearly the same mix of labels."""
    parts = data.dirichlet(LABELS, 4, 1e6, balanced=balanced)
    for counts in parts.counts().values():
        for label, count in counts.items():
            expected = np.count_nonzero(label == LABELS) / 4
            assert abs(count - expected) <= (2 if not balanced else 6 * math.sqrt(expected))


def test_a_small_alpha_leaves_each_label_at_one_site() -> None:
    """With an α close to 0, the Dirichlet split gives all examples of a label to one site."""
    counts = data.dirichlet(LABELS, 3, 1e-4, min_size=0).counts()
    for label in range(10):
        assert sorted(site[label] > 0 for site in counts.values()) == [False, False, True]


def test_balanced_sites_differ_only_in_labels() -> None:
    """A balanced Dirichlet split gives sites of equal size with different mixes of labels."""
    parts = data.dirichlet(LABELS, 5, 0.1, seed=3, balanced=True)
    assert parts.sizes == [200] * 5
    most = [max(counts.values()) for counts in parts.counts().values()]
    assert max(most) > 100  # of 200; in the whole data set, no label has a share above 14 %


def test_shares_are_redrawn_until_sites_have_enough() -> None:
    """The Dirichlet split draws the shares again until each site has the requested minimum of examples."""
    few = [min(data.dirichlet(LABELS, 5, 0.2, seed=seed).sizes) for seed in range(20)]
    assert min(few) < 60
    assert all(min(data.dirichlet(LABELS, 5, 0.2, seed=seed, min_size=60).sizes) >= 60 for seed in range(20))


def test_shards_hold_neighbouring_labels() -> None:
    """Each site gets shards of examples that are neighbours when sorted by label, so it has only a few labels."""
    # Ten shards of 100 neighbours of the sorted labels: two of them have at most five labels.
    # Ten shards of 100 neighbours of the sorted labels: two of them have at most five labels.
    labels = np.random.default_rng(0).permutation(LABELS)
    parts = data.shards(labels, 5)
    order = np.argsort(labels, kind="stable")
    assert parts.sizes == [200] * 5
    for part in parts:
        starts = [start for start in range(0, 1000, 100) if set(order[start : start + 100]) <= set(part)]
        assert len(starts) == 2


def test_each_site_has_the_requested_number_of_labels() -> None:
    """A split by labels gives each site the requested number of labels."""
    # 21 places for 10 labels: one label is at three sites, the others at two.
    counts = data.by_attribute(LABELS, 7, 3).counts()
    assert all(sum(count > 0 for count in site.values()) == 3 for site in counts.values())
    at = [[site[label] for site in counts.values() if site[label]] for label in range(10)]
    assert sorted(map(len, at)) == [2] * 9 + [3]
    assert all(max(sizes) - min(sizes) <= 1 for sizes in at)


@pytest.mark.parametrize(("sites", "per_site"), [(10, [1] * 10), (5, [2] * 5), (20, [1] * 20), (4, [2, 2, 3, 3])])
def test_a_label_stays_whole_if_sites_are_few(sites: int, per_site: list[int]) -> None:
    """If there are fewer sites than labels or keys, each value belongs to one site as a whole."""
    counts = data.by_attribute(LABELS, sites).counts()
    assert sorted(sum(count > 0 for count in site.values()) for site in counts.values()) == per_site


def test_given_shares_decide_the_sizes() -> None:
    """A split by given shares has these sizes, and the last site gets what is left over."""
    # 1001 examples by 1 : 2 : 5 are 125, 250 and 625.
    assert data.quantity_skew(1001, 3, shares=[1, 2, 5]).sizes == [125, 250, 626]


class Patient(NamedTuple):
    age: int
    hospital: str


PATIENTS = [Patient(age, hospital) for age, hospital in enumerate("bab b!aabbbc")]


def test_natural_sites_are_named_after_their_keys() -> None:
    parts = data.natural(PATIENTS, by="hospital")
    assert parts.names == ("site", "site-1", "a", "b", "c")
    assert parts["a"] == [1, 6, 7]
    assert parts["c"] == [11]
    assert [patient.age for patient in parts.subset("a")] == [1, 6, 7]


def test_natural_keys_are_joined_into_equal_sites() -> None:
    """If there are more natural keys than sites, small keys are joined so that the sites get similar sizes."""
    # Six b, three a, one each of the others: b alone; a with the rest.
    parts = data.natural(PATIENTS, by="hospital", sites=["big", "rest"])
    assert {PATIENTS[index].hospital for index in parts["big"]} == {"b"}
    assert parts.sizes == [6, 6]


def test_a_holdout_splits_off_a_share() -> None:
    train, test = data.holdout(LABELS, 0.25, seed=4)
    assert len(test) == 250
    assert sorted(train + test) == list(range(1000))
    assert data.holdout(2, 0.01) in ([[0], [1]], ([0], [1]), ([1], [0]))


# -- kinds of data sets


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """A data set that says nothing of its labels: they stand in its examples."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2,), float(index)), int(LABELS[index])


def with_targets() -> Pictures:
    pictures = Pictures()
    pictures.targets = torch.from_numpy(LABELS)  # type: ignore[attr-defined]
    return pictures


TABLE = datasets.Dataset.from_dict({"number": list(range(1000)), "label": LABELS.tolist()})

SETS: dict[str, Any] = {
    "labels": LABELS,
    "list": LABELS.tolist(),
    "tensor": torch.from_numpy(LABELS),
    "TensorDataset": TensorDataset(torch.zeros(1000, 3), torch.from_numpy(LABELS)),
    "Dataset": Pictures(),
    "Dataset with targets": with_targets(),
    "Subset": Subset(Pictures(), list(range(1000))),
    "datasets": TABLE,
    "examples as dicts": [{"number": index, "label": label} for index, label in enumerate(LABELS.tolist())],
}


@pytest.mark.parametrize("examples", SETS.values(), ids=list(SETS))
def test_labels_are_found_in_every_kind_of_data_set(examples: Any) -> None:
    assert [*data.dirichlet(examples, 5, 0.3, seed=1)] == [*data.dirichlet(LABELS, 5, 0.3, seed=1)]


@pytest.mark.parametrize(
    ("examples", "by"),
    [
        (TABLE, "label"),
        (Pictures(), 1),
        (with_targets(), "targets"),
        (1000, LABELS),
        (Pictures(), lambda each: each[1]),
    ],
    ids=["column", "position", "attribute", "values", "function"],
)
def test_the_attribute_with_the_labels_can_be_named(examples: Any, by: Any) -> None:
    assert [*data.shards(examples, 5, by=by, seed=1)] == [*data.shards(LABELS, 5, seed=1)]


def test_a_subset_has_the_class_of_its_data_set() -> None:
    parts = {name: data.shards(examples, 5) for name, examples in SETS.items()}
    first = parts["labels"][0]
    assert parts["labels"].subset(0).tolist() == LABELS[first].tolist()
    assert parts["list"].subset(0) == LABELS[first].tolist()
    assert torch.equal(parts["tensor"].subset(0), torch.from_numpy(LABELS[first]))
    assert parts["datasets"].subset("site-0000")["number"][:] == first
    subset = parts["Dataset"].subset(0)
    assert isinstance(subset, Subset)
    assert [int(picture[0]) for picture, _ in subset] == first


def test_a_subset_can_be_split_again() -> None:
    evens = Subset(Pictures(), list(range(0, 1000, 2)))
    parts = data.by_attribute(evens, 10)
    for site in range(10):
        assert len({label for _, label in parts.subset(site)}) == 1


# -- the table and the plot


def test_a_splits_table_counts_labels_of_sites() -> None:
    parts = data.natural(["x", "y", "x", "x"], by=["b", "b", "a", "b"])
    assert parts.table().splitlines() == ["site  examples  a  b", "a            1  1  ·", "b            3  ·  3"]
    assert parts.table(by=["x", "y", "x", "x"]).splitlines()[2] == "b            3  2  1"
    assert str(parts) == parts.table()


def test_a_long_table_counts_the_omitted_sites() -> None:
    lines = data.iid(100, 60).table(rows=10).splitlines()
    assert len(lines) == 12
    assert lines[0] == "site       examples"
    assert lines[-1] == "… and 50 more sites"


def test_the_plot_has_a_bar_for_each_site_and_label() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    parts = data.dirichlet(LABELS, 4, 0.5)
    axes = parts.plot()
    assert [text.get_text() for text in axes.get_yticklabels()] == list(parts.names)
    widths = np.array([bar.get_width() for bar in axes.patches]).reshape(10, 4)
    assert widths.sum(axis=0).tolist() == parts.sizes


# -- refusals


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield 1


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "more sites than examples": (lambda: data.iid(3, 4), "4 sites need 4 examples, but there are 3"),
    "no sites": (lambda: data.iid(3, 0), "sites is 0"),
    "two sites of one name": (lambda: data.iid(9, ["a", "a"]), "different names"),
    "one name as text": (lambda: data.iid(9, "ab"), "Give a list of names"),
    "no examples": (lambda: data.iid([], 1), "0 examples"),
    "no length": (lambda: data.iid(Endless(), 1), "no length"),
    "minimum above the mean": (lambda: data.dirichlet(LABELS, 10, 1.0, min_size=101), "at least 101 examples each"),
    "minimum not reached": (lambda: data.dirichlet(LABELS, 10, 0.01, min_size=99), "none of 1000 draws"),
    "negative minimum": (lambda: data.dirichlet(LABELS, 10, 1.0, min_size=-1), "min_size is -1"),
    "alpha zero": (lambda: data.dirichlet(LABELS, 2, 0), "alpha is 0"),
    "alpha below zero": (lambda: data.quantity_skew(9, 2, -1.0), "alpha is -1.0"),
    "alpha NaN": (lambda: data.dirichlet(LABELS, 2, math.nan), "alpha is nan"),
    "alpha infinite": (lambda: data.dirichlet(LABELS, 2, math.inf), "alpha is inf"),
    "alpha as text": (lambda: data.dirichlet(LABELS, 2, "0.3"), "alpha is '0.3'"),  # type: ignore[arg-type]
    "NaN label": (
        lambda: data.shards([0.0, math.nan], 1),
        "1 of 2 labels are missing or NaN, the first one at index 1",
    ),
    "missing label": (lambda: data.natural(["a", None, "b"], by=["a", None, "b"]), "1 of 3 values in by"),
    "labels in two dimensions": (lambda: data.shards(np.zeros((4, 2)), 2), "shape [4, 2]"),
    "too few labels": (lambda: data.shards(5, 2, by=[0, 1]), "5 examples"),
    "only a number": (lambda: data.dirichlet(9, 2, 1.0), "needs the labels"),
    "unknown column": (lambda: data.natural(TABLE, by="labl"), "Did you mean 'label'?"),
    "no label column": (lambda: data.shards(TABLE.remove_columns("label"), 2), "None of the columns number"),
    "unknown attribute": (lambda: data.natural(PATIENTS, by="hospitl"), "Did you mean 'hospital'?"),
    "unknown position": (lambda: data.natural(Pictures(), by=7), "no 7"),
    "too many shards": (lambda: data.shards(LABELS, 400, 3), "need 1200 examples"),
    "values left over": (lambda: data.by_attribute(LABELS, 3, 2), "Give a number from 4"),
    "more values than there are": (lambda: data.by_attribute(LABELS, 3, 11), "to 10"),
    "a small natural site": (
        lambda: data.natural(PATIENTS, by="hospital", min_size=2),
        "3 of 5 sites have fewer than 2",
    ),
    "more sites than keys": (lambda: data.natural(PATIENTS, by="hospital", sites=6), "5 values for 6 sites"),
    "shares of other sites": (lambda: data.quantity_skew(9, 3, shares=[1, 2]), "2 shares for 3 sites"),
    "a share of NaN": (lambda: data.quantity_skew(9, 2, shares=[1, math.nan]), "shares is nan"),
    "negative seed": (lambda: data.iid(9, 2, seed=-1), "seed is -1"),
    "seed that is no number": (lambda: data.iid(9, 2, seed=None), "seed is None"),  # type: ignore[arg-type]
    "unknown site": (lambda: data.iid(9, 2)["site-001"], "Did you mean 'site-000"),
    "examples of a number": (lambda: data.iid(9, 2).subset(0), "Use the indices"),
    "holdout of all": (lambda: data.holdout(9, 1.0), "share is 1.0"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_wrong_arguments_of_a_split_are_refused(refused: str) -> None:
    call, expected = REFUSED[refused]
    with pytest.raises(UsageError) as caught:
        call()
    assert expected in str(caught.value)
    assert isinstance(caught.value, AtollError)
    assert caught.value.remedy


def test_natural_names_are_never_taken_twice() -> None:
    """If two keys lead to the same name, the second gets a number that no other site has."""
    parts = data.natural([10, 20, 30], by=["-x-1", "/x", "x"])
    assert len(set(parts.names)) == 3
    assert sorted(index for name in parts.names for index in parts[name]) == [0, 1, 2]
