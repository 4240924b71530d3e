"""Optimizers that keep a copy of the weights: it is loaded with them, or the load is refused, or what undid it is told.

Every optimizer here steps as SGD does, w ← w − g, but from a copy of the weights. Site a has the gradient −1 and site b
−3, H is 2, and the outer step is half the mean: the sites add 2 and 6 in a round, so the model gains 2.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from kit.models import Weights
from kit.optimizers import Flat, InList, InState, Masters, Outside, Padded, ScheduleFree, fp32
from kit.servers import PLAIN_DILOCO
from kit.world import World
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD

import atoll
from atoll.algorithms.weight_copies import WeightCopies
from atoll.errors import UsageError

GRADIENTS = {"a": -1.0, "b": -3.0}
ROUNDS = 3
RESULT = {"w": 6.0, "b": 7.0}
"""3 rounds of 2 more than at the start."""
HALF = PLAIN_DILOCO | {"algorithm.outer_optimizer.lr": 0.5}


def two(dtype: torch.dtype = torch.float32) -> Weights:
    """two parameters of one shape, one of them zero."""
    return Weights(w=torch.zeros(4, dtype=dtype), b=torch.ones(4, dtype=dtype))


class InDict(InList):
    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.master_of = dict(zip(self.weights, self.fp32_groups.pop(), strict=True))

    def copies(self) -> list[Tensor]:
        return [self.master_of[value] for value in self.weights]


class InGroup(InList):
    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.param_groups[0]["masters"] = self.fp32_groups.pop()

    def copies(self) -> list[Tensor]:
        return list(self.param_groups[0]["masters"])


class Reshaped(Masters):
    """Each copy has two rows."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.rows = [fp32(value).view(2, 2) for value in self.weights]

    def copies(self) -> list[Tensor]:
        return [each.view(4) for each in self.rows]


class ReshapedInState(Masters):
    def copies(self) -> list[Tensor]:
        rows = [self.state[value].setdefault("master", fp32(value).view(2, 2)) for value in self.weights]
        return [each.view(4) for each in rows]


def step(model: Any, optimizer: Any, site: str, number: int = 0) -> None:
    for value in model.parameters():
        value.grad = torch.full_like(value, GRADIENTS[site])
    optimizer.step()


def run(folder: Path, make: Callable[[Any], Any], *, dtype: Any = torch.float32, **more: Any) -> Any:
    """A run of two sites; what it exports."""
    world = World(folder, two(dtype), rounds=ROUNDS, **HALF | {"diloco.sync_every": 2} | more)
    sites = world.run(steps=30, build=lambda: two(dtype), inner=lambda model: make(model.parameters()), step=step)
    for model in sites.models.values():
        assert values(dict(model.named_parameters())) == values(world.result)
    return values(world.result)


def values(tensors: dict[str, Any]) -> dict[str, float]:
    assert all(bool((each == each[0]).all()) for each in tensors.values())
    return {name: each[0].item() for name, each in sorted(tensors.items(), reverse=True)}


def plain(parameters: Any) -> Any:
    return SGD(parameters, lr=1.0)


