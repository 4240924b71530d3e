"""An optimizer that takes the place of another in mid-run: followed when it is passed, refused at its first step else.

Each parameter has the gradient −1 at each step, and the learning rate is 1: a step adds 1 to each weight.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from kit import exported
from kit.corrections import Scaffold, fedprox
from kit.models import Weights
from kit.optimizers import Outside
from kit.servers import PLAIN_DILOCO, state_of
from kit.world import World
from torch import nn
from torch.optim import SGD, Optimizer

from atoll.errors import UsageError

NOT_FOLLOWED = r"SGD, which DiLoCo does not follow, is about to train .*'\w+'.*call follow\(optimizer\) of the DiLoCo"
NOT_CORRECTED = r"SGD, which correct\(\) did not get, is about to train .*'\w+'.* not be corrected.* call correct\(\)"
NOT_COUNTED = r"SGD, which correct\(\) did not get, is about to train .*'\w+'.* not be counted"


def two() -> Weights:
    return Weights(w=torch.zeros(3), b=torch.zeros(2))


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=1.0)


def step(model: nn.Module, optimizer: Any) -> None:
    for value in model.parameters():
        value.grad = torch.full_like(value, -1.0)
    optimizer.step()


@contextmanager
def diloco(folder: Path, model: nn.Module, optimizer: Any, **options: Any) -> Iterator[Any]:
    """A DiLoCo run of one site and three rounds of two steps. It has made one step."""
    with (
        World(folder, copy.deepcopy(model), "a", rounds=3, H=2, **PLAIN_DILOCO) as world,
        world.diloco(model, optimizer, **options) as loop,
    ):
        step(model, optimizer)
        yield loop


@contextmanager
def federated(folder: Path, model: nn.Module, algorithm: str = "fedprox") -> Iterator[Any]:
    with World(folder, copy.deepcopy(model), "a", algorithm=algorithm, rounds=2) as world, world.worker() as worker:
        fl_round = next(iter(worker))
        fl_round.load_into(model)
        yield fl_round


# -- replaced in mid-run


def new(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    return sgd(model)


def shallow(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    return copy.copy(optimizer)


def recreated(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """As from a file: a copy has parameters of its own, in place of which it gets those of the model."""
    copied = copy.deepcopy(optimizer)
    copied.param_groups[0]["params"] = list(model.parameters())
    return copied


def of_new_parameters(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return sgd(model)


def of_one_parameter(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    return SGD([model.get_parameter("b")], lr=1.0)


def of_the_same_memory(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    values = [nn.Parameter(value.data) for value in model.parameters()]
    for value in values:
        value.grad = torch.full_like(value, -1.0)
    return SGD(values, lr=1.0)


REPLACEMENTS = [new, shallow, recreated, of_new_parameters, of_one_parameter, of_the_same_memory]


@pytest.mark.covers("X11")
@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_diloco_refuses_an_optimizer_that_replaces_another(tmp_path: Path, replace: Any) -> None:
    """If another optimizer takes the place of the one that a DiLoCo loop follows, its first step raises an error and
    changes no weight.
    """
    model = two()
    with pytest.raises(UsageError, match=NOT_FOLLOWED), diloco(tmp_path, model, optimizer := sgd(model)):
        step(model, replace(model, optimizer))
    assert model.w.tolist() == [1.0] * 3  # the refused step has changed nothing


@pytest.mark.covers("X11")
def test_a_refused_optimizer_fails_the_site(tmp_path: Path) -> None:
    """If a DiLoCo loop refuses an optimizer, the server's status shows the site as `failed`."""
    model = two()
    with World(tmp_path, two(), "a", rounds=1, H=2, **PLAIN_DILOCO) as world:
        with pytest.raises(UsageError, match=NOT_FOLLOWED), world.diloco(model, sgd(model)):
            step(model, sgd(model))
        assert state_of(world.server) == "failed"


@pytest.mark.covers("X11")
def test_diloco_refuses_replacing_one_of_several_optimizers(tmp_path: Path) -> None:
    """If one of several optimizers of a DiLoCo loop is replaced, the step of the new optimizer is refused."""
    model = two()
    first, second = SGD([model.w], lr=1.0), SGD([model.b], lr=1.0)
    with World(tmp_path, two(), "a", rounds=3, **PLAIN_DILOCO) as world, world.diloco(model, [first, second]):
        step(model, first)
        with pytest.raises(UsageError, match=NOT_FOLLOWED):
            SGD([model.b], lr=1.0).step()


