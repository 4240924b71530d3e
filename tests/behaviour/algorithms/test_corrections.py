"""Corrections of local steps by FedProx and SCAFFOLD: which ways to step are followed, which are refused.

FedProx from w = 2 towards 1 with μ = 0.5 and η = 0.1: 2 → 1.9 → 1.9 − 0.1·(0.9 + 0.5·(1.9 − 2)) = 1.815.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import build_model, exported, serve, tensors_digest
from kit.corrections import Scaffold, fedprox
from kit.servers import plain_server
from scaffold_world import ETA, One, controls, first_round, sgd, train
from torch import nn
from torch.optim import SGD, Optimizer

import atoll
from atoll.errors import UsageError


def test_fedprox_pulls_towards_the_received_weights(tmp_path: Path) -> None:
    """FedProx pulls each step inside `correct` towards the weights that the site received for the round.

    A step after the `with` block is a plain step and does not count.
    """
    with first_round(tmp_path, "fedprox", One(2.0), **{"algorithm.mu": 0.5}) as fl_round:
        model = fl_round.load_into(One())
        with fl_round.correct(model, optimizer := sgd(model)) as hooks:
            train(model, optimizer, 1.0, steps=2)
        assert model.w.item() == pytest.approx(1.815)
        train(model, optimizer, 1.0, steps=1)  # plain again
        assert model.w.item() == pytest.approx(1.815 - 0.1 * 0.815)
        assert hooks.steps == 2


def test_scaffold_needs_at_least_one_step() -> None:
    """SCAFFOLD computes a control difference after one step, and refuses to compute one without any step."""
    # By hand: c = 0.5, c_i = 0.2, η = 0.1, target 1. y = 0 + 0.1·1 − 0.1·0.3 = 0.07; Δc = (0 − 0.07)/0.1 − 0.5 = −1.2.
    model = One()
    c, own = controls(0.5), controls(0.2)
    with pytest.raises(UsageError, match="no optimizer step"):
        Scaffold(model, c, own).difference()
    scaffold = Scaffold(model, c, own)
    with scaffold.attach(optimizer := sgd(model)):
        train(model, optimizer, 1.0, steps=1)
    assert model.w.item() == pytest.approx(0.07)
    assert scaffold.difference()["w"].item() == pytest.approx(-1.2)
    assert scaffold.own.after["atoll.control.w"].item() == pytest.approx(-1.0)
    assert c["w"].item() == pytest.approx(0.5)


def test_scaffold_follows_a_learning_rate_schedule() -> None:
    """SCAFFOLD divides by the sum of the learning rates that a schedule gave to the steps."""
    # With the rates 0, 0.1 and 0.2, Δc = (x − y)/0.3. The warm-up step at rate 0 counts as a step.
    model = One()
    scaffold = Scaffold(model, controls(0.0), controls(0.0))
    with scaffold.attach(optimizer := sgd(model, 0.0)):
        for rate in (0.0, 0.1, 0.2):
            optimizer.param_groups[0]["lr"] = rate
            train(model, optimizer, 1.0, steps=1)
    assert scaffold.steps == 3
    assert scaffold.difference()["w"].item() == pytest.approx(-(1 - 0.9 * 0.8) / 0.3)


def test_scaffold_ignores_a_step_without_gradients() -> None:
    """SCAFFOLD neither corrects nor counts an optimizer step if no parameter has a gradient."""
    # The second step has the gradient 2: w ← w − η·g − η·(c − c_i) = −3. Δc = (0 − w)/η − c = 3/0.5 − 4, so the first
    # step added no rate.
    model = One()
    scaffold = Scaffold(model, controls(4.0), controls(0.0))
    with scaffold.attach(optimizer := sgd(model, 0.5)):
        optimizer.step()
        assert (model.w.item(), scaffold.steps) == (0.0, 0)
        model.w.grad = torch.tensor([2.0])
        optimizer.step()
    assert (model.w.item(), scaffold.steps) == (-3.0, 1)  # 0 − 0.5·2 − 0.5·4
    assert scaffold.difference()["w"].item() == pytest.approx(2.0)


# -- parameters without a gradient: a branch of the model that a step does not use


class TwoHeads(nn.Module):
    """Two heads, of which a step uses one; in doubles, so that both ways round alike."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 1).double(), nn.Linear(2, 1).double()


