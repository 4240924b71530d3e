"""Scripts that put weights of earlier rounds back after the global model was loaded, and scripts that only seem to.

All train with SGD of torch, towards targets that change at each step.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.models import Weights
from kit.servers import PLAIN_DILOCO
from kit.world import World
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import atoll
from atoll.algorithms.weight_copies import WeightCopies

pytestmark = pytest.mark.covers("X11")

CAUSE = "the script put weights from before the load back into the model before the next step"
REMEDY = "before the global model is loaded"


def small() -> nn.Module:
    return Weights(w=torch.linspace(0, 1, 16), b=torch.linspace(1, 2, 16))


class Script:
    """Trains a model; and may do something after each load, and before the end of each round."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.random = model, torch.Generator().manual_seed(0)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        self.old: dict[str, Any] = {}
        self.best = float("inf")

    def step(self) -> float:
        """A step, and its loss."""
        self.optimizer.zero_grad()
        parts = [(each - torch.randn(16, generator=self.random)).square().sum() for each in self.model.parameters()]
        loss = torch.stack(parts).sum()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def now(self) -> dict[str, Any]:
        return deepcopy(self.model.state_dict())

    def loaded(self) -> None:
        """After each load."""

    def ends(self) -> None:
        """Before the next load."""
        self.old = self.now()


class StateDict(Script):
    def loaded(self) -> None:
        self.model.load_state_dict(self.old or self.now())


class Copy(Script):
    @torch.no_grad()
    def loaded(self) -> None:
        for name, value in self.model.named_parameters():
            value.copy_(self.old.get(name, value))


class Data(Script):
    def loaded(self) -> None:
        for name, value in self.model.named_parameters():
            value.data = self.old.get(name, value.data).clone()


class Best(Script):
    """Goes on with the best weights so far."""

    def loaded(self) -> None:
        self.model.load_state_dict(self.old or self.now())

    def ends(self) -> None:
        loss = sum(each.square().sum().item() for each in self.model.parameters())
        if loss < self.best:
            self.best, self.old = loss, self.now()


class SwappedAverage(Script):
    """Submits an average of its weights, and goes on with its own after the load."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.average = self.now()

    def loaded(self) -> None:
        self.model.load_state_dict(self.old or self.now())

    def ends(self) -> None:
        self.old = self.now()
        self.average = {name: (value + self.old[name]) / 2 for name, value in self.average.items()}
        self.model.load_state_dict(self.average)


class Average(Script):
    """Goes on with an average of the weights after each step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.averaged: Any = self.made()

    def made(self) -> Any:
        return AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def loaded(self) -> None:
        self.model.load_state_dict(self.averaged.module.state_dict())

    def step(self) -> float:
        loss = super().step()
        self.averaged.update_parameters(self.model)
        return loss


class StochasticAverage(Average):
    def made(self) -> Any:
        return AveragedModel(self.model)


class AverageOfRounds(Average):
    """Takes the average once a round."""

    def step(self) -> float:
        return Script.step(self)

    def ends(self) -> None:
        self.averaged.update_parameters(self.model)


class HasNested(StateDict):
    """The process has a tensor without a shape, and a sparse one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        self.sparse = torch.eye(4).to_sparse()


PUT_BACK = [HasNested, StateDict, Copy, Data, Best, SwappedAverage, AverageOfRounds]


def two_sites(world: World, model: Any, train: Callable[[Any], None]) -> list[str]:
    """A run of the site a, which trains, and the site b, which adds 1; what the server warns of."""
    with world:
        world.join("b")
        with world.worker("a") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                train(fl_round)
                world.move("b", fl_round.number, 1.0)
        world.finish()
        return [text for text in world.status.warnings if "the result is wrong" in text]


def in_rounds(folder: Path, kind: Callable[[nn.Module], Script], rounds: int = 4) -> list[str]:
    model = small()
    script = kind(model)

    def train(fl_round: Any) -> None:
        script.loaded()
        for _ in range(3):
            script.step()
        script.ends()
        fl_round.submit(model)

    return two_sites(World(folder, small(), rounds=rounds), model, train)


def require_told_once(told: list[str]) -> None:
    (text,) = told
    assert CAUSE in text
    assert REMEDY in text


@pytest.mark.parametrize("kind", [*PUT_BACK, Average, StochasticAverage])
def test_weights_put_back_in_rounds_are_told_once(tmp_path: Path, kind: Any) -> None:
    """If a script puts weights from before the load back in every round, the status says so once, with a remedy."""
    require_told_once(in_rounds(tmp_path, kind))


@pytest.mark.parametrize("kind", PUT_BACK)
def test_weights_put_back_in_diloco_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any) -> None:
    """If a script puts weights from before a synchronisation back, the site's log says so once, with a remedy."""
    model = small()
    script, numbers = kind(model), iter(range(100))

    def step() -> None:
        number = next(numbers)
        if number and number % 3 == 0:
            script.loaded()
        script.step()
        if number % 3 == 1:
            script.ends()

    settings = PLAIN_DILOCO | {"algorithm.outer_optimizer.lr": 0.5}
    World(tmp_path, small(), "a", rounds=4, H=3, **settings).train_steps(model, script.optimizer, step)
    require_told_once(
        [each.getMessage() for each in caplog.records if each.name == "atoll" and CAUSE in each.getMessage()]
    )