@pytest.mark.covers("X11")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, dtype) for kind in (InState, InList, InDict, InGroup) for dtype in (torch.float32, torch.bfloat16)),
        *((kind, dtype) for kind in (Reshaped, ReshapedInState, Flat) for dtype in (torch.float32, torch.bfloat16)),
        (Padded, torch.bfloat16),
        (Outside, torch.bfloat16),  # in fp32 its parameters could be another model's: the next test
        *((plain, dtype) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_master_weights_follow_each_synchronisation(tmp_path: Path, kind: Any, dtype: torch.dtype) -> None:
    """If an optimizer steps its own full-precision copies of the weights, a DiLoCo run has the same result as without
    copies.
    """
    assert run(tmp_path, kind, dtype=dtype) == RESULT


@pytest.mark.covers("X11")
def test_master_weights_follow_beside_equal_shaped_buffers(tmp_path: Path) -> None:
    """Master weights follow each synchronisation, even if a buffer of the same shape stands between the parameters."""
    # One of the parameters has no full-precision copy. 3 rounds that each add half of 2 make 3.

    def build() -> nn.Module:
        model = nn.ModuleList([two(torch.bfloat16), two(torch.bfloat16)])
        model[0].b = nn.Parameter(torch.ones(4))
        model[0].register_buffer("mean", torch.zeros(4, dtype=torch.bfloat16))
        return model

    model = build()
    optimizer = Outside(model.parameters())
    world = World(tmp_path, build(), "a", rounds=3, H=2, **HALF)
    world.train_steps(model, optimizer, lambda: step(model, optimizer, "a"))
    # 3 rounds of half of 2
    assert values(world.result) == {"1.w": 3.0, "1.b": 4.0, "0.w": 3.0, "0.mean": 0.0, "0.b": 4.0}


def test_refuses_an_optimizer_of_another_model(tmp_path: Path) -> None:
    """A DiLoCo loop refuses an optimizer of another model, even if both models were built alike and have equal
    parameters.
    """
    model = two()
    with World(tmp_path, two(), "a", **PLAIN_DILOCO) as world:
        with pytest.raises(UsageError, match="holds none of the model's parameters"):
            world.diloco(model, plain(two().parameters())).start()


@pytest.mark.covers("X11")
@pytest.mark.parametrize(
    "settings",
    [
        {"diloco.num_fragments": 2},
        pytest.param({"diloco.fragment_sync_delay": 1}, marks=pytest.mark.long),
        pytest.param({"diloco.fragment_update_alpha": 0.5}, marks=pytest.mark.long),
        {"diloco.num_fragments": 2, "diloco.fragment_sync_delay": 1, "diloco.fragment_update_alpha": 0.5},
    ],
    ids=str,
)
def test_master_weights_follow_fragments_and_merges(tmp_path: Path, settings: dict[str, Any]) -> None:
    """With fragments, delays and partial merges, optimizers with copies of the weights give the same result as an
    optimizer without.
    """
    in_state, in_list, without = (run(tmp_path / kind.__name__, kind, **settings) for kind in (InState, InList, plain))
    assert in_state == in_list == without


def test_another_model_is_not_treated_as_copy(tmp_path: Path) -> None:
    """If an optimizer also trains a second model, Atoll does not treat the second model as a copy of the weights."""
    # The second model starts with the values of the first, as a copy would. Its 6 steps of 2 make 12.
    model, other = two(), two()
    optimizer = plain([*model.parameters(), *other.parameters()])

    def train() -> None:
        for value in other.parameters():
            value.grad = torch.full_like(value, -2.0)
        step(model, optimizer, "a")

    World(tmp_path, two(), "a", rounds=3, H=2, **HALF).train_steps(model, optimizer, train)
    assert values(dict(model.named_parameters())) == {"w": 3.0, "b": 4.0}
    assert values(dict(other.named_parameters())) == {"w": 12.0, "b": 13.0}


def test_zero_moments_are_not_treated_as_copies(tmp_path: Path) -> None:
    """A moment that is zero is not treated as a copy of weights that are zero: it stays zero."""
    moments: list[Tensor] = []
    model = two()
    model.b.requires_grad_(False)
    optimizer = InState([model.w])

    def train() -> None:
        step(model, optimizer, "a")
        moments.extend(each["moment"] for each in optimizer.state.values())

    World(tmp_path, two(), "a", rounds=3, H=1, **PLAIN_DILOCO).train_steps(model, optimizer, train)
    assert len(moments) == 3
    assert not any(bool(each.any()) for each in moments)


# -- copies that differ from the weights at most steps


class Lookahead:
    """Every k steps, slow weights move half the way to the weights, which begin there again."""

    def __init__(self, parameters: Iterable[Tensor], k: int, made: int = 0) -> None:
        self.optimizer, self.k, self.made = plain(parameters), k, made
        self.slow: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        fast = self.optimizer.param_groups[0]["params"]
        for value in fast:
            self.slow.setdefault(value, value.clone())
        self.optimizer.step()
        self.made += 1
        for value in fast if self.made % self.k == 0 else ():
            self.slow[value].lerp_(value, 0.5)
            value.copy_(self.slow[value])


class WithAverage(SGD):
    """Keeps an average for evaluation, which equals the weights after the first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for value in self.param_groups[0]["params"]:
            self.state[value].setdefault("ema", value.clone()).lerp_(value, 0.5)


@pytest.mark.covers("X11")
def test_slow_weights_equal_to_the_weights_follow(tmp_path: Path) -> None:
    """The slow weights of Lookahead follow a synchronisation if they equal the weights there. k = H = 2: the sites add
    half of 2 and half of 6 in a round.
    """
    # The outer step takes half of their mean of 2, so the model gains 1.
    assert run(tmp_path, lambda parameters: Lookahead(parameters, k=2)) == {"w": 3.0, "b": 4.0}


@pytest.mark.covers("X11")
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda each: Lookahead(each, k=3), "Lookahead.slow, .* after a multiple of 3 steps"),
        (lambda each: Lookahead(each, k=4, made=3), "Lookahead.slow, .*equal after step 1. Use .* without"),
        (ScheduleFree, "ScheduleFree.state.z, .*equal after step 1. Use .* without"),
    ],
    ids=["lookahead", "lookahead-from-step-1", "schedule-free"],
)
def test_copies_that_differ_from_weights_are_refused(tmp_path: Path, make: Callable[[Any], Any], named: str) -> None:
    """If an optimizer's copy of the weights differs from the weights at a synchronisation, the error names the copy and
    a remedy that fits it.
    """
    # With H = 4, these copies have equalled the weights at an earlier step.
    model = two()
    optimizer = make(model.parameters())
    with World(tmp_path, two(), "a", rounds=2, H=4, **PLAIN_DILOCO) as world, world.diloco(model, optimizer):
        for _ in range(3):
            step(model, optimizer, "a")
        with pytest.raises(UsageError, match=f"(?s)a copy of the weights, {named}"):
            step(model, optimizer, "a")


class WithPlainName(SGD):
    """An average with a name that does not say what it is, and momentum."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for value in self.param_groups[0]["params"]:
            self.state[value].setdefault("slow", value.clone() - 1).lerp_(value, 0.25)
            self.state[value].setdefault("velocity", torch.zeros_like(value)).mul_(0.5).add_(value.grad)


@pytest.mark.covers("X11")
@pytest.mark.parametrize("make", [ScheduleFree, WithPlainName], ids=["schedule-free", "average"])
def test_a_used_schedule_free_optimizer_is_refused(tmp_path: Path, make: Any) -> None:
    """A DiLoCo loop refuses a schedule-free optimizer that has stepped before the run."""
    # An optimizer that keeps only an average is accepted. After earlier steps, the `z` of a schedule-free optimizer
    # does not equal the weights at any step of the run.

    def build() -> nn.Module:
        return nn.ParameterList([torch.ones(16), torch.ones(4, 4)])

    model, random = build(), torch.Generator().manual_seed(0)
    optimizer = make(model.parameters())

    def train() -> None:
        for value in model.parameters():
            value.grad = value.detach() * 0.1 + torch.randn(value.shape, generator=random) * 0.1
        optimizer.step()

    for _ in range(10):
        train()
    refused = pytest.raises(UsageError, match=r"ScheduleFree\.state\.z, that has drawn them")
    with World(tmp_path, build(), "a", rounds=2, H=5, **PLAIN_DILOCO) as world, world.diloco(model, optimizer):
        with refused if make is ScheduleFree else contextlib.nullcontext():
            for _ in range(10):
                train()


def test_synchronisations_keep_an_average_of_the_weights(tmp_path: Path) -> None:
    """A synchronisation does not change an average of the weights that the optimizer keeps."""
    # With one site, the steps from 0 give 1, 2, 3 and 4. The average is 1, 1.5, 2.25 and 3.125.
    model = two()
    optimizer = WithAverage(model.parameters(), lr=1.0)
    world = World(tmp_path, two(), "a", rounds=2, H=2, **PLAIN_DILOCO)
    world.train_steps(model, optimizer, lambda: step(model, optimizer, "a"))
    assert optimizer.state[model.w]["ema"].tolist() == [3.125] * 4


# -- copies that are not found


class Hidden(Masters):
    """Copies with the other sign."""

    def copies(self) -> list[Tensor]:
        return [self.state[value].setdefault("minus", -fp32(value)) for value in self.weights]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for value, minus in zip(self.weights, self.copies(), strict=True):
            minus += value.grad
            value.copy_(-minus)


def late_lookahead(parameters: Any) -> Any:
    return Lookahead(parameters, k=3)


@pytest.mark.covers("X11")
@pytest.mark.parametrize(
    ("make", "every", "told"),
    [
        (Hidden, 4, "a copy of the weights that the optimizer or the script keeps"),
        (late_lookahead, 2, "Lookahead.slow"),
    ],
    ids=["minus", "lookahead"],
)
def test_undone_synchronisations_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Any], Any], every: int, told: str
) -> None:
    """If an optimizer's copies of the weights undo a synchronisation, the site's log, the server's log and the status
    say that the result is wrong.
    """
    caplog.set_level(logging.WARNING)

    def warned() -> bool:
        return any(told in text and "the result is wrong" in text for text in world.status.warnings)

    def work(model: Any, optimizer: Any, site: str, number: int) -> None:
        step(model, optimizer, site)
        if number == 2 * every - 1 and site == "a":
            wait_until(warned, "the warning")

    def inner(model: Any) -> Any:
        return make(model.parameters())

    with World(tmp_path, two(), rounds=4, H=every, **HALF | {"network.heartbeat_interval_s": 0.2}) as world:
        with contextlib.suppress(UsageError):  # the next synchronisation of Lookahead is refused
            world.begin(steps=2 * every, build=two, inner=inner, step=work).join()
    lines = {each.name for each in caplog.records if told in each.getMessage()}
    assert "atoll" in lines
    assert any(name.startswith("atoll.server") for name in lines)


