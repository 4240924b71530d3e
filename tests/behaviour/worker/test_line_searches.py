"""Optimizers that evaluate a closure several times in a step, and go by the loss: FedProx is in it, SCAFFOLD refuses.

FedProx around w_t = 2 with μ = 0.5, of a site with the loss f(w) = (w + 1)²/2: F(w) = f(w) + (w − 2)²/4 is least where
(w + 1) + (w − 2)/2 = 0, which is w = 0. Every step begins at w = −1, where f is least: on the way to 0 f rises, and F
falls from 0 + 9/4 to 1/2 + 4/4.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.errors import UsageError


class One(nn.Module):
    def __init__(self, w: float = 2.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((1,), w))


class Backtracking(torch.optim.Optimizer):
    """Armijo's: against the gradient by 2, 1, ½, … until the loss falls by 0.1 of what the gradient promises."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 2.0})
        self.seen: list[tuple[float, float, float]] = []

    def step(self, closure: Callable[[], Any] | None = None) -> float:
        (value,) = self.param_groups[0]["params"]
        start = value.detach().clone()
        first, slope = self._evaluate(closure, value)
        length = self.param_groups[0]["lr"]
        while True:
            with torch.no_grad():
                value.copy_(start - length * slope)
            loss, _ = self._evaluate(closure, value)
            if loss <= first - 0.1 * length * slope**2 or length < 1e-3:
                return first
            length /= 2

    def _evaluate(self, closure: Any, value: torch.Tensor) -> tuple[float, float]:
        with torch.enable_grad():
            loss = torch.as_tensor(closure()).item()
        assert value.grad is not None
        self.seen.append((value.item(), loss, value.grad.item()))
        return loss, value.grad.item()


def closure_of(model: One, optimizer: torch.optim.Optimizer, gives: Callable[[torch.Tensor], Any]) -> Any:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = ((model.w + 1.0) ** 2 / 2).sum()
        loss.backward()
        return gives(loss)

    return closure


GIVES = {"tensor": lambda loss: loss, "number": lambda loss: loss.item()}


@pytest.mark.covers("S10")
@pytest.mark.parametrize("gives", GIVES)
def test_every_evaluation_sees_the_loss_and_the_gradient_of_fedprox(gives: str) -> None:
    """F(−1) = 2.25, F'(−1) = 0 − 3/2. By 2·1.5: F(2) = 4.5, F' = 3; by 1.5: F(0.5) = 1.125 + 0.5625, F' = 1.5 − 0.75.

    1.6875 ≤ 2.25 − 0.1·1·2.25: taken. f alone would go by 0, 4.5, 1.125, 0.28, … and never fall.
    """
    model = One()
    prox = atoll.FedProx(model, mu=0.5)
    with torch.no_grad():
        model.w.fill_(-1.0)
    optimizer = Backtracking(model.parameters())
    with prox.correct(optimizer):
        optimizer.step(closure_of(model, optimizer, GIVES[gives]))
    assert optimizer.seen == [
        pytest.approx(row) for row in [(-1.0, 2.25, -1.5), (2.0, 4.5, 3.0), (0.5, 1.125 + 0.5625, 1.5 - 0.75)]
    ]
    assert prox.steps == 1
    optimizer.step(closure_of(model, optimizer, GIVES[gives]))  # let go of: f(0.5) = 1.125
    assert optimizer.seen[3] == pytest.approx((0.5, 1.125, 1.5))


@pytest.mark.covers("S10")
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_finds_where_fedprox_is_least(search: str | None) -> None:
    model = One()
    prox = atoll.FedProx(model, mu=0.5)
    with torch.no_grad():
        model.w.fill_(-1.0)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn=search)
    with prox.correct(optimizer):
        assert optimizer.step(closure_of(model, optimizer, GIVES["tensor"])).item() == pytest.approx(2.25)
    assert model.w.item() == pytest.approx(0.0, abs=1e-6)
    assert prox.steps == 1


def test_what_a_closure_returns_beside_a_loss_stays_as_it_is() -> None:
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.FedProx(model, mu=0.5).correct(optimizer):
        assert optimizer.step(closure_of(model, optimizer, lambda _: None)) is None
        assert optimizer.step(closure_of(model, optimizer, lambda _: {"loss": 1.0})) == {"loss": 1.0}


@pytest.mark.covers("S8")
def test_scaffold_refuses_an_optimizer_that_chooses_its_own_length(tmp_path: Path) -> None:
    """Before it trains; the round is open still, and another optimizer may take its place."""
    with plain_server(tmp_path, One(), algorithm="scaffold", sites=1, rounds=1) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
            round_ = next(iter(worker))
            model = round_.load_into(One())
            with pytest.raises(UsageError, match=r"LBFGS chooses its own step length.*or use fedprox or fedavg"):
                round_.correct(model, torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe"))
            with round_.correct(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1)):
                optimizer.step(closure_of(model, optimizer, GIVES["tensor"]))
            round_.submit(model)
        assert server.wait(30)
