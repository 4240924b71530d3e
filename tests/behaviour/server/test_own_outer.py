"""An outer optimizer of the user's own: a class or function of a program, or what `module:function` names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from kit.client import Client
from kit.servers import plain_server
from safetensors.torch import load_file
from torch import Tensor, nn

import atoll
from atoll import Settings
from atoll.errors import ConfigError, UsageError

ROUNDS = 4
START = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)


class Fading(torch.optim.Optimizer):
    """θ ← θ − (lr/t)·m with m ← m/2 + g: t is an int of Python's, m a tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for theta in group["params"]:
                state = self.state[theta]
                state["t"] = state.get("t", 0) + 1
                state["m"] = state.get("m", torch.zeros_like(theta)).div_(2).add_(theta.grad)
                theta.sub_(state["m"], alpha=group["lr"] / state["t"])


def fading(parameters: Any, lr: float = 0.5) -> Fading:
    return Fading(parameters, lr)


def serve(folder: Path, outer: str | Callable[..., Any], **options: Any) -> atoll.Server:
    model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(START)
    return plain_server(folder, model, outer_optimizer=outer, **({"rounds.total": ROUNDS} | options))


def gradient(number: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def play(server: atoll.Server, folder: Path, numbers: range) -> None:
    with server, Client(server.url, site="a", folder=folder / "w") as client:
        for number in numbers:
            assert client.next_round() == number
            client.submit({"weight": client.pull()["weight"] - gradient(number)})
        if client.next_round() is None:  # answered once it is committed; the result is written behind that
            wait_until((server.exports / "model.safetensors").exists, "the result")


@pytest.mark.covers("L21")
@pytest.mark.parametrize("how", ["function", "lambda", "module", "file"])
def test_it_is_one_optimizer_for_the_run_and_outlives_a_restart(tmp_path: Path, how: str) -> None:
    """In four rounds, with a new server after two, it comes to what one object of it does by itself."""
    (tmp_path / "mine.py").write_text(f"from {__name__} import fading as made\n")
    outer = {
        "function": fading,
        "lambda": lambda parameters: Fading(parameters, 0.5),
        "module": f"{__name__}:fading",
        "file": f"{tmp_path / 'mine.py'}:made",
    }[how]
    theta = nn.Parameter(START.clone())
    plain = Fading([theta], 0.5)
    for number in range(1, ROUNDS + 1):
        theta.grad = gradient(number)
        plain.step()
    play(serve(tmp_path, outer), tmp_path, range(1, 3))
    server = serve(tmp_path, outer)
    play(server, tmp_path, range(3, ROUNDS + 1))
    result = load_file(server.exports / "model.safetensors")["weight"]
    assert torch.allclose(result, theta.detach(), rtol=0, atol=1e-12)
    states = [load_file(path) for path in (tmp_path / "state" / "slots").glob("state-*")]
    newest = max(states, key=lambda state: state["weight.t"].item())
    assert newest.keys() == {"weight.t", "weight.m"}
    assert newest["weight.t"].item() == ROUNDS
    assert torch.allclose(newest["weight.m"], plain.state[theta]["m"], rtol=0, atol=1e-12)


@pytest.mark.covers("L21")
def test_its_options_are_those_of_the_run(tmp_path: Path) -> None:
    server = serve(tmp_path, fading, **{"algorithm.outer_optimizer.lr": 0.25, "rounds.total": 1})
    play(server, tmp_path, range(1, 2))
    result = load_file(server.exports / "model.safetensors")["weight"]
    assert torch.allclose(result, START - 0.25 * gradient(1), rtol=0, atol=1e-12)
    assert server.status().outer == "fading(lr=0.25)"


@pytest.mark.covers("L21", "X3")
def test_another_one_at_the_next_start_is_refused(tmp_path: Path) -> None:
    play(serve(tmp_path, fading), tmp_path, range(1, 2))
    with pytest.raises(ConfigError, match=r"has algorithm.outer_optimizer = .*Fading"):
        serve(tmp_path, torch.optim.Adagrad).start()


@pytest.mark.covers("L21", "X3")
def test_what_is_no_outer_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    def no_optimizer(parameters: Any) -> list[Any]:
        return [parameters]

    with pytest.raises(ConfigError, match=r"no_optimizer' cannot be an outer optimizer: it created a list"):
        serve(tmp_path, no_optimizer).start()
    with pytest.raises(ConfigError, match=r"async.momentum_every is 2, but the outer optimizer is 'fading'"):
        serve(tmp_path, fading, **{"algorithm.name": "diloco", "async.momentum_every": 2}).start()
    with pytest.raises(UsageError, match="got settings and also outer_optimizer"):
        atoll.Server(None, Settings(), outer_optimizer="adam")
