"""Stock torch optimizers through the contract: they run in chunks, on whole tensors, or are refused; never wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from harness.fork_server import fresh_processes

from atoll import Settings
from atoll.errors import ConfigError
from atoll.outer_optimizers import DelayedNesterov, build_outer
from atoll.registry import OwnName
from atoll.testing.contracts import OuterContract

pytestmark = pytest.mark.covers("L1")


class TestSgd(OuterContract):
    target, options = "sgd", {"lr": 1.0}


class TestMomentum(OuterContract):
    target, options = "sgd", {"lr": 0.7, "momentum": 0.9, "weight_decay": 0.01}


class TestNesterov(OuterContract):
    target, options = "sgd", {"lr": 0.7, "momentum": 0.9, "nesterov": True}


class TestNesterovUnfused(OuterContract):
    target, options = "sgd", {"lr": 0.7, "momentum": 0.9, "nesterov": True, "fused": False}


class TestForeachMomentum(OuterContract):
    target, options = "sgd", {"lr": 0.7, "momentum": 0.9, "foreach": True}


class TestAdam(OuterContract):
    target, options = "adam", {"lr": 0.01}


class TestAmsgrad(OuterContract):
    target, options = "adam", {"lr": 0.01, "amsgrad": True, "betas": [0.9, 0.99]}


class TestAdamW(OuterContract):
    target, options = "adamw", {"lr": 0.01}


class TestAdagrad(OuterContract):
    target, options = "adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5}


class TestRmsprop(OuterContract):
    target, options = "rmsprop", {"lr": 0.01, "momentum": 0.9, "centered": True}


class TestYogi(OuterContract):
    target, options = "yogi", {"lr": 0.01, "betas": [0.9, 0.95]}


class TestDelayedNesterov(OuterContract):
    target, options = "delayed_nesterov", {"lr": 0.7, "momentum": 0.9, "delay": 2}


class TestDelayedNesterovBehindOthers(OuterContract):
    target, options = "delayed_nesterov", {"lr": 0.7, "momentum": 0.9, "delay": 3, "undelayed": 1}


class TestNadam(OuterContract):
    target = "nadam"


class TestRadam(OuterContract):
    target = "radam"


class TestRprop(OuterContract):
    target = "rprop"


class TestAdamax(OuterContract):
    target = "adamax"


class TestAdadelta(OuterContract):
    target = "adadelta"


class TestAsgd(OuterContract):
    target = "asgd"


class TestAdafactor(OuterContract):
    """Its second moments are per row and per column, and it clips by the norm of the tensor."""

    target = torch.optim.Adafactor
    granularity = "tensor"


def by_factory(parameters, lr=0.5):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.5)


class TestFactory(OuterContract):
    target, options = staticmethod(by_factory), {"lr": 0.25}


class CountsInPython(torch.optim.Optimizer):
    """lr / t, with t an int in its state."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["t"] = state.get("t", 0) + 1
                p.add_(p.grad, alpha=-group["lr"] / state["t"])


class TestPythonNumbersInTheState(OuterContract):
    target = CountsInPython


class ClipsTheWholeModel(CountsInPython):
    def step(self):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


class AddsNoise(CountsInPython):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p))


class CountsInItsGroup(CountsInPython):
    def step(self):
        self.param_groups[0]["lr"] *= 0.5
        super().step()


