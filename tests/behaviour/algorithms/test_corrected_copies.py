"""Corrections of optimizers that keep a copy of the weights: they reach the copy, or are refused.

Every optimizer steps by its gradient, w ← w − g, from a copy of the weights. FedProx, with g = −1/4 and μ = 1/2 from 1:
1.25, then by 1/4 − 1/2·1/4 to 1.375, then by 1/4 − 1/2·3/8 to 1.4375. SCAFFOLD adds c_i − c to each step. Numbers in
bf16 have 8 bits: 1 + 1/256 is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from kit.corrections import Scaffold, fedprox
from kit.models import Weights
from kit.optimizers import Flat, InList, InState, Masters, Outside, Padded, ScheduleFree
from kit.world import World
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from atoll.errors import UsageError

pytestmark = pytest.mark.covers("X11")

SMALL = 1 / 1024


def two(dtype: torch.dtype = torch.bfloat16) -> Weights:
    return Weights(w=torch.full((3,), 1.0, dtype=dtype), b=torch.full((3,), 2.0, dtype=dtype))


class FlatFromTheStart(Flat):
    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.copies()


class Aligned(Padded):
    """Each part of the flat copy, which is in the state of the first parameter, has padding up to 4 elements."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        one, other = super().copies()
        self.state[self.weights[0]]["flat"] = torch.cat([one, torch.ones(1), other, torch.ones(1)])
        del self.flat

    def copies(self) -> list[Tensor]:
        (state,) = self.state.values()
        return [state["flat"][:3], state["flat"][4:7]]


class Buckets(Padded):
    """Has a flat copy for each parameter, with padding."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.buckets = [torch.cat([each, torch.zeros(1)]) for each in super().copies()]
        del self.flat

    def copies(self) -> list[Tensor]:
        return [each[:3] for each in self.buckets]


class InOptimizer(Masters):
    """Has an optimizer of the copies inside, to which it gives the gradients."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.inner = SGD([nn.Parameter(value.detach().float().clone()) for value in self.weights], lr=1.0)

    def copies(self) -> list[Tensor]:
        return self.inner.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for value, master in zip(self.weights, self.copies(), strict=True):
            master.grad = value.grad.float()
        self.inner.step()
        for value, master in zip(self.weights, self.copies(), strict=True):
            value.copy_(master)


class Lookahead(Optimizer):
    """Every second step, slow weights move half the way to the weights, which begin there again."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.inner, self.made = SGD(self.param_groups, lr=1.0), 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        values = self.param_groups[0]["params"]
        slow = [self.state[value].setdefault("slow", value.clone()) for value in values]
        self.inner.step()
        self.made += 1
        if self.made % 2 == 0:
            for value, each in zip(values, slow, strict=True):
                value.copy_(each.lerp_(value, 0.5))


class WithMoment(SGD):
    """Keeps an average of the weights, their first values and a moment, from none of which it steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for value in self.param_groups[0]["params"]:
            self.state[value].setdefault("anchor", value.clone())
        super().step()
        for value in self.param_groups[0]["params"]:
            self.state[value].setdefault("ema", value.clone()).lerp_(value, 0.5)
            self.state[value]["m"] = value.grad.clone()