def heads(build: Callable[[Any], Optimizer]) -> tuple[TwoHeads, list[Optimizer]]:
    torch.manual_seed(0)
    model = TwoHeads()
    return model, [build(model.parameters())]


HEADS: dict[str, Callable[[], tuple[TwoHeads, list[Optimizer]]]] = {
    "sgd": lambda: heads(lambda values: SGD(values, lr=0.1)),
    "momentum": lambda: heads(lambda values: SGD(values, lr=0.1, momentum=0.9, weight_decay=0.1)),
    "adamw": lambda: heads(lambda values: torch.optim.AdamW(values, lr=0.1, weight_decay=0.1)),
    "two optimizers": lambda: (
        model := heads(lambda values: SGD(values, lr=0.1))[0],
        [SGD(model.a.parameters(), lr=0.1), torch.optim.Adam(model.b.parameters(), lr=0.1)],
    ),
}


def train_heads(
    model: TwoHeads, optimizers: list[Optimizer], term: Callable[[], Any] = lambda: 0.0, *, thaw: bool = False
) -> None:
    """Eight steps of one head, then of the other, twice. The second head may be frozen at first."""
    model.b.requires_grad_(not thaw)
    torch.manual_seed(3)
    for step in range(8):
        if step == 2:
            model.b.requires_grad_(True)
        head = model.a if step % 4 < 2 else model.b
        for optimizer in optimizers:
            optimizer.zero_grad()
        ((head(torch.randn(4, 2, dtype=torch.double)) - 3).pow(2).mean() + term()).backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.covers("S5")
@pytest.mark.parametrize("thaw", [False, True], ids=["trained", "thawed"])
@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
def test_fedprox_pulls_parameters_without_gradients(
    make: Callable[[], tuple[TwoHeads, list[Optimizer]]], thaw: bool
) -> None:
    """FedProx also pulls a trainable parameter that has no gradient in a step."""
    # The result equals training with the term μ/2·‖w − w_t‖² in the loss, which gives every trainable parameter a
    # gradient.
    expected, optimizers = make()
    start = [value.detach().clone() for value in expected.parameters()]

    def term() -> torch.Tensor:
        pairs = zip(expected.parameters(), start, strict=True)
        return 0.25 * sum(((w - w_t).pow(2).sum() for w, w_t in pairs if w.requires_grad), torch.zeros(()))

    train_heads(expected, optimizers, term, thaw=thaw)
    model, optimizers = make()
    model.b.requires_grad_(not thaw)
    with fedprox(model, mu=0.5).attach(optimizers) as correction:
        train_heads(model, optimizers, thaw=thaw)
    assert correction.steps == (8 if not thaw or len(optimizers) == 1 else 6)  # the last optimizer had nothing to step
    for w, expected_w in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(w, expected_w, rtol=1e-12, atol=1e-12)


def test_fedprox_leaves_no_gradient_behind() -> None:
    """FedProx leaves no gradient at a parameter that had none before the step.

    Such gradients would add up in a loop that never clears gradients.
    """
    model = nn.ParameterDict({"a": torch.zeros(1), "b": torch.ones(1)})
    prox = fedprox(model, mu=0.5)
    nn.init.constant_(model["b"], 3.0)
    with prox.attach(optimizer := SGD(model.parameters(), lr=0.1)):
        for value in (2.9, 2.805):  # 3 − 0.1·0.5·(3 − 1); 2.9 − 0.1·0.5·1.9
            model["a"].grad = torch.ones(1)
            optimizer.step()
            assert model["b"].item() == pytest.approx(value)
            assert model["b"].grad is None