class CountsInItself(CountsInPython):
    t = 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-0.1 / self.t)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (torch.optim.LBFGS, "closure"),
        (torch.optim.SparseAdam, "dense gradients"),
        (ClipsTheWholeModel, "if another tensor is present"),
        (AddsNoise, "random"),
        (CountsInItsGroup, "change its `param_groups`"),
        (CountsInItself, "would be lost"),
        (lambda parameters: [parameters], "returned an object of type list"),
    ],
)
def test_an_unsuitable_outer_optimizer_is_refused(target, why):
    """If an optimizer cannot be an outer optimizer, the error has its name, the reason and a remedy."""
    with pytest.raises(ConfigError, match=why) as caught:
        build_outer(target)
    assert target.__qualname__ in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("sgd", {"momentm": 0.9}, "Did you mean 'momentum'"),
        ("sgd", {"lr": -1.0}, "Invalid learning rate"),
        ("sgd", {"nesterov": True}, "Nesterov momentum requires"),
        ("sdg", {}, "Did you mean 'sgd'"),
        ("torch.optim:SDG", {}, "Did you mean 'SGD'"),
    ],
)
def test_wrong_outer_options_are_refused(target, options, words):
    """If an outer optimizer has a wrong name or option, the error says what is wrong or what is probably meant."""
    with pytest.raises(ConfigError, match=words):
        build_outer(OwnName(target), options)


def test_nesterov_matches_a_calculation_by_hand():
    # μ = 0.9, η = 0.7, g = 1 twice. m₁ = 1, θ₁ = −0.7·(1 + 0.9·1) = −1.33;
    # m₂ = 0.9 + 1 = 1.9, θ₂ = −1.33 − 0.7·(1 + 0.9·1.9) = −1.33 − 1.897 = −3.227
    """Two outer steps with Nesterov momentum give the value that the comment derives."""
    stepper = build_outer(OwnName("sgd"), {"lr": 0.7, "momentum": 0.9, "nesterov": True}).stepper()
    theta = torch.zeros(1, dtype=torch.float64)
    states = stepper.step_([theta], [torch.ones(1, dtype=torch.float64)], None)
    stepper.step_([theta], [torch.ones(1, dtype=torch.float64)], states)
    assert theta.item() == pytest.approx(-3.227, rel=1e-15)


def test_fused_steps_are_used_where_available():
    """An outer optimizer uses the fused step where torch has one for the CPU, as for Adam. RMSprop has none and does
    not use `foreach` either.
    """
    assert build_outer(OwnName("adam")).describe()["fused"] is True
    assert build_outer(OwnName("rmsprop")).describe()["fused"] is None
    assert build_outer(OwnName("rmsprop")).describe()["foreach"] is False


# -- Delayed Nesterov (arXiv 2401.09135, algorithm 3, c = 0), by hand


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
def test_delayed_nesterov_matches_a_calculation_by_hand():
    # ε = 0.5, β = 0.5, N = 2; θ = 10
    # g = 4: θ = 10 − 0.5·4/2 = 9
    # g = 8: m = (4 + 8)/2 = 6;  θ = 9 − 0.5·(0.5·6 + 8/2) = 5.5
    # g = 2: θ = 5.5 − 0.5·2/2 = 5
    # g = 6: m = 0.5·6 + (2 + 6)/2 = 7;  θ = 5 − 0.5·(0.5·7 + 6/2) = 1.75
    """Four steps of Delayed Nesterov give the values that the comment derives."""
    leaf = leaf_at(10.0)
    got = steps(DelayedNesterov([leaf], lr=0.5, momentum=0.5, delay=2), leaf, [4.0, 8.0, 2.0, 6.0])
    assert got == [9.0, 5.5, 5.0, 1.75]


@pytest.mark.covers("L6")
@pytest.mark.parametrize("n", [1, 2, 5])
def test_n_delayed_steps_equal_one_nesterov_step(n):
    """n equal updates with Delayed Nesterov of delay n move a weight as far as one step of Nesterov momentum."""
    mine, torchs = leaf_at(3.0), leaf_at(3.0)
    delayed = DelayedNesterov([mine], lr=0.7, momentum=0.9, delay=n)
    nesterov = torch.optim.SGD([torchs], lr=0.7, momentum=0.9, nesterov=True)
    for g in (1.0, -0.25, 0.5):
        far = steps(nesterov, torchs, [g])[-1]
        assert steps(delayed, mine, [g] * n)[-1] == pytest.approx(far, abs=1e-12)