class PartlyHidden(Hidden):
    """Copies with the other sign of matrices alone; other weights are stepped themselves."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for value in self.weights:
            if value.dim() == 1:
                value -= value.grad
                continue
            minus = self.state[value].setdefault("minus", -fp32(value))
            minus += value.grad
            value.copy_(-minus)


@pytest.mark.covers("X11")
@pytest.mark.parametrize(("make", "is_undone"), [(PartlyHidden, True), (plain, False)])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_partly_undone_synchronisations_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any, is_undone: bool, noise: float
) -> None:
    """If an optimizer undoes a synchronisation for some weights only, the log says that the result is wrong."""
    # A plain optimizer causes no warning. The biases, of which there are as many as weights, follow the
    # synchronisation. The gradients may be noisy.

    def build() -> nn.Module:
        return nn.ParameterList([torch.zeros(8, 8), torch.zeros(32), torch.zeros(32)])

    model, random = build(), torch.Generator().manual_seed(0)
    optimizer = make(model.parameters())

    def train() -> None:
        for value in model.parameters():
            value.grad = torch.randn(value.shape, generator=random) * noise - 1
        optimizer.step()

    World(tmp_path, build(), "a", rounds=4, H=6, **HALF).train_steps(model, optimizer, train)
    assert ("the result is wrong" in caplog.text) is is_undone


@pytest.mark.covers("X11")
def test_optimizers_that_step_in_turn_cause_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If each parameter has its own optimizer, the log does not say that a synchronisation was undone."""
    # Each step of 1 is as long as the step that would undo a synchronisation, which is half of 2.

    def build() -> nn.Module:
        return nn.ParameterList([torch.zeros(8), torch.zeros(8)])

    model = build()
    optimizers = [plain([value]) for value in model.parameters()]

    def train() -> None:
        for optimizer in optimizers:
            step(model, optimizer, "a")

    World(tmp_path, build(), "a", rounds=4, H=2, **HALF).train_steps(model, optimizers, train)
    assert "the result is wrong" not in caplog.text