def controls(shift: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Control variates c and c_i of `two()`, with c − c_i = `shift`."""
    return {name: torch.full((3,), shift) for name in "wb"}, {name: torch.zeros(3) for name in "wb"}


def train(
    model: Any, hooks: AbstractContextManager[object], step: Callable[[], object], gradient: float, steps: int = 3
) -> None:
    with hooks:
        for _ in range(steps):
            for value in model.parameters():
                value.grad = torch.full_like(value, gradient)
            step()


def hooks_of(algorithm: str, model: nn.Module) -> Any:
    return fedprox(model, mu=0.5) if algorithm == "fedprox" else Scaffold(model, *controls(-0.25))


def first(tensors: Iterable[Tensor]) -> list[float]:
    values = [each.flatten().tolist() for each in tensors]
    assert all(len(set(each)) == 1 for each in values)
    return [each[0] for each in values]


MASTERS = pytest.mark.parametrize(
    "kind", [InState, InList, InOptimizer, Flat, FlatFromTheStart, Padded, Aligned, Buckets]
)
RESULTS = pytest.mark.parametrize(("algorithm", "result"), [("fedprox", 1.4375), ("scaffold", 2.5)])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@MASTERS
@DTYPES
@RESULTS
def test_corrections_reach_the_master_weights(kind: Any, dtype: torch.dtype, algorithm: str, result: float) -> None:
    """FedProx and SCAFFOLD correct the master copy that an optimizer keeps of the weights."""
    # SCAFFOLD's numbers: c − c_i = −1/4, so each of 3 steps adds 1/4 + 1/4. Δc_i = (x − y)/3 − c = −1/2 + 1/4.
    model = two(dtype)
    optimizer = kind(model.parameters())
    hooks = hooks_of(algorithm, model)
    train(model, hooks.attach(optimizer), optimizer.step, -0.25)
    assert first(model.parameters()) == first(optimizer.copies()) == [result, result + 1]
    if algorithm == "scaffold":
        assert first(hooks.difference().values()) == [-0.25, -0.25]


class FromMainGrad(Optimizer):
    """As in Megatron: gradients are in `main_grad`, in more bits. `grad` may be left over from the backward pass."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for value in self.param_groups[0]["params"]:
            value -= value.main_grad


@pytest.mark.parametrize("left_over", [False, True])
@RESULTS
def test_corrects_steps_that_use_main_grad(algorithm: str, result: float, left_over: bool) -> None:
    """FedProx and SCAFFOLD correct an optimizer that takes its gradients from `main_grad`.

    A gradient left over in `grad` changes nothing.
    """
    model = two(torch.float32)
    optimizer = FromMainGrad(model.parameters())
    with hooks_of(algorithm, model).attach(optimizer) as hooks:
        for _ in range(3):
            for value in model.parameters():
                value.main_grad = torch.full_like(value, -0.25)
                value.grad = torch.full_like(value, -0.25) if left_over else None
            optimizer.step()
    assert first(model.parameters()) == [result, result + 1]
    assert hooks.steps == 3


def test_fedprox_adds_its_term_to_main_grad_once() -> None:
    """FedProx adds its term only once when `grad` and `main_grad` share one memory."""
    model = two(torch.float32)
    optimizer = FromMainGrad(model.parameters())
    with fedprox(model, mu=0.5).attach(optimizer):
        for _ in range(3):
            for value in model.parameters():
                value.grad = torch.full_like(value, -0.25)
                value.main_grad = value.grad.view(3)
            optimizer.step()
    assert first(model.parameters()) == [1.4375, 2.4375]


@MASTERS
def test_master_weights_keep_corrections_that_bf16_loses(kind: Any) -> None:
    """Master weights in fp32 sum up SCAFFOLD corrections that are too small for weights in bf16."""
    # Each of 8 steps adds 1/1024. In bf16, 1 + 1/1024 rounds to 1, and the next number after 1 is 1 + 8/1024.
    model = two()
    optimizer = kind(model.parameters())
    train(model, Scaffold(model, *controls(-SMALL)).attach(optimizer), optimizer.step, 0.0, steps=8)
    assert first(optimizer.copies()) == [1 + 8 * SMALL, 2 + 8 * SMALL]
    assert first(model.parameters()) == [1 + 8 * SMALL, 2.0]
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}


