"""An update with NaN is refused; at the first one the site hears whether its optimizer can recover at all."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from harness.processes import wait_until
from kit import DiLoCoSites, build_model, local_step, serve
from torch import nn

import atoll
from atoll.errors import UpdateRefused


def told_of_moments(caplog: pytest.LogCaptureFixture) -> list[int]:
    """How many refusals the site had heard of at each line that names the moments."""
    lines = [record.getMessage() for record in caplog.records if record.name == "atoll"]
    return [
        sum("was refused" in before for before in lines[:place])
        for place, line in enumerate(lines)
        if "exp_avg" in line
    ]


def poison(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step as a loss of infinity leaves its gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.step()


def adam_site(server: atoll.Server, folder: Path, steps: int, step: Callable[..., None]) -> DiLoCoSites:
    inner = partial(torch.optim.AdamW, lr=0.01)
    return DiLoCoSites(server.url, folder, steps, ["a"], inner=lambda model: inner(model.parameters()), step=step)


@pytest.mark.covers("X3")
@pytest.mark.parametrize("fragments", [1, 2])
def test_names_the_moments_at_the_first_refusal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fragments: int
) -> None:
    caplog.set_level(logging.INFO, "atoll")
    warned = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, site: str, number: int) -> None:
        local_step(model, optimizer, site, number)
        if number == 2:
            poison(model, optimizer)
        if server.status().refused and not warned:
            warned.append(wait_until(lambda: [text for text in server.status().warnings if "exp_avg" in text], "it"))

    with serve(tmp_path, algorithm="diloco", H=4, sites=1, K=fragments) as server:
        with contextlib.suppress(UpdateRefused):  # the fifth
            adam_site(server, tmp_path, 100, step).join()
    assert told_of_moments(caplog)[:1] == [1]
    assert "exp_avg_sq) contains NaN or Inf, so every further update will be refused" in caplog.text
    assert warned, "status showed no warning"


@pytest.mark.covers("X3")
def test_takes_the_warning_back_when_the_state_is_cleared_and_an_update_counts(tmp_path: Path) -> None:
    warned: list[list[str]] = []

    def warnings() -> list[str]:
        return [text for text in server.status().warnings if "exp_avg" in text]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, site: str, number: int) -> None:
        if server.status().refused and not warned:
            warned.append(wait_until(warnings, "the warning"))
            optimizer.state.clear()
        local_step(model, optimizer, site, number)
        if number == 2:
            poison(model, optimizer)
        if number == 80:
            wait_until(lambda: not warnings(), "no warning")

    with serve(tmp_path, algorithm="diloco", H=4, sites=1, rounds=30) as server:
        adam_site(server, tmp_path, 81, step).join()
    assert warned


def test_says_nothing_of_moments_that_are_finite(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only the parameters broke: the site goes on from the global model."""
    caplog.set_level(logging.INFO, "atoll")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, site: str, number: int) -> None:
        local_step(model, optimizer, site, number)
        if number == 2:
            with torch.no_grad():
                next(model.parameters()).fill_(math.nan)

    with serve(tmp_path, algorithm="diloco", H=4, sites=1) as server:
        DiLoCoSites(server.url, tmp_path, 100, ["a"], step=step).join()
        assert server.status().refused == 1
        assert server.status().finished
    assert told_of_moments(caplog) == []


@pytest.mark.covers("X3")
def test_names_the_moments_of_a_corrected_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "atoll")
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    with serve(tmp_path, sites=1) as server, contextlib.suppress(UpdateRefused):
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                with fl_round.correct(model, optimizer):
                    poison(model, optimizer)
                fl_round.submit(model)
    assert told_of_moments(caplog) == [1], "once: the next refusals are of the same moments"