# -- federated rounds with one optimizer


def with_another_site(world: World, model: Any, train: Callable[[Any], None]) -> list[str]:
    """Train the site a's model in a run of two sites, of which b adds 10 in each round; what the server warns of.

    `train` gets each round after its model is loaded.
    """
    with world:
        world.join("b")
        with world.worker("a") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                train(fl_round)
                fl_round.submit(model)
                world.move("b", fl_round.number, 10.0)
        world.finish()
        return list(world.status.warnings)


@pytest.mark.covers("X11")
@pytest.mark.parametrize("corrects", [False, True], ids=["unknown", "hooked"])
@pytest.mark.parametrize("kind", [InState, InList, InDict, InGroup, ReshapedInState, Flat])
def test_master_weights_follow_federated_rounds(tmp_path: Path, kind: Any, corrects: bool) -> None:
    """In a federated run, an optimizer's copies of the weights follow the model that each round loads."""
    # This site's 2 steps add 2 and the other site adds 10, so the model gains 6 in each of 3 rounds. The values in the
    # first loaded model differ from those for which the optimizer was made.
    model = two()
    nn.init.constant_(model.w, -5.0)
    nn.init.constant_(model.b, -6.0)
    optimizer = kind(model.parameters())

    def train(fl_round: Any) -> None:
        with fl_round.correct(model, optimizer) if corrects else contextlib.nullcontext():
            step(model, optimizer, "a")
            step(model, optimizer, "a")

    world = World(tmp_path, two(), rounds=3)
    with_another_site(world, model, train)
    assert values(world.result) == {"w": 18.0, "b": 19.0}


