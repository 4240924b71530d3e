"""What α leaves of the outer optimizer's speed: as docs/low-communication.md says."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from kit.servers import plain_server
from kit.sites import DiLoCoSites
from safetensors.torch import load_file
from torch import nn


class Two(nn.Module):
    """Two tensors of two elements, one for each fragment."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(2, dtype=torch.float64))


@pytest.mark.covers("L7")
@pytest.mark.parametrize(
    ("alpha", "tau", "outer_lr", "outer_momentum", "speed"),
    [
        # G = outer_lr / (1 − outer_momentum); G·p / (1 − α + α·G), with p = 2, of two inner steps of 1
        (0.25, 0, 0.7, 0.9, 2 * 7 / 2.5),
        (0.5, 0, 0.7, 0.9, 2 * 7 / 4),
        (0.5, 0, 1.0, 0.9, 2 * 10 / 5.5),
        (0.5, 0, 1.0, 0.0, 2.0),
        # and 1 − (1 − α)·τ/H of it
        (0.5, 1, 0.7, 0.9, 2 * 7 / 4 * 0.75),
    ],
)
def test_the_model_moves_by_so_much_in_each_round(
    tmp_path: Path, alpha: float, tau: int, outer_lr: float, outer_momentum: float, speed: float
) -> None:
    """After 30 rounds; what is left of how it began is less than 0.73²⁹ of it."""
    found: list[float] = []

    def step(model: Two, optimizer: torch.optim.Optimizer, site: str, number: int) -> None:
        optimizer.zero_grad()
        (model.first.sum() + model.second.sum()).backward()  # every element moves by −1
        optimizer.step()
        if number in (56, 58):
            found.append(load_file(server.save_state(tmp_path / "version.safetensors"))["first"][0].item())

    rates = {"algorithm.outer_optimizer.lr": outer_lr, "algorithm.outer_optimizer.momentum": outer_momentum}
    run = {"sites": 1, "rounds": 30, "H": 2, "K": 2, "tau": tau, "alpha": alpha, "codec": "none"}
    with plain_server(tmp_path, Two(), algorithm="diloco", **run, **rates) as server:
        inner = partial(torch.optim.SGD, lr=1.0)
        DiLoCoSites(
            server.url, tmp_path, 10**6, "a", build=Two, inner=lambda model: inner(model.parameters()), step=step
        ).join()
    assert found[0] - found[1] == pytest.approx(speed, rel=1e-3)
