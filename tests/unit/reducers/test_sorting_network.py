"""The network of minima and maxima that sorts the rows of a median."""

import itertools

import pytest
import torch

from atoll.reducers.robust import network, select


@pytest.mark.parametrize("k", range(1, 12))
def test_a_network_sorts(k):
    """The 0-1 principle: what sorts every sequence of zeros and ones sorts everything."""
    for bits in itertools.product([0, 1], repeat=k):
        held = list(bits)
        for low, high, wanted in network(k, frozenset(range(k))):
            assert wanted == "both"
            held[low], held[high] = sorted((held[low], held[high]))
        assert held == sorted(bits)


@pytest.mark.parametrize("k", [2, 5, 9, 16, 33, 64])
def test_a_pruned_network_finds_the_ranks_it_was_asked_for(k):
    rows = torch.randn(k, 301, generator=torch.Generator().manual_seed(k))
    expected = rows.sort(0).values
    for ranks in ({0}, {k - 1}, {(k - 1) // 2, k // 2}, set(range(k // 4, k - k // 4))):
        found = select(rows.clone(), frozenset(ranks), spare=torch.full((301,), torch.nan))
        assert torch.equal(torch.stack(found), expected[sorted(ranks)])
    assert len(network(k, frozenset({0}))) <= len(network(k, frozenset(range(k))))


def test_a_pruned_network_computes_only_what_it_is_asked_for():
    # of 3, Batcher sorts by (0,1) (0,2) (1,2): the least is in row 0 after the second, and the last orders the others.
    # The median is the smaller one of those, so nobody asks for the least nor for the largest
    assert network(3, frozenset({1})) == ((0, 1, "both"), (0, 2, "max"), (1, 2, "min"))