@pytest.mark.covers("X11")
def test_master_weights_in_wrappers_follow_rounds(tmp_path: Path) -> None:
    """If a wrapper contains an optimizer with its own copies of the weights, these copies follow each round."""
    # Atoll knows neither the wrapper nor its optimizer. The gradients show to which weights the copies belong. The
    # steps add 2 in a round, and the server keeps half of the change, so the model gains 1 in each of 3 rounds.
    model, optimizers = two(torch.bfloat16), list[Outside]()

    def train(_: Any) -> None:
        optimizers[:] = optimizers or [Outside(model.parameters())]
        step(model, optimizers[0], "a")
        step(model, optimizers[0], "a")

    settings = {"algorithm.outer_optimizer.name": "sgd", "algorithm.outer_optimizer.lr": 0.5}
    world = World(tmp_path, two(torch.bfloat16), "a", rounds=3, **settings)
    world.train_rounds(model, train)
    assert values(world.result) == {"w": 3.0, "b": 4.0}


@pytest.mark.covers("X11")
def test_master_weights_of_two_sites_are_not_confused(tmp_path: Path) -> None:
    """If two sites in one process have optimizers of the same class, Atoll does not confuse their copies of the
    weights.
    """
    # The sites add 2 and 6 in a round, so the model gains 4. The last round starts from 8 and 9.
    models = {site: two() for site in GRADIENTS}
    optimizers = {site: InList(model.parameters()) for site, model in models.items()}
    with World(tmp_path, two(), GRADIENTS, rounds=3) as world, world.worker("a") as worker, world.worker("b") as other:
        for rounds in zip(worker, other, strict=False):
            by_site = dict(zip(GRADIENTS, rounds, strict=True))
            for site, fl_round in by_site.items():
                fl_round.load_into(models[site])
            for site in [*GRADIENTS, *GRADIENTS]:
                step(models[site], optimizers[site], site)
            for site, fl_round in by_site.items():
                fl_round.submit(models[site], weight=1.0)
    assert values(dict(models["a"].named_parameters())) == {"w": 10.0, "b": 11.0}
    assert values(dict(models["b"].named_parameters())) == {"w": 14.0, "b": 15.0}


@pytest.mark.covers("X11")
@pytest.mark.parametrize("kind", [InList, Outside])
def test_a_personal_model_keeps_its_master_weights(tmp_path: Path, kind: Any) -> None:
    """If a site also trains a personal model, the rounds do not change the master weights of that model."""
    # The personal model starts with the values of this site's model and makes 6 steps of 2. The run's model gains 2 in
    # each of 3 rounds.
    model, shared = two(torch.bfloat16), two(torch.bfloat16)
    personal = deepcopy(model)
    nn.init.constant_(shared.w, 10.0)
    optimizer, own = plain(model.parameters()), kind(personal.parameters())

    def train(_: Any) -> None:
        for _ in range(2):
            for value in personal.parameters():
                value.grad = torch.full_like(value, -2.0)
            own.step()
            step(model, optimizer, "a")

    world = World(tmp_path, shared, "a", rounds=3)
    world.train_rounds(model, train)
    assert values(world.result) == {"w": 16.0, "b": 7.0}
    assert values(dict(personal.named_parameters())) == {"w": 12.0, "b": 13.0}


