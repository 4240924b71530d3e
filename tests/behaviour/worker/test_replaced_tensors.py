"""A script that replaces tensors of its model while DiLoCo follows them: found anew, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import diloco, exported, serve
from torch import nn

import atoll
from atoll.errors import UsageError

DILOCO: dict[str, Any] = {"algorithm": "diloco", "sites": 1, "H": 2, "rounds": 3, "codec": "none"}
STREAMED = {"K": 2, "tau": 1, "alpha": 0.5}


def load_by_assignment(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def replace_weight(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.zeros(40, 64))


def grow(model: nn.Sequential) -> None:
    model.append(nn.Linear(40, 2))


def shrink(model: nn.Sequential) -> None:
    model[2].bias = None


def move_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def replace_buffers(model: nn.Sequential) -> None:
    model[1].running_mean = model[1].running_mean + 1.0


def trained(server: atoll.Server, folder: Path, change: Callable[[Any], None]) -> nn.Module:
    """Change the model behind one step after the first synchronisation, and train to the end of the run."""
    with diloco(server, folder) as loop:
        for step in range(40):
            if loop.finished:
                break
            if step == 3:
                change(loop.model)
            for parameter in loop.model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1)
            loop.optimizer.step()  # type: ignore[union-attr]
    assert loop.finished
    return loop.model


@pytest.mark.parametrize("settings", [{}, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (load_by_assignment, "0.weight"),
        (replace_weight, "2.weight"),
        (nn.Module.half, "0.weight"),
        (grow, "3.weight"),
        (shrink, "2.bias"),
    ],
)
def test_refuses_a_model_with_tensors_that_are_no_longer_trained(
    tmp_path: Path, settings: dict[str, Any], change: Callable[[Any], None], named: str
) -> None:
    with serve(tmp_path, **DILOCO | settings) as server:
        with pytest.raises(UsageError) as refused:
            trained(server, tmp_path, change)
        (worker,) = server.status().workers
        assert worker.state == "failed"
    assert named in str(refused.value)


@pytest.mark.parametrize("change", [move_parameters, replace_buffers])
def test_goes_on_with_moved_parameters_and_new_buffers(tmp_path: Path, change: Callable[[Any], None]) -> None:
    with serve(tmp_path, **DILOCO) as server:
        model = trained(server, tmp_path, change)
        server.run()
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in exported(tmp_path).items())