@pytest.mark.covers("L6")
def test_undelayed_first_steps_keep_their_momentum():
    # ε = 1, β = 0.5, N = 2 behind one undelayed step; θ = 0
    # g = 2: m = 2;            θ = −(0.5·2 + 2) = −3
    # g = 4: θ = −3 − 4/2 = −5
    # g = 0: m = 0.5·2 + (4 + 0)/2 = 3;  θ = −5 − (0.5·3 + 0) = −6.5
    """With `undelayed=1`, the first step of Delayed Nesterov has no delay, and later steps keep its momentum."""
    leaf = leaf_at(0.0)
    optimizer = DelayedNesterov([leaf], lr=1.0, momentum=0.5, delay=2, undelayed=1)
    assert steps(optimizer, leaf, [2.0, 4.0, 0.0]) == [-3.0, -5.0, -6.5]


@pytest.mark.covers("L15")
def test_parameter_groups_have_their_own_rates():
    """Delayed Nesterov uses the learning rate of each parameter group."""
    one, two = leaf_at(0.0), leaf_at(0.0)
    optimizer = DelayedNesterov([{"params": [one], "lr": 1.0}, {"params": [two], "lr": 0.5}], momentum=0.0, delay=2)
    for leaf in (one, two):
        leaf.grad = torch.ones_like(leaf)
    optimizer.step()
    assert (one.item(), two.item()) == (-0.5, -0.25)


def test_synchronous_first_rounds_are_not_delayed() -> None:
    """If an asynchronous run starts with synchronous rounds, Delayed Nesterov gets the number of these rounds as
    `undelayed`.
    """
    from atoll.algorithms.resolve import resolve

    settings = {"algorithm.name": "diloco", "async.momentum_every": 4}
    late = {"async.enabled": True, "async.sync_rounds_first": 3}
    assert resolve(Settings.build(settings)).outer_options["undelayed"] == 0
    assert resolve(Settings.build(settings | late)).outer_options["undelayed"] == 3


@pytest.mark.parametrize("name", ["sgd", "adamw", "yogi"])
def test_an_outer_optimizer_does_not_import_the_compiler(name):
    """To build and step an outer optimizer imports no `torch._dynamo`: that takes two seconds of a server's start."""
    script = (
        "import sys, torch; from atoll.outer_optimizers import build_outer; from atoll.registry import OwnName; "
        f"rule = build_outer(OwnName({name!r})); rule.describe(); rule.stepper().step_([torch.ones(2)], "
        "[torch.ones(2)], None); print(*sys.modules)"
    )
    with fresh_processes():
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "atoll.outer_optimizers" in done.stdout.split()
    assert "torch._dynamo" not in done.stdout.split()


@pytest.mark.parametrize(
    ("name", "stock", "options"),
    [
        ("sgd", torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        ("adam", torch.optim.Adam, {"lr": 0.1}),
        ("rprop", torch.optim.Rprop, {}),
    ],
)
def test_the_steps_are_those_of_torch(name, stock, options):
    """Three steps give the bits, and the run's records the class, of torch's own optimizer."""
    rule = build_outer(OwnName(name), options)
    ours, theirs = torch.linspace(-1, 1, 99), torch.nn.Parameter(torch.linspace(-1, 1, 99))
    described = rule.describe()
    optimizer = (
        stock([theirs], **options, fused=described["fused"]) if described["fused"] else stock([theirs], **options)
    )
    states, stepper = None, rule.stepper()
    for scale in (1.0, -0.5, 0.25):
        gradient = scale * torch.linspace(0, 3, 99)
        theirs.grad = gradient.clone()
        optimizer.step()
        states = stepper.step_([ours], [gradient], states)
    assert torch.equal(ours, theirs.detach())
    assert described["optimizer"] == f"{stock.__module__}.{stock.__qualname__}"
