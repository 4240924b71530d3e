"""A step that is longer than torch's hooks show: the update is the change of the whole of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from kit.corrections import fedprox
from kit.models import Weights
from kit.servers import PLAIN_DILOCO
from kit.world import World
from torch import nn
from torch.optim import SGD

# Each of these optimizers makes the same step: w ← (w − g)/2. With g = −1, w = 0 becomes 1/2, 3/4, 7/8, 15/16.


def one() -> Weights:
    return Weights(w=torch.zeros(3))


@torch.no_grad()
def halve(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for value in group["params"]:
            value.mul_(0.5)


class Derived(SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        halve(self)
        return loss


class DerivedTwice(Derived):
    def step(self, closure: Any = None) -> Any:
        loss = SGD.step(self, closure)
        halve(self)
        return loss


def looks_hooked() -> type[SGD]:
    """A class whose step torch takes for one with hooks: `functools.wraps` has copied that mark of its parent's."""

    class Decorated(SGD):
        @functools.wraps(SGD.step)
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            halve(self)
            return loss

    return Decorated


class Wrapper:
    """As many wrappers do: no torch optimizer itself, with one in its attribute `optimizer`."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        halve(self.optimizer)
        return loss


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=1.0)


def replaced(model: nn.Module) -> SGD:
    def step(self: SGD, closure: Any = None) -> Any:
        loss = SGD.step(self, closure)
        halve(self)
        return loss

    optimizer = sgd(model)
    optimizer.step = MethodType(step, optimizer)
    return optimizer


def scheduled(model: nn.Module) -> Any:
    """A learning rate schedule wraps `step` of its optimizer."""
    optimizer = Derived(model.parameters(), lr=1.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return optimizer


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "derived": lambda model: Derived(model.parameters(), lr=1.0),
    "derived from a derived one": lambda model: DerivedTwice(model.parameters(), lr=1.0),
    "decorated": lambda model: looks_hooked()(model.parameters(), lr=1.0),
    "wrapper": lambda model: Wrapper(sgd(model)),
    "replaced": replaced,
    "scheduled": scheduled,
}


def trained(folder: Path, make: Callable[[nn.Module], Any], step: Callable[[nn.Module, Any], object]) -> list[float]:
    """Train to the end of 2 rounds of H = 2; the weights that the loop had after each step, and last the result's."""
    sgd(one())  # from here on torch's hooks are in SGD's own step, too
    model, weights = one(), list[float]()
    optimizer = make(model)
    with World(folder, one(), "a", rounds=2, H=2, **PLAIN_DILOCO) as world:
        with world.diloco(model, optimizer) as loop:
            while not loop.finished:
                step(model, optimizer)
                weights.append(model.w[0].item())
                assert loop.step == len(weights)
        world.server.run()
    return [*weights, world.result["w"][0].item()]


def plainly(model: Any, optimizer: Any) -> None:
    model.w.grad = torch.full((3,), -1.0)
    optimizer.step()


def by_closure(model: Any, optimizer: Any) -> None:
    def closure() -> float:
        model.w.grad = torch.full((3,), -1.0)
        return 1.0

    assert optimizer.step(closure) == 1.0


RIGHT = [0.5, 0.75, 0.875, 0.9375, 0.9375]


@pytest.mark.covers("X11")
@pytest.mark.parametrize("step", [plainly, by_closure], ids=["plain", "closure"])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_sends_the_change_of_whole_steps(
    tmp_path: Path, make: Callable[[nn.Module], Any], step: Callable[[nn.Module, Any], object]
) -> None:
    assert trained(tmp_path, make, step) == RIGHT


@pytest.mark.covers("X11")
def test_follows_a_step_called_by_a_reference(tmp_path: Path) -> None:
    """Another program has kept the bound method."""
    kept: list[Any] = []

    def make(model: nn.Module) -> Any:
        optimizer = Derived(model.parameters(), lr=1.0)
        kept.append(optimizer.step)
        return optimizer

    def step(model: Any, _: Any) -> None:
        model.w.grad = torch.full((3,), -1.0)
        kept[0]()

    assert trained(tmp_path, make, step) == RIGHT


@pytest.mark.covers("X11")
def test_sends_steps_of_a_later_schedule(tmp_path: Path) -> None:
    """The change of a step is sent under a schedule that began later, and under a compiled one."""
    compiled: list[Any] = []

    def step(model: Any, optimizer: Any) -> None:
        if not compiled:
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
            compiled.append(torch.compile(lambda: optimizer.step(), backend="eager"))
        model.w.grad = torch.full((3,), -1.0)
        compiled[0]()

    assert trained(tmp_path, KINDS["derived"], step) == RIGHT


