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
def test_updates_include_the_whole_optimizer_step(
    tmp_path: Path, make: Callable[[nn.Module], Any], step: Callable[[nn.Module, Any], object]
) -> None:
    """An update includes all that an optimizer's step changes, even if a derived class or a wrapper changes the weights
    after the step of torch.
    """
    assert trained(tmp_path, make, step) == RIGHT


@pytest.mark.covers("X11")
def test_a_step_called_through_a_reference_counts(tmp_path: Path) -> None:
    """A DiLoCo loop follows steps that are called through a bound method which was stored before the loop began."""
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
def test_steps_under_a_later_schedule_are_sent(tmp_path: Path) -> None:
    """If a script adds a learning rate schedule and compiles the step after the loop has begun, the update still has
    the change of whole steps.
    """
    compiled: list[Any] = []

    def step(model: Any, optimizer: Any) -> None:
        if not compiled:
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
            compiled.append(torch.compile(lambda: optimizer.step(), backend="eager"))
        model.w.grad = torch.full((3,), -1.0)
        compiled[0]()

    assert trained(tmp_path, KINDS["derived"], step) == RIGHT


@pytest.mark.covers("X11")
def test_a_failed_step_does_not_count(tmp_path: Path) -> None:
    """If an optimizer's step raises an error after the step of its parent class, this step does not count as a local
    step.
    """
    # The failed step makes the weight 1. Each later step keeps the weight: (1 + 1)/2 = 1.

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
def test_diloco_restores_the_optimizer_afterwards(tmp_path: Path, make: Callable[[nn.Module], Any]) -> None:
    """A DiLoCo loop replaces the optimizer's `step` while it runs. After the loop, all attributes of the optimizer are
    as before.
    """
    model = one()
    optimizer = make(model)
    before = dict(vars(optimizer))
    with World(tmp_path, one(), "a", rounds=2, **PLAIN_DILOCO) as world, world.diloco(model, optimizer):
        assert vars(optimizer)["step"] != before.get("step")
    assert vars(optimizer) == before


@pytest.mark.covers("X11")
@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_steps_of_a_frozen_optimizer_do_not_count(tmp_path: Path, is_first: bool) -> None:
    """Steps of an optimizer without trained parameters do not count as local steps."""
    # Two optimizers step in turn, and one of them has frozen parameters only. With H = 2, two turns make a round.
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
def test_steps_of_inner_optimizers_count(tmp_path: Path, kind: str, in_two_calls: bool) -> None:
    """DiLoCo and FedProx count the steps of an optimizer that is inside the script's optimizer, as with SAM."""
    # The gradient is −1, so four steps add 4. FedProx with μ = 1/2 makes the weights 1, 3/2, 7/4 and 15/8. In one call,
    # FedProx corrects the gradient where the closure forms it, at w + 1. This adds μ·1, which makes the weights 1/2,
    # 3/4, 7/8 and 15/16.
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
