"""What α leaves of the outer optimizer's speed: as docs/low-communication.md says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.servers import plain_server
from safetensors.torch import load_file
from torch import nn

import atoll


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
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    versions: list[float] = []
    with plain_server(
        tmp_path,
        Two(),
        algorithm="diloco",
        sites=1,
        rounds=30,
        H=2,
        K=2,
        tau=tau,
        alpha=alpha,
        codec="none",
        **{"algorithm.outer_optimizer.lr": outer_lr, "algorithm.outer_optimizer.momentum": outer_momentum},
    ) as server:
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as diloco:
            while not diloco.finished:
                optimizer.zero_grad()
                (model.first.sum() + model.second.sum()).backward()  # every element moves by −1
                optimizer.step()
                if diloco.step in (57, 59):
                    path = server.save_state(tmp_path / "version.safetensors")
                    versions.append(load_file(path)["first"][0].item())
    assert versions[0] - versions[1] == pytest.approx(speed, rel=1e-3)
