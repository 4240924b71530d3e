"""Every reducer through the contract; and numbers by hand."""

import math

import pytest
import torch

from atoll.errors import UsageError
from atoll.reducers.base import normalised
from atoll.reducers.maximum import Maximum
from atoll.reducers.mean import WeightedMean
from atoll.testing.reducers import ReducerContract


class TestMean(ReducerContract):
    reducer = WeightedMean()


class TestMaximum(ReducerContract):
    reducer = Maximum()
    dtypes = (torch.int64, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool, torch.float32)


def test_the_mean_by_hand():
    # weights 1 and 3 → ¼ and ¾;  ¼·8 + ¾·4 = 5,  ¼·0 + ¾·(−4) = −3
    out = torch.empty(2)
    WeightedMean().reduce_(iter([torch.tensor([8.0, 0.0]), torch.tensor([4.0, -4.0])]), normalised([1, 3]), out)
    assert out.tolist() == [5.0, -3.0]


def test_the_mean_is_the_documented_expression():
    rows = [torch.randn(1001, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    weights = normalised([0.3, 1.7, 5.0])
    expected = rows[0] * weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        expected.add_(row, alpha=weight)
    out = torch.empty(1001)
    WeightedMean().reduce_(rows, weights, out)
    assert torch.equal(out, expected)


def test_the_maximum_of_counters_beyond_the_signed_range():
    out = torch.empty(2, dtype=torch.uint64)
    rows = [torch.tensor([2**63 + 1, 5], dtype=torch.uint64), torch.tensor([2**63, 6], dtype=torch.uint64)]
    Maximum().reduce_(rows, [0.5, 0.5], out)
    assert out.tolist() == [2**63 + 1, 6]


def test_weights_are_normalised_in_fp64():
    assert normalised([1, 1, 2]) == [0.25, 0.25, 0.5]
    assert math.fsum(normalised([0.1] * 10)) == pytest.approx(1.0, abs=2**-52)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_that_is_no_weight_is_refused(bad):
    with pytest.raises(UsageError, match="above zero"):
        normalised([1.0, bad])


def test_no_update_is_no_round():
    with pytest.raises(UsageError):
        normalised([])
