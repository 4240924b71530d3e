"""Outer learning rates of some parameters: the server steps as torch does with parameter groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.servers import plain_server
from kit.sites import clients, finish, play_round
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.outer_optimizers import DelayedNesterov

ROUNDS = 4
LRS = {"head.bias": 2.0, "head.*": 0.25}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"body": nn.Linear(5, 70), "head": nn.Linear(70, 100)}).double()


def changes(number: int) -> dict[str, Tensor]:
    """What the only site trains in a round."""
    generator = torch.Generator().manual_seed(number)
    return {
        name: torch.randn(value.shape, dtype=torch.float64, generator=generator)
        for name, value in build().state_dict().items()
    }


def served(folder: Path, **settings: Any) -> dict[str, Tensor]:
    """The model after a run whose site trains `changes`."""
    options = {"rounds.total": ROUNDS, "algorithm.outer_lr_of": LRS} | settings
    with plain_server(folder, build(), **options) as server:
        sites = clients(server, folder, "a")
        for number in range(ROUNDS):
            moved = changes(number)
            play_round(sites, number + 1, lambda _, state: {n: t - moved[n] for n, t in state.items()})  # noqa: B023
        return finish(server, sites)


def by_torch(make: Any) -> dict[str, Tensor]:
    """The same by one torch optimizer with three groups."""
    parameters = dict(build().named_parameters())
    groups = [
        {"params": [parameters["body.weight"], parameters["body.bias"]]},
        {"params": [parameters["head.weight"]], "lr": 0.25},
        {"params": [parameters["head.bias"]], "lr": 2.0},
    ]
    optimizer = make(groups)
    for number in range(ROUNDS):
        for name, parameter in parameters.items():
            parameter.grad = changes(number)[name]
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


CASES = {
    "sgd": (
        {
            "algorithm.outer_optimizer.name": "sgd",
            "algorithm.outer_optimizer.lr": 0.5,
            "algorithm.outer_optimizer.momentum": 0.5,
        },
        lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.5),
    ),
    "adam": (
        {"algorithm.outer_optimizer.name": "adam", "algorithm.outer_optimizer.lr": 0.125},
        lambda groups: torch.optim.Adam(groups, lr=0.125),
    ),
    "delayed": (
        {
            "algorithm.outer_optimizer.name": "sgd",
            "algorithm.outer_optimizer.lr": 0.5,
            "algorithm.outer_optimizer.momentum": 0.5,
            "async.momentum_every": 2,
        },
        lambda groups: DelayedNesterov(groups, lr=0.5, momentum=0.5, delay=2),
    ),
}


@pytest.mark.covers("L15")
@pytest.mark.parametrize("case", CASES)
def test_steps_each_parameter_by_the_first_matching_rate(tmp_path: Path, case: str) -> None:
    settings, make = CASES[case]
    got, right = served(tmp_path, **settings), by_torch(make)
    for name, value in right.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-12)


def test_what_cannot_be_meant_is_refused_by_name(tmp_path: Path) -> None:
    def begin(**settings: Any) -> None:
        with plain_server(tmp_path, build(), **settings):
            pass

    with pytest.raises(
        ConfigError, match=r"algorithm.outer_lr_of contains 'haed\.bias', but no parameter has such a name.*'head.bias'"
    ):
        begin(**{"algorithm.outer_lr_of": {"haed.bias": 0.5}})
    with pytest.raises(ConfigError, match="outer_lr_of"):
        begin(**{"algorithm.outer_lr_of": {"head.*": 0}})


def test_status_says_them_and_another_start_must_too(tmp_path: Path) -> None:
    with plain_server(tmp_path, build(), **{"algorithm.outer_lr_of": LRS}) as server:
        assert "lr of head.bias=2, lr of head.*=0.25" in server.status().outer
    with pytest.raises(ConfigError, match="outer"):
        plain_server(tmp_path, build()).start()