def test_scaffold_corrects_parameters_without_a_gradient() -> None:
    """SCAFFOLD also corrects a parameter that has no gradient in a step."""
    # By hand: y ← y − η·(0 − c_i + c), twice: 1 − 2·0.1·(0.5 − 0.2) = 0.94; Δc = (1 − 0.94)/0.2 − 0.5 = −0.2.
    model = nn.ParameterDict({"a": torch.zeros(1), "b": torch.ones(1)})
    c, own = ({name: torch.full((1,), value) for name in "ab"} for value in (0.5, 0.2))
    scaffold = Scaffold(model, c, own)
    with scaffold.attach(optimizer := SGD(model.parameters(), lr=0.1)):
        for _ in range(2):
            model["a"].grad = torch.ones(1)
            optimizer.step()
    assert model["b"].item() == pytest.approx(0.94)
    assert scaffold.difference()["b"].item() == pytest.approx(-0.2, rel=1e-5)


# -- steps in odd ways


class TwoSteps(Optimizer):
    """As SAM steps: a gradient, a step aside, a second gradient, another's step; and no gradient is left behind."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.inner = SGD(self.param_groups, lr=lr)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        values = [value for group in self.param_groups for value in group["params"]]
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            torch._foreach_add_(values, 0.5)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(values, 0.5)
        self.inner.step()
        self.zero_grad()
        return loss


class NoRate(SGD):
    """As Adafactor with relative_step: its learning rate is None, and it chooses one by itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=ETA)
        self.param_groups[0]["lr"] = None

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for value in self.param_groups[0]["params"]:
                value.sub_(value.grad, alpha=ETA)


class Calls(SGD):
    """As many optimizers of users: something of its own around its parent's step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


class BreaksOff(SGD):
    """Its step fails behind the gradient while it is `broken`; whole, it calls its parent's."""

    broken = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        return fails() if self.broken else super().step()


def fails() -> None:
    raise ValueError("no more records")


@pytest.mark.covers("S5")
@pytest.mark.parametrize("by_closure", [False, True], ids=["plain", "closure"])
def test_a_step_that_calls_its_parent_counts_once(by_closure: bool) -> None:
    """FedProx counts one step when an optimizer's `step` calls the `step` of its parent class.

    A step that raises an error does not count.
    """
    model = One(2.0)
    sgd(model)  # from here on torch's hooks are in the parent's step, too
    optimizer = Calls(model.parameters(), lr=ETA)
    prox = fedprox(model, mu=0.5)
    closure = closure_of(model, optimizer, 1.0, lambda loss: loss)
    with prox.attach(optimizer):
        for number in range(2):
            if not by_closure:
                closure()
            elif number == 1:
                with pytest.raises(ValueError, match="no more records"):
                    optimizer.step(fails)
            optimizer.step(closure if by_closure else None)
    assert prox.steps == 2
    assert model.w.item() == pytest.approx(1.815)


@pytest.mark.covers("S8")
@pytest.mark.parametrize("by_closure", [False, True], ids=["plain", "closure"])
@pytest.mark.parametrize("refused", [False, True])
def test_scaffold_refuses_after_a_failed_last_step(by_closure: bool, refused: bool) -> None:
    """After an optimizer step has failed, SCAFFOLD refuses to compute a control difference until a later step succeeds.
    The failed step may have moved some weights.
    """
    # By hand after the whole step: w = 0 + 0.1 − 0.1·4 and Δc = 0.3/0.1 − 4.
    model = One()
    optimizer = BreaksOff(model.parameters(), lr=ETA)
    scaffold = Scaffold(model, controls(4.0), controls(0.0))
    closure = closure_of(model, optimizer, 1.0, lambda loss: loss)

    def step() -> None:
        if not by_closure:
            closure()
        optimizer.step(closure if by_closure else None)

    scaffold.attach(optimizer)
    with pytest.raises(ValueError, match="no more records"):
        step()
    if refused:
        with pytest.raises(UsageError, match=r"has not returned, or has failed.*call correct\(\) and step\(\) again"):
            scaffold.difference()
        scaffold.attach(optimizer)
    optimizer.broken = False
    step()
    assert (scaffold.steps, model.w.item()) == (1, pytest.approx(-0.3))
    assert scaffold.difference()["w"].item() == pytest.approx(-1.0)