class WithNumbers(SGD):
    """Keeps a velocity, which begins at zero, and a count, which begins at one, for each parameter."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, lr=1.0)
        for value in self.param_groups[0]["params"]:
            self.state[value] = {"velocity": torch.zeros_like(value), "count": torch.ones(())}


@pytest.mark.covers("X11")
def test_velocities_and_counts_are_not_treated_as_copies() -> None:
    """A velocity or a count in an optimizer's state is not treated as a copy of a weight with an equal value."""
    # The velocity equals a weight of zeros, and the count equals a weight with the single element 1. A load of 5
    # changes the weights only.
    model = nn.ParameterDict({"zero": torch.zeros(3), "one": torch.ones(1)})
    weights, copies = dict(model.named_parameters()), WeightCopies(pytest.fail)
    for name, weight in weights.items():
        optimizer = WithNumbers([weight])
        copies.watch(optimizer)
        with copies.loading({name: weight}, {name: weight}), torch.no_grad():
            weight.fill_(5.0)
        assert weight.unique().tolist() == [5.0]
        assert {key: each.unique().tolist() for key, each in optimizer.state[weight].items()} == {
            "velocity": [0.0],
            "count": [1.0],
        }


@pytest.mark.covers("X11")
def test_a_load_keeps_a_step_of_master_weights() -> None:
    """If only the optimizer's copies of the weights have made a step, the next load adds to the weights after this
    step.
    """
    # 5 is loaded, the step adds 1, and the next load adds 10, which makes 16.
    model = two()
    masters = [nn.Parameter(value.detach().double()) for value in model.parameters()]
    optimizer, copies, tensors = SGD(masters, lr=1.0), WeightCopies(pytest.fail), dict(model.named_parameters())
    copies.watch(optimizer)
    with copies.loading(model, tensors), torch.no_grad():
        for value in tensors.values():
            value.fill_(5.0)
    for master in masters:
        master.grad = torch.full_like(master, -1.0)
    optimizer.step()
    with copies.loading(model, tensors), torch.no_grad():
        for value in tensors.values():
            value.add_(10.0)
    assert [each.unique().tolist() for each in (*tensors.values(), *masters)] == [[16.0]] * 4


