"""The server's step: FedOpt by hand, the defaults of each algorithm, and what is set on top of them.

By hand x₀ = 0, one element; an update is x − g.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from kit import exported
from kit.requests import get
from kit.servers import new_server, plain_server
from kit.wire import WireSite
from torch import nn

import atoll
from atoll.algorithms import Algorithm
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


def test_fedavgm_matches_a_calculation_by_hand(tmp_path: Path) -> None:
    """Steps of FedAvgM have the momentum of a calculation by hand."""
    # By hand: m₁ = 1, m₂ = 0.9 + 1, m₃ = 0.9·1.9.
    assert stepped(tmp_path, "fedavgm", [1.0, 1.0, 0.0]) == pytest.approx([-1.0, -2.9, -4.61])


def test_fedadagrad_matches_a_calculation_by_hand(tmp_path: Path) -> None:
    # v₀ = τ² = 1e-6;  v₁ = 4 + 1e-6, v₂ = 8 + 1e-6
    first = 0.01 * 2 / (math.sqrt(4 + 1e-6) + 1e-3)
    second = 0.01 * 2 / (math.sqrt(8 + 1e-6) + 1e-3)
    assert stepped(tmp_path, "fedadagrad", [2.0, 2.0]) == pytest.approx([-first, -first - second])


def test_fedadam_matches_a_calculation_by_hand(tmp_path: Path) -> None:
    # m̂₁ = g, v̂₁ = g²;  m₂ = 0.9·0.1·2, m̂₂ = m₂/0.19;  v₂ = 0.99·0.01·4, v̂₂ = v₂/0.0199
    first = 0.1 * 2 / (2 + 1e-3)
    second = 0.1 * (0.18 / 0.19) / (math.sqrt(0.0396 / 0.0199) + 1e-3)
    settings = {"algorithm.outer_optimizer.lr": 0.1}
    assert stepped(tmp_path, "fedadam", [2.0, 0.0], **settings) == pytest.approx([-first, -first - second])


def test_fedyogi_matches_a_calculation_by_hand(tmp_path: Path) -> None:
    # v₀ = 1e-6 < g²: v₁ = v₀ + 0.01·1;  then g = 0: v stays, m₂ = 0.9·0.1
    v = 1e-6 + 0.01
    first, second = (0.01 * m / (math.sqrt(v) + 1e-3) for m in (0.1, 0.09))
    assert stepped(tmp_path, "fedyogi", [1.0, 0.0]) == pytest.approx([-first, -first - second])


def test_fedyogi_forgets_a_large_gradient_slowly(tmp_path: Path) -> None:
    # v₁ = 1e-6 + 0.01·10⁴ = 100, as Adam's; then g = 1: v₂ = 100 − 0.01·1, where Adam's is 0.99·100 + 0.01;  m₂ = 9.1
    """After a large gradient, FedYogi's second moment v shrinks more slowly than FedAdam's."""
    first, second = 0.01 * 10 / (math.sqrt(100) + 1e-3), 0.01 * 9.1 / (math.sqrt(100 - 0.01) + 1e-3)
    found = stepped(tmp_path, "fedyogi", [100.0, 1.0])
    assert found == pytest.approx([-first, -first - second], rel=1e-5)


# -- defaults and settings


mine = Algorithm(name="mine", citation="", outer="adam", outer_options={"lr": 0.1})


not_one = 3


def server_of(folder: Path, **settings: Any) -> atoll.Server:
    """A server of DiLoCo, where the settings name no other algorithm."""
    return new_server(nn.Linear(1, 1), **{"disk.state_dir": folder / "state", "network.port": 0} | settings)


OUTER = "algorithm.outer_optimizer"


CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "diloco as in the paper": (
        {"diloco.sync_every": 200},
        "sgd(lr=0.7, momentum=0.9, nesterov=True)",
        {"codec": "bf16", "sync_every": 200, "on_missed": "rebase"},
    ),
    "fedavg as in the paper": (
        {"algorithm.name": "fedavg", "rounds.total": 1},
        "sgd(lr=1.0, momentum=0.0)",
        {"codec": "none", "sync_every": 0, "on_missed": "reset"},
    ),
    "settings win over defaults": (
        {f"{OUTER}.lr": 0.5, f"{OUTER}.momentum": 0.8, "aggregation.upload_codec.name": "none"},
        "sgd(lr=0.5, momentum=0.8, nesterov=True)",
        {"codec": "none"},
    ),
    "another optimizer starts from its own defaults": (
        {f"{OUTER}.name": "adam", f"{OUTER}.lr": 0.01, f"{OUTER}.eps": 1e-6},
        "adam(lr=0.01, eps=1e-06)",
        {},
    ),
    "no momentum leaves nothing for Nesterov": ({f"{OUTER}.momentum": 0.0}, "sgd(lr=0.7, momentum=0.0)", {}),
    "an algorithm of one's own": (
        {"algorithm.path": f"{__name__}:mine", "rounds.total": 1},
        "adam(lr=0.1)",
        {"algorithm": "mine"},
    ),
    "delayed Nesterov is made of SGD": (
        {"async.momentum_every": 4, f"{OUTER}.lr": 0.5},
        "delayed_nesterov(lr=0.5, momentum=0.9, N=4)",
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_settings_override_the_algorithms_defaults(tmp_path: Path, case: str) -> None:
    """A run uses the defaults of its algorithm. Settings of the run take precedence over these defaults."""
    settings, outer, told = CASES[case]
    with server_of(tmp_path, **settings) as server:
        assert server.status().outer == outer
        run = get(server.url, "/v1/run")[1]
    assert {key: run[key] for key in told} == told


@pytest.mark.covers("L19")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm.name": "dilocco"}, "Did you mean 'diloco'"),
        ({"algorithm.path": f"{__name__}:not_one"}, "not an algorithm"),
        ({f"{OUTER}.name": "adem"}, "Did you mean 'adam'"),
        ({"aggregation.upload_codec.name": "bf61"}, "Did you mean 'bf16'"),
        ({f"{OUTER}.name": "adam", f"{OUTER}.momentum": 0.9}, "adam has no momentum.*betas"),
        ({f"{OUTER}.lr": 0}, "Use a number above 0"),
        ({"algorithm.name": "fedyogi", f"{OUTER}.betas": [1.0, 0.9]}, "yogi"),
        ({"algorithm.name": "fedyogi", f"{OUTER}.eps": 0.0}, "yogi"),
        ({"algorithm.name": "fedyogi", f"{OUTER}.momentum": 0.9}, "betas"),
        ({f"{OUTER}.momentum": 1.0}, "Use a number from 0 to below 1"),
        ({"async.momentum_every": 2, f"{OUTER}.name": "adam"}, "the outer optimizer is 'adam'"),
        ({"async.momentum_every": 2, "algorithm.name": "fedyogi"}, "the outer optimizer is 'yogi'"),
        (
            {"async.momentum_every": 2, f"{OUTER}.weight_decay": 0.1},
            "weight_decay = 0.1, an option that delayed Nesterov",
        ),
    ],
)
def test_refuses_impossible_settings_with_a_reason(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    """A server with an unknown name or an impossible setting of the algorithm refuses to start and says why."""
    with pytest.raises(ConfigError, match=words):
        server_of(tmp_path, **settings).start()
