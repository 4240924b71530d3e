"""Delayed Nesterov (arXiv 2401.09135, algorithm 3, c = 0), by hand."""

from __future__ import annotations

import pytest
import torch

from atoll import Settings
from atoll.outer_optimizers import DelayedNesterov


def steps(optimizer: torch.optim.Optimizer, leaf: torch.nn.Parameter, gradients: list[float]) -> list[float]:
    out = []
    for g in gradients:
        leaf.grad = torch.full_like(leaf, g)
        optimizer.step()
        out.append(leaf.item())
    return out


def leaf_at(value: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(value, dtype=torch.float64))


@pytest.mark.covers("L6")
def test_by_hand():
    # ε = 0.5, β = 0.5, N = 2; θ = 10
    # g = 4: θ = 10 − 0.5·4/2 = 9
    # g = 8: m = (4 + 8)/2 = 6;  θ = 9 − 0.5·(0.5·6 + 8/2) = 5.5
    # g = 2: θ = 5.5 − 0.5·2/2 = 5
    # g = 6: m = 0.5·6 + (2 + 6)/2 = 7;  θ = 5 − 0.5·(0.5·7 + 6/2) = 1.75
    leaf = leaf_at(10.0)
    got = steps(DelayedNesterov([leaf], lr=0.5, momentum=0.5, delay=2), leaf, [4.0, 8.0, 2.0, 6.0])
    assert got == [9.0, 5.5, 5.0, 1.75]


@pytest.mark.covers("L6")
@pytest.mark.parametrize("n", [1, 2, 5])
def test_n_equal_updates_move_as_far_as_one_step_of_nesterov(n):
    mine, torchs = leaf_at(3.0), leaf_at(3.0)
    delayed = DelayedNesterov([mine], lr=0.7, momentum=0.9, delay=n)
    nesterov = torch.optim.SGD([torchs], lr=0.7, momentum=0.9, nesterov=True)
    for g in (1.0, -0.25, 0.5):
        far = steps(nesterov, torchs, [g])[-1]
        assert steps(delayed, mine, [g] * n)[-1] == pytest.approx(far, abs=1e-12)


@pytest.mark.covers("L6")
def test_the_first_steps_are_undelayed_and_keep_their_momentum():
    # ε = 1, β = 0.5, N = 2 behind one undelayed step; θ = 0
    # g = 2: m = 2;            θ = −(0.5·2 + 2) = −3
    # g = 4: θ = −3 − 4/2 = −5
    # g = 0: m = 0.5·2 + (4 + 0)/2 = 3;  θ = −5 − (0.5·3 + 0) = −6.5
    leaf = leaf_at(0.0)
    optimizer = DelayedNesterov([leaf], lr=1.0, momentum=0.5, delay=2, undelayed=1)
    assert steps(optimizer, leaf, [2.0, 4.0, 0.0]) == [-3.0, -5.0, -6.5]


@pytest.mark.covers("L15")
def test_groups_have_their_own_rates():
    one, two = leaf_at(0.0), leaf_at(0.0)
    optimizer = DelayedNesterov([{"params": [one], "lr": 1.0}, {"params": [two], "lr": 0.5}], momentum=0.0, delay=2)
    for leaf in (one, two):
        leaf.grad = torch.ones_like(leaf)
    optimizer.step()
    assert (one.item(), two.item()) == (-0.5, -0.25)


def test_the_first_rounds_of_an_asynchronous_run_that_are_synchronous_are_undelayed() -> None:
    from atoll.algorithms.resolve import resolve

    settings = {"algorithm.name": "diloco", "async.momentum_every": 4}
    late = {"async.enabled": True, "async.sync_rounds_first": 3}
    assert resolve(Settings.build(settings)).outer_options["undelayed"] == 0
    assert resolve(Settings.build(settings | late)).outer_options["undelayed"] == 3