@pytest.mark.covers("X11")
def test_master_weights_from_zero_cause_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the weights start at zero, an optimizer with copies of the weights causes no warning of an undone
    synchronisation.
    """
    # The first load changes nothing that a step could undo. The site adds 2 in each of 3 rounds.

    def zeros() -> nn.Module:
        return nn.ParameterList([torch.zeros(4), torch.zeros(4)])

    model = zeros()
    optimizer = InList(model.parameters())
    world = World(tmp_path, zeros(), "a", rounds=3, H=2, **PLAIN_DILOCO)
    world.train_steps(model, optimizer, lambda: step(model, optimizer, "a"))
    assert values(world.result) == {"1": 6.0, "0": 6.0}
    assert "the result is wrong" not in caplog.text


# -- federated rounds with an optimizer that calls no hooks


@pytest.mark.covers("X11")
@pytest.mark.parametrize("passes", ["nothing", "the inner one"])
def test_slow_weights_in_unknown_wrappers_are_refused(tmp_path: Path, passes: str) -> None:
    """If slow weights in an unknown wrapper differ from the weights at the end of a round, the site gets an error that
    names them.
    """
    # This Lookahead is not a torch optimizer. With k = 2, its slow weights differ from the weights after a round of 3
    # steps.
    model = two()
    lookahead = Lookahead(model.parameters(), k=2)

    def train(fl_round: Any) -> None:
        assert fl_round.number == 1
        if passes == "the inner one":
            fl_round.correct(model, lookahead.optimizer)
        for _ in range(3):
            step(model, lookahead, "a")

    with pytest.raises(UsageError, match=r"(?s)Lookahead\.slow, .* after a multiple of 2 steps"):
        World(tmp_path, two(), "a", rounds=3).train_rounds(model, train)


class Handwritten:
    """No torch optimizer. Steps fp32 copies of the weights, which may be made late; or the weights themselves."""

    def __init__(self, model: Any, *, copies: bool = True, late: bool = False) -> None:
        self.weights, self.has_copies = list(model.parameters()), copies
        self.masters = [] if late else [fp32(value) for value in self.weights]

    @torch.no_grad()
    def step(self) -> None:
        self.masters = self.masters or [fp32(value) for value in self.weights]
        for value, master in zip(self.weights, self.masters, strict=True):
            assert value.grad is not None
            if self.has_copies:
                value.copy_(master.sub_(value.grad))
            else:
                value -= value.grad


def by_hand(model: Any) -> None:
    for value in model.parameters():
        value.grad = torch.full_like(value, -1.0)


def backward(model: Any) -> None:
    """The gradient is −1 again."""
    model.zero_grad()
    (-sum(value.sum() for value in model.parameters())).backward()


def towards_five(model: Any) -> None:
    """With steps of the whole gradient, 5 is reached at the first step of a round."""
    for value in model.parameters():
        value.grad = value.detach() - 5


def gently_towards_five(model: Any) -> None:
    model.zero_grad()
    sum((value - 5).square().sum() / 20 for value in model.parameters()).backward()


def shifted() -> nn.Module:
    """The weights that the server begins with are other ones than those of the site."""
    model = two()
    nn.init.constant_(model.w, 5.0)
    return model


@pytest.mark.covers("X11")
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("server_model", [two, shifted], ids=["equal", "shifted"])
@pytest.mark.parametrize(("gradients", "steps"), [(by_hand, 1), (by_hand, 3), (backward, 1), (gently_towards_five, 2)])
def test_handwritten_optimizers_with_copies_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gradients: Any, steps: int, server_model: Any, late: bool
) -> None:
    """If a handwritten optimizer with copies of the weights undoes the loads, the site's log and the status warn of a
    wrong result.
    """
    model, optimizers = two(), list[Handwritten]()

    def train(_: Any) -> None:
        optimizers[:] = optimizers or [Handwritten(model, late=late)]
        for _ in range(steps):
            gradients(model)
            optimizers[0].step()

    told = with_another_site(World(tmp_path, server_model(), rounds=3), model, train)
    assert any("a copy of the weights that the optimizer or the script keeps" in text for text in told)
    assert any("the result is wrong" in each.getMessage() for each in caplog.records if each.name == "atoll")


@pytest.mark.covers("X11")
@pytest.mark.parametrize("server_model", [two, shifted], ids=["equal", "shifted"])
@pytest.mark.parametrize(
    ("gradients", "steps"),
    [(by_hand, 1), (backward, 3), (towards_five, 2), (gently_towards_five, 3)],
)
def test_handwritten_optimizers_without_copies_cause_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gradients: Any, steps: int, server_model: Any
) -> None:
    """A handwritten optimizer without copies of the weights causes no warning, even if each round ends at the site's
    own optimum.
    """
    model = two()

    def train(_: Any) -> None:
        optimizer = Handwritten(model, copies=False)
        for _ in range(steps):
            gradients(model)
            optimizer.step()

    told = with_another_site(World(tmp_path, server_model(), rounds=5), model, train)
    assert not any("the result is wrong" in text for text in told)
    assert "the result is wrong" not in caplog.text


@pytest.mark.covers("X11")
def test_a_step_to_the_own_optimum_is_no_undone_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A first step of SGD that leads back to the site's own optimum, followed by noise, is not called
    an undone load.
    """
    # With lr = 0.5 on (w − t)², each step lands on its target t, which is the site's optimum and some noise.
    optimum = {"a": 0.0, "b": 8.0}

    def train(worker: atoll.Worker) -> None:
        model = Weights(w=torch.zeros(16))
        for fl_round in worker:
            fl_round.load_into(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for noise in (0.0, 0.1, -0.1, 0.12):
                optimizer.zero_grad()
                ((model.w - optimum[worker.site] - noise) ** 2).sum().backward()
                optimizer.step()
            fl_round.submit(model, weight=1.0)

    settings = {"algorithm.name": "fedavg", "rounds.total": 4, "disk.state_dir": tmp_path / "s"}
    result = atoll.run(Weights(w=torch.zeros(16)), train, sites=["a", "b"], settings=settings)
    assert load_file(result.model)["w"].tolist() == pytest.approx([4.12] * 16)
    assert [line for line in caplog.messages if "the result is wrong" in line] == []