def test_weights_put_back_between_functions_are_told(tmp_path: Path) -> None:
    """If a script puts weights back between `receive` and `send`, the status says so in that round."""
    model = small()
    script = StateDict(model)
    with World(tmp_path, small(), rounds=2) as world:
        world.join("b")
        atoll.functional.init(world.url, "a", folder=tmp_path / "a")
        while (fl_round := atoll.functional.receive(into=model)) is not None:
            script.loaded()
            script.step()
            script.ends()
            atoll.functional.send(model)
            world.move("b", fl_round.number, 1.0)
        world.finish()
        require_told_once([text for text in world.status.warnings if "the result is wrong" in text])


# -- what is no fault


class Perturbed(Script):
    """Adds noise to the loaded weights."""

    @torch.no_grad()
    def loaded(self) -> None:
        for value in self.model.parameters():
            value += torch.randn(16, generator=self.random) / 10


class Mixed(Script):
    """Goes on from the middle between its own weights and the loaded ones."""

    @torch.no_grad()
    def loaded(self) -> None:
        for name, value in self.model.named_parameters():
            value.lerp_(self.old.get(name, value), 0.5)


class OwnBias(Script):
    """Keeps its own biases by hand."""

    def loaded(self) -> None:
        self.model.load_state_dict(self.now() | {"b": self.old.get("b", self.now()["b"])})


class OwnModel(Script):
    """Trains its own model in the same module before the global one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.own = self.now()

    def loaded(self) -> None:
        shared = self.now()
        self.model.load_state_dict(self.own)
        for _ in range(4):
            self.step()
        self.own = self.now()
        self.model.load_state_dict(shared)


class Looks(Script):
    """Measures its last weights beside the loaded ones."""

    def loaded(self) -> None:
        shared = self.now()
        self.model.load_state_dict(self.old or shared)
        self.model.load_state_dict(shared)


class Restored(SwappedAverage):
    """Submits an average of its weights, and does not go on with its own."""

    def loaded(self) -> None:
        pass


@pytest.mark.parametrize("kind", [Script, Perturbed, Mixed, OwnBias, OwnModel, Looks, Restored])
def test_changes_on_purpose_are_not_told(tmp_path: Path, kind: Any) -> None:
    """Noise, a mixture, own layers, a second model in the same module and a look at old weights cause no warning."""
    assert in_rounds(tmp_path, kind) == []


def test_weights_of_the_same_round_are_no_earlier_ones(tmp_path: Path) -> None:
    """A script that loads the global model again, to compare it with its own, and then goes on with its own, causes no
    warning. Nor does one that goes on training its own weights after the round.
    """
    model = small()
    script = Script(model)

    def train(fl_round: Any) -> None:
        script.step()
        mine = script.now()
        fl_round.load_into(model)
        model.load_state_dict(mine)
        script.step()
        script.ends()
        fl_round.submit(model)
        model.load_state_dict(mine)
        script.step()

    assert two_sites(World(tmp_path, small(), rounds=4), model, train) == []


def test_weights_after_a_look_at_the_newest_model_are_no_earlier_ones() -> None:
    """A script that measures a newer global model in a round, and goes on with its own weights, causes no warning."""
    model, told = small(), list[str]()
    script, copies = Script(model), WeightCopies(told.append)
    copies.discover_all()

    def load(value: float, *, is_round: bool) -> None:
        tensors = dict(model.named_parameters())
        with copies.loading(model, tensors, refuses=is_round), torch.no_grad():
            for each in tensors.values():
                each.fill_(value)

    for number in (1.0, 2.0, 3.0):
        load(number, is_round=True)
        script.step()
        mine = script.now()
        load(number + 0.5, is_round=False)
        model.load_state_dict(mine)
        script.step()
        copies.look_at_end()
    assert told == []