@pytest.mark.covers("X11")
def test_diloco_follows_an_optimizer_passed_to_follow(tmp_path: Path) -> None:
    """A DiLoCo loop goes on with an optimizer that is passed to its method `follow`."""
    # 3 rounds of 2 steps, each of 1, make 6, including the first optimizer's step. After the run, the first optimizer
    # may step.
    model = two()
    with diloco(tmp_path, model, first := sgd(model)) as loop:
        loop.follow(second := sgd(model))
        while not loop.finished:
            step(model, second)
        step(model, first)  # the run is over
    assert exported(tmp_path)["w"].tolist() == [6.0] * 3


class Wrapper:
    """Steps the optimizer that it has."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


@pytest.mark.covers("X11")
def test_diloco_refuses_a_replacement_in_a_wrapper(tmp_path: Path) -> None:
    """If a script replaces the optimizer inside a wrapper, the next step of the wrapper is refused."""
    model = two()
    with diloco(tmp_path, model, wrapper := Wrapper(sgd(model))):
        wrapper.optimizer = sgd(model)
        with pytest.raises(UsageError, match=NOT_FOLLOWED):
            step(model, wrapper)


def masters(model: nn.Module) -> Outside:
    return Outside(model.parameters(), torch.float64)


@pytest.mark.covers("X11")
def test_diloco_refuses_replaced_optimizers_of_master_weights(tmp_path: Path) -> None:
    """If an optimizer that steps master copies of the weights is replaced by another such optimizer, its step is
    refused.
    """
    model = two()
    nn.init.ones_(model.w)  # zeros alone are not taken for copies
    with diloco(tmp_path, model, masters(model)):
        with pytest.raises(UsageError, match=NOT_FOLLOWED):
            step(model, masters(model))


@pytest.mark.covers("X11")
def test_a_partial_loop_lets_other_parameters_train(tmp_path: Path) -> None:
    """With `allow_partial`, another optimizer may train the parameters that the DiLoCo loop does not train. An
    optimizer that also steps the loop's own parameters is refused.
    """
    model = two()
    with diloco(tmp_path, model, SGD([model.w], lr=1.0), allow_partial=True):
        step(model, SGD([model.b], lr=1.0))
        with pytest.raises(UsageError, match=NOT_FOLLOWED):
            step(model, sgd(model))


@pytest.mark.covers("X11")
@pytest.mark.parametrize("replace", REPLACEMENTS[:3])
@pytest.mark.parametrize(
    ("algorithm", "told"), [("fedprox", NOT_CORRECTED), ("scaffold", NOT_CORRECTED), ("fednova", NOT_COUNTED)]
)
def test_a_round_refuses_optimizers_not_passed_to_correct(
    tmp_path: Path, algorithm: str, told: str, replace: Any
) -> None:
    """In FedProx, SCAFFOLD and FedNova, a step of an optimizer that was not passed to `correct` raises an error."""
    # After `correct` gets this optimizer, the round goes on and counts the steps of both optimizers. After `submit`,
    # any optimizer may step.
    model = two()
    with federated(tmp_path, model, algorithm) as fl_round:
        with fl_round.correct(model, optimizer := sgd(model)) as hooks:
            step(model, optimizer)
            other = replace(model, optimizer)
            with pytest.raises(UsageError, match=told):
                step(model, other)
        with fl_round.correct(model, other):
            step(model, other)
        assert hooks.steps == 2
        fl_round.submit(model)
        step(model, optimizer)  # the round is over


@pytest.mark.covers("X11")
def test_fedprox_corrects_a_newly_attached_optimizer() -> None:
    """FedProx refuses a step of a second optimizer until this optimizer is attached, and then corrects its steps."""
    # With μ = 1/2, the second step has the gradient −1 + 1/2·1, so the weights become 1 + 1/2.
    model = two()
    prox = fedprox(model, mu=0.5)
    with prox.attach(optimizer := sgd(model)):
        step(model, optimizer)
        with pytest.raises(UsageError, match=NOT_CORRECTED):
            step(model, sgd(model))
    with prox.attach(second := sgd(model)):
        step(model, second)
    assert model.w.tolist() == [1.5] * 3


@pytest.mark.covers("X11")
@pytest.mark.parametrize("told_to_optimizer", [True, False])
def test_a_round_refuses_a_replaced_parameter(tmp_path: Path, told_to_optimizer: bool) -> None:
    """If a script replaces a parameter of the model during a round, an error names the parameter."""
    # If the optimizer holds the new parameter, its next step raises the error. If the optimizer does not hold it,
    # `submit` raises the error.
    model = two()
    with federated(tmp_path, model) as fl_round, fl_round.correct(model, optimizer := sgd(model)):
        step(model, optimizer)
        model.b = nn.Parameter(torch.zeros(2))
        if told_to_optimizer:
            optimizer.add_param_group({"params": [model.b]})
        else:
            step(model, optimizer)
        refused: Any = partial(step, model, optimizer) if told_to_optimizer else partial(fl_round.submit, model)
        with pytest.raises(UsageError, match=r"parameter 'b' was added, removed or replaced.*does not correct the new"):
            refused()


# -- what is no replacement


class Outer(Optimizer):
    """Steps another optimizer of the same parameters, which it has in a list."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = [inner]

    def step(self, closure: Any = None) -> None:
        for each in self.inner:
            each.step()