def test_scaffold_does_not_correct_averages_or_anchors() -> None:
    """SCAFFOLD does not correct an average or a stored first value of the weights, since no step starts from them."""
    # Each of 3 steps adds 1/4 + 1/4. The average sees each step before its correction: 1.25, then (1.25 + 1.75)/2, then
    # 1.875.
    model = two(torch.float32)
    optimizer = WithMoment(model.parameters(), lr=1.0)
    train(model, Scaffold(model, *controls(-0.25)).attach(optimizer), optimizer.step, -0.25)
    assert first(model.parameters()) == [2.5, 3.5]
    state = optimizer.state[model.w]
    assert first([state["anchor"], state["ema"], state["m"]]) == [1.0, 1.875, -0.25]


@pytest.mark.parametrize(
    ("kind", "named"), [(Lookahead, "Lookahead.state.slow"), (ScheduleFree, "ScheduleFree.state.z")]
)
def test_scaffold_refuses_lookahead_and_schedule_free(kind: Any, named: str) -> None:
    """SCAFFOLD refuses Lookahead and Schedule-Free, because their own copies of the weights would undo a part of each
    correction.
    """
    model = two(torch.float32)
    optimizer = kind(model.parameters())
    scaffold = Scaffold(model, *controls(-0.25))
    with pytest.raises(UsageError, match=rf"a copy of the weights, {named}, .*scaffold changes .* undo a part"):
        train(model, scaffold.attach(optimizer), optimizer.step, -0.25)


def test_scaffold_corrects_the_inner_optimizer_of_lookahead() -> None:
    """SCAFFOLD can correct the inner optimizer of Lookahead."""
    # Each step adds 1/4 + 1/4. After two steps, Lookahead keeps half of the way: 1 → 1.5 → 2 → 1.5 → 2.
    model = two(torch.float32)
    optimizer = Lookahead(model.parameters())
    train(model, Scaffold(model, *controls(-0.25)).attach(optimizer.inner), optimizer.step, -0.25)
    assert first(model.parameters()) == [2.0, 3.0]


@pytest.mark.parametrize(("kind", "result"), [(Lookahead, 1.34375), (ScheduleFree, 1.40625)])
def test_fedprox_works_with_lookahead_and_schedule_free(kind: Any, result: float) -> None:
    """FedProx adds its pull to the gradient, so the steps of Lookahead and Schedule-Free contain the pull."""
    # Lookahead: two steps lead to 1.25 and 1.375. Half of this way remains, 1.1875. A step of 1/4 − 1/2·0.1875 ends at
    # 1.34375. Schedule-Free: the first step makes y and z 1.25. With g = −1/8, of which y gets 3/4, y is 1.34375 and z
    # is 1.375. With g = −0.078125, y moves by 1/3 of 1/32 and by 2/3 of −g.
    model = two(torch.float32)
    optimizer = kind(model.parameters())
    train(model, fedprox(model, mu=0.5).attach(optimizer), optimizer.step, -0.25)
    assert first(model.parameters()) == pytest.approx([result, result + 1])


@pytest.mark.parametrize("algorithm", ["fedprox", "scaffold"])
def test_refuses_optimizers_that_hold_only_copies(algorithm: str) -> None:
    """FedProx and SCAFFOLD refuse an optimizer that holds only copies of the model's parameters."""
    model = two()
    optimizer: Any = Outside(model.parameters())
    with pytest.raises(
        UsageError, match=r"SGD trains copies of the model's parameters, for example of 'b'.*in its state"
    ):
        hooks_of(algorithm, model).attach(optimizer)


def test_counts_steps_of_optimizers_that_hold_only_copies(tmp_path: Any) -> None:
    """FedNova counts the steps of an optimizer that holds only copies of the model's parameters."""
    # One optimizer makes three steps of 1/4 in each of two rounds: 1 + 6/4 = 2.5.
    model = two()
    optimizer: Any = Outside(model.parameters())
    world = World(tmp_path, two(), "a", algorithm="fednova", rounds=2)
    world.train_rounds(model, lambda fl_round: train(model, fl_round.correct(model, optimizer), optimizer.step, -0.25))
    assert first(world.result[name] for name in "wb") == [2.5, 3.5]
