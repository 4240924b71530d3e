"""What it costs to find optimizers' copies of the weights: bounds on calls and looks, and that they miss no copy.

Every optimizer here steps as SGD does, w ← w − g, and is none of torch's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.corrections import Scaffold, fedprox
from kit.optimizers import InState, Masters
from kit.servers import PLAIN_DILOCO
from kit.world import World
from torch import Tensor, nn
from torch.optim import SGD

from atoll.algorithms.copies_in_optimizers import SAMPLED_ELEMENTS, SAMPLED_TENSORS, Sample, Weights

pytestmark = pytest.mark.covers("X11")

HALF = PLAIN_DILOCO | {"algorithm.outer_optimizer.lr": 0.5}
MANY = 3 * SAMPLED_TENSORS
"""Tensors of a model of which not all are sampled."""


class State(dict[str, Any]):
    """The state of one parameter. It counts how often any such state is looked at."""

    looks = 0

    def items(self) -> Any:
        State.looks += 1
        return super().items()


class WithMoment(Masters):
    """Keeps one tensor for each parameter, which is no copy, in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for value in self.weights:
            if value not in self.state:
                self.state[value] = State()
            self.keep(value)
            value -= value.grad

    def keep(self, value: Tensor) -> None:
        self.state[value]["m"] = torch.full_like(value, 0.5)


class OneGroupEach(WithMoment):
    """Has a group for each parameter."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__([{"params": [value]} for value in parameters])


class ByName(WithMoment):
    """Keeps the tensors in a dict, each by a name of its own."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters)
        self.moments = {f"m{number}": torch.full_like(value, 0.5) for number, value in enumerate(self.weights)}

    def keep(self, value: Tensor) -> None:
        pass


class EverySecondHidden(WithMoment):
    """Steps copies of every second weight, which have the other sign, so that they are not found."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, value in enumerate(self.weights):
            if number % 2:
                value -= value.grad
            else:
                value.copy_(-self.state[value].setdefault("minus", -value.clone()).add_(value.grad))


def build(tensors: int, value: float = 1.0) -> nn.Module:
    return nn.ParameterList([torch.full((8,), value) for _ in range(tensors)])


def calls(function: Callable[[], object]) -> int:
    """Number of calls that a function makes, of Python functions and of others."""
    made = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return made


def step(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        for value in model.parameters():
            value.grad = torch.full_like(value, -1.0)
        optimizer.step()


def calls_of_loads(folder: Path, make: Callable[[Any], Any], tensors: int) -> int:
    """Calls of the second and the third load of a federated run of one site, with an optimizer."""
    model, made = build(tensors), 0
    optimizer = make(model.parameters())
    with World(folder, build(tensors), "a", rounds=3) as world, world.worker() as worker:
        for number, fl_round in enumerate(worker):
            made += bool(number) * calls(partial(fl_round.load_into, model))
            step(model, optimizer, 3)
            fl_round.submit(model)
    return made


@pytest.mark.parametrize("make", [WithMoment, OneGroupEach, ByName])
def test_the_cost_of_a_load_grows_linearly(tmp_path: Path, make: Any) -> None:
    """Loading the parameters costs as much for each tensor of a large model as of a small one."""
    # Four times as many tensors make at most 4.5 times as many calls.
    few, many = (calls_of_loads(tmp_path / str(tensors), make, tensors) for tensors in (50, 200))
    assert many <= 4.5 * few


def test_scaffold_searches_the_optimizers_state_twice() -> None:
    """SCAFFOLD looks at the optimizer's whole state only in its first two steps, and then at one parameter's state in
    each step.

    This holds as long as nothing in the state equals the weights.
    """
    model = build(40)
    optimizer = WithMoment(model.parameters())
    zeros = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    State.looks = 0
    with Scaffold(model, zeros, zeros).attach(optimizer):
        step(model, optimizer, 70)
    assert 2 * 40 <= State.looks <= 2 * 40 + 70


def test_few_steps_after_a_load_search_the_state(tmp_path: Path) -> None:
    """After a load, DiLoCo looks at the optimizer's state of several parameters in a few steps only."""
    # DiLoCo searches once at the load, then five times at eight parameters, and at most 16 times at one. It does not
    # search in each of the 70 steps.
    model = build(40)
    optimizer = WithMoment(model.parameters())
    step(model, optimizer)
    State.looks = 0
    with World(tmp_path, build(40), "a", H=100, **PLAIN_DILOCO) as world, world.diloco(model, optimizer):
        step(model, optimizer, 70)
        assert 5 * 8 <= State.looks <= 2 * 40 + 5 * 8 + 16 + 8


def test_fedprox_calls_few_functions_for_each_gradient() -> None:
    """FedProx adds four function calls for each gradient to the optimizer's own, and a few for each step."""
    # Two find the gradient, and two form and add the term.
    model = build(100)
    optimizer = SGD(model.parameters(), lr=1.0)
    own = calls(lambda: step(model, optimizer, 10))
    with fedprox(model, mu=0.5).attach(optimizer):
        step(model, optimizer, 5)
        assert calls(lambda: step(model, optimizer, 10)) <= own + 10 * (4 * 100 + 100)


def test_the_check_for_copies_reads_bounded_samples() -> None:
    """To find copies of the weights in an optimizer, Atoll compares a sample of bounded size, spread over the trained
    tensors.
    """
    tensors = [torch.ones(100) for _ in range(20 * SAMPLED_TENSORS)]
    assert Sample(Weights(tensors)).values.numel() == SAMPLED_TENSORS * SAMPLED_ELEMENTS
    for value in tensors[:300]:
        value.requires_grad_()
    sampled = set(map(id, Weights(tensors).sampled.values()))
    assert len(sampled) == SAMPLED_TENSORS
    assert sampled <= set(map(id, tensors[:300]))


def test_optimizer_copies_follow_each_synchronisation(tmp_path: Path) -> None:
    """If the optimizer keeps full-precision copies of many weights, they follow the model at each synchronisation."""
    # H = 2, and the outer step is half the mean: 3 rounds of 1 move each weight from 1 to 4.
    model = build(MANY)
    optimizer = InState(model.parameters())
    world = World(tmp_path, build(MANY), "a", rounds=3, H=2, **HALF)
    world.train_steps(model, optimizer, lambda: step(model, optimizer))
    assert {value for each in world.result.values() for value in each.tolist()} == {4.0}


@pytest.mark.parametrize("make", [EverySecondHidden, WithMoment])
def test_a_load_undone_by_the_optimizer_is_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any) -> None:
    """If the optimizer overwrites every second loaded weight from hidden copies, the log says that the result is wrong.

    An optimizer without such copies causes no warning.
    """
    model = build(MANY)
    optimizer = make(model.parameters())
    world = World(tmp_path, build(MANY), "a", rounds=3, H=6, **HALF)
    world.train_steps(model, optimizer, lambda: step(model, optimizer))
    assert ("the result is wrong" in caplog.text) is (make is EverySecondHidden)
