"""Stock torch optimizers through the contract: they run in chunks, on whole tensors, or are refused; never wrong."""

import pytest
import torch

from atoll.errors import ConfigError
from atoll.outer_optimizers import build_outer
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
    target = torch.optim.NAdam


class TestRadam(OuterContract):
    target = torch.optim.RAdam


class TestRprop(OuterContract):
    target = torch.optim.Rprop


class TestAdamax(OuterContract):
    target = torch.optim.Adamax


class TestAdadelta(OuterContract):
    target = torch.optim.Adadelta


class TestAsgd(OuterContract):
    target = torch.optim.ASGD


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
        (CountsInItsGroup, "change its own settings"),
        (CountsInItself, "would be lost"),
        (lambda parameters: [parameters], "created a list"),
    ],
)
def test_what_cannot_be_an_outer_optimizer_is_refused_by_name(target, why):
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
def test_wrong_options_name_the_remedy(target, options, words):
    with pytest.raises(ConfigError, match=words):
        build_outer(target, options)


def test_nesterov_by_hand():
    # μ = 0.9, η = 0.7, g = 1 twice. m₁ = 1, θ₁ = −0.7·(1 + 0.9·1) = −1.33;
    # m₂ = 0.9 + 1 = 1.9, θ₂ = −1.33 − 0.7·(1 + 0.9·1.9) = −1.33 − 1.897 = −3.227
    stepper = build_outer("sgd", {"lr": 0.7, "momentum": 0.9, "nesterov": True}).stepper()
    theta = torch.zeros(1, dtype=torch.float64)
    states = stepper.step_([theta], [torch.ones(1, dtype=torch.float64)], None)
    stepper.step_([theta], [torch.ones(1, dtype=torch.float64)], states)
    assert theta.item() == pytest.approx(-3.227, rel=1e-15)


def test_fused_is_used_where_torch_has_it_for_cpu():
    assert build_outer("adam").describe()["fused"] is True
    assert build_outer("rmsprop").describe()["fused"] is None
    assert build_outer("rmsprop").describe()["foreach"] is False