@pytest.mark.covers("S8")
def test_another_optimizer_may_replace_a_failed_one() -> None:
    """After an optimizer's step has failed, SCAFFOLD accepts a new optimizer and counts its steps."""
    model = One()
    scaffold = Scaffold(model, controls(0.0), controls(0.0))
    broken = BreaksOff(model.parameters(), lr=ETA)
    closure_of(model, broken, 1.0, lambda loss: loss)()
    with scaffold.attach(broken), pytest.raises(ValueError, match="no more records"):
        broken.step()
    optimizer = sgd(model)
    scaffold.attach(optimizer)
    train(model, optimizer, 1.0, steps=1)
    assert scaffold.steps == 1
    scaffold.difference()


@pytest.mark.covers("S8")
def test_scaffold_ignores_a_step_with_a_failed_closure() -> None:
    """SCAFFOLD does not count a step whose closure fails at once, for example because the data has ended.

    The control difference is still valid, since the failed step moved no weight.
    """
    model = One()
    optimizer = sgd(model)
    scaffold = Scaffold(model, controls(0.0), controls(0.0))
    scaffold.attach(optimizer)
    train(model, optimizer, 1.0, steps=1)
    with pytest.raises(ValueError, match="no more records"):
        optimizer.step(fails)
    assert scaffold.steps == 1
    assert scaffold.difference()["w"].item() == pytest.approx(-0.1 / 0.1)


@pytest.mark.covers("S8")
def test_refuses_an_update_after_a_failed_line_search(tmp_path: Path) -> None:
    """A site's update is refused after a line search has failed in the middle.

    The closure fails at its second call, after LBFGS has moved the weights.
    """
    with first_round(tmp_path, "fedprox") as fl_round:
        model = fl_round.load_into(One())
        optimizer = torch.optim.LBFGS([model.w], line_search_fn="strong_wolfe")
        fl_round.correct(model, optimizer)
        calls = iter([closure_of(model, optimizer, -1.0, lambda loss: loss)])
        with pytest.raises(ValueError, match="no more records"):
            optimizer.step(lambda: next(calls, fails)())
        assert model.w.item() != 0.0
        with pytest.raises(UsageError, match="has not returned, or has failed"):
            fl_round.submit(model)


@pytest.mark.covers("L2")
def test_diloco_counts_a_nested_step_once(tmp_path: Path) -> None:
    """DiLoCo counts one step when an optimizer's `step` calls the `step` of its parent class."""
    # A step that raises an error does not count. With H = 2, three counted steps make one synchronisation.
    model = One()
    sgd(model)
    optimizer = Calls(model.parameters(), lr=ETA)
    with plain_server(tmp_path, One(), algorithm="diloco", sites=1, rounds=9, H=2) as server:
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path) as diloco:
            train(model, optimizer, 1.0, steps=1)
            with pytest.raises(ValueError, match="no more records"):
                optimizer.step(fails)
            assert (diloco.step, diloco.rounds) == (1, 0)
            train(model, optimizer, 1.0, steps=2)
            assert (diloco.step, diloco.rounds) == (3, 1)


@pytest.mark.covers("S5")
def test_scaffold_corrects_a_step_that_clears_its_gradients() -> None:
    """SCAFFOLD corrects an optimizer whose `step` clears the gradients before it returns, as SAM does."""
    # By hand, the gradient at w + 0.5 = 0.5 towards 1 is −0.5. y = 0.1·0.5 − 0.1·(0.5 − 0.2) and Δc = (0 − 0.02)/0.1 −
    # 0.5.
    model = One()
    optimizer = TwoSteps([model.w], lr=ETA)
    scaffold = Scaffold(model, controls(0.5), controls(0.2))
    with scaffold.attach(optimizer):
        optimizer.step(closure_of(model, optimizer, 1.0, lambda loss: loss))
    assert scaffold.steps == 1
    assert model.w.item() == pytest.approx(0.02)
    assert scaffold.difference()["w"].item() == pytest.approx(-0.7)


