"""Every reducer through the contract; numbers by hand; the network that sorts the rows of a median."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from atoll.errors import ConfigError, UsageError
from atoll.reducers import (
    ClippedMean,
    Maximum,
    Median,
    RoundFacts,
    Share,
    TrimmedMean,
    WeightedMean,
    build_reducers,
    normalised,
)
from atoll.reducers.means import First, Sum
from atoll.reducers.robust import network, select
from atoll.registry import OwnName
from atoll.testing.contracts import ReducerContract


class TestMean(ReducerContract):
    reducer = WeightedMean()


class TestMaximum(ReducerContract):
    reducer = Maximum()
    dtypes = (torch.int64, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool, torch.float32)


class TestFirst(ReducerContract):
    reducer = First()
    dtypes = (torch.int64, torch.uint8, torch.bool, torch.float32)


class TestClippedMean(ReducerContract):
    reducer = ClippedMean(max_norm=3.0)


class TestClippedToTheMedian(ReducerContract):
    reducer = ClippedMean()


class TestMedian(ReducerContract):
    reducer = Median()


class TestTrimmedMean(ReducerContract):
    reducer = TrimmedMean(0.25)


def facts(weights, norms=None, population_weight=0.0):
    """Of a round whose updates report one step each."""
    ones = [1.0] * len(weights)
    return RoundFacts(weights, norms or ones, [1] * len(weights), population_weight)


def reduced(reducer, values, norms=None, weights=None, population_weight=0.0):
    """One element of each update."""
    rows, out = torch.tensor(values)[:, None], torch.empty(1)
    weights = reducer.weigh(facts(weights or [1.0] * len(values), norms, population_weight))
    reducer.reduce_(rows, weights, out)
    return out.item()


def test_the_median_by_hand():
    """The median of an even number of values is the mean of the two in the middle. Weights do not change the median."""
    assert reduced(Median(), [5.0, -1e30, 2.0]) == 2.0
    assert reduced(Median(), [8.0, 1.0, 1e30, 2.0]) == 5.0  # of 1 2 8 1e30 the two in the middle: (2 + 8) / 2
    assert reduced(Median(), [3e38, 3e38]) == pytest.approx(3e38)  # their sum is no fp32
    assert reduced(Median(), [1.0, 2.0, 9.0], weights=[1.0, 1.0, 100.0]) == 2.0  # one site is one voice


def test_median_and_trimmed_mean_ignore_site_order():
    """The median and the trimmed mean do not depend on the order of the sites, not even in one bit. Some values are
    zeros of both signs.
    """
    rows = torch.randn(9, 301, generator=torch.Generator().manual_seed(3))
    rows[:, ::7] = 0.0
    rows[::2, ::7] = -0.0
    for reducer in (Median(), TrimmedMean(0.2)):
        found = []
        for order in (range(9), reversed(range(9)), [4, 8, 0, 2, 6, 1, 3, 7, 5]):
            out = torch.empty(301)
            reducer.reduce_(rows[list(order)], [1.0] * 9, out)
            found.append(out.view(torch.int32))
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


def test_the_trimmed_mean_by_hand():
    # of ten, two at each end go: 3 … 8 are left, whose mean is 33 / 6
    """The trimmed mean leaves out the given share of the values at each end. The number of values left out is rounded
    down.
    """
    values = [10.0, 2.0, 9.0, 4.0, 1.0, 6.0, 7.0, 8.0, 3.0, 5.0]
    assert reduced(TrimmedMean(0.2), values) == 5.5
    # 29 of 0², 1² … 99² at each end, not 28:  Σ 29²…70² = 70·71·141/6 − 28·29·57/6 = 116795 − 7714, of 42
    squares = [float(value**2) for value in range(100)]
    assert reduced(TrimmedMean(0.29), squares) == pytest.approx(109081 / 42)
    assert reduced(TrimmedMean(0.2), [1.0, 2.0, 6.0]) == 3.0  # ⌊0.6⌋: none is cut off
    assert reduced(TrimmedMean(0.4), [1e30, 7.0, -1e30]) == 7.0


def test_the_clipped_mean_by_hand():
    # norms 1, 2 and 8, the median is 2: the third counts for a quarter;  (1 + 2 + 8/4) / 3
    """The clipped mean scales an update with a norm above the bound down to the bound. Without a given bound, the bound
    is the median of the norms.
    """
    assert reduced(ClippedMean(), [1.0, 2.0, 8.0], norms=[1.0, 2.0, 8.0]) == pytest.approx(5 / 3)
    # C = 4: (1·1 + 3·8·(4/8)) / 4, weights 1 and 3
    assert reduced(ClippedMean(4.0), [1.0, 8.0], norms=[1.0, 8.0], weights=[1.0, 3.0]) == pytest.approx(13 / 4)
    assert ClippedMean(4.0).weigh(facts([1.0, 1.0], [0.0, 8.0])) == [0.5, 0.25]  # nothing to divide by, nothing to clip


def test_an_even_number_of_norms_averages_the_middle():
    # of 1, 2, 6 and 8 it is (2 + 6) / 2 = 4: the factors are 1, 1, 4/6 and 4/8, each of a quarter
    """For an even number of norms, the bound of the clipped mean is the mean of the two norms in the middle."""
    weights = ClippedMean().weigh(facts([1.0] * 4, [8.0, 1.0, 6.0, 2.0]))
    assert weights == pytest.approx([1 / 8, 1 / 4, 1 / 6, 1 / 4], abs=1e-15)


def test_the_share_of_a_total_weight_by_hand():
    # two of ten sites with weight 1 take part: (3 + 4) / 10; two with weights 1 and 9 of 40: (1·3 + 9·4) / 40
    """`Share` divides the weighted sum of the updates by the weight of all sites, including those that do not take
    part. A NaN weight is refused.
    """
    assert reduced(Share(), [3.0, 4.0], population_weight=10.0) == pytest.approx(0.7)
    assert reduced(Share(), [3.0, 4.0], weights=[1.0, 9.0], population_weight=40.0) == pytest.approx(39 / 40)
    assert reduced(Share(), [3.0, 4.0]) == 3.5  # there are no other sites
    with pytest.raises(UsageError):
        Share().weigh(facts([1.0, math.nan], population_weight=3.0))


@pytest.mark.parametrize(
    ("reducer", "words", "value"),
    [
        *((TrimmedMean, "share", value) for value in (0.5, -0.1, math.nan)),
        *((ClippedMean, "L2", value) for value in (0.0, -1.0, math.inf, math.nan)),
    ],
)
def test_an_invalid_share_or_bound_is_refused(reducer, words, value):
    """The trimmed mean refuses an impossible share, and the clipped mean refuses an impossible bound."""
    with pytest.raises(ConfigError, match=words):
        reducer(value)


def test_a_chosen_reducer_may_also_reduce_buffers():
    """If a run chooses the trimmed mean instead of the algorithm's own reducer, buffers get it too. With the clipped
    mean, buffers keep the weighted mean.
    """
    mean, median = OwnName("mean"), OwnName("median")
    groups = {"params": mean, "buffers": mean}
    assert build_reducers(groups, mean, {}) == {"params": WeightedMean(), "buffers": WeightedMean()}
    assert build_reducers(groups, OwnName("trimmed_mean"), {"trim": 0.1})["buffers"] == TrimmedMean(0.1)
    assert build_reducers(groups, OwnName("clipped_mean"), {})["buffers"] == WeightedMean()
    assert build_reducers({"params": median, "buffers": mean}, median, {})["buffers"] == WeightedMean()


def test_unknown_reducer_options_are_refused():
    """An option that the reducer does not have, and an object that is no reducer, are refused."""
    with pytest.raises(ConfigError, match="trimm"):
        build_reducers({"params": OwnName("mean")}, OwnName("trimmed_mean"), {"trimm": 0.1})
    with pytest.raises(ConfigError, match="not a reducer"):
        build_reducers({"params": OwnName("mean")}, OwnName("builtins:dict"), {})


def test_the_mean_by_hand():
    # weights 1 and 3 → ¼ and ¾;  ¼·8 + ¾·4 = 5,  ¼·0 + ¾·(−4) = −3
    """The weighted mean of two updates is the value that the comment derives."""
    out = torch.empty(2)
    WeightedMean().reduce_(iter([torch.tensor([8.0, 0.0]), torch.tensor([4.0, -4.0])]), normalised([1, 3]), out)
    assert out.tolist() == [5.0, -3.0]


def test_the_mean_has_the_documented_bits():
    """The weighted mean has the bits of the documented expression: the first row times its weight, then each other row
    added with its weight.
    """
    rows = [torch.randn(1001, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    weights = normalised([0.3, 1.7, 5.0])
    expected = rows[0] * weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        expected.add_(row, alpha=weight)
    out = torch.empty(1001)
    WeightedMean().reduce_(rows, weights, out)
    assert torch.equal(out, expected)


def test_the_maximum_handles_large_unsigned_counters():
    """The maximum of unsigned 64-bit counters is right beyond the range of signed integers."""
    out = torch.empty(2, dtype=torch.uint64)
    rows = [torch.tensor([2**63 + 1, 5], dtype=torch.uint64), torch.tensor([2**63, 6], dtype=torch.uint64)]
    Maximum().reduce_(rows, [0.5, 0.5], out)
    assert out.tolist() == [2**63 + 1, 6]


@pytest.mark.covers("X10")
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint16, torch.uint64, torch.float32])
def test_a_sum_ignores_the_weights(dtype):
    """`Sum` adds the values of all updates, whatever their weights."""
    rows, out = torch.tensor([[1, 2], [10, 0], [100, 5]]).to(dtype), torch.empty(2, dtype=dtype)
    Sum().reduce_(iter(rows), normalised([1, 2, 3]), out)
    assert out.tolist() == [111, 7]


def test_weights_are_normalised_in_fp64():
    assert normalised([1, 1, 2]) == [0.25, 0.25, 0.5]
    assert normalised([0.25, 0.25]) == [0.5, 0.5]  # a sum below 1
    assert normalised([2**-60, 3 * 2**-60]) == [0.25, 0.75]
    assert math.fsum(normalised([0.1] * 10)) == pytest.approx(1.0, abs=2**-52)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_an_invalid_weight_is_refused(bad):
    """A weight that is zero, negative, NaN or infinite is refused."""
    with pytest.raises(UsageError, match="above zero"):
        normalised([1.0, bad])


def test_an_empty_list_of_weights_is_refused():
    with pytest.raises(UsageError):
        normalised([])


# -- the network of minima and maxima that sorts the rows of a median


@pytest.mark.parametrize("k", range(1, 12))
def test_a_sorting_network_sorts_every_sequence(k):
    """A sorting network sorts every sequence of zeros and ones. By the 0-1 principle, it then sorts every sequence."""
    for bits in itertools.product([0, 1], repeat=k):
        held = list(bits)
        for low, high, wanted in network(k, frozenset(range(k))):
            assert wanted == "both"
            held[low], held[high] = sorted((held[low], held[high]))
        assert held == sorted(bits)


@pytest.mark.parametrize("k", [2, 5, 9, 16, 33, 64])
def test_a_pruned_network_finds_the_requested_ranks(k):
    """A sorting network that is pruned to some ranks finds the rows of these ranks."""
    rows = torch.randn(k, 301, generator=torch.Generator().manual_seed(k))
    expected = rows.sort(0).values
    for ranks in ({0}, {k - 1}, {(k - 1) // 2, k // 2}, set(range(k // 4, k - k // 4))):
        found = select(rows.clone(), frozenset(ranks), spare=torch.full((301,), torch.nan))
        assert torch.equal(torch.stack(found), expected[sorted(ranks)])
    assert len(network(k, frozenset({0}))) <= len(network(k, frozenset(range(k))))


def test_a_pruned_network_computes_only_requested_ranks():
    # of 3, Batcher sorts by (0,1) (0,2) (1,2): the least is in row 0 after the second, and the last orders the others.
    # The median is the smaller one of those, so neither the least nor the largest is needed
    """The sorting network for the median of three rows computes only the outputs that the median needs."""
    assert network(3, frozenset({1})) == ((0, 1, "both"), (0, 2, "max"), (1, 2, "min"))