def outer(model: nn.Module, optimizer: Optimizer) -> Any:
    return Outer(optimizer)


def scheduled(model: nn.Module, optimizer: Optimizer) -> Any:
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return optimizer


def scaled(model: nn.Module, optimizer: Optimizer) -> Any:
    class Scaled:
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)

        def step(self) -> None:
            self.scaler.scale(torch.zeros(()))
            self.scaler.step(optimizer)
            self.scaler.update()

    return Scaled()


def reloaded(model: nn.Module, optimizer: Optimizer) -> Any:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer


def beside_another_model(model: nn.Module, optimizer: Optimizer) -> Any:
    other = copy.deepcopy(model)
    for _ in range(2):
        step(other, sgd(other))
    return optimizer


def beside_an_equal_model_in_more_bits(model: nn.Module, optimizer: Optimizer) -> Any:
    other, values = copy.deepcopy(model).double(), list(model.parameters())
    gradients = [value.grad for value in values]
    model.zero_grad()
    step(other, sgd(other))
    for value, gradient in zip(values, gradients, strict=True):
        value.grad = gradient
    return optimizer


def beside_a_teacher(model: nn.Module, optimizer: Optimizer) -> Any:
    """A copy of the model in more bits, trained on something else while the model has gradients."""
    other = copy.deepcopy(model).double()
    for sign, value in zip((1.0, -1.0), other.parameters(), strict=True):
        value.grad = torch.full_like(value, sign)
    sgd(other).step()
    return optimizer


def beside_frozen_parameters(model: nn.Module, optimizer: Optimizer) -> Any:
    frozen = SGD([model.get_parameter("b").requires_grad_(False)], lr=0.0)
    for _ in range(2):
        frozen.step()
    return optimizer


def beside_a_schedule_that_is_tried(model: nn.Module, optimizer: Optimizer) -> Any:
    model.zero_grad()
    sgd(model).step()
    return optimizer


def in_a_fork(model: nn.Module, optimizer: Optimizer) -> Any:
    process = os.fork()
    if not process:
        try:
            for value in model.parameters():
                value.grad = None
            next(iter(model.parameters())).grad = torch.zeros(3)
            sgd(model).step()
        except BaseException:  # the child must not go on as the test
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    return optimizer


RIGHT = [
    outer,
    scheduled,
    scaled,
    reloaded,
    beside_another_model,
    beside_an_equal_model_in_more_bits,
    beside_a_teacher,
    beside_frozen_parameters,
    beside_a_schedule_that_is_tried,
    in_a_fork,
]


@pytest.mark.parametrize("change", RIGHT)
@pytest.mark.parametrize("kind", ["diloco", "fedprox", "scaffold"])
def test_optimizers_that_replace_nothing_are_accepted(tmp_path: Path, kind: str, change: Any) -> None:
    """DiLoCo, FedProx and SCAFFOLD accept a wrapped, scheduled, scaled or reloaded optimizer, and a second optimizer
    that does not train the model.
    """
    # With μ = 1/2, FedProx makes the weights 1, 1.5 and 1.75. In DiLoCo and in SCAFFOLD without controls, each step
    # adds 1.
    model = two()
    if kind == "diloco":
        with diloco(tmp_path, model, optimizer := sgd(model)) as loop:
            optimizer = change(model, optimizer)
            while not loop.finished:
                step(model, optimizer)
        assert exported(tmp_path)["w"].tolist() == [6.0] * 3
        return
    none = {"w": torch.zeros(3), "b": torch.zeros(2)}
    corrected = fedprox(model, mu=0.5) if kind == "fedprox" else Scaffold(model, none, none)
    with corrected.attach(optimizer := sgd(model)) as hooks:
        step(model, optimizer)
        optimizer = change(model, optimizer)
        for _ in range(2):
            step(model, optimizer)
    assert hooks.steps == 3
    assert model.w.tolist() == [1.75 if kind == "fedprox" else 3.0] * 3
    step(model, sgd(model))  # the block has ended


def test_any_optimizer_may_step_after_leaving(tmp_path: Path) -> None:
    """Before a script calls `correct`, and after the site has left, any optimizer may train the model."""
    model = two()
    with federated(tmp_path, model) as fl_round:
        step(model, sgd(model))  # before correct()
        fl_round.correct(model, optimizer := sgd(model))
        step(model, optimizer)
    step(model, sgd(model))