def test_scaffold_needs_an_optimizer_with_a_learning_rate() -> None:
    """SCAFFOLD refuses an optimizer that has no learning rate.

    Training without a server, which is not corrected, accepts such an optimizer and counts its steps.
    """
    model = One()
    with atoll.join() as worker:
        fl_round = worker.next_round()
        fl_round.load_into(model)
        with fl_round.correct(model, optimizer := NoRate([model.w])) as plain:
            train(model, optimizer, 1.0, steps=2)
    assert plain.steps == 2
    assert model.w.item() == pytest.approx(0.19)
    model = One()
    with Scaffold(model, controls(0.0), controls(0.0)).attach(optimizer := NoRate([model.w])):
        with pytest.raises(UsageError, match=r"NoRate has no learning rate.*set lr"):
            train(model, optimizer, 1.0, steps=1)
    assert model.w.item() == 0.0


def test_fedprox_refuses_a_sparse_gradient() -> None:
    """FedProx refuses a sparse gradient with an error that names the parameter."""
    model = nn.Embedding(4, 2, sparse=True)
    fedprox(model, mu=0.1).attach(optimizer := torch.optim.SparseAdam(model.parameters()))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"'weight' is sparse.*sparse=False"):
        optimizer.step()


def test_an_optimizer_of_another_model_is_refused() -> None:
    """FedProx refuses an optimizer that holds none of the model's parameters.

    A script makes this mistake if it calls `load_into(Model())` after it has made its optimizer for an earlier model.
    """
    with pytest.raises(UsageError, match="holds none of the model's parameters"):
        fedprox(One(), mu=0.1).attach(sgd(One()))


@pytest.mark.parametrize("algorithm", ["fedprox", "scaffold"])
def test_training_without_the_corrected_optimizer_is_refused(tmp_path: Path, algorithm: str) -> None:
    """FedProx and SCAFFOLD refuse an update if the optimizer given to `correct` made no step."""
    # Here, another optimizer over the same parameters trained the model before the call of `correct`.
    with first_round(tmp_path, algorithm) as fl_round:
        model = fl_round.load_into(One())
        train(model, sgd(model), 1.0)
        with fl_round.correct(model, sgd(model)):
            pass
        with pytest.raises(UsageError, match=r"(fedprox|scaffold) saw no optimizer step.*that trains the model"):
            fl_round.submit(model)
        assert not fl_round.done


# -- line searches evaluate a closure several times in a step, and go by the loss
#
# FedProx around w_t = 2 with μ = 0.5, of a site with the loss f(w) = (w + 1)²/2: F(w) = f(w) + (w − 2)²/4 is least
# where (w + 1) + (w − 2)/2 = 0, which is w = 0. Every step begins at w = −1, where f is least: on the way to 0 f rises,
# and F falls from 0 + 9/4 to 1/2 + 4/4.


def closure_of(model: One, optimizer: Optimizer, target: float, gives: Callable[[torch.Tensor], Any]) -> Any:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = ((model.w - target) ** 2 / 2).sum()
        loss.backward()
        return gives(loss)

    return closure


@pytest.mark.covers("S10")
@pytest.mark.parametrize("gives", [lambda loss: loss, lambda loss: loss.item()], ids=["tensor", "number"])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_minimizes_the_loss_of_fedprox(gives: Callable[[torch.Tensor], Any], search: str | None) -> None:
    """LBFGS finds the minimum of FedProx's loss, since each evaluation sees the loss and the gradient of FedProx.

    After the `with` block, the closure's loss is the site's own loss again.
    """
    model = One(2.0)
    prox = fedprox(model, mu=0.5)
    nn.init.constant_(model.w, -1.0)
    optimizer = torch.optim.LBFGS([model.w], line_search_fn=search)
    with prox.attach(optimizer):
        assert float(optimizer.step(closure_of(model, optimizer, -1.0, gives))) == pytest.approx(2.25)
    assert model.w.item() == pytest.approx(0.0, abs=1e-6)
    assert prox.steps == 1
    # behind it the loss is the site's own: f(0) = 1/2
    assert float(optimizer.step(closure_of(model, optimizer, -1.0, gives))) == pytest.approx(0.5)


