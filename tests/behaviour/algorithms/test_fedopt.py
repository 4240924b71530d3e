"""The server's steps of FedOpt, by hand: x₀ = 0, one element; an update is x − g."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from kit import exported
from kit.servers import plain_server
from kit.wire import WireSite
from torch import nn

from atoll.errors import ConfigError


def zero() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def stepped(folder: Path, algorithm: str, gradients: list[float], **settings: Any) -> list[float]:
    """x after each round of a site that submits these gradients."""
    rules = {"rounds.sites": 1, "rounds.total": len(gradients), "algorithm.name": algorithm}
    path = []
    with plain_server(folder, zero(), **rules, **settings) as server:
        site = WireSite(server.url)
        for gradient in gradients:
            ticket = site.ticket()
            base = site.pull(ticket)
            path.append(base["weight"].item())
            site.form(ticket, base, {"weight": base["weight"] - gradient}).submit()
        site.leave()  # else the server waits for it to pull the result
        server.run()
    return [*path[1:], exported(folder)["weight"].item()]


def test_momentum(tmp_path: Path) -> None:
    # m₁ = 1, m₂ = 0.9 + 1, m₃ = 0.9·1.9
    assert stepped(tmp_path, "fedavgm", [1.0, 1.0, 0.0]) == pytest.approx([-1.0, -2.9, -4.61])


def test_adagrad(tmp_path: Path) -> None:
    # v₀ = τ² = 1e-6;  v₁ = 4 + 1e-6, v₂ = 8 + 1e-6
    first = 0.01 * 2 / (math.sqrt(4 + 1e-6) + 1e-3)
    second = 0.01 * 2 / (math.sqrt(8 + 1e-6) + 1e-3)
    assert stepped(tmp_path, "fedadagrad", [2.0, 2.0]) == pytest.approx([-first, -first - second])


def test_adam(tmp_path: Path) -> None:
    # m̂₁ = g, v̂₁ = g²;  m₂ = 0.9·0.1·2, m̂₂ = m₂/0.19;  v₂ = 0.99·0.01·4, v̂₂ = v₂/0.0199
    first = 0.1 * 2 / (2 + 1e-3)
    second = 0.1 * (0.18 / 0.19) / (math.sqrt(0.0396 / 0.0199) + 1e-3)
    settings = {"algorithm.outer_optimizer.lr": 0.1}
    assert stepped(tmp_path, "fedadam", [2.0, 0.0], **settings) == pytest.approx([-first, -first - second])


def test_yogi(tmp_path: Path) -> None:
    # v₀ = 1e-6 < g²: v₁ = v₀ + 0.01·1;  then g = 0: v stays, m₂ = 0.9·0.1
    v = 1e-6 + 0.01
    first, second = (0.01 * m / (math.sqrt(v) + 1e-3) for m in (0.1, 0.09))
    assert stepped(tmp_path, "fedyogi", [1.0, 0.0]) == pytest.approx([-first, -first - second])


def test_yogi_lets_a_large_gradient_be_forgotten_slowly(tmp_path: Path) -> None:
    # v₁ = 1e-6 + 0.01·10⁴ = 100, as Adam's; then g = 1: v₂ = 100 − 0.01·1, where Adam's is 0.99·100 + 0.01;  m₂ = 9.1
    first, second = 0.01 * 10 / (math.sqrt(100) + 1e-3), 0.01 * 9.1 / (math.sqrt(100 - 0.01) + 1e-3)
    found = stepped(tmp_path, "fedyogi", [100.0, 1.0])
    assert found == pytest.approx([-first, -first - second], rel=1e-5)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("lr", 0.0, "outer_optimizer.lr"),
        ("betas", [1.0, 0.9], "yogi"),
        ("eps", 0.0, "yogi"),
        ("momentum", 0.9, "betas"),
    ],
)
def test_a_wrong_value_is_refused(tmp_path: Path, option: str, value: Any, words: str) -> None:
    settings = {"rounds.total": 1, "algorithm.name": "fedyogi", f"algorithm.outer_optimizer.{option}": value}
    with pytest.raises(ConfigError, match=words):
        plain_server(tmp_path, zero(), **settings).start()
