"""Corrections around optimizers that step in a way of their own, or train something else: followed, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.servers import plain_server
from scaffold_world import ETA, One, controls, first_round, train
from torch import nn

import atoll
from atoll.errors import UsageError


class TwoSteps(torch.optim.Optimizer):
    """As SAM steps: a gradient, a step aside, a second gradient, another's step; and no gradient is left behind."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            loss = closure()
        values = [value for group in self.param_groups for value in group["params"]]
        with torch.no_grad():
            for value in values:
                value.add_(0.5)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for value in values:
                value.sub_(0.5)
        self.inner.step()
        self.zero_grad()
        return loss


class NoRate(torch.optim.SGD):
    """As Adafactor with relative_step: its learning rate is None, and it chooses one by itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=ETA)
        self.param_groups[0]["lr"] = None

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for value in self.param_groups[0]["params"]:
                value.sub_(value.grad, alpha=ETA)


class Calls(torch.optim.SGD):
    """As many optimizers of users: something of its own around its parent's step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


@pytest.mark.covers("S5")
@pytest.mark.parametrize("by_closure", [False, True], ids=["plain", "closure"])
def test_a_step_that_calls_its_parents_is_one_step(by_closure: bool) -> None:
    """FedProx from w = 2, μ = 0.5: 2 → 1.9 → 1.9 − 0.1·(0.9 + 0.5·(1.9 − 2)) = 1.815; and an error is no step."""
    model = One(2.0)
    torch.optim.SGD(model.parameters(), lr=ETA)  # from here on torch's hooks are in the parent's step, too
    optimizer = Calls(model.parameters(), lr=ETA)
    prox = atoll.FedProx(model, mu=0.5)

    def closure(scale: float = 1.0) -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((model.w - scale) ** 2 / 2).sum()
        loss.backward()
        return loss

    with prox.correct(optimizer):
        for number in range(2):
            if not by_closure:
                closure()
            elif number == 1:
                with pytest.raises(TypeError):
                    optimizer.step(lambda: closure("one"))  # type: ignore[arg-type]
            optimizer.step(closure if by_closure else None)
    assert prox.steps == 2
    assert model.w.item() == pytest.approx(1.815)


@pytest.mark.covers("S8")
@pytest.mark.parametrize("another", [False, True])
def test_a_last_step_that_broke_off_is_refused_and_another_behind_it_is_not(another: bool) -> None:
    """The closure of the second step fails: whether weights have moved is not known until a step has ended again."""
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=ETA)
    scaffold = atoll.Scaffold(model, controls(0.0), controls(0.0))

    def fails() -> None:
        raise ValueError("no more records")

    scaffold.correct(optimizer)
    train(model, optimizer, 1.0, steps=1)
    with pytest.raises(ValueError, match="no more records"):
        optimizer.step(fails)  # type: ignore[arg-type]
    if not another:
        with pytest.raises(UsageError, match="has not returned yet"):
            scaffold.finish()
        return
    train(model, optimizer, 1.0, steps=1)
    assert scaffold.steps == 2
    assert scaffold.finish()["w"].item() == pytest.approx(-0.19 / 0.2)


@pytest.mark.covers("L2")
def test_diloco_counts_such_a_step_once(tmp_path: Path) -> None:
    """H = 2: one synchronisation in three steps. An error inside of one is no step."""
    model = One()
    torch.optim.SGD(model.parameters(), lr=ETA)
    optimizer = Calls(model.parameters(), lr=ETA)

    def fails() -> None:
        raise ValueError("no more records")

    with plain_server(tmp_path, One(), algorithm="diloco", sites=1, rounds=9, H=2) as server:
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path) as diloco:
            train(model, optimizer, 1.0, steps=1)
            with pytest.raises(ValueError, match="no more records"):
                optimizer.step(fails)
            assert (diloco.step, diloco.rounds) == (1, 0)
            train(model, optimizer, 1.0, steps=2)
            assert (diloco.step, diloco.rounds) == (3, 1)


@pytest.mark.covers("S5")
def test_a_step_that_clears_its_gradients_inside_is_a_step() -> None:
    """At w + 0.5 = 0.5 towards 1 the gradient is −0.5: y = 0.1·0.5 − 0.1·(0.5 − 0.2); Δc = (0 − 0.02)/0.1 − 0.5."""
    model = One()
    optimizer = TwoSteps([model.w], lr=ETA)
    scaffold = atoll.Scaffold(model, controls(0.5), controls(0.2))

    def closure() -> torch.Tensor:
        loss = ((model.w - 1.0) ** 2 / 2).sum()
        loss.backward()
        return loss

    with scaffold.correct(optimizer):
        optimizer.step(closure)
    assert scaffold.steps == 1
    assert model.w.item() == pytest.approx(0.02)
    assert scaffold.finish()["w"].item() == pytest.approx(-0.7)


def test_an_optimizer_without_a_rate_is_followed_where_no_rate_is_needed() -> None:
    model = One()
    with atoll.join() as worker:
        fl_round = worker.next_round()
        assert fl_round is not None
        with fl_round.correct(model, optimizer := NoRate([model.w])) as plain:
            train(model, optimizer, 1.0, steps=2)
    assert plain.steps == 2
    assert model.w.item() == pytest.approx(0.19)
    model = One()
    scaffold = atoll.Scaffold(model, controls(0.0), controls(0.0))
    with scaffold.correct(optimizer := NoRate([model.w])):
        with pytest.raises(UsageError, match=r"NoRate has no learning rate.*set lr"):
            train(model, optimizer, 1.0, steps=1)
    assert model.w.item() == 0.0


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    prox = atoll.FedProx(model, mu=0.1)
    prox.correct(optimizer := torch.optim.SparseAdam(model.parameters()))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"'weight' is sparse.*sparse=False"):
        optimizer.step()


def test_an_optimizer_of_another_model_is_refused() -> None:
    """Guards against `load_into(Model())` behind an optimizer that trains the model before it."""
    optimizer = torch.optim.SGD(One().parameters(), lr=ETA)
    with pytest.raises(UsageError, match="holds none of the model's parameters"):
        atoll.FedProx(One(), mu=0.1).correct(optimizer)


@pytest.mark.parametrize("algorithm", ["fedprox", "scaffold"])
def test_training_behind_the_corrections_back_is_refused(tmp_path: Path, algorithm: str) -> None:
    """A second optimizer over the same parameters trains: no step of it was corrected."""
    with first_round(tmp_path, algorithm) as round_:
        model = round_.load_into(One())
        with round_.correct(model, torch.optim.SGD([model.w], lr=ETA)):
            train(model, torch.optim.SGD([model.w], lr=ETA), 1.0)
        with pytest.raises(UsageError, match=r"(fedprox|scaffold) saw no optimizer step.*that trains the model"):
            round_.submit(model)
        assert not round_.done


def test_an_update_that_changes_nothing_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with plain_server(tmp_path, One(), sites=1, rounds=2) as server:
        with atoll.join(server.url, site="a", folder=tmp_path) as worker, caplog.at_level(logging.WARNING):
            rounds = iter(worker)
            for lost in (True, False):
                round_ = next(rounds)
                model = round_.load_into(One())
                train(One() if lost else model, torch.optim.SGD(model.parameters(), lr=ETA), 1.0)
                caplog.clear()
                round_.submit(model)
                assert ("a: the pseudo-gradient is all zero. Check that the optimizer" in caplog.text) == lost