@pytest.mark.covers("X11")
def test_a_step_that_fails_is_none(tmp_path: Path) -> None:
    """A step that raises an error after its parent's step is not counted.

    The weight becomes 1 and stays there; then (1 + 1)/2 = 1.
    """

    class Fails(Derived):
        def step(self, closure: Any = None) -> Any:
            if self.fails:
                self.fails = False
                SGD.step(self, closure)
                raise ValueError("out of memory")
            return super().step(closure)

        fails = True

    def step(model: Any, optimizer: Any) -> None:
        model.w.grad = torch.full((3,), -1.0)
        if optimizer.fails:
            with pytest.raises(ValueError, match="out of memory"):
                optimizer.step()
        optimizer.step()

    assert trained(tmp_path, lambda model: Fails(model.parameters(), lr=1.0), step) == [1.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.covers("L2")
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_leaves_the_optimizer_as_it_was(tmp_path: Path, make: Callable[[nn.Module], Any]) -> None:
    model = one()
    optimizer = make(model)
    before = dict(vars(optimizer))
    with World(tmp_path, one(), "a", rounds=2, **PLAIN_DILOCO) as world, world.diloco(model, optimizer):
        assert vars(optimizer)["step"] != before.get("step")
    assert vars(optimizer) == before


@pytest.mark.covers("X11")
@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_steps_of_a_frozen_optimizer_do_not_count(tmp_path: Path, is_first: bool) -> None:
    """Two optimizers step in turn, and one has no trained parameters: with H = 2, two turns are a round."""
    model = Weights(w=torch.zeros(3), frozen=torch.ones(2))
    trained, frozen = SGD([model.w], lr=1.0), SGD([model.frozen.requires_grad_(False)], lr=1.0)
    turn = [frozen, trained] if is_first else [trained, frozen]

    def step() -> None:
        model.w.grad = torch.full_like(model.w, -1.0)
        for optimizer in turn:
            optimizer.step()

    initial = Weights(w=torch.zeros(3), frozen=torch.ones(2))
    world = World(tmp_path, initial, "a", rounds=2, H=2, **PLAIN_DILOCO)
    world.train_steps(model, turn, step)
    assert world.result["w"].tolist() == [4.0] * 3


class Sharpness(SGD):
    """SAM: its first call moves the weights by ρ = 1, the second takes them back and steps the optimizer inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=1.0)
        self.base_optimizer = SGD(self.param_groups, lr=1.0)

    @torch.no_grad()
    def first_step(self) -> None:
        for value in self.param_groups[0]["params"]:
            self.state[value]["before"] = value.clone()
            value.add_(1.0)

    @torch.no_grad()
    def second_step(self) -> None:
        for value in self.param_groups[0]["params"]:
            value.copy_(self.state[value]["before"])
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        self.first_step()
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss


@pytest.mark.covers("X11")
@pytest.mark.parametrize("in_two_calls", [True, False])
@pytest.mark.parametrize("kind", ["diloco", "fedprox"])
def test_counts_steps_of_inner_optimizers(tmp_path: Path, kind: str, in_two_calls: bool) -> None:
    """Counts steps of an optimizer inside that other methods step.

    The gradient is −1. By hand, FedProx with μ = 1/2 goes to 1, 3/2, 7/4, 15/8; without it 4 steps add 4.

    In one call, the closure's gradient is corrected where it was formed, at one more than w: by μ·1 more.
    """
    model = one()
    optimizer = Sharpness(model)

    def closure() -> torch.Tensor:
        model.w.grad = torch.full_like(model.w, -1.0)
        return torch.zeros(())

    def step() -> None:
        if not in_two_calls:
            optimizer.step(closure)
            return
        closure()
        optimizer.first_step()
        closure()
        optimizer.second_step()

    if kind == "diloco":
        world = World(tmp_path, one(), "a", rounds=2, H=2, **PLAIN_DILOCO)
        world.train_steps(model, optimizer, step)
        assert world.result["w"].tolist() == [4.0] * 3
        return
    with fedprox(model, mu=0.5).attach(optimizer) as hooks:
        for _ in range(4):
            step()
    assert hooks.steps == 4
    # in one call: 1/2, 3/4, 7/8, 15/16
    assert model.w.tolist() == [1.875 if in_two_calls else 0.9375] * 3