def test_closures_may_return_something_else_than_a_loss() -> None:
    """FedProx passes a closure's return value on unchanged if it is not a loss, such as `None` or a dictionary."""
    model = One(2.0)
    with fedprox(model, mu=0.5).attach(optimizer := sgd(model)):
        for given in (None, {"loss": 1.0}):
            assert optimizer.step(closure_of(model, optimizer, -1.0, lambda _, given=given: given)) == given


@pytest.mark.covers("S8")
def test_scaffold_refuses_line_searches(tmp_path: Path) -> None:
    """SCAFFOLD refuses an optimizer that chooses its own step length, before this optimizer trains.

    The round stays open, and the site may train with another optimizer.
    """
    with first_round(tmp_path) as fl_round:
        model = fl_round.load_into(One())
        with pytest.raises(UsageError, match=r"LBFGS chooses its own step length.*or use fedprox or fedavg"):
            fl_round.correct(model, torch.optim.LBFGS([model.w], line_search_fn="strong_wolfe"))
        with fl_round.correct(model, optimizer := sgd(model)):
            train(model, optimizer, 1.0)
        fl_round.submit(model)


# -- several optimizers


def one(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.05)]


def two(model: nn.Module) -> list[Optimizer]:
    parameters = list(model.parameters())
    return [SGD(parameters[:1], lr=0.05), SGD(parameters[1:], lr=0.05)]


def step_all(model: nn.Module, optimizers: list[Optimizer], number: int) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.3 + number
    for optimizer in optimizers:
        optimizer.step()


def trained(folder: Path, make: Callable[[nn.Module], list[Optimizer]], **settings: Any) -> tuple[str, list[int]]:
    """The digest of the result of two rounds of three steps, and the steps that each round counted."""
    model, counted = build_model(), []
    with serve(folder, sites=1, rounds=2, codec="none", **settings) as server:
        with atoll.join(server.url, site="a", folder=folder / "workers") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                optimizers = make(model)
                with fl_round.correct(model, optimizers) as correction:
                    for number in range(3):
                        step_all(model, optimizers, number)
                counted.append(correction.steps)
                fl_round.submit(model, weight=1.0)
        server.run()
    return tensors_digest(exported(folder)), counted


@pytest.mark.parametrize("settings", [{"algorithm": "fedavg"}, {"algorithm": "fedprox", "algorithm.mu": 0.5}], ids=str)
def test_corrects_several_optimizers_as_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Under FedAvg and FedProx, two optimizers give the same bits as one optimizer that holds all parameters."""
    digest, steps = trained(tmp_path / "one", one, **settings)
    assert steps == [3, 3]
    assert trained(tmp_path / "two", two, **settings) == (digest, steps)
    if settings["algorithm"] == "fedprox":  # the term is not nothing
        assert trained(tmp_path / "plain", two)[0] != digest


def test_scaffold_refuses_several_optimizers(tmp_path: Path) -> None:
    """SCAFFOLD refuses two optimizers. The site may go on in this round with one optimizer."""
    with first_round(tmp_path, model=build_model()) as fl_round:
        model = fl_round.load_into(build_model())
        with pytest.raises(UsageError, match="one optimizer"):
            fl_round.correct(model, two(model))
        fl_round.correct(model, one(model))  # the round may go on


def test_without_a_server_the_last_optimizer_counts(tmp_path: Path) -> None:
    """In a script that trains without a server, `correct` counts only the steps of the last optimizer."""
    model = build_model()
    optimizers = two(model)
    with atoll.join(site="a", folder=tmp_path) as worker:
        fl_round = next(iter(worker))
        fl_round.load_into(model)
        with fl_round.correct(model, optimizers) as correction:
            step_all(model, optimizers, 0)
    assert correction.steps == 1