@pytest.mark.parametrize("algorithm", ["fedavg", "fednova"])
def test_uncorrected_parameters_may_have_any_optimizer(tmp_path: Path, algorithm: str) -> None:
    """In FedAvg and FedNova, another optimizer may train the parameters that the corrected optimizer does not hold. In
    FedAvg, another optimizer may train all parameters.
    """
    model = two()
    with federated(tmp_path, model, algorithm) as fl_round, fl_round.correct(model, first := SGD([model.w], lr=1.0)):
        step(model, first)
        step(model, SGD([model.b], lr=1.0))
        if algorithm == "fedavg":
            step(model, sgd(model))
        fl_round.submit(model)


class Watched(nn.Parameter):
    """Records the threads that read its gradient."""

    readers: ClassVar[set[str]] = set()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__self__", None) is torch.Tensor.grad:
            cls.readers.add(threading.current_thread().name)
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("kind", ["diloco", "fedavg"])
def test_a_step_reads_no_other_threads_gradients(tmp_path: Path, kind: str) -> None:
    """An optimizer step in one thread does not read the gradients of a model that another thread trains."""
    # A backward pass replaces gradients without the GIL, so a read at that moment corrupts the memory of the process.
    # The other thread trains an equal model with master weights in fp64. Only gradients could tell to which model these
    # belong.
    model = two()
    model.w, model.b = (Watched(value.data + 1) for value in (model.w, model.b))
    optimizer = sgd(model)
    with diloco(tmp_path, model, optimizer) if kind == "diloco" else federated(tmp_path, model, kind):
        other = two()
        other.load_state_dict(model.state_dict())
        Watched.readers.clear()
        thread = threading.Thread(target=step, args=(other, masters(other)), name="other")
        thread.start()
        thread.join()
        assert Watched.readers == set()
        step(model, optimizer)
        assert Watched.readers == {threading.current_thread().name}


@pytest.mark.covers("X11")
def test_master_weights_of_equal_models_are_not_confused(tmp_path: Path) -> None:
    """Two DiLoCo loops in one process do not confuse the master weights of two models with equal values."""
    # The second model starts with the values that the first model has after a step, and both models have equal
    # gradients.
    model = two()
    nn.init.ones_(model.w)
    with diloco(tmp_path / "one", model, masters(model)):
        other = copy.deepcopy(model)
        with diloco(tmp_path / "other", other, masters(other)):
            assert other.w.tolist() == [3.0] * 3


# -- optimizers without gradients


class ZeroOrder(Optimizer):
    """As MeZO does: the step has a random direction of a seed, and a length that the script has measured."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 1.0})

    @torch.no_grad()
    def step(self, length: Any = 1.0) -> None:
        random = torch.Generator().manual_seed(0)
        for value in self.param_groups[0]["params"]:
            value.add_(torch.randn(value.shape, generator=random), alpha=length)


@pytest.mark.covers("X11")
@pytest.mark.parametrize("kind", ["diloco", "fedprox", "scaffold", "fednova"])
def test_replacing_by_a_gradient_free_optimizer_is_refused(tmp_path: Path, kind: str) -> None:
    """If an optimizer that uses no gradients replaces the loop's optimizer, its second step is refused; the first one
    only shows what it trains.
    """
    model = two()
    told = "ZeroOrder, which .* is about to train the model; for example, 'b'"
    with contextlib.ExitStack() as stack:
        if kind == "diloco":
            stack.enter_context(diloco(tmp_path, model, sgd(model)))
        else:
            stack.enter_context(stack.enter_context(federated(tmp_path, model, kind)).correct(model, sgd(model)))
        model.zero_grad()
        optimizer = ZeroOrder(model)
        optimizer.step()
        with pytest.raises(UsageError, match=told):
            optimizer.step()


def test_gradient_free_steps_that_move_nothing_are_accepted(tmp_path: Path) -> None:
    """A step without gradients by a second optimizer is accepted if it does not move the weights."""
    # 3 rounds of 2 steps of the followed optimizer, each of 1, make 6.
    model = two()
    with diloco(tmp_path, model, optimizer := sgd(model)) as loop:
        still = ZeroOrder(model)
        while not loop.finished:
            gradients = [value.grad for value in model.parameters()]
            model.zero_grad()
            still.step(0.0)
            still.step(0.0)
            for value, gradient in zip(model.parameters(), gradients, strict=True):
                value.grad = gradient
            step(model, optimizer)
    assert exported(tmp_path)["w"].tolist() == [6.0] * 3
