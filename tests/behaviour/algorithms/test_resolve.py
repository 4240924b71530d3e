"""Settings on top of an algorithm's defaults, as a server says what it runs by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.requests import get
from kit.servers import new_server
from torch import nn

import atoll
from atoll.algorithms import Algorithm
from atoll.errors import ConfigError

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
def test_a_run_has_the_defaults_of_its_algorithm_and_what_is_set(tmp_path: Path, case: str) -> None:
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
        ({f"{OUTER}.momentum": 1.0}, "Use a number from 0 to below 1"),
        ({"async.momentum_every": 2, f"{OUTER}.name": "adam"}, "the outer optimizer is 'adam'"),
        ({"async.momentum_every": 2, "algorithm.name": "fedyogi"}, "the outer optimizer is 'yogi'"),
        (
            {"async.momentum_every": 2, f"{OUTER}.weight_decay": 0.1},
            "weight_decay = 0.1, an option that delayed Nesterov",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        server_of(tmp_path, **settings).start()
