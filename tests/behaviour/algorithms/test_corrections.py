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


def test_fedprox_pulls_towards_where_it_began(tmp_path: Path) -> None:
    with first_round(tmp_path, "fedprox", One(2.0), **{"algorithm.mu": 0.5}) as fl_round:
        model = fl_round.load_into(One())
        with fl_round.correct(model, optimizer := sgd(model)) as hooks:
            train(model, optimizer, 1.0, steps=2)
        assert model.w.item() == pytest.approx(1.815)
        train(model, optimizer, 1.0, steps=1)  # plain again
        assert model.w.item() == pytest.approx(1.815 - 0.1 * 0.815)
        assert hooks.steps == 2


def test_scaffold_needs_a_step() -> None:
    """One step by hand; a round without steps is refused.

    c = 0.5, c_i = 0.2, η = 0.1, target 1: y = 0 + 0.1·1 − 0.1·0.3 = 0.07; Δc = (0 − 0.07)/0.1 − 0.5 = −1.2.
    """
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


def test_a_schedule_is_followed() -> None:
    """Rates 0, 0.1, 0.2: Δc = (x − y)/0.3; the warm-up step without a rate does no harm."""
    model = One()
    scaffold = Scaffold(model, controls(0.0), controls(0.0))
    with scaffold.attach(optimizer := sgd(model, 0.0)):
        for rate in (0.0, 0.1, 0.2):
            optimizer.param_groups[0]["lr"] = rate
            train(model, optimizer, 1.0, steps=1)
    assert scaffold.steps == 3
    assert scaffold.difference()["w"].item() == pytest.approx(-(1 - 0.9 * 0.8) / 0.3)


def test_a_step_without_gradients_is_none() -> None:
    """Nothing is corrected where the optimizer moved nothing; behind one with them, w ← w − η·g − η·(c − c_i).

    Δc = (0 − w)/η − c = 3/0.5 − 4: the first step adds no rate.
    """
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
    """As with the term μ/2·‖w − w_t‖² in the loss, which gives every trainable parameter a gradient."""
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


def test_fedprox_leaves_no_gradient_of_its_own_behind() -> None:
    """A loop that never clears gradients would add them up."""
    model = nn.ParameterDict({"a": torch.zeros(1), "b": torch.ones(1)})
    prox = fedprox(model, mu=0.5)
    nn.init.constant_(model["b"], 3.0)
    with prox.attach(optimizer := SGD(model.parameters(), lr=0.1)):
        for value in (2.9, 2.805):  # 3 − 0.1·0.5·(3 − 1); 2.9 − 0.1·0.5·1.9
            model["a"].grad = torch.ones(1)
            optimizer.step()
            assert model["b"].item() == pytest.approx(value)
            assert model["b"].grad is None


def test_scaffold_shifts_parameters_without_a_gradient() -> None:
    """y ← y − η·(0 − c_i + c), twice: 1 − 2·0.1·(0.5 − 0.2) = 0.94; Δc = (1 − 0.94)/0.2 − 0.5 = −0.2."""
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
    """A step that calls its parent's is counted once, and one that raises an error is not counted."""
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
def test_refuses_a_last_step_that_broke_off(by_closure: bool, refused: bool) -> None:
    """If a whole step follows it, nothing is refused.

    Whether weights have moved is not known until a step has ended again: w = 0 + 0.1 − 0.1·4, Δc = 0.3/0.1 − 4.
    """
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
def test_an_optimizer_may_replace_a_failed_one() -> None:
    """Another optimizer may take the place of one with a failed step."""
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
def test_a_step_with_a_failed_closure_is_none() -> None:
    """As at the end of the data: no weight has moved."""
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
def test_a_line_search_that_breaks_off_is_refused(tmp_path: Path) -> None:
    """The closure fails at its second call, where the weights have moved."""
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
def test_diloco_counts_such_a_step_once(tmp_path: Path) -> None:
    """H = 2: one synchronisation in three steps. A step that raises an error is not counted."""
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
def test_a_step_may_clear_its_gradients_inside() -> None:
    """At w + 0.5 = 0.5 towards 1 the gradient is −0.5: y = 0.1·0.5 − 0.1·(0.5 − 0.2); Δc = (0 − 0.02)/0.1 − 0.5."""
    model = One()
    optimizer = TwoSteps([model.w], lr=ETA)
    scaffold = Scaffold(model, controls(0.5), controls(0.2))
    with scaffold.attach(optimizer):
        optimizer.step(closure_of(model, optimizer, 1.0, lambda loss: loss))
    assert scaffold.steps == 1
    assert model.w.item() == pytest.approx(0.02)
    assert scaffold.difference()["w"].item() == pytest.approx(-0.7)


def test_fedprox_needs_no_learning_rate() -> None:
    """An optimizer without a rate is followed where no rate is needed; SCAFFOLD needs it."""
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


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    fedprox(model, mu=0.1).attach(optimizer := torch.optim.SparseAdam(model.parameters()))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"'weight' is sparse.*sparse=False"):
        optimizer.step()


def test_an_optimizer_of_another_model_is_refused() -> None:
    """Guards against `load_into(Model())` behind an optimizer that trains the model before it."""
    with pytest.raises(UsageError, match="holds none of the model's parameters"):
        fedprox(One(), mu=0.1).attach(sgd(One()))


@pytest.mark.parametrize("algorithm", ["fedprox", "scaffold"])
def test_training_before_the_correction_is_refused(tmp_path: Path, algorithm: str) -> None:
    """An optimizer over the same parameters trains: no step of it was corrected."""
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
def test_lbfgs_finds_where_fedprox_is_least(gives: Callable[[torch.Tensor], Any], search: str | None) -> None:
    """Every evaluation has to see the loss and the gradient of FedProx."""
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


def test_closures_may_return_more_than_a_loss() -> None:
    """What a closure returns beside a loss stays as it is."""
    model = One(2.0)
    with fedprox(model, mu=0.5).attach(optimizer := sgd(model)):
        for given in (None, {"loss": 1.0}):
            assert optimizer.step(closure_of(model, optimizer, -1.0, lambda _, given=given: given)) == given


@pytest.mark.covers("S8")
def test_scaffold_refuses_line_searches(tmp_path: Path) -> None:
    """An optimizer that chooses its own length is refused.

    Before it trains; the round is open still, and another optimizer may take its place.
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
    """Two optimizers give the bits of one that holds all parameters."""
    digest, steps = trained(tmp_path / "one", one, **settings)
    assert steps == [3, 3]
    assert trained(tmp_path / "two", two, **settings) == (digest, steps)
    if settings["algorithm"] == "fedprox":  # the term is not nothing
        assert trained(tmp_path / "plain", two)[0] != digest


def test_refuses_several_optimizers_with_scaffold(tmp_path: Path) -> None:
    with first_round(tmp_path, model=build_model()) as fl_round:
        model = fl_round.load_into(build_model())
        with pytest.raises(UsageError, match="one optimizer"):
            fl_round.correct(model, two(model))
        fl_round.correct(model, one(model))  # the round may go on


def test_alone_the_last_optimizer_counts(tmp_path: Path) -> None:
    """A script that trains alone has the steps of the last optimizer counted."""
    model = build_model()
    optimizers = two(model)
    with atoll.join(site="a", folder=tmp_path) as worker:
        fl_round = next(iter(worker))
        fl_round.load_into(model)
        with fl_round.correct(model, optimizers) as correction:
            step_all(model, optimizers, 0)
    assert correction.steps == 1
